"""Clients that ask all the time, a thread each, and the ledger of what came back."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from asked import CANCELS, WHOLE, Asked, Choice, Known, draw
from grpc_way import over_grpc
from http_way import over_http
from llm_client import grpc_infer
from outcome import Outcome, Texts, fault_of

MAX_FAULTS_KEPT, MAX_FAULT_CHARS = 60, 600


@dataclass(frozen=True)
class Doors:
    """Where clients ask.  patience_s: nobody waits longer for the end of an answer."""

    grpc_url: str
    http_url: str
    gateway_url: str
    patience_s: float

    def ask(self, asked: Asked) -> Outcome:
        if asked.ending == "kill":
            return self._ask_and_die(asked)
        stopper = None
        if asked.ending == "stop" and asked.way.startswith("http"):
            stopper = threading.Timer(0.05 * (1 + asked.after), self._stop, (asked,))
            stopper.start()
        over = over_grpc if asked.way.startswith("grpc") else self._over_http
        outcome = over(asked, self.grpc_url, self.patience_s)
        if stopper is not None:
            stopper.join()
        return outcome

    def _over_http(self, asked: Asked, _: str, patience_s: float) -> Outcome:
        return over_http(asked, self.http_url, self.gateway_url, patience_s)

    def _stop(self, asked: Asked) -> None:
        grpc_infer(self.grpc_url, asked.model, {"stop": True}, request_id=asked.request_id)

    def _ask_and_die(self, asked: Asked) -> Outcome:
        """SIGKILL after `after` responses, or after the end of the client."""
        plan = {"prompt": asked.known.prompt, "settings": dict(asked.known.settings), "model": asked.model}
        urls = {"grpc_url": self.grpc_url, "http_url": self.http_url, "gateway_url": self.gateway_url}
        outcome = Outcome(asked)
        command = [sys.executable, str(Path(__file__).with_name("killed_client.py"))]
        client = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert client.stdin is not None and client.stdout is not None
        client.stdin.write(json.dumps({**plan, **urls, "way": asked.way, "patience_s": self.patience_s}))
        client.stdin.close()
        for _ in range(1 + asked.after):
            if not client.stdout.readline():
                break
        client.kill()
        client.wait()
        client.stdout.close()
        outcome.cut()
        return outcome


@dataclass
class Ledger:
    """Everything counted; all clients write to it."""

    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)  # (model, kind of outcome)
    ways: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_faults: int = 0
    num_compared: int = 0
    num_cancelled_streams: int = 0  # of gRPC, by their clients
    longest_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: Outcome, fault: str) -> None:
        with self.lock:
            asked = outcome.asked
            self.kinds[asked.model, outcome.kind] += 1
            self.ways[asked.way] += 1
            self.endings[asked.ending] += 1
            self.longest_s = max(self.longest_s, outcome.ended - outcome.sent)
            self.num_cancelled_streams += asked.way.startswith("grpc") and asked.ending in CANCELS
            self.num_compared += asked.ending == WHOLE and not outcome.error
        if fault:
            self.fault(f"{fault}; {asked}")

    def fault(self, text: str) -> None:
        text = text if len(text) <= MAX_FAULT_CHARS else text[:MAX_FAULT_CHARS] + "…"
        with self.lock:
            self.num_faults += 1
            if len(self.faults) < MAX_FAULTS_KEPT:
                self.faults.append(text)
                print(f"VIOLATION {text}", flush=True)


@dataclass
class Target:
    """The model that is asked now; requests that run, by model."""

    model: str = ""
    has_drafts: bool = False
    running: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> tuple[str, bool]:
        with self.lock:
            self.running[self.model] += 1
            return self.model, self.has_drafts

    def give_back(self, model: str) -> None:
        with self.lock:
            self.running[model] -= 1

    def switch(self, model: str, has_drafts: bool) -> None:
        with self.lock:
            self.model, self.has_drafts = model, has_drafts


class Traffic:
    """`with Traffic(...)`: clients ask inside, and have all ended behind it."""

    def __init__(
        self,
        doors: Doors,
        target: Target,
        catalogue: list[Known],
        texts: Texts,
        is_explained: Callable[[Outcome], bool],
        ledger: Ledger,
        choice: Choice,
    ) -> None:
        self._choice = choice
        self._doors, self._target, self._ledger = doors, target, ledger
        self._catalogue, self._texts, self._is_explained = catalogue, texts, is_explained
        self._is_over = threading.Event()
        self._clients: list[threading.Thread] = []

    def start(self, num_clients: int, seed: int) -> None:
        for index in range(num_clients):
            rng = random.Random(f"client {index} of {seed}")
            self._clients.append(threading.Thread(target=self._run, args=(rng,), name=f"client {index}", daemon=True))
            self._clients[-1].start()

    def stop(self) -> None:
        """Until every client has its last answer; who has none by then never gets one."""
        self._is_over.set()
        deadline = time.monotonic() + self._doors.patience_s + 30.0
        for client in self._clients:
            client.join(max(0.1, deadline - time.monotonic()))
            if client.is_alive():
                self._ledger.fault(f"{client.name} still waits at the end")

    def _run(self, rng: random.Random) -> None:
        while not self._is_over.is_set():
            model, has_drafts = self._target.take()
            try:
                failed = self._ask(draw(rng, self._catalogue, model, has_drafts, self._choice))
            except Exception as error:  # the program's own mistake must not look like a quiet server
                self._ledger.fault(f"the client itself failed: {type(error).__name__}: {error}")
                failed = True
            finally:
                self._target.give_back(model)
            if failed:
                time.sleep(0.5)  # the engine is away: asking more often says no more

    def _ask(self, asked: Asked) -> bool:
        """Whether it had an error, explained or not."""
        outcome = self._doors.ask(asked)
        fault = fault_of(outcome, self._texts[asked.known.number, asked.is_chat], self._is_explained(outcome))
        self._ledger.add(outcome, fault)
        return bool(outcome.error)
