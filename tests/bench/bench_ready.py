"""Seconds until the engine process is ready, started as the server starts it, and CPU seconds of its first rank.

    python tests/bench/bench_ready.py --shape llama3-8b --repeats 3 --set tensor_parallel_size=2
    python tests/bench/bench_ready.py --model models/slipstream-demo-code --set device=cpu --set num_blocks=256

Dummy weights of a shape, or a checkpoint. The first start may compile kernels and read files that are not in the page
cache; its line is printed, and the medians are those of the others. phases: what the engine's log says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/bench")]

from engine_peer import TOKEN, Backend  # noqa: E402
from measures import add_settings  # noqa: E402
from shapes import SHAPES  # noqa: E402
from slipstream.protocol.wire import FrameType  # noqa: E402

TOKENIZER = ROOT / "models/slipstream-demo-code"  # of a shape, which has none
ENGINE = "from slipstream.engine.main import main; main()"
MAX_SECONDS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=SHAPES)
    model.add_argument("--model", type=Path)
    add_settings(parser)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"--repeats: {arguments.repeats}, accepted: 1 or more")
    settings = dict(pair.split("=", 1) for pair in arguments.set)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.shape:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[arguments.shape].config()))
            of_shape = {"model": folder, "tokenizer": str(TOKENIZER), "load_format": "dummy"}
            settings = {**of_shape, "enable_prefix_caching": "false", "max_model_len": "32768", **settings}
        else:
            settings = {"model": str(arguments.model.resolve()), **settings}
        found = []
        for _ in range(1 + arguments.repeats):
            found.append(start(settings))
            print(json.dumps(found[-1] | {"load": round(os.getloadavg()[0], 1)}), flush=True)
    for name in ("ready_s", "cpu_s"):
        values = [float(one[name]) for one in found[1:]]
        print(f"{name}: median {statistics.median(values):.2f}, {min(values):.2f} to {max(values):.2f}")


def start(settings: dict[str, str]) -> dict[str, float | str]:
    """Seconds of one process from its start until READY has come, and the user and system time until then."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as log:  # a pipe would fill up
        backend = Backend(Path(folder))
        command = [sys.executable, "-c", ENGINE, "--socket", backend.path, "--token", TOKEN.hex()]
        begun = time.monotonic()
        with subprocess.Popen(command, stderr=log, text=True) as engine:
            backend.accept()
            backend.connection.settimeout(MAX_SECONDS)
            backend.configure(settings)
            backend.next(FrameType.READY)
            ready_s = time.monotonic() - begun
            ticks = Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            backend.close()
        log.seek(0)
        phases = re.findall(r"start-up in [\d.]+ s: (.*)", log.read())
    cpu_s = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return {"ready_s": round(ready_s, 2), "cpu_s": round(cpu_s, 2), "phases": "".join(phases)}


if __name__ == "__main__":
    main()
