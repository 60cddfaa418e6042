"""A client that is killed: asks what its standard input says, prints a line per response, has no ending of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from asked import Asked, Known
from grpc_way import over_grpc
from http_way import over_http
from outcome import Outcome


def main() -> None:
    plan = json.load(sys.stdin)
    received = Outcome.received
    Outcome.received = lambda self: (received(self), print("response", flush=True))[0]  # type: ignore[method-assign]
    asked = Asked(Known(0, plan["prompt"], plan["settings"]), plan["model"], plan["way"])
    if asked.way.startswith("grpc"):
        over_grpc(asked, plan["grpc_url"], plan["patience_s"])
    else:
        over_http(asked, plan["http_url"], plan["gateway_url"], plan["patience_s"])


if __name__ == "__main__":
    main()
