"""The operator's logits processors: what they see, whose rows they change, and whom their failures cost an answer."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import own_processors
import pytest
from engine_driver import GREEDY, Told, make_engine, run_all, run_requests
from slipstream.core.config import ParallelConfig
from slipstream.core.errors import ConfigError, EngineError, RequestError
from slipstream.core.logits_processors import ProcessorCall
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.stats import Metric
from slipstream.engine.engine import Engine
from slipstream.worker.sample import named_processors
from speculation_config import speculation_config
from tiny_heads import make_eagle

SHIPPED = "slipstream.processors:NoRepeatNgram, sigma=slipstream.processors:TopNSigma"
OWN = "own_processors:Force, numbers=own_processors:Numbers, own_processors:Recorder, own_processors:Never"
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=4, ignore_eos=True)


def asked(name: str, params: SamplingParams = GREEDY, **kwargs: Any) -> SamplingParams:
    return replace(params, logits_processors=(ProcessorCall(name, kwargs),))


@pytest.fixture(scope="module")
def served(tiny_llama: Path) -> Iterator[Engine]:
    """Chunked, overlapped, and with so few blocks that requests are preempted."""
    engine = make_engine(
        tiny_llama,
        {"logits_processors": f"{OWN}, {SHIPPED}", "max_model_len": 128},
        {"num_blocks": 24},
        {"max_num_batched_tokens": 24, "overlap_scheduling": "on"},
        speculation_config("ngram", ngram_min=1, throttle="off"),
    )
    yield engine
    engine.close()


def texts(told: list[Told]) -> list[list[int]]:
    assert not any(one.error for one in told)
    return [one.token_ids for one in told]


def test_only_the_rows_of_those_who_ask_are_changed(served: Engine, prompts: list[list[int]]) -> None:
    """Beside requests of which none is changed."""
    params = [replace(one, num_draft_tokens=0) for one in (GREEDY, SAMPLED, asked("Force", token=7), GREEDY)]
    params.append(asked("Force", replace(SAMPLED, num_draft_tokens=0, max_tokens=24), token=9))
    found = texts(run_all(served, prompts[:5], params))
    assert found[2] == [7] * 24 and found[4] == [9] * 24
    plain = [replace(one, logits_processors=()) for one in params]
    expected = texts(run_all(served, prompts[:5], plain))
    assert [found[0], found[1], found[3]] == [expected[0], expected[1], expected[3]]


def test_one_call_a_step_for_all_rows(tiny_llama: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(tiny_llama, {"logits_processors": OWN})
    own_processors.Force.num_calls = 0
    assert texts(run_all(engine, prompts[:3], asked("Force", token=7))) == [[7] * 24] * 3
    assert own_processors.Force.num_calls == 24
    engine.close()


def test_what_is_seen_is_what_was_said(served: Engine, prompts: list[list[int]]) -> None:
    """The whole text before each token, also after a preemption and in front of drafts."""
    own_processors.Recorder.seen.clear()
    longest = sorted(prompts, key=len)[-4:]
    found = run_all(served, longest, asked("Recorder", replace(SAMPLED, max_tokens=24)))
    assert texts(found) == texts(run_all(served, longest, replace(SAMPLED, max_tokens=24)))
    for prompt, told in zip(longest, found):
        seen = [output for known, output in own_processors.Recorder.seen if known == prompt]
        for count in range(24):
            assert told.token_ids[:count] in seen


def test_drafts_are_verified_by_their_own_texts(served: Engine, prompts: list[list[int]]) -> None:
    params = asked("NoRepeatNgram", replace(GREEDY, max_tokens=30), size=2)
    drafted = run_all(served, prompts[:6], params)
    assert texts(drafted) == texts(run_all(served, prompts[:6], replace(params, num_draft_tokens=0)))
    for prompt, told in zip(prompts, drafted):
        whole = [*prompt, *told.token_ids]
        pairs = list(itertools.pairwise(whole))
        for index in range(len(prompt) - 1, len(pairs)):
            assert pairs[index] not in pairs[:index], "a pair of tokens came twice"


def test_one_that_raises_ends_its_own_request_alone(
    served: Engine, prompts: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    params = [asked("Force", token=7), asked("Force", token=8, fail_after=3), GREEDY, asked("Force", token=9)]
    found = run_all(served, prompts[:4], params)
    assert [one.finish_reason for one in found] == [FinishReason.LENGTH, FinishReason.ERROR] + [FinishReason.LENGTH] * 2
    assert found[1].error == "the logits processor Force failed: RuntimeError" and found[1].fault is EngineError
    assert "tells of" in caplog.text, "the log has the whole story"
    assert (found[0].token_ids, found[3].token_ids) == ([7] * 24, [9] * 24)
    assert found[2].token_ids == run_all(served, prompts[2:3], GREEDY)[0].token_ids


def test_a_text_of_drafts_alone_fails_nobody(served: Engine, prompts: list[list[int]]) -> None:
    """Every fifth draft is a token that the class forbids, and it raises for a text that has it."""
    check_forbidden_drafts(served, prompts[4:8])


def test_ranks_bury_the_drafts_that_the_first_one_cannot_take(tiny_llama: Path, prompts: list[list[int]]) -> None:
    speculation = speculation_config("ngram", ngram_min=1, throttle="off")
    engine = make_engine(
        tiny_llama,
        {"logits_processors": OWN, "max_model_len": 128},
        speculation=speculation,
        parallel=ParallelConfig(tensor_parallel_size=2),
    )
    try:
        check_forbidden_drafts(engine, prompts[4:7])
    finally:
        engine.close()


def check_forbidden_drafts(engine: Engine, prompts: list[list[int]]) -> None:
    params = asked("Never", token=9)
    expected = texts(run_all(engine, prompts, replace(params, num_draft_tokens=0)))
    for prompt, text in zip(prompts, expected):
        reference = tuple(9 if index % 5 == 4 else token_id for index, token_id in enumerate([*prompt, *text, *text]))
        [request] = run_requests(engine, [prompt], replace(params, reference_ids=reference))
        assert (request.error, request.output_token_ids) == ("", text)
        assert 3 < request.num_accepted_tokens < request.num_drafted_tokens


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "shape"])
def test_numbers_that_are_none_are_the_request_s_own_trouble(
    served: Engine, prompts: list[list[int]], value: str
) -> None:
    found = run_all(served, prompts[:2], [asked("numbers", SAMPLED, value=value), GREEDY])
    if value == "shape":
        assert "numbers failed: TypeError" in found[0].error
    else:
        assert len(found[0].token_ids) == 12 and max(found[0].token_ids) < served.spec.vocab_size
    assert found[1].token_ids == run_all(served, prompts[1:2], GREEDY)[0].token_ids


def test_the_server_s_own_bans_hold(served: Engine, prompts: list[list[int]]) -> None:
    params = asked("Force", replace(SAMPLED, allowed_token_ids=(5, 6), temperature=0.0), token=9)
    assert set(texts(run_all(served, prompts[:1], params))[0]) <= {5, 6}
    banned = asked("Force", replace(SAMPLED, bad_words_ids=((0,),), temperature=0.0), token=0)
    assert 0 not in texts(run_all(served, prompts[:1], banned))[0]


def test_top_n_sigma(served: Engine, prompts: list[list[int]]) -> None:
    """Nothing but the largest logit is left, however hot."""
    hot = replace(SAMPLED, temperature=50.0, num_draft_tokens=0)
    greedy = texts(run_all(served, prompts[:3], replace(hot, temperature=0.0)))
    assert (
        texts(run_all(served, prompts[:3], asked("sigma", hot, n=0)))
        == greedy
        != texts(run_all(served, prompts[:3], asked("sigma", hot, n=100.0)))
    )


@pytest.mark.parametrize(
    ("params", "refusal"),
    [
        (asked("other"), "'other', accepted: one of those that the model serves: Force, numbers, Recorder, "),
        (asked("Force"), "Force refuses {}: `token` is missing"),
        (asked("NoRepeatNgram", size=True), 'NoRepeatNgram refuses .*accepted: {"size": n}'),
        (asked("sigma", n=-1), "sigma refuses"),
        (asked("Force", token="x" * 20000), r"`kwargs` of \d+ bytes as JSON, .*max_logits_processor_bytes=16384"),
    ],
)
def test_refusals(served: Engine, params: SamplingParams, refusal: str) -> None:
    with pytest.raises(RequestError, match=f"^logits_processors: .*{refusal}"):
        served.submit(Request([5, 6], params))


def test_what_cannot_be_a_list_of_processors() -> None:
    for value in ("[", [{"kwargs": {}}], [{"name": "a", "args": [1]}], ["a", "a"], ["a"] * 17, [""], 5):
        with pytest.raises(RequestError, match=r"^logits_processors"):
            SamplingParams(logits_processors=value)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^logits_processors: .*beam search"):
        SamplingParams(logits_processors=("a",), beam_width=2)  # type: ignore[arg-type]
    same = ProcessorCall("a", {"n": 1})
    for value in ('{"name": "a", "kwargs": {"n": 1}}', [{"qualname": "a", "args": [], "kwargs": {"n": 1}}], (same,)):
        assert SamplingParams(logits_processors=value).logits_processors == (same,)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("own_processors:Missing", "own_processors:Missing.*cannot be imported: AttributeError"),
        ("no_such_module:X", "cannot be imported: ModuleNotFoundError"),
        ("own_processors:NoProcessor", "accepted: a class with a method `apply`"),
        ("own_processors:Unmade", "Unmade.*cannot be made: OSError: no such list of words"),
    ],
)
def test_classes_that_cannot_be_served(tiny_llama: Path, text: str, refusal: str) -> None:
    with pytest.raises(ConfigError, match=f"^logits_processors.*{refusal}"):
        make_engine(tiny_llama, {"logits_processors": text})


def _measured(engine: Engine) -> list[float]:
    """All of it: what a full mailbox kept back, too, which is why one drain tells of earlier tests' steps."""
    seen = []
    for _ in range(2):
        engine.stats.publish()
        seen += dict(engine.stats.drain()).get(Metric.PROCESSOR_TIME, [])
    return seen


