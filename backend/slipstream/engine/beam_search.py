"""Beam search: the likeliest continuations of a prompt, searched a token at a time.

Each beam of a step is a request of one token that reports its likeliest successors; the prefix cache has the tokens
before it, but for those of the last block. So the scheduler, the KV cache and the worker know no beams: they see
short requests, which queue, chunk, preempt and time out as all do. Engine thread only, but for `first_step`.

Order and end are those of Hugging Face's `generate(num_beams=...)`: of the 2 * beam_width best successors of all beams,
those that end the text are results if they are among the best beam_width, and the best beam_width others go on. A
result's score is its log-probability divided by its number of tokens to the power of length_penalty.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from slipstream.core.errors import RequestError
from slipstream.core.finish import StopConditions, end_token_ids
from slipstream.core.latencies import note_end, note_lengths
from slipstream.core.outputs import StepOutput, StepOutputs, TokenLogprobs
from slipstream.core.request import FinishReason, Request, RequestTimes
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.scheduler import Scheduler

_MOST_ENDS = 4  # end tokens for which further successors are looked at, so that beam_width others go on


@dataclass(slots=True, eq=False)
class _Beam:
    """A continuation. token_ids, logprobs: of the output alone; sum: of all its log-probabilities.

    step: the request that looks for its successors, at first that of the beam which it extends.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    sum: float = 0.0
    step: Request | None = None


@dataclass(slots=True, eq=False)
class _Result:
    score: float
    beam: _Beam
    reason: FinishReason
    stop_reason: int | None = None


@dataclass(slots=True, eq=False)
class BeamSearch:
    """The state of one search. request: the client's; its steps' requests refer to the search.

    num_successors: of each beam that are looked at.
    """

    request: Request
    max_tokens: int
    ends: frozenset[int]
    stops: frozenset[int]
    num_successors: int
    beams: list[_Beam] = field(default_factory=list)
    num_missing: int = 0  # steps of beams whose outputs have not come yet
    successors: list[tuple[float, _Beam, TokenLogprobs]] = field(default_factory=list)
    results: list[_Result] = field(default_factory=list)  # best first, at most beam_width
    is_over: bool = False
    num_cached_tokens: int = 0

    @property
    def width(self) -> int:
        return self.request.params.beam_width


def first_step(request: Request, stop: StopConditions, vocab_size: int) -> Request:
    """The one-token request that begins the search of a client's request. stop: the request's own.

    Raises RequestError where the vocabulary has too few tokens for so many beams.
    """
    width = request.params.beam_width
    if 2 * width > vocab_size:
        raise RequestError("beam_width", f"got {width}, accepted: at most {vocab_size // 2}, half of the vocabulary")
    ends = end_token_ids(request)
    stops = ends | frozenset(request.params.stop_token_ids)
    num_successors = min(max(2, 1 + min(len(stops), _MOST_ENDS)) * width, vocab_size)
    search = BeamSearch(request, stop.max_len - request.num_prompt_tokens, ends, stops, num_successors)
    search.beams, search.num_missing = [_Beam([], [])], 1
    return _step_of(search, search.beams[0])


