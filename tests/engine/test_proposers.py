"""Every way to draft gives the text of plain decoding; heads load in their published layouts, and draft as they should.

Random heads are mostly wrong, which is what rejects; drafts that are right come from a draft that is the model itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Told, make_engine, model_worker, run_all, run_steps
from slipstream.core.config import SpeculationConfig
from slipstream.core.config_table import PARAMETERS
from slipstream.core.draft_methods import DRAFT_METHODS
from slipstream.core.errors import ConfigError, RequestError
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.speculation import DraftPlanner, Speculation
from slipstream.core.step import ScheduledStep
from slipstream.engine.drafting import Drafting
from slipstream.engine.engine import Engine
from slipstream.engine.in_flight import AheadStep, InFlightStep
from slipstream.worker.interface import DraftBudget, DraftTokens
from slipstream.worker.spec_decode.eagle import EagleDrafter
from slipstream.worker.spec_decode.interface import PROPOSERS
from slipstream.worker.spec_decode.medusa import default_choices, parse_choices
from speculation_config import speculation_config
from tiny_heads import make_eagle, make_eagle3, make_medusa, make_mtp
from tiny_model import make_tiny_llama

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=16, temperature=0.9, seed=5, ignore_eos=True, top_k=50)
METHODS = ("ngram", "same_draft", "other_draft", "medusa", "medusa_pt", "mtp", "eagle", "eagle3", "eagle_chain")


def settings(method: str, model: Path, folder: Path) -> SpeculationConfig:
    """A configuration of each method with heads made for the model."""
    common = {"throttle": "off"}
    made = {
        "ngram": lambda: {"methods": "ngram", "ngram_min": 1},
        "same_draft": lambda: {"methods": "draft_model", "draft_model": str(model)},
        "other_draft": lambda: {"methods": "draft_model", "draft_model": str(make_tiny_llama(folder, seed=9))},
        "medusa": lambda: {"methods": "medusa", "medusa_heads": str(make_medusa(model, folder))},
        "medusa_pt": lambda: {
            "methods": "medusa",
            "medusa_heads": str(make_medusa(model, folder, is_pickled=True, own_head=False)),
        },
        "mtp": lambda: {"methods": "mtp", "mtp_module": str(make_mtp(model, folder))},
        "eagle": lambda: {"methods": "eagle", "eagle_head": str(make_eagle(model, folder))},
        "eagle3": lambda: {"methods": "eagle", "eagle_head": str(make_eagle3(model, folder))},
        "eagle_chain": lambda: {"methods": "eagle", "eagle_head": str(make_eagle(model, folder)), "eagle_top_k": 1},
    }
    return speculation_config(**common, **made[method]())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def eight_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """EAGLE-3 reads three different layers."""
    return make_tiny_llama(tmp_path_factory.mktemp("eight"), num_layers=8)


@pytest.mark.parametrize("method", METHODS)
def test_text_is_that_of_plain_decoding(
    tiny_llama: Path, eight_layers: Path, tmp_path: Path, prompts: list[list[int]], method: str
) -> None:
    model = eight_layers if method == "eagle3" else tiny_llama
    plain = make_engine(model, model={"max_model_len": 128})
    engine = make_engine(
        model,
        scheduler={"max_num_batched_tokens": 40},
        cache={"num_blocks": 34},  # some are preempted
        model={"max_model_len": 128},
        speculation=settings(method, model, tmp_path),
    )
    some = prompts[1::2]
    for params, times in ((GREEDY, 2), (SEEDED, 1)):  # the second time from the prefix cache
        expected = [told.token_ids for told in run_all(plain, some, params)]
        for _ in range(times):
            assert [told.token_ids for told in run_all(engine, some, params)] == expected


@pytest.mark.parametrize("method", ["medusa", "mtp", "eagle", "eagle3", "eagle_chain"])
def test_verifications_launched_ahead_say_the_same(
    eight_layers: Path, tmp_path: Path, prompts: list[list[int]], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests end at different steps and others take their seats: launches are taken up with all rows or with less."""
    engine = make_engine(
        eight_layers,
        scheduler={"overlap_scheduling": "on", "max_num_seqs": 3},
        speculation=replace(settings(method, eight_layers, tmp_path), num_draft_tokens=6),
    )
    found: Counter[str] = Counter()
    match = AheadStep.match

    def note(ahead: AheadStep, step: ScheduledStep) -> InFlightStep | None:
        in_flight = match(ahead, step)
        found["dropped" if in_flight is None else "whole" if in_flight.indices is None else "part"] += 1
        return in_flight

    monkeypatch.setattr(AheadStep, "match", note)
    plain = make_engine(eight_layers)
    for base in (GREEDY, SEEDED):
        each = [replace(base, max_tokens=20 + 5 * place) for place in range(5)]
        expected = [told.token_ids for told in run_all(plain, prompts[4:9], each)]
        assert [told.token_ids for told in run_all(engine, prompts[4:9], each)] == expected
    assert found["whole"] > 20, found


