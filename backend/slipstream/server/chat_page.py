"""The chat page: its files, read once at the gateway's start and answered from memory, and the headers that confine it.

Event loop thread. The files are in page/. page/vendor holds the libraries for markdown that the build adds; without
them the page shows answers as plain text.
"""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from slipstream.server.errors import ApiError

FOLDER = Path(__file__).parent / "page"
PREFIX = "/page/"
LIBRARIES = ("vendor/marked.js", "vendor/purify.js", "vendor/highlight.js")
_INDEX = "index.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# No inline script or style, nothing from other hosts, and no way from text to HTML but through DOMPurify's policy
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


def is_page(path: str) -> bool:
    """Paths that need no key and leave no line in the log."""
    return path == "/" or path.startswith(PREFIX)


@dataclass(frozen=True)
class PageFile:
    body: bytes
    packed: bytes  # the same by gzip
    etag: str
    media_type: str


def read_page(folder: Path = FOLDER) -> dict[str, PageFile]:
    """The page's files by their path below `folder`. The index says whether all libraries are there."""
    has_libraries = all((folder / name).is_file() for name in LIBRARIES)
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix not in _TYPES or (name.startswith("vendor/") and not has_libraries):
            continue
        body = path.read_bytes()
        if name == _INDEX and has_libraries:
            body = body.replace(b'data-libraries="no"', b'data-libraries="yes"', 1)
        etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        files[name] = PageFile(body, gzip.compress(body, mtime=0), etag, _TYPES[path.suffix])
    return files


def answer(files: dict[str, PageFile], name: str, request: Request) -> Response:
    """Raises ApiError, 404, for a name that is not among the files."""
    file = files.get(name or _INDEX)
    if file is None:
        raise ApiError(404, "The chat page has no such file", code="not_found")
    headers = {**_HEADERS, "ETag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(file.packed, headers={**headers, "Content-Encoding": "gzip"}, media_type=file.media_type)
    return Response(file.body, headers=headers, media_type=file.media_type)