class BeamSearches:
    """Turns the outputs of steps into further steps and, at the end, into the client's sequences.

    forget(steps): drops what is kept of ended requests outside of the scheduler.
    """

    def __init__(self, scheduler: Scheduler, forget: Callable[[list[Request]], None]) -> None:
        self._scheduler = scheduler
        self._forget = forget
        self._stats = scheduler.stats

    def advance(self, outputs: StepOutputs, ended: Sequence[Request]) -> StepOutputs:
        """The outputs without those of searches' steps, and those of the searches that they end.

        ended: the requests that these outputs end, as all steps of searches do.
        """
        if all(request.search is None for request in ended):
            return outputs
        kept = StepOutputs()
        for output in outputs:
            search = output.request.search
            if search is None:
                kept.append(output)
            elif not search.is_over:
                kept += self._take(search, output)
        return kept

    def _take(self, search: BeamSearch, output: StepOutput) -> list[StepOutput]:
        if output.finish_reason is not FinishReason.LENGTH or not output.logprobs:
            return self._abort(search, output)
        step = output.request
        beam = next(beam for beam in search.beams if beam.step is step)
        if not beam.token_ids:
            search.num_cached_tokens = step.num_cached_tokens
        top = output.logprobs[0].top  # perhaps the whole vocabulary, which the client has asked for
        for rank, (token_id, logprob) in enumerate(top[: search.num_successors], 1):
            search.successors.append((beam.sum + logprob, beam, TokenLogprobs(token_id, logprob, rank, top)))
        search.num_missing -= 1
        return [] if search.num_missing else self._decide(search)

    def _decide(self, search: BeamSearch) -> list[StepOutput]:
        """Choose the beams of the next step, or end."""
        width = search.width
        length = len(search.beams[0].token_ids) + 1
        best = sorted(search.successors, key=lambda successor: -successor[0])[: search.num_successors]
        beams: list[_Beam] = []
        for place, (total, parent, entry) in enumerate(best):
            is_last = entry.token_id in search.stops or length >= search.max_tokens
            if is_last and place < width:
                self._add_result(search, _extended(search, total, parent, entry))
            elif not is_last and len(beams) < width:
                beams.append(_extended(search, total, parent, entry))
        search.beams, search.successors = beams, []
        if not beams or self._cannot_improve(search, length):
            return self._end(search)
        search.num_missing = len(beams)
        for beam in beams:
            last = beam.step
            assert last is not None
            self._scheduler.add_next(_step_of(search, beam), last)
        return []

    def _add_result(self, search: BeamSearch, beam: _Beam) -> None:
        token_id, length = beam.token_ids[-1], len(beam.token_ids)
        is_stop = token_id in search.stops
        reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
        stop_reason = token_id if is_stop and token_id not in search.ends else None
        beam.step = None
        insort(search.results, _Result(_score(search, beam.sum, length), beam, reason, stop_reason), key=_by_score)
        del search.results[search.width :]

    def _cannot_improve(self, search: BeamSearch, length: int) -> bool:
        """Whether there are enough results, and, without early_stopping, no beam is better than the worst of them."""
        if len(search.results) < search.width:
            return False
        if search.request.params.early_stopping:
            return True
        return _score(search, search.beams[0].sum, length) <= search.results[-1].score

    def _end(self, search: BeamSearch) -> list[StepOutput]:
        search.is_over = True
        results = search.results[: search.request.params.n]
        outputs = [_final(search, index, result) for index, result in enumerate(results)]
        self._note_end(search, outputs)
        return outputs

    def _abort(self, search: BeamSearch, output: StepOutput) -> list[StepOutput]:
        """A step was cancelled, timed out or failed: so is the search. What was found until then is the answer."""
        search.is_over = True
        for beam in search.beams:
            if beam.step is not None and beam.step is not output.request and not beam.step.is_finished:
                self._scheduler.finish(beam.step, FinishReason.CANCELLED)
                self._forget([beam.step])
        reason = output.finish_reason or FinishReason.ERROR
        beams = [result.beam for result in search.results] + search.beams
        beams += [_Beam([], [])] * (search.request.params.n - len(beams))
        outputs = []
        for index, beam in enumerate(beams[: search.request.params.n]):
            final = _final(search, index, _Result(0.0, beam, reason))
            final.error, final.fault, final.request.error = output.error, output.fault, output.error
            outputs.append(final)
        self._note_end(search, outputs)
        return outputs

    def _note_end(self, search: BeamSearch, outputs: Sequence[StepOutput]) -> None:
        """A search counts as its sequences do without it: steps of searches are no requests of a client."""
        for output in outputs:
            output.request.times = replace(search.request.times, last_token_ns=time.time_ns())
            note_end(self._stats, output.request)
            if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                note_lengths(self._stats, output.request)


def _extended(search: BeamSearch, total: float, parent: _Beam, entry: TokenLogprobs) -> _Beam:
    logprobs = [*parent.logprobs, _shown(search.request, entry)]
    return _Beam([*parent.token_ids, entry.token_id], logprobs, total, parent.step)


def _step_of(search: BeamSearch, beam: _Beam) -> Request:
    """The request that finds the successors of a beam."""
    request, parent = search.request, beam.step
    num_logprobs = max(search.num_successors, request.params.logprobs or 0)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=num_logprobs, ignore_eos=True, detokenize=False)
    step = Request(
        [*request.prompt_token_ids, *beam.token_ids],
        params,
        seed=request.seed,
        priority=request.priority,
        deadline=request.deadline,
        handle=request.handle,
        request_id=request.request_id,
        prefix_key=request.prefix_key,
        adapter=request.adapter,
        times=RequestTimes(first_scheduled_ns=parent.times.first_scheduled_ns) if parent else request.times,
        search=search,
    )
    if parent is not None:
        step.block_hashes, step.guessed_blocks = list(parent.block_hashes), parent.guessed_blocks
    beam.step = step
    return step


def _score(search: BeamSearch, total: float, length: int) -> float:
    return total / float(length) ** search.request.params.length_penalty


def _by_score(result: _Result) -> float:
    return -result.score


def _shown(request: Request, entry: TokenLogprobs) -> TokenLogprobs:
    """What the client sees of a token: its alternatives as far as asked for, and its rank among those reported."""
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top[: request.params.logprobs or 0])


def _final(search: BeamSearch, index: int, result: _Result) -> StepOutput:
    """The last and only output of a sequence of the client's request."""
    request, beam = search.request, result.beam
    sequence = Request(
        request.prompt_token_ids,
        request.params,
        handle=request.handle,
        request_id=request.request_id,
        sequence_index=index,
        eos_token_ids=request.eos_token_ids,
        finish_reason=result.reason,
        stop_reason=result.stop_reason,
        token_ids=[*request.prompt_token_ids, *beam.token_ids],
        num_cached_tokens=search.num_cached_tokens,
        cumulative_logprob=beam.sum,
    )
    logprobs = beam.logprobs if request.params.logprobs is not None else None
    return StepOutput(sequence, list(beam.token_ids), result.reason, logprobs)
