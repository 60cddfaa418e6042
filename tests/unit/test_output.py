"""The output thread's work: deltas, coalescing, stop strings over token borders, n sequences, log-probabilities."""

from __future__ import annotations

import time

import pytest
import toy_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.core.outputs import RequestOutput, StepOutput, TokenLogprobs
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine import output_processor as output_module
from slipstream.engine.output_processor import OutputProcessor
from slipstream.protocol.request_parser import ClientRequest
from slipstream.tokenizer.detokenizer import decode_after, start_detokenizer
from slipstream.tokenizer.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer(toy_tokenizers.byte_level())
PROMPT = TOKENIZER.encode("The quick brown")


class Bench:
    """A processor, one client request, and the stops that the engine was asked for."""

    def __init__(self, stream: bool = True, interval: int = 1, n: int = 1, **options: object) -> None:
        client_options = {k: options.pop(k) for k in ("echo_text", "wants_context") if k in options}
        self.stops: list[tuple[Request, str]] = []
        self.params = SamplingParams(max_tokens=1000, n=n, **options)
        self.requests = [Request(PROMPT, self.params, handle=9, sequence_index=i) for i in range(n)]
        self.failures: list[int] = []
        self.processor = OutputProcessor(
            TOKENIZER, lambda request, stop: self.stops.append((request, stop)), self.failures.append
        )
        client = ClientRequest(9, self.requests[0], stream=stream, stream_interval=interval, **client_options)
        self.processor.add(client)

    def step(self, ids: list[int], finish: FinishReason | None = None, index: int = 0, **news) -> list[RequestOutput]:
        return self.processor.process([StepOutput(self.requests[index], ids, finish, **news)])

    def play(self, ids: list[int], sizes: tuple[int, ...] = (1,), finish: FinishReason = FinishReason.LENGTH):
        """All outputs of a sequence whose tokens come in bursts of these sizes."""
        outputs, at, turn = [], 0, 0
        while at < len(ids):
            size = sizes[turn % len(sizes)]
            burst = ids[at : at + size]
            at, turn = at + size, turn + 1
            logprobs = [TokenLogprobs(token_id, -0.5, 1) for token_id in burst]
            outputs += self.step(burst, finish if at >= len(ids) else None, logprobs=logprobs)
        return outputs