def test_requests_that_fill_their_blocks_one_by_one_are_launched_ahead_together(
    eight_layers: Path, tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 8 tokens, six requests: nearly every step some request comes to the end of one. What is launched ahead
    reads block tables that were copied before."""
    engine = make_engine(
        eight_layers,
        scheduler={"overlap_scheduling": "on"},
        speculation=settings("mtp", eight_layers, tmp_path),
    )
    num_launched: list[int] = []
    launch = Engine._launch

    def count(self: Engine, step: ScheduledStep) -> InFlightStep:
        num_launched.append(len(step.requests))
        return launch(self, step)

    monkeypatch.setattr(Engine, "_launch", count)
    params = replace(GREEDY, max_tokens=100)
    requests = drafted(engine, [prompts[place] for place in (4, 5, 6, 7, 8, 9)], params)
    assert engine.error is None and all(request.num_output_tokens == 100 for request in requests)
    num_steps = max(request.num_output_tokens - request.num_accepted_tokens for request in requests)
    assert len(num_launched) < num_steps / 5, (len(num_launched), num_steps)


def test_a_request_ends_while_its_verification_is_under_way(
    eight_layers: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    engine = make_engine(
        eight_layers,
        scheduler={"overlap_scheduling": "on"},
        speculation=replace(settings("mtp", eight_layers, tmp_path), throttle="auto"),
    )
    (expected,) = run_all(engine, prompts[5:6], GREEDY)
    requests = [Request(list(prompts[place]), GREEDY, handle=place) for place in (4, 5)]
    for request in requests:
        engine.submit(request)
    while engine._ahead is None:
        engine.step()
    engine.cancel(4)
    told: dict[Request, Told] = {}
    run_steps(engine, told)
    assert engine.error is None and engine.scheduler.cache.num_used_blocks == 0
    assert requests[0].finish_reason is FinishReason.CANCELLED
    assert requests[1].output_token_ids == expected.token_ids
    engine.submit(request := Request(list(prompts[6]), GREEDY, handle=6))
    while engine._ahead is None:
        engine.step()
    engine.cancel(6)
    run_steps(engine, told)
    assert engine.error is None and request.is_finished, "nobody was left in the step that was under way"


class Fickle(DraftPlanner):
    """Gives no drafts while it is asked behind every other launch, and all of them once such a step is read."""

    num_launches = 0
    is_launching = False

    def num_drafts(self, request: Request) -> int:
        return 0 if self.is_launching and self.num_launches % 2 else super().num_drafts(request)


@pytest.mark.parametrize("method", ["medusa", "mtp"])
def test_the_planner_thinks_again_while_a_step_is_under_way(
    eight_layers: Path, tmp_path: Path, prompts: list[list[int]], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(
        eight_layers,
        scheduler={"max_num_batched_tokens": 40},
        speculation=settings(method, eight_layers, tmp_path),
    )
    planner = engine.scheduler.planner = Fickle()
    methods_behind = Drafting.methods_behind

    def decide_in_doubt(self: Drafting, step: ScheduledStep) -> Any:
        planner.num_launches, planner.is_launching = planner.num_launches + 1, True
        methods = methods_behind(self, step)
        planner.is_launching = False
        return methods

    monkeypatch.setattr(Drafting, "methods_behind", decide_in_doubt)
    expected = run_all(make_engine(eight_layers), prompts[4:7], GREEDY)
    requests = drafted(engine, prompts[4:7])
    assert engine.error is None and sum(request.num_drafted_tokens for request in requests) > 0
    assert [request.output_token_ids for request in requests] == [told.token_ids for told in expected]


def drafted(engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Request]:
    requests = [Request(list(prompt), params) for prompt in prompts]
    for request in requests:
        engine.submit(request)
    run_steps(engine, {})
    return requests


def test_a_draft_that_is_the_model_is_always_right(
    eight_layers: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    engine = make_engine(eight_layers, speculation=settings("same_draft", eight_layers, tmp_path))
    for requests in (drafted(engine, prompts), drafted(engine, prompts[:3])):
        assert all(r.num_drafted_tokens == r.num_accepted_tokens >= 15 for r in requests)


@pytest.mark.parametrize("acceptance", ["exact", "rejection"])
def test_a_sampled_draft_that_is_the_model_is_always_right(
    eight_layers: Path, tmp_path: Path, prompts: list[list[int]], acceptance: str
) -> None:
    config = speculation_config(
        "draft_model", throttle="off", draft_model=str(eight_layers), draft_sampling="sampled", acceptance=acceptance
    )
    for request in drafted(make_engine(eight_layers, speculation=config), prompts[:4], SEEDED):
        assert request.num_accepted_tokens >= 0.95 * request.num_drafted_tokens > 0


@pytest.mark.parametrize("method", ["mtp", "eagle", "eagle3", "medusa"])
def test_drafts_do_not_depend_on_how_the_prompt_was_computed(
    eight_layers: Path, tmp_path: Path, prompts: list[list[int]], method: str
) -> None:
    """In chunks, in a batch or alone: the same drafts, so the head's own cache is right. `typical` shows drafts."""
    config = settings(method, eight_layers, tmp_path)
    found = []
    for budget, chosen in ((2048, prompts[6:9]), (13, prompts[6:9]), (2048, prompts[7:8])):
        engine = make_engine(eight_layers, speculation=config, scheduler={"max_num_batched_tokens": budget})
        requests = [Request(list(prompt), GREEDY) for prompt in chosen]
        for request in requests:
            engine.submit(request)
        seen: dict[int, list[list[int]]] = {}
        while engine.has_work:
            engine.step()
            for request in requests:
                if request.draft_token_ids:
                    seen.setdefault(len(request.prompt_token_ids), []).append(
                        [request.num_tokens, *request.draft_token_ids[:3]]
                    )
        found.append(seen[len(prompts[7])])
    firsts = [{tuple(entry[:2]) for entry in entries} for entries in found]
    assert len(firsts[0]) > 5 and firsts[0] == firsts[2]
    assert firsts[1] and firsts[1] <= firsts[0] | firsts[1]
    assert len(firsts[0] & firsts[1]) > 5


def test_medusa_choices() -> None:
    assert parse_choices("{0},{0,0},{1}") == parse_choices("[[0], [0, 0], [1]]") == [(0,), (0, 0), (1,)]
    assert parse_choices("{0,0},{0}") == [(0,), (0, 0)]
    assert len(default_choices(4)) == 63 and len(set(default_choices(4))) == 63
    assert max(map(len, default_choices(2))) == 2
    for text in ("", "0,0", "{0,1}", "{0},{0}", "{a}", ",".join(f"{{{rank}}}" for rank in range(64))):
        with pytest.raises(ConfigError, match="medusa_choices"):
            parse_choices(text)


def test_what_does_not_fit_is_refused_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "other", hidden_size=32)
    cases = [
        (speculation_config("medusa"), "medusa_heads"),
        (speculation_config("mtp"), "mtp_module"),
        (speculation_config("eagle"), "eagle_head"),
        (speculation_config("draft_model"), "draft_model"),
        (speculation_config("medusa", medusa_heads=str(make_medusa(other, tmp_path / "m"))), "medusa_heads"),
        (speculation_config("mtp", mtp_module=str(make_mtp(other, tmp_path / "t"))), "mtp_module"),
        (speculation_config("eagle", eagle_head=str(make_eagle3(other, tmp_path / "e"))), "eagle_head"),
        (speculation_config("mtp", mtp_module=str(tmp_path / "nowhere")), "mtp_module|nowhere"),
    ]
    for config, field in cases:
        with pytest.raises(ConfigError, match=field):
            make_engine(tiny_llama, speculation=config)