def test_a_slow_one_is_measured_and_named(
    served: Engine, prompts: list[list[int]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_processors, "_SLOW_S", 0.0)
    _measured(served)
    with caplog.at_level(logging.WARNING):
        run_all(served, prompts[:1], asked("Recorder"))
    slow = [record.message for record in caplog.records if "logits processor Recorder took" in record.message]
    assert len(slow) == 1, "once in a while, not at every step"
    assert _measured(served)


def test_two_ranks_have_the_tokens_of_the_first(tiny_llama: Path, prompts: list[list[int]]) -> None:
    engine = make_engine(tiny_llama, {"logits_processors": SHIPPED}, parallel=ParallelConfig(tensor_parallel_size=2))
    alone = make_engine(tiny_llama, {"logits_processors": SHIPPED})
    params = asked("NoRepeatNgram", size=1)
    try:
        assert texts(run_all(engine, prompts[:3], params)) == texts(run_all(alone, prompts[:3], params))
    finally:
        engine.close()
        alone.close()


def test_ranks_accept_the_same_drafts(tiny_llama: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """By logits that only the first rank has: else others keep the keys of other drafts, which later requests find."""
    head = make_eagle(tiny_llama, tmp_path / "eagle")
    lossy = {"acceptance": "typical", "typical_threshold": 1.0, "typical_alpha": 1.0}
    tree = {"eagle_head": str(head), "eagle_top_k": 4, "eagle_depth": 4}
    speculation = speculation_config("eagle", throttle="off", **tree, **lossy)
    params = asked("Roll", replace(SAMPLED, max_tokens=32))
    found = []
    for parallel in (None, ParallelConfig(2)):
        options = {"logits_processors": "own_processors:Roll", "max_model_len": 128}
        engine = make_engine(tiny_llama, options, speculation=speculation, parallel=parallel)
        said = texts(run_all(engine, prompts[4:10], params))
        following = [[*prompt, *text] for prompt, text in zip(prompts[4:10], said)]
        found.append((said, texts(run_all(engine, following, replace(GREEDY, num_draft_tokens=0)))))
        engine.close()
    assert found[0] == found[1]