def all_ids(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_the_end_of_a_request_is_told_with_its_last_output() -> None:
    """With that of its last sequence, with an error in one of them, and when the request is discarded."""
    told: list[int] = []
    for handle in (1, 2, 3):
        params = SamplingParams(max_tokens=9, n=2)
        requests = [Request(PROMPT, params, handle=handle, sequence_index=index) for index in range(2)]
        processor = OutputProcessor(TOKENIZER, lambda request, stop: None, lambda handle: None, told.append)
        processor.add(ClientRequest(handle, requests[0], stream=True))
        reason = FinishReason.ERROR if handle == 2 else FinishReason.LENGTH
        processor.process([StepOutput(requests[1], [300], reason)])
        assert told == ([1, 2] if handle == 2 else list(range(1, handle)))
        if handle == 1:
            processor.process([StepOutput(requests[0], [300], reason)])
        elif handle == 3:
            processor.discard(3)
    assert told == [1, 2, 3]


def test_token_ids_alone_have_no_text() -> None:
    ids = TOKENIZER.encode(" fox jumps", False)
    outputs = Bench(detokenize=False).play(ids)
    assert all_ids(outputs) == ids and len(outputs) == len(ids)
    assert not any(output.text for output in outputs)
    assert [output.is_first for output in outputs] == [True, *[False] * (len(ids) - 1)]


@pytest.mark.parametrize("stop", [(), ("####",)])
def test_every_token_leaves_in_its_step_and_the_end_is_marked(stop: tuple[str, ...]) -> None:
    ids = TOKENIZER.encode(" fox jumps over the lazy dog", False)
    outputs = Bench(stop=stop).play(ids)
    assert len(outputs) == len(ids)
    assert "".join(output.text for output in outputs) == " fox jumps over the lazy dog"
    assert [output.is_final for output in outputs] == [False] * (len(ids) - 1) + [True]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert all_ids(outputs) == ids


@pytest.mark.parametrize("interval", [2, 3, 7])
def test_stream_interval_coalesces_but_not_the_first_or_the_last(interval: int) -> None:
    ids = TOKENIZER.encode(" fox jumps over the lazy dog", False)
    outputs = Bench(interval=interval).play(ids)
    sizes = [len(output.token_ids) for output in outputs]
    assert sizes[0] == 1 and all(size == interval for size in sizes[1:-1]) and 1 <= sizes[-1] <= interval
    assert "".join(output.text for output in outputs) == " fox jumps over the lazy dog"


def test_without_streaming_there_is_one_output() -> None:
    ids = TOKENIZER.encode(" fox jumps", False)
    outputs = Bench(stream=False, echo_text="The quick brown").play(ids)
    assert [(output.text, output.is_final) for output in outputs] == [("The quick brown fox jumps", True)]
    assert outputs[0].token_ids == ids and len(outputs[0].logprobs) == len(ids)
    assert outputs[0].cumulative_logprob == pytest.approx(-0.5 * len(ids))


def test_half_a_character_is_no_output_and_its_tokens_come_with_the_rest() -> None:
    ids = TOKENIZER.encode("ཀ", False)
    outputs = Bench().play([*ids, ids[0]])
    assert [output.text for output in outputs] == ["ཀ", "\ufffd"]
    assert [output.token_ids for output in outputs] == [ids, ids[:1]]
    assert [len(output.logprobs) for output in outputs] == [3, 1]


def test_half_a_character_at_the_end_can_be_a_stop_as_any_text_after_min_tokens() -> None:
    ids = TOKENIZER.encode("ཀ", False)[:1]
    for min_tokens, reason in ((0, "\ufffd"), (1, None)):
        (output,) = Bench(stop=("\ufffd",), min_tokens=min_tokens).play(ids)
        assert (output.stop_reason, output.text) == (reason, "" if reason else "\ufffd")


def test_special_tokens_without_text_still_leave() -> None:
    ids = [TOKENIZER.backend.token_to_id("<|user|>")] * 3
    assert [output.text for output in Bench().play(ids)] == ["", "", ""]


@pytest.mark.parametrize("sizes", [(1,), (3,)])
@pytest.mark.parametrize("stop", [(), ("never",)])
def test_the_token_that_ends_a_sequence_is_counted_but_not_shown(stop: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    ids = TOKENIZER.encode(" fox!", False)
    stop_id, whole = {"stop_token_ids": (ids[-1],)}, " fox!"
    for options, reason, expected in (
        (stop_id, ids[-1], " fox"),
        ({}, None, " fox"),  # an end-of-sequence token
        ({}, ids[-1], whole),  # the end of a stop word in tokens
        ({**stop_id, "include_stop_str_in_output": True}, ids[-1], whole),
    ):
        bench = Bench(stop=stop, **options)
        bench.requests[0].stop_reason = reason
        outputs = bench.play(ids, sizes, finish=FinishReason.STOP)
        assert "".join(output.text for output in outputs) == expected, options
        assert all_ids(outputs) == ids and outputs[-1].stop_reason == reason
        assert sum(len(output.logprobs) for output in outputs) == len(ids)


def test_an_echoed_prompt_comes_once_with_the_first_output() -> None:
    outputs = Bench(echo_text="The quick brown").play(TOKENIZER.encode(" fox jumps", False))
    assert len(outputs) > 1 and "".join(output.text for output in outputs) == "The quick brown fox jumps"


def test_a_stop_string_over_token_borders_ends_the_sequence_once() -> None:
    ids = TOKENIZER.encode(" one two STOP three", False)
    bench = Bench(stop=("o STOP t",))
    outputs = bench.play(ids)
    assert "".join(output.text for output in outputs) == " one tw"
    last = outputs[-1]
    assert (last.finish_reason, last.stop_reason, last.is_final) == (FinishReason.STOP, "o STOP t", True)
    assert bench.stops == [(bench.requests[0], "o STOP t")]
    assert bench.processor.num_requests == 0
    assert bench.step(ids, FinishReason.STOP) == []  # the engine's own end, and tokens computed meanwhile, are dropped


def test_stop_string_included_when_asked_and_not_before_min_tokens() -> None:
    ids = TOKENIZER.encode("a END b END c", False)
    text = "".join(o.text for o in Bench(stop=("END",), include_stop_str_in_output=True).play(ids))
    assert text == "a END"
    num_first = len(TOKENIZER.encode("a END b", False))
    text = "".join(o.text for o in Bench(stop=("END",), min_tokens=num_first).play(ids))
    assert text == "a END b "


def test_text_that_only_looked_like_a_stop_comes_out_with_its_tokens() -> None:
    ids = TOKENIZER.encode("x###", False)
    outputs = Bench(stop=("####",)).play(ids)
    assert "".join(output.text for output in outputs) == "x###"
    assert all_ids(outputs) == ids
    assert sum(len(output.logprobs) for output in outputs) == len(ids)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="abん👍 \n", max_size=25),
    stops=st.lists(st.text(alphabet="abん👍", min_size=1, max_size=3), max_size=2),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    interval=st.integers(1, 3),
)
def test_pieces_and_their_tokens_tell_the_same_story(text, stops, sizes, interval) -> None:
    """Whatever the bursts and the interval: the text is the whole decode cut at the stop, tokens and log-probabilities
    leave together, and each piece is what a stateless decoder makes of its tokens and context."""
    ids = TOKENIZER.encode(text, False)
    if not ids:
        return
    bench = Bench(stop=tuple(stops), interval=interval, wants_context=True)
    outputs = bench.play(ids, tuple(sizes))
    one_by_one = Bench(stream=False, stop=tuple(stops)).play(ids)
    streamed = "".join(output.text for output in outputs)
    assert streamed == one_by_one[0].text
    assert streamed == min((text.split(stop)[0] for stop in stops), key=len, default=text) or len(stops) > 1
    assert outputs[-1].is_final and all(output.text or output is outputs[-1] for output in outputs[1:])
    for output in outputs:
        assert len(output.logprobs or []) == len(output.token_ids)
        piece = decode_after(TOKENIZER, output.context_token_ids, output.token_ids, num_characters=len(output.text))
        assert piece == output.text


