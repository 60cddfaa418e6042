"""Decides which grammars may be used: each text has one trial in a separate process, and the verdict is cached. Engine
thread; never waits."""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence

from slipstream.core.config import StructuredOutputConfig
from slipstream.core.errors import CapacityError, EngineError, RequestError, SlipstreamError, internal_error
from slipstream.core.grammar_limits import FIELD
from slipstream.core.sampling_params import Guide
from slipstream.engine.grammar_link import GrammarLink
from slipstream.engine.grammar_messages import MAX_KILLS
from slipstream.engine.grammar_state import GrammarState

logger = logging.getLogger(__name__)

MAX_KNOWN_GRAMMARS = 4096  # hashes of texts that have passed their trial, or failed it


def key_of(guide: Guide) -> bytes:
    return hashlib.sha256(f"{guide.type}\n{guide.text}".encode("utf-8", "surrogatepass")).digest()


class Verdicts:
    """Verdicts by key of the text. A trial is cancelled when no state waits for it any more."""

    def __init__(self, limits: StructuredOutputConfig, link: GrammarLink) -> None:
        self._limits, self._link = limits, link
        self._known: OrderedDict[bytes, str] = OrderedDict()  # "" or why the text is refused
        self._trying: dict[bytes, list[GrammarState]] = {}  # states that wait for a verdict

    @property
    def is_trying(self) -> bool:
        return bool(self._trying)

    def find(self, key: bytes) -> str | None:
        """Why the text is refused, "" if it is accepted; None if there is no verdict yet."""
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def wait(self, key: bytes, states: Sequence[GrammarState]) -> None:
        """Start or join the trial of the grammar that these states share."""
        if key not in self._trying:
            self._trying[key] = []
            self._link.send_to_process("try", key, states[0].guide)
        self._trying[key] += states

    def is_waiting(self, state: GrammarState) -> bool:
        return state in self._trying.get(state.key, ())

    def leave(self, state: GrammarState) -> bool:
        """Stop waiting for a verdict. Returns whether the state was waiting."""
        if not self.is_waiting(state):
            return False
        self._trying[state.key].remove(state)
        if not self._trying[state.key]:
            del self._trying[state.key]
            self._link.send_to_process("forget", state.key)
        return True

    def try_again(self) -> None:
        """Repeat pending trials in a new process, after the old one ended without verdicts."""
        for key, states in list(self._trying.items()):
            self._trying[key] = [state for state in states if state.error is None]
            if self._trying[key]:
                self._link.send_to_process("try", key, states[0].guide)
            else:
                del self._trying[key]

    def take(self, key: bytes, verdict: str, text: str) -> tuple[list[GrammarState], SlipstreamError | None]:
        """Store a verdict. Returns the states that waited for it, and their error if the text is refused."""
        states = self._trying.pop(key, [])
        if not states:
            return [], None
        limits, name = self._limits, states[0].guide.type
        if verdict == "full":
            return states, CapacityError("too many grammars that take long are being compiled")
        if verdict == "killed":
            return states, CapacityError(f"compiling this {name} was ended from outside {MAX_KILLS} times")
        if verdict == "bug":
            return states, internal_error(logger, "compiling a grammar", EngineError(text))
        refusal = {
            "good": "",
            "bad": f"not a usable {name}: {text}",
            "time": f"compiling this {name} takes more CPU time than guided_max_compile_ms={limits.max_compile_ms}",
            "memory": f"compiling this {name} takes more memory than guided_memory_bytes={limits.memory_bytes}",
        }[verdict]
        self._known[key] = refusal
        if len(self._known) > MAX_KNOWN_GRAMMARS:
            self._known.popitem(last=False)
        return states, RequestError(FIELD, refusal) if refusal else None
