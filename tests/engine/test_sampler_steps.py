"""What the sampler keeps between steps: edits, parameters and rows of requests that join, leave and change places."""

from __future__ import annotations

import random

import pytest
import torch
from slipstream.core.finish import StopConditions
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.step_inputs import new_request
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.draws import draws_of
from slipstream.worker.sample.logit_bias import BANNED, EARLY, LogitsProcessors
from slipstream.worker.sample.sampler import Sampled, Sampler
from slipstream_kernels import ops


class _Counted(tuple):
    """Pairs that count how often they are gone through."""

    num_read = 0

    def __iter__(self):
        _Counted.num_read += 1
        return super().__iter__()


def test_edits_are_added_as_asked_and_a_bias_per_token_is_read_once() -> None:
    vocab = 40
    bias = _Counted((token_id, token_id / 20) for token_id in [*range(vocab), *range(vocab)])
    one = Request(
        [1, 2], SamplingParams(logit_bias=bias, bad_words_ids=((7,), (3, 5), (2, 6), (9, 3, 4), (2, 3, 9, 8)))
    )
    two = Request([1, 2], SamplingParams(min_tokens=2, max_tokens=5, stop_token_ids=(8,)))
    plain = Request([1, 2], SamplingParams())
    for request in (one, two, plain):
        request.stop_conditions = StopConditions(request, 100)
    one, two, plain = (RequestState(new_request(request)) for request in (one, two, plain))
    edits = LogitsProcessors(vocab, torch.device("cpu"))
    assert not edits.compose([plain])
    _Counted.num_read = 0
    for batch in ([one], [two, plain, one], [one, two]):
        assert edits.compose(batch)
        for output in ([], [3], [3, 9], [3, 9, 3]):
            expected = torch.zeros(len(batch), vocab)
            for row, request in enumerate(batch):
                request.token_ids = [1, 2, *output]
                request.num_drawn_tokens = len(output) + 1
                if request is one:
                    expected[row] = torch.arange(vocab) / 10
                    banned = [7, *([5] if output[-1:] == [3] else []), *([4] if output[-2:] == [9, 3] else [])]
                else:
                    banned = [8] if request is two and len(output) < 2 else []
                expected[row, banned] = BANNED if request is one else EARLY
            logits = torch.zeros(len(batch), vocab)
            edits.apply(logits, batch)
            torch.testing.assert_close(logits, expected)
    assert _Counted.num_read == 1


def test_a_bias_per_token_is_added_and_shared_by_the_sequences_of_a_request() -> None:
    vocab = 12
    biases = tuple(index / 4 for index in range(vocab - 2))  # may be shorter than the vocabulary, or padded with zeros
    params = SamplingParams(embedding_bias=(*biases, 0.0, 0.0, 0.0), logit_bias=((3, 1.0),), bad_words_ids=((4,),))
    requests = [RequestState(new_request(Request([1], one))) for one in (params, SamplingParams(), params)]
    edits = LogitsProcessors(vocab, torch.device("cpu"))
    assert edits.compose(requests)
    logits = torch.zeros(3, vocab)
    edits.apply(logits, requests)
    expected = torch.zeros(vocab)
    expected[: vocab - 2] = torch.tensor(biases)
    expected[3] += 1.0
    expected[4] = BANNED
    torch.testing.assert_close(logits, torch.stack([expected, torch.zeros(vocab), expected]))


KINDS = (
    {"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 3}, {"temperature": 0.9, "min_p": 0.2}, {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.7}, {"temperature": 0.7, "logit_bias": ((4, 3.0),)},
    {"temperature": 0.0, "embedding_bias": (9.0, -9.0) * 6}, {"temperature": 0.9, "allowed_token_ids": (2, 5)},
    {"temperature": 0.0, "min_tokens": 4, "max_tokens": 9, "stop_token_ids": (1, 3, 6, 7, 8)},
    {"temperature": 0.0, "bad_words_ids": ((0,), (3,), (9,), (10,))}, {"temperature": 0.8, "frequency_penalty": 2.0},
    {"temperature": 0.0, "logprob_token_ids": (7, 1)}, {"temperature": 0.5, "return_generation_logits": True},
)  # fmt: skip


def _state(index: int, kind: dict[str, object], seed: int) -> RequestState:
    request = Request([index % 12] * 20, SamplingParams(**kind), seed=seed)  # type: ignore[arg-type]
    request.stop_conditions = StopConditions(request, 100)
    return RequestState(new_request(request))


def _first_sample(requests: list[RequestState], logits: torch.Tensor, positions: torch.Tensor) -> Sampled:
    sampler = Sampler(logits.shape[1], len(KINDS), 64, torch.device("cpu"))
    return sampler.sample(requests, logits.clone(), positions).result()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_samples_as_if_it_were_the_first(seed: int, dtype: torch.dtype) -> None:
    """Requests of all kinds join, leave and change places; now and then all are greedy, or the same as before, or a
    graph has drawn for those that nobody edits."""
    dice, vocab, noise, chosen = random.Random(seed), 12, torch.Generator().manual_seed(seed), []
    kept = Sampler(vocab, len(KINDS), 64, torch.device("cpu"))
    pool = [_state(index, kind, dice.getrandbits(64)) for index, kind in enumerate(KINDS)]
    for step in range(160):
        if not chosen or dice.random() < 0.6:
            chosen = dice.sample(pool[:2] if dice.random() < 0.3 else pool, dice.randrange(1, 3))
            chosen += [one for one in dice.sample(pool, 3 if dice.random() < 0.5 else 0) if one not in chosen]
        for one in chosen:
            if one.params.min_tokens:
                one.num_drawn_tokens = 1 + step % 9
        logits = torch.randn(len(chosen), vocab, generator=noise).to(dtype)
        positions = torch.full((len(chosen),), 3 + step)
        drawn = ops.sample(logits, *draws_of(chosen, torch.device("cpu")), positions) if dice.random() < 0.5 else None
        found = kept.sample(chosen, logits.clone(), positions, drawn=drawn).result()
        assert found == _first_sample(chosen, logits, positions)
        alone = [_first_sample([one], logits[row : row + 1], positions[:1]) for row, one in enumerate(chosen)]
        assert found.token_ids == [token_id for one in alone for token_id in one.token_ids], "of a request by itself"
        assert found.logprobs == {key: entries for one in alone for key, entries in one.logprobs.items()}