def test_n_sequences_answer_apart_and_only_the_last_end_is_final() -> None:
    ids = TOKENIZER.encode(" fox", False)
    bench = Bench(n=3)
    outputs = []
    for index in (2, 0, 1):
        outputs += bench.step(ids, FinishReason.STOP if index else FinishReason.LENGTH, index)
    assert [output.request.sequence_index for output in outputs] == [2, 0, 1]
    assert [output.is_final for output in outputs] == [False, False, True]


def test_a_sequence_that_a_stop_string_ended_does_not_end_its_siblings() -> None:
    """What the engine had computed of it meanwhile, and its end there, come later."""
    bench = Bench(n=2, stop=("fox",))
    ids = TOKENIZER.encode(" fox jumps", False)
    (first,) = bench.step(ids, index=0)
    assert (first.finish_reason, first.is_final, bench.stops) == (
        FinishReason.STOP,
        False,
        [(bench.requests[0], "fox")],
    )
    assert bench.step(ids, index=0) == [] and bench.step([], FinishReason.STOP, index=0) == []
    others = TOKENIZER.encode(" dog", False)
    (last,) = bench.step(others, FinishReason.LENGTH, index=1)
    assert (last.text, last.is_final, len(bench.stops)) == (" dog", True, 1)


def test_an_error_is_the_final_answer_of_the_whole_request() -> None:
    bench = Bench(n=2)
    (output,) = bench.step([], FinishReason.ERROR, 1, error="out of luck")
    assert output.is_final and output.error == "out of luck"
    assert bench.step([5]) == [] and bench.processor.num_requests == 0


def test_a_discarded_request_is_not_answered() -> None:
    bench = Bench()
    bench.processor.discard(9)
    bench.processor.discard(9)
    assert bench.step([5]) == []


def test_prompt_logprobs_come_once_with_the_first_output() -> None:
    bench = Bench()
    entries = [None, TokenLogprobs(5, -1.0, 2)]
    ids = TOKENIZER.encode(" fox", False)
    first = bench.step(ids[:1], prompt_logprobs=entries, context_logits=[b"rows"])
    rest = bench.step(ids[1:], FinishReason.LENGTH)
    assert (first[0].prompt_logprobs, first[0].context_logits) == (entries, [b"rows"])
    assert (rest[0].prompt_logprobs, rest[0].context_logits) == (None, None)


def test_a_piece_without_text_takes_no_context_from_the_next() -> None:
    """A stateless decoder would read the next one as the beginning of a text, without its space."""
    tokenizer = TextTokenizer(toy_tokenizers.metaspace())
    special = min(tokenizer.special_ids)
    request = Request(tokenizer.encode("The quick", False), SamplingParams(max_tokens=9), handle=1)
    processor = OutputProcessor(tokenizer, lambda request, stop: None, lambda handle: None)
    processor.add(ClientRequest(1, request, stream=True, wants_context=True))
    for token_ids in ([special], tokenizer.encode("brown fox", False)):
        (output,) = processor.process([StepOutput(request, token_ids)])
        piece = decode_after(tokenizer, output.context_token_ids, output.token_ids, num_characters=len(output.text))
        assert piece == output.text == ("" if token_ids == [special] else " brown fox")


