"""Write the tables in docs/ (PAGES) from the code, between their markers.

    .venv/bin/python build/make_docs.py  # rewrite
    .venv/bin/python build/make_docs.py --check  # exit 1 if a page is out of date

The text around the tables is written by hand and not changed.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from slipstream.core.config_parse import parameter_default
from slipstream.core.config_table import FOREIGN, PARAMETERS
from slipstream.core.metric_aliases import ALIASES, describe
from slipstream.core.settings import IN_SPECULATION, PASSED_ON, SETTINGS, Setting
from slipstream.core.stats import METRICS
from slipstream.nn.quant import NAMES as QUANTIZATIONS
from slipstream.protocol.contract import DETOKENIZE, GENERATE, TOKENIZE
from slipstream.protocol.tensor_spec import TYPE_NAMES, InputSpec, OutputSpec, Use
from slipstream.server.metrics import FAMILIES, PREFIX

DOCS = Path(__file__).resolve().parents[1] / "docs"


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _tensor(spec: InputSpec | OutputSpec) -> tuple[str, str]:
    dims = ", ".join(map(str, spec.dims))
    return f"`{spec.name}`", f"{TYPE_NAMES[spec.dtype].removeprefix('TYPE_')} [{dims}]"


def _origins(spec: InputSpec | OutputSpec) -> str:
    return ", ".join(spec.origins).replace("TensorRT-LLM ", "TRT-LLM ")


def inputs(specs: Iterable[InputSpec]) -> str:
    served = [spec for spec in specs if spec.use is not Use.NEUTRAL_ONLY]
    return table(("input", "type", "from", "meaning"), [(*_tensor(s), _origins(s), s.doc) for s in served])


def unserved(specs: Iterable[InputSpec]) -> str:
    rows = []
    for spec in specs:
        if spec.use is Use.NEUTRAL_ONLY:
            accepted = ", ".join(f"`{value!r}`" for value in spec.neutral)
            accepted = f"{accepted}, or empty" if accepted and -1 in spec.dims else accepted or "empty"
            rows.append((*_tensor(spec), accepted, spec.reason))
    return table(("input", "type", "accepted", "reason"), rows)


def outputs(specs: Iterable[OutputSpec]) -> str:
    rows = [(*_tensor(s), f"`{s.flag}`" if s.flag else "", _origins(s), s.doc) for s in specs]
    return table(("output", "type", "sent with", "from", "meaning"), rows)


def parameters(*sections: str) -> str:
    """Parameters of these sections of EngineConfig."""
    rows = []
    for parameter in PARAMETERS:
        if parameter.path.partition(".")[0] not in sections:
            continue
        default = parameter_default(parameter)
        shown = (
            "unset" if default in ("", None) else f"`{str(default).lower() if isinstance(default, bool) else default}`"
        )
        names = QUANTIZATIONS if parameter.name == "quantization" else parameter.accepted
        words = [f"`{word}`" for word in names]
        words += [f"`{word}` (`{meant}`)" for word, meant in parameter.synonyms.items()]
        accepted = ", ".join(words) or parameter.limits or _kind(default)
        aliases = ", ".join(f"`{alias}`" for alias in parameter.aliases)
        rows.append((f"`{parameter.name}`", shown, accepted, parameter.doc, aliases))
    return table(("parameter", "default", "accepted", "meaning", "also as"), rows)


def _text(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def _kind(default: object) -> str:
    if default is None or isinstance(default, bool):
        return "true or false"
    return "text" if isinstance(default, str) else "a number"


def foreign() -> str:
    rows = []
    for name, (harmless, advice) in FOREIGN.items():
        values = ", ".join(f"`{value}`" if value else "empty" for value in harmless)
        rows.append((f"`{name}`", values, advice))
    return table(("parameter", "may stay as", "otherwise"), rows)


def settings(rows: Iterable[Setting]) -> str:
    """Settings of `sampling_parameters`. The return_* flags are left out: the tensors' table has them."""
    listed = [setting for setting in rows if setting.is_in_json and not setting.name.startswith("return_")]
    header = ("setting", "accepted", "default", "gateway", "meaning")
    return table(header, [(_keys(s), s.kind.accepted, _default(s), _openai(s), s.doc) for s in listed])