def test_a_request_chooses_among_the_methods_loaded(tiny_llama: Path, tmp_path: Path) -> None:
    heads = make_medusa(tiny_llama, tmp_path)
    config = speculation_config("ngram,medusa", num_draft_tokens=8, medusa_heads=str(heads), throttle="off")
    engine = make_engine(tiny_llama, speculation=config)
    by_default, by_name = (
        drafted(engine, [[3, 4, 5, 6] * 3], SamplingParams(max_tokens=9, temperature=0.0, speculative_method=method))[0]
        for method in (None, "medusa")
    )
    assert by_default.speculation is not None and by_default.speculation.method == "ngram"
    assert by_name.speculation is not None and by_name.speculation.num_draft_tokens == 8
    for wrong in ({"speculative_method": "eagle"}, {"num_draft_tokens": 9}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            engine.submit(Request([3, 4], SamplingParams(**wrong)))  # type: ignore[arg-type]
    assert torch.is_inference_mode_enabled() is False


def test_who_asks_for_more_than_a_head_makes_is_launched_ahead_too(
    tiny_llama: Path, tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(settings("mtp", tiny_llama, tmp_path), methods="mtp,ngram")
    engine = make_engine(tiny_llama, scheduler={"overlap_scheduling": "on"}, speculation=config)
    by_method = [Speculation("mtp", 3, "exact", True), Speculation("ngram", 10, "exact", True)]
    for expected in by_method:
        asked = SamplingParams(num_draft_tokens=10, speculative_method=expected.method)
        assert engine._drafting.resolve(asked) == expected
    launch, launched = Engine._launch, list[ScheduledStep]()
    monkeypatch.setattr(Engine, "_launch", lambda *one: (launched.append(one[1]), launch(*one))[1])
    (request,) = drafted(engine, prompts[4:5], replace(GREEDY, max_tokens=60, num_draft_tokens=10))
    num_steps = request.num_output_tokens - request.num_accepted_tokens
    assert len(launched) < num_steps / 2, "the others were launched ahead"


def test_a_draft_model_computes_each_token_once(eight_layers: Path, tmp_path: Path, prompts: list[list[int]]) -> None:
    """What was drafted and taken is in its cache already, and nothing is computed twice but what was rejected."""
    engine = make_engine(eight_layers, speculation=settings("other_draft", eight_layers, tmp_path))
    proposer = model_worker(engine).speculator._proposers["draft_model"]
    spans: list[tuple[int, int]] = []
    arrays = proposer._batches.arrays  # type: ignore[attr-defined]

    def note(chosen: list[object], *rest: object) -> object:
        spans.extend((span.start, span.count) for span in chosen)  # type: ignore[attr-defined]
        return arrays(chosen, *rest)

    proposer._batches.arrays = note  # type: ignore[attr-defined]
    drafted(engine, prompts[7:8])
    assert spans[0] == (0, len(prompts[7]) + 1) and len(spans) > 10
    assert all(count <= 1 + 4 for _, count in spans[1:])


@pytest.mark.parametrize("method", ["mtp", "eagle"])
def test_a_prefix_of_a_request_without_drafts_is_followed(
    tiny_llama: Path, tmp_path: Path, prompts: list[list[int]], method: str
) -> None:
    """Prompts pass through a head whoever asks them, so that who shares them later may draft."""
    engine = make_engine(tiny_llama, speculation=settings(method, tiny_llama, tmp_path))
    (plain,) = drafted(engine, [prompts[11]], replace(GREEDY, num_draft_tokens=0))
    (request,) = drafted(engine, [prompts[11]])
    assert request.num_cached_tokens >= 64 and request.num_drafted_tokens > 20
    assert request.output_token_ids == plain.output_token_ids


def test_a_draft_goes_on_being_right_once_every_block_was_used(tiny_llama: Path, tmp_path: Path) -> None:
    """A block that is given out anew holds what the draft made of other tokens."""
    engine = make_engine(
        tiny_llama,
        model={"max_model_len": 128},
        cache={"num_blocks": 20},
        speculation=settings("same_draft", tiny_llama, tmp_path),
    )
    for number in range(8):
        prompt = [(7 * place + 13 * number) % 300 + 100 for place in range(50)]
        (request,) = drafted(engine, [prompt])
        assert request.num_cached_tokens == 0
        assert request.num_accepted_tokens == request.num_drafted_tokens > 15
    (again,) = drafted(engine, [prompt])
    assert again.num_cached_tokens >= 40 and again.num_accepted_tokens == again.num_drafted_tokens > 15


@pytest.mark.parametrize("make_head", [make_eagle, make_eagle3])
def test_a_chain_is_the_tree_of_one_branch(
    eight_layers: Path,
    tmp_path: Path,
    prompts: list[list[int]],
    make_head: Callable[[Path, Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose tokens were fed again at each level; a chain feeds each once."""
    head = str(make_head(eight_layers, tmp_path))
    config = speculation_config("eagle", eagle_head=head, eagle_top_k=1, eagle_depth=4, throttle="off")
    found: dict[str, list[list[int]]] = {"chain": [], "tree": []}
    give = EagleDrafter.drafts

    def note(self: EagleDrafter, wanted: DraftBudget, tokens: list[Any], name: str) -> DraftTokens:
        found[name].append(tokens)
        return give(self, wanted, tokens)

    for name in found:
        monkeypatch.setattr(EagleDrafter, "drafts", partialmethod(note, name=name))
        drafted(make_engine(eight_layers, speculation=config), prompts[4:8])
        monkeypatch.setattr(EagleDrafter, "_chain", lambda self, *arguments: self._tree(*arguments)[:, 1])
    assert len(found["chain"]) > 40 and found["chain"] == found["tree"]


def test_every_way_to_draft_is_described_once() -> None:
    """In core as data, in the worker as code; its checkpoint's parameter is one of the configuration's."""
    assert set(PROPOSERS.names()) == set(DRAFT_METHODS.names())
    parameters = {parameter.name for parameter in PARAMETERS}
    for method in DRAFT_METHODS.values():
        own = {parameter.name for parameter in method.parameters}
        assert own <= parameters and method.checkpoint in own | {""}
    for name in PROPOSERS.names():
        assert callable(PROPOSERS.get(name).planned) and callable(PROPOSERS.get(name).refusal)
