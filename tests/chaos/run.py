"""Chaos on the real server and gateway: mixed traffic, clients that go in every way, failures all the time.

    .venv/bin/python tests/chaos/run.py --seconds 120 --seed 7
    .venv/bin/python tests/chaos/run.py --seconds 3600 --round-seconds 240 --clients 32 --report chaos.txt

Prints a table and every violation of what must always hold; exit status 1 when there is one. The seed gives the same
requests, rounds and failures in the same order again; how they fall together is the machine's.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/support"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the engines: clients and server have cores to run on, too

import psutil  # noqa: E402
from asked import ENDINGS, WAYS, Asked, Choice, Known, make_catalogue  # noqa: E402
from clock import Clock  # noqa: E402
from failures import DISK_LIMIT, NEIGHBOUR, WEIGHTS, Downtimes, Failures, schedule  # noqa: E402
from gateway import GatewayProcess  # noqa: E402
from llm_server import LlmServer, missing_server  # noqa: E402
from lost_streams import refusal  # noqa: E402
from outcome import Texts  # noqa: E402
from processes import is_gone, wait_gone  # noqa: E402
from report import Report, RoundFigures  # noqa: E402
from rounds import Round, make_rounds  # noqa: E402
from traffic import Doors, Ledger, Target, Traffic  # noqa: E402
from watch import Watch, idle_engine_threads, too_many_lost, zombies  # noqa: E402

QUIET_MODEL = "llm"
LOAD_S, UNLOAD_S, EXIT_S = 120.0, 30.0, 25.0
MAX_UNLOAD_S, MAX_EXIT_S = 10.0, 10.0  # an idle model's; the server's
# Server 2.51 holds a model for good when a client cancels while the last response is written (docs/operations.md)
MAX_HELD = 2
IDLE_S = 30.0


class ChaosServer(LlmServer):
    """Ignores SIGXFSZ, as the engines then do, so that a write beyond a limit fails instead of ending the process; its
    log begins beyond the limit that the failure "full disk" sets."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        super().__init__(folder, ROOT / "models/slipstream-demo-code", extra_args=[f"--exit-timeout-secs={EXIT_S:.0f}"])
        self._env |= clock.env
        self.add_variant(QUIET_MODEL, {"num_blocks": 64})

    def _command(self) -> list[str]:
        shell = f'trap "" XFSZ; truncate -s {2 * DISK_LIMIT} "$0"; exec "$@" >> "$0" 2>&1'
        return ["/bin/sh", "-c", shell, str(self.log_path), *super()._command()]

    @property
    def log(self) -> str:
        return super().log.lstrip("\0")

    def terminate(self) -> tuple[float, int]:
        """SIGTERM: seconds to the end, exit status."""
        assert self.process is not None
        began = time.monotonic()
        self.process.terminate()
        try:
            status = self.process.wait(EXIT_S + 10.0)
        except subprocess.TimeoutExpired:
            return time.monotonic() - began, -1
        return time.monotonic() - began, status


def quiet_run(doors: Doors, catalogue: list[Known]) -> Texts:
    """What each request of the catalogue answers when nothing else happens."""
    texts = {}
    for known, way in product(catalogue, ("grpc", "chat")):  # a chat's prompt has other special tokens
        asked = Asked(known, QUIET_MODEL, way)
        outcome = doors.ask(asked)
        if outcome.error or len(outcome.texts) != known.num_sequences:
            raise RuntimeError(f"the quiet run failed: {outcome}")
        texts[known.number, asked.is_chat] = outcome.texts
    return texts


