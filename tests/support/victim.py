"""Measures a victim request during an attack: its tokens and latencies must not change.

`assert_unharmed(server, attack)` runs a greedy stream on the quiet server, then during the attack. The attack runs on a
thread of low priority, so that the test's own work (such as building a huge request) hardly slows the victim. A
different text or an error fails at once; latencies fail only if they are bad in each of several attempts. An attempt
begins when the server's processes are idle, so that leftovers of the last attack do not count as the quiet state.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Protocol

from patience import PATIENCE_S
from processes import cpu_seconds

PROMPT = "import os\n"
NUM_TOKENS = 100
MOST_SLOWER = 1.5  # attacked / quiet
GAP_FLOOR_MS = 400.0  # shorter gaps may come from a busy machine
ATTACK_NICENESS = 10
HOLD_S = 1.0  # inside an attack that is a context manager
AT_REST = 0.3  # of a core, for all processes of the server

Attack = Callable[[], object]


class Server(Protocol):
    grpc_url: str

    @property
    def pid(self) -> int: ...


@dataclass(frozen=True)
class Run:
    """One run of the victim's client.  waits_ms: to each stream's first token, then between tokens."""

    texts: tuple[str, ...]
    errors: tuple[str, ...]
    waits_ms: tuple[float, ...]

    @property
    def median_ms(self) -> float:
        return median(self.waits_ms)

    @property
    def p99_ms(self) -> float:
        return quantiles(self.waits_ms, n=100)[98]

    @property
    def largest_ms(self) -> float:
        return max(self.waits_ms)

    def __str__(self) -> str:
        return f"median {self.median_ms:.2f} ms, p99 {self.p99_ms:.1f} ms, largest gap {self.largest_ms:.0f} ms"


@dataclass(frozen=True)
class Comparison:
    quiet: Run
    attacked: Run

    def harm(self, gap_floor_ms: float = GAP_FLOOR_MS) -> str:
        """The violated limit of the victim's latencies; "" if none."""
        quiet, attacked = self.quiet, self.attacked
        if attacked.median_ms > MOST_SLOWER * quiet.median_ms:
            return f"the median inter-token time is more than {MOST_SLOWER} x the quiet one"
        if attacked.largest_ms > max(MOST_SLOWER * quiet.largest_ms, gap_floor_ms):
            return f"the largest gap is more than {MOST_SLOWER} x the quiet one, and than {gap_floor_ms:.0f} ms"
        return ""

    def __str__(self) -> str:
        return f"quiet: {self.quiet}; attacked: {self.attacked} ({len(self.attacked.texts)} streams)"


@dataclass(frozen=True)
class Victim:
    """The victim's request, to Triton's gRPC port, or to the gateway if openai_url is given."""

    grpc_url: str
    openai_url: str = ""
    model: str = "llm"
    prompt: str = PROMPT
    num_tokens: int = NUM_TOKENS

    def run(self, attack: Attack | None = None, timeout_s: float = 2 * PATIENCE_S) -> Run:
        """One stream; beside an attack, one after the other until it has ended.  Raises what the attack raises."""
        address = ["--openai", self.openai_url] if self.openai_url else ["--grpc", self.grpc_url]
        asked = ["--model", self.model, "--prompt", self.prompt, "--num-tokens", str(self.num_tokens)]
        command = [sys.executable, str(Path(__file__).with_name("victim_client.py")), *address, *asked]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        overdue = threading.Timer(timeout_s, client.kill)
        overdue.start()
        try:
            assert client.stdout is not None
            first_line = client.stdout.readline()
            if attack is not None and "streaming" in first_line:
                _run_beside(attack, client)
            output = first_line + client.communicate()[0]
        finally:
            overdue.cancel()
            client.kill()
            client.wait()
        assert client.returncode == 0, f"the victim's client ended with {client.returncode} after {timeout_s} s at most"
        streams = [message for message in map(json.loads, output.splitlines()) if "text" in message]
        return Run(
            tuple(stream["text"] for stream in streams),
            tuple(stream["error"] for stream in streams if stream["error"]),
            tuple(wait for stream in streams for wait in stream["waits_ms"]),
        )


def _run_beside(attack: Attack, client: subprocess.Popen[str]) -> None:
    """Attack on a thread of its own; returns when the attack has ended, or the client."""
    failures: list[BaseException] = []

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ATTACK_NICENESS)  # of this thread and its children
        try:
            held = attack()
            if isinstance(held, AbstractContextManager):
                with held:
                    time.sleep(HOLD_S)
        except BaseException as failure:  # raised again by the test's thread
            failures.append(failure)

    thread = threading.Thread(target=run, name="attack", daemon=True)
    thread.start()
    while thread.is_alive() and client.poll() is None:
        thread.join(0.05)
    if failures:
        raise failures[0]


def wait_at_rest(server: Server, timeout_s: float = PATIENCE_S) -> None:
    """Wait until server and engines are idle.  AssertionError if they stay busy because of the attack."""
    deadline, spent = time.monotonic() + timeout_s, cpu_seconds(server.pid)
    while True:
        time.sleep(0.25)
        before, spent = spent, cpu_seconds(server.pid)
        if spent - before < AT_REST * 0.25:
            return
        assert time.monotonic() < deadline, f"the server is still busy after {timeout_s} s without a request"


def compare(server: Server, victim: Victim, attack: Attack) -> Comparison:
    """Run quietly, then attacked.  AssertionError if the victim's text differs or it gets an error."""
    wait_at_rest(server)
    quiet = victim.run()
    attacked = victim.run(attack)
    assert not quiet.errors + attacked.errors, f"the victim got an error: {(quiet.errors + attacked.errors)[0]}"
    assert set(attacked.texts) == set(quiet.texts), "the victim's text beside the attack is not its text without"
    return Comparison(quiet, attacked)


def assert_unharmed(
    server: Server,
    attack: Attack,
    *,
    openai_url: str = "",
    model: str = "llm",
    num_tokens: int = NUM_TOKENS,
    gap_floor_ms: float = GAP_FLOOR_MS,
    attempts: int = 3,
) -> Comparison:
    """Assert equal text, a median inter-token time of at most 1.5 x the quiet one, and bounded gaps.

    attack is called in each attempt while the victim streams; the victim streams until it returns. If it returns a
    context manager, the victim streams for a second inside it. Its exceptions fail the test.
    """
    victim = Victim(server.grpc_url, openai_url, model, num_tokens=num_tokens)
    replace(victim, num_tokens=10).run()  # the first request after a start is slower: threads, caches
    seen: list[str] = []
    for _ in range(attempts):
        comparison = compare(server, victim, attack)
        if not comparison.harm(gap_floor_ms):
            return comparison
        seen.append(f"{comparison.harm(gap_floor_ms)}: {comparison}")
    raise AssertionError("the attack harms another's stream in every attempt:\n" + "\n".join(seen))