def _keys(setting: Setting) -> str:
    """All keys of a setting, its own name first."""
    keys = dict.fromkeys((*setting.json, *setting.tensors))
    return ", ".join(f"`{name}`" for name in sorted(keys, key=lambda name: name != setting.name))


def _default(setting: Setting) -> str:
    if setting.parameter:
        return f"the model's `{setting.parameter}`"
    return "" if setting.default in (None, (), "") else f"`{_text(setting.default)}`"


def _openai(setting: Setting) -> str:
    return {PASSED_ON: "same name", IN_SPECULATION: "in `speculation`"}.get(setting.openai, setting.openai)


def openai_names(rows: Iterable[Setting]) -> str:
    return textwrap.fill(", ".join(f"`{setting.name}`" for setting in rows if setting.openai == PASSED_ON), 120)


def metrics() -> str:
    rows = {}
    for metric in METRICS:
        labels = ", ".join(["model", "version", *metric.labels])
        unit = metric.kind.name.lower() + (", seconds" if metric.buckets and metric.family.endswith("_seconds") else "")
        rows[metric.family] = (f"`{metric.family}`", unit, labels, metric.help)
    return table(("metric", "kind", "labels", "meaning"), rows.values())


def metric_aliases() -> str:
    rows = []
    for name, aliases in ALIASES.items():
        for alias in aliases:
            labels = ", ".join(f'{label}="{value}"' for label, value in alias.labels.items())
            family = f"`{alias.family}{{{labels}}}`" if labels else f"`{alias.family}`"
            rows.append((f"`{name}`", family, f"`{describe(alias)}`" if alias.source is not None else describe(alias)))
    return table(("set", "metric", "what it repeats"), rows)


def gateway_metrics() -> str:
    rows = []
    for family in FAMILIES:
        labels = ", ".join(part.partition("=")[0] for part in family.labels[0].split(",") if part)
        unit = "histogram, seconds" if family.kind == "histogram" else family.kind
        rows.append((f"`{PREFIX}{family.name}`", unit, labels, family.help))
    return table(("metric", "kind", "labels", "meaning"), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "generate inputs": lambda: inputs(GENERATE.inputs),
    "generate unserved": lambda: unserved(GENERATE.inputs),
    "generate outputs": lambda: outputs(GENERATE.outputs),
    "settings": lambda: settings(SETTINGS),
    "passed on": lambda: openai_names(SETTINGS),
    "tokenize inputs": lambda: inputs(TOKENIZE.inputs),
    "tokenize unserved": lambda: unserved(TOKENIZE.inputs),
    "tokenize outputs": lambda: outputs(TOKENIZE.outputs),
    "detokenize inputs": lambda: inputs(DETOKENIZE.inputs),
    "detokenize outputs": lambda: outputs(DETOKENIZE.outputs),
    "model parameters": lambda: parameters("task", "model"),
    "cache parameters": lambda: parameters("cache"),
    "scheduler parameters": lambda: parameters("scheduler"),
    "parallel parameters": lambda: parameters("parallel"),
    "serving parameters": lambda: parameters("serving"),
    "speculation parameters": lambda: parameters("speculation"),
    "guided parameters": lambda: parameters("structured_output"),
    "foreign parameters": foreign,
    "metrics": metrics,
    "metric aliases": metric_aliases,
    "gateway metrics": gateway_metrics,
}
PAGES = ("contracts.md", "gateway.md", "configuration.md", "metrics.md")
_MARKED = re.compile(r"<!-- table: (?P<name>[a-z ]+) -->\n.*?<!-- end of table -->", re.S)


def render(page: str) -> str:
    """The page with every marked table replaced. Raises KeyError for a marker without a table."""
    return _MARKED.sub(lambda m: f"<!-- table: {m['name']} -->\n{BLOCKS[m['name']]()}\n<!-- end of table -->", page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    arguments = parser.parse_args()
    stale = []
    for name in PAGES:
        path = DOCS / name
        text = path.read_text("utf-8")
        if render(text) != text:
            stale.append(name)
            if not arguments.check:
                path.write_text(render(text), "utf-8")
    if stale:
        print(f"{'out of date' if arguments.check else 'rewritten'}: {', '.join(stale)}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