class Run:
    """One run: rounds until the time is over."""

    def __init__(self, options: argparse.Namespace, server: ChaosServer, doors: Doors, clock: Clock) -> None:
        self._options, self._server, self._doors = options, server, doors
        self.ledger, self._target, self._downtimes = Ledger(), Target(), Downtimes()
        self._choice = Choice(tuple(options.way) or WAYS, tuple(options.without))
        ready_s = options.max_ready_s
        self._failures = Failures(server, clock, self._target, self._downtimes, self.ledger, ready_s)
        self._watch = Watch(server)
        self._watch.name(server.pid, "tritonserver")
        self.report = Report(f"chaos: {options.seconds} s, seed {options.seed}, {options.clients} clients")
        without = (*options.without, "clock") if clock.why_not else options.without
        allowed = tuple(name for name in WEIGHTS if name not in without)
        if clock.why_not:
            self.report.lines.append(f"no clock jumps: {clock.why_not}")
        if why_not := refusal():
            self.report.lines.append(f"streams lost by the server count as a leak: {why_not}")
        self._schedule = iter(schedule(options.seed, 100_000, allowed) if allowed else ())

    def run(self) -> None:
        catalogue = make_catalogue(random.Random(f"catalogue of {self._options.seed}"), self._options.requests)
        texts = quiet_run(self._doors, catalogue)
        traffic = Traffic(
            self._doors,
            self._target,
            catalogue,
            texts,
            self._downtimes.explains,
            self.ledger,
            self._choice,
        )
        self._server.add_variant(NEIGHBOUR, {"load_format": "null", "max_model_len": 256})
        self._watch.start()
        until, is_first = time.monotonic() + self._options.seconds, True
        old: tuple[Round, RoundFigures] | None = None
        for each in make_rounds(self._options.seed):
            figures = self._begin(each)
            if is_first:
                traffic.start(self._options.clients, self._options.seed)
            elif old is not None:
                self._end(*old)
            is_first, old = False, (each, figures)
            self._fail_for(each, figures, min(until, time.monotonic() + self._options.round_seconds))
            if time.monotonic() >= until:
                break
        traffic.stop()
        assert old is not None
        self._end(old[0], old[1], is_last=True)
        self._judge_processes()

    def _begin(self, each: Round) -> RoundFigures:
        """Load its model beside the one that is asked, then ask it instead."""
        self._server.add_variant(each.name, each.parameters)
        seconds = self._failures.load(each.name, LOAD_S)
        self._watch.name(self._failures.engines[each.name].pid, f"engine of {each.name}")
        self._target.switch(each.name, each.has_drafts)
        print(f"{each.name}: loaded in {seconds:.1f} s, {each.parameters}", flush=True)
        self.report.rounds.append(RoundFigures(each.name))
        return self.report.rounds[-1]

    def _fail_for(self, each: Round, figures: RoundFigures, until: float) -> None:
        began, counted, restarted = time.monotonic(), self._failures.counts.copy(), len(self._failures.ready_again_s)
        while time.monotonic() < until:
            failure = next(self._schedule, None)
            if failure is None:
                time.sleep(until - time.monotonic())
                break
            time.sleep(min(failure.rest_s, max(0.0, until - time.monotonic())))
            if time.monotonic() < until:
                self._failures.run(failure)
                self._watch.name(self._failures.engines[each.name].pid, f"engine of {each.name}")
        figures.seconds = time.monotonic() - began
        figures.failures = ", ".join(f"{n} {name}" for name, n in (self._failures.counts - counted).items())
        figures.ready_again_s = self._failures.ready_again_s[restarted:]

    def _end(self, each: Round, figures: RoundFigures, is_last: bool = False) -> None:
        """Unload it: while it still answers, or when it is idle, its blocks having been counted."""
        name = each.name
        figures.num_preemptions = int(self._server.metric("slipstream_preemptions_total", name))
        drafted = self._server.metric("slipstream_spec_drafted_tokens_total", name)
        accepted = self._server.metric("slipstream_spec_accepted_tokens_total", name)
        figures.accepted = f"{accepted / drafted:.0%} of {drafted:.0f}" if drafted else ""
        if is_last or not each.unloads_running:
            figures.num_leaked = self._leaked_when_idle(name)
        figures.unload_s = self._failures.unload(name, UNLOAD_S)
        if figures.is_held(UNLOAD_S):
            num_held = sum(others.is_held(UNLOAD_S) for others in self.report.rounds)
            if num_held > max(MAX_HELD, len(self.report.rounds) // 3):
                self.ledger.fault(f"{num_held} models are there {UNLOAD_S:.0f} s after their unload")
        elif figures.num_leaked >= 0 and figures.unload_s > MAX_UNLOAD_S:
            self.ledger.fault(f"{name} was idle and took {figures.unload_s:.1f} s to unload")
        if dead := zombies(self._server):
            self.ledger.fault(f"zombies after {name}: {dead}")
        if self._options.report:  # what is known so far, should the run not come to its end
            self._options.report.write_text(self.report.render(self.ledger))

    def _leaked_when_idle(self, model: str) -> int:
        """Blocks that are in use although nobody asks."""
        deadline = time.monotonic() + self._doors.patience_s
        while self._target.running[model] and time.monotonic() < deadline:
            time.sleep(0.1)
        try:
            self._server.wait_idle(model, IDLE_S)
        except AssertionError as error:
            self.ledger.fault(str(error))
        used, leaked = (int(self._server.metric(f"slipstream_kv_blocks_{kind}", model)) for kind in ("used", "leaked"))
        if used or leaked:
            self.ledger.fault(f"{model}: {used} KV blocks used, {leaked} leaked, with no request")
        return used + leaked

    def survivors(self) -> list[int]:
        """Engines and their helpers that are still there when the server has ended."""
        with suppress(AssertionError):
            wait_gone(*self._watch.lives, timeout_s=5.0)
        return [pid for pid in self._watch.lives if not is_gone(pid)]

    def _judge_processes(self) -> None:
        self._watch.stop()
        num_lost, num_cancelled = self._watch.num_lost, self.ledger.num_cancelled_streams
        num_gone = len(self._failures.ready_again_s) + len(self.report.rounds)  # instances: killed engines', unloaded
        for pid, life in self._watch.lives.items():
            if life.rss_mib:
                self.report.lines.append(str(life))
            for growth in life.growth(min(num_lost, num_gone) if pid == self._server.pid else 0):
                self.ledger.fault(growth)
        if left := idle_engine_threads(self._server):
            self.ledger.fault(left)
        self.report.lines.append(
            f"{num_lost} gRPC streams lost by the server, of {num_cancelled} that clients cancelled"
        )
        if fault := too_many_lost(num_lost, num_cancelled):
            self.ledger.fault(fault)


def end_server(server: ChaosServer, run: Run) -> None:
    """SIGTERM must end it in seconds, with status 0."""
    seconds, status = server.terminate()
    run.report.lines.append(f"SIGTERM: the server ended after {seconds:.1f} s with status {status}")
    if left := run.survivors():
        run.ledger.fault(f"processes that outlived the server: {left}")
    if status != 0 or seconds > MAX_EXIT_S:
        run.ledger.fault(f"exit status {status} after {seconds:.1f} s; the end of its log:\n{server.log[-2000:]}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="of traffic (%(default)s)")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--clients", type=int, default=10, help="that ask at once (%(default)s)")
    parser.add_argument("--requests", type=int, default=32, help="different ones (%(default)s)")
    parser.add_argument("--round-seconds", type=float, default=15.0, help="a model is asked (%(default)s)")
    parser.add_argument("--patience-s", type=float, default=90.0, help="to the end of an answer (%(default)s)")
    parser.add_argument("--max-ready-s", type=float, default=10.0, help="from a kill to ready (%(default)s)")
    names = (*WEIGHTS, *ENDINGS)
    parser.add_argument(
        "--without", action="append", default=[], choices=names, help="leave a failure or an ending out"
    )
    parser.add_argument("--way", action="append", default=[], choices=WAYS, help="only these (all)")
    parser.add_argument("--report", type=Path, help="a file for the table")
    parser.add_argument("--log", type=Path, help="a file for the server's log")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the server must not outlive this
    if missing_server():
        print(f"cannot run: {missing_server()}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        clock = Clock(folder)
        server = ChaosServer(folder, clock)
        with server, GatewayProcess(server.grpc_url) as gateway:
            doors = Doors(server.grpc_url, server.http_url, gateway.url, options.patience_s)
            run = Run(options, server, doors, clock)
            try:
                run.run()
            except (RuntimeError, psutil.NoSuchProcess) as error:
                run.ledger.fault(f"the run broke off: {error}")
            end_server(server, run)
            if options.log:
                options.log.write_text(server.log)
        table = run.report.render(run.ledger)
    print(table)
    if options.report:
        options.report.write_text(table)
    return 1 if run.ledger.num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