@pytest.mark.parametrize(
    "stop", [("    return a",), ("return",), ("a",), ("rn", "    return a"), ("aa",), ("n a", " a")]
)
def test_a_stop_string_counts_by_where_it_ends(stop: tuple[str, ...]) -> None:
    """At every number of min_tokens: the first match that a later token completes ends the text, wherever it began."""
    ids = TOKENIZER.encode("def add(a):\n    return a\n    return aaa", False)
    lengths = [len(TOKENIZER.decode(ids[:count])) for count in range(len(ids) + 1)]
    text = TOKENIZER.decode(ids)
    for min_tokens in range(len(ids) + 1):
        ends = range(lengths[min_tokens] + 1, len(text) + 1)
        end = next((end for end in ends if text[:end].endswith(stop)), None)
        matched = "" if end is None else max((s for s in stop if text[:end].endswith(s)), key=len)
        for sizes in ((1,), (3,), (len(ids),)):
            outputs = Bench(stop=stop, min_tokens=min_tokens).play(ids, sizes)
            expected = text if end is None else text[: end - len(matched)]
            assert "".join(output.text for output in outputs) == expected, (min_tokens, sizes)
            assert outputs[-1].stop_reason == (matched or None)


def test_the_siblings_of_a_sequence_that_failed_are_cancelled() -> None:
    bench = Bench(n=3)
    ids = TOKENIZER.encode(" fox", False)
    bench.step(ids, FinishReason.LENGTH, index=0)
    assert bench.failures == []
    (failed,) = bench.step([], FinishReason.ERROR, index=1, error="went wrong")
    assert (failed.is_final, failed.error, bench.failures) == (True, "went wrong", [9])
    assert bench.step(ids, index=2) == [] and bench.step([], FinishReason.CANCELLED, index=2) == []
    alone = Bench()
    alone.step([], FinishReason.ERROR, error="went wrong")
    assert alone.failures == []


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece", "metaspace"])
def test_sequences_share_the_prompts_end_and_nothing_else(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt ends within a character, each sequence goes on in its own way."""
    tokenizer = TextTokenizer(getattr(toy_tokenizers, name)())
    prompt = tokenizer.encode("brown ཀ", False)[:-1]
    outputs = [tokenizer.encode(text, False) for text in ("fox ག", "ཀ dog", "🏳 x")[:n]]
    alone = []
    for output in outputs:
        detokenizer = start_detokenizer(tokenizer, prompt)
        alone.append("".join(detokenizer.push([token_id]) for token_id in output) + detokenizer.flush())
    num_starts = []
    start = output_module.start_detokenizer

    def counting(*args):
        num_starts.append(1)
        return start(*args)

    monkeypatch.setattr(output_module, "start_detokenizer", counting)
    params = SamplingParams(max_tokens=100, n=n)
    requests = [Request(prompt, params, handle=1, sequence_index=index) for index in range(n)]
    processor = OutputProcessor(tokenizer, lambda request, stop: None, lambda handle: None)
    processor.add(ClientRequest(1, requests[0], stream=True))
    texts = [""] * n
    for at in range(max(map(len, outputs)) + 1):
        for request, output in zip(requests, outputs):
            if at > len(output):
                continue
            is_over = at == len(output)
            step = StepOutput(request, output[at : at + 1], FinishReason.LENGTH if is_over else None)
            texts[request.sequence_index] += "".join(one.text for one in processor.process([step]))
    assert texts == alone and len(num_starts) == 1


def test_a_text_that_is_not_streamed_costs_time_by_its_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding each token's text to it copies all of it, on the thread that answers everybody: 1.6 ms at 5 MB."""
    bench = Bench(stream=False)
    text = " " * 80
    monkeypatch.setattr(output_module.start_detokenizer(TOKENIZER, PROMPT, True).__class__, "push", lambda *_: text)
    start = time.process_time()
    for _ in range(100_000):
        assert not bench.step([300])
    (output,) = bench.step([300], FinishReason.LENGTH)
    assert time.process_time() - start < 4.0, "10 to 60 s, where all of it is copied with each"
    assert output.text == text * 100_001
