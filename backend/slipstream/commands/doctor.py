"""Say what this machine can do and, where it cannot, why not and what would help.

Looks at the processor, memory and disk, GPU and CUDA, Python packages, tritonserver and the backend, ports, and (with
--model-repository) at each model as `slipstream validate` does. Changes nothing. The exit status is 1 if something
that is needed to serve is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

SIGNS = {"ok": "ok  ", "note": "note", "missing": "MISS"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-repository", type=Path, metavar="DIR", help="look at these models as well")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(arguments: argparse.Namespace) -> int:
    from slipstream.commands import examinations

    findings = [finding for examine in examinations.ALL for finding in examine()]
    if arguments.model_repository:
        findings += examinations.models(arguments.model_repository)
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            print(f"{SIGNS[finding.state]}  {finding.subject:<14} {finding.text}")
            if finding.advice:
                print(f"{'':22}{finding.advice}")
    missing = [finding.subject for finding in findings if finding.state == "missing"]
    if missing:
        print(f"\nnot ready to serve: {', '.join(missing)}", file=sys.stderr)
    return 1 if missing else 0
