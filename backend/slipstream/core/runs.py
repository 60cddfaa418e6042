"""The run of now, of decodes or of verifications, if there is one: it is made and dropped here. Engine thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.core.decode_run import DecodeRun, MayDraft, needs_look
from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.outputs import StepOutputs
from slipstream.core.request import Request
from slipstream.core.stats import Stats
from slipstream.core.step import ScheduledStep
from slipstream.core.verify_run import VerifyRun

_LOOKS = 2  # steps that look, before a run of decodes is worth making


class Runs:
    """may_draft: whether drafts are made in this step for requests with these settings."""

    def __init__(self, cache: KVCacheManager, may_draft: MayDraft) -> None:
        self._cache = cache
        self._may_draft = may_draft
        self._decodes: DecodeRun | None = None
        self._verifications: VerifyRun | None = None
        self._num_looks = 0  # steps without drafts since the last run of decodes
        self._special: Request | None = None  # one of the running requests that needs a look

    def start(self, request: Request) -> None:
        for run in (self._verifications, self._decodes):
            if run is not None:
                run.start(request)

    def leave(self, request: Request) -> None:
        for run in (self._verifications, self._decodes):
            if run is not None:
                run.leave(request)
        if request is self._special:
            self._special = None

    def end_verifications(self) -> None:
        """Something of their requests has changed: the next step looks at each."""
        if self._verifications is not None:
            self._verifications.end()
            self._verifications = None

    def schedule(self, step: ScheduledStep, budget: int, prefills: list[Request], num_running: int) -> int | None:
        """Schedule the requests of a run, and append to `prefills` the others that run. Returns how many tokens these
        are; None if the scheduler has to look at each request."""
        if (verifications := self._verifications) is not None:
            num_tokens = None
            if self._may_draft(verifications.speculation):
                num_tokens = verifications.schedule(step, budget, prefills, num_running)
            if num_tokens is not None:
                return num_tokens
            self.end_verifications()
        if self._decodes is not None and self._decodes.schedule(step, budget, prefills):
            return len(step.requests)
        self._num_looks, self._decodes = (0 if self._decodes is not None else self._num_looks), None
        return None

    def note_look(self, step: ScheduledStep, running: Sequence[Request], prefills: Sequence[Request]) -> None:
        """step: of decodes, at each of which the scheduler has looked."""
        may_draft = self._may_draft
        speculation = step.requests[0].speculation if step.requests else None
        if speculation is not None and may_draft(speculation):
            self._verifications = VerifyRun.after(step, running, prefills, self._cache)
        if any(step.num_drafts):
            return
        self._num_looks += 1
        if self._num_looks < _LOOKS or (self._special is not None and needs_look(self._special, may_draft)):
            return
        self._special = next((request for request in step.requests if needs_look(request, may_draft)), None)
        if self._special is None:
            self._decodes = DecodeRun.after(step, running, prefills, self._cache, may_draft)

    def commit(
        self,
        step: ScheduledStep,
        sampled_token_ids: list[list[int]],
        now_ns: int,
        stats: Stats,
        leave: Callable[[Request], None],
    ) -> tuple[StepOutputs, int]:
        """Commit the rows of a step that the run of now has scheduled. Returns their outputs and the number of rows."""
        if (verified := step.verified) is not None and verified.is_whole:
            outputs = verified.run.commit(step, verified, sampled_token_ids, now_ns, stats, leave)
            return outputs, len(verified.requests)
        if verified is not None:
            verified.run.note_committed()
        else:
            self.end_verifications()
        rows = step.run
        if rows is None or rows.run is not self._decodes:
            return StepOutputs(), 0
        return rows.run.commit(rows, sampled_token_ids, now_ns, stats, leave), len(rows.requests)
