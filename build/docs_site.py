"""A hook of mkdocs (mkdocs.yml): links of docs/ to files outside of it, which a site does not have, become names."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r"(?<!!)\[([^\]]+)\]\((?:\.\./)+(?!measurements)[^)]*\)")


def on_page_markdown(markdown: str, page: object, **_: object) -> str:
    depth = str(getattr(getattr(page, "file", None), "src_uri", "")).count("/")
    return _OUTSIDE.sub(lambda link: link[1] if link[0].count("../") > depth else link[0], markdown)
