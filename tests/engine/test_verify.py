"""Which drafts are taken: the walk through chains and trees, the lossy modes by hand, and χ² on what is drawn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import make_engine, run_steps
from slipstream.core.config import EngineConfig, ModelConfig, SpeculationConfig
from slipstream.core.drafts import row_depths, row_masks, row_paths, rows_accepted, tokens_accepted
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.speculation import DraftGains, DraftPlanner, MeasuredStep, Speculation
from slipstream.core.step_costs import StepCosts
from slipstream.engine.make_planner import make_planner
from slipstream.engine.step_inputs import new_request
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.quant import FREE_TOKENS, NAMES
from slipstream.nn.read_spec import read_spec
from slipstream.nn.stored_format import StoredFormat
from slipstream.worker.cuda_graphs import StepTimes
from slipstream.worker.graph_shapes import GraphShape
from slipstream.worker.hardware import Hardware
from slipstream.worker.request_state import RequestState
from slipstream.worker.sample.draws import Draws
from slipstream.worker.spec_decode.speculator import measured_costs
from slipstream.worker.spec_decode.verification import DraftedRequest, Verification
from slipstream_kernels import ops
from speculation_config import speculation_config
from tiny_model import make_tiny_llama

TREE = [-1, -1, 0, 2, 0, 1]  # two first guesses; the first has two children, one of them a child; the second has one
TOKENS = [10, 11, 12, 13, 14, 15]


def scheduled(acceptance: str, parents: list[int], tokens: list[int], temperature: float = 1.0) -> DraftedRequest:
    request = Request([1, 2, 3], SamplingParams(temperature=temperature), seed=1)
    request.speculation = Speculation("ngram", 8, acceptance)
    return DraftedRequest(RequestState(new_request(request)), len(tokens), tokens, parents)


def verdict(
    drawn: list[int], parents: list[int] = TREE, tokens: list[int] = TOKENS, dead: tuple[int, ...] = ()
) -> tuple[list[int], tuple[int, ...]]:
    verification = Verification([len(tokens)], [scheduled("exact", parents, tokens)], SpeculationConfig())
    return accepted(verification, parents, tokens, torch.tensor(drawn), dead)


def accepted(
    verification: Verification, parents: list[int], tokens: list[int], drawn: torch.Tensor, dead: tuple[int, ...] = ()
) -> tuple[list[int], tuple[int, ...]]:
    """What is taken of one request's drafts in a step of their own."""
    rows = torch.arange(1 + len(tokens))
    batch = ForwardBatch(
        token_ids=torch.tensor([3, *tokens]),
        positions=rows,
        query_start_loc=torch.tensor([0, len(rows)], dtype=torch.int32),
        seq_lens=torch.tensor([len(rows)], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=rows,
        logits_indices=rows,
        max_query_len=len(rows),
        max_seq_len=len(rows),
        num_decode_requests=1,
        num_decode_tokens=len(rows),
        max_decode_query_len=len(rows),
        tree_mask=torch.tensor(row_masks(parents, len(tokens))) if parents else None,
    )
    verification.bury(dead, drawn.device)
    kept = verification.accept(batch, torch.tensor([len(tokens)], dtype=torch.int32), drawn)
    found = rows_accepted(int(kept.paths.item()), len(tokens))
    return tokens_accepted(found, tokens, int(drawn[found[-1]])), found


def test_shapes_of_a_tree() -> None:
    assert row_depths(TREE, 6) == (0, 1, 1, 2, 3, 2, 2)
    assert row_paths(TREE, TOKENS)[4] == (10, 12, 13)
    assert [bin(mask) for mask in row_masks(TREE, 6)[3:5]] == ["0b1011", "0b11011"]
    assert row_masks([], 63)[63] == -1 and row_depths([], 3) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("drawn", "token_ids", "rows"),
    [
        ([9, 0, 0, 0, 0, 0, 0], [9], [0]),
        ([10, 9, 0, 0, 0, 0, 0], [10, 9], [0, 1]),
        ([10, 12, 0, 13, 7, 0, 0], [10, 12, 13, 7], [0, 1, 3, 4]),
        ([10, 14, 0, 13, 7, 8, 0], [10, 14, 8], [0, 1, 5]),
        ([11, 12, 15, 0, 0, 0, 6], [11, 15, 6], [0, 2, 6]),
    ],
)
def test_the_walk_follows_what_was_drawn(drawn: list[int], token_ids: list[int], rows: list[int]) -> None:
    assert verdict(drawn) == (token_ids, tuple(rows))


def test_a_dead_row_is_not_entered() -> None:
    """A guide says that nothing may follow the draft: its token is the last one then."""
    assert verdict([10, 12, 0, 13, 7, 0, 0], dead=(3,)) == ([10, 12], (0, 1))


def judged(mode: str, probs: list[list[float]], parents: list[int], tokens: list[int], drawn: list[int]) -> list[int]:
    config = SpeculationConfig(typical_threshold=0.2, typical_alpha=0.5, acceptance_top_p=0.6, acceptance_window=2)
    verification = Verification([len(tokens)], [scheduled(mode, parents, tokens)], config)
    logits = torch.tensor(probs).log()
    rows = len(probs)
    draws = Draws(ops.SamplingMetadata(torch.ones(rows)), torch.zeros(rows, dtype=torch.int64))
    assert verification.needs_judge
    token_ids = verification.judge(logits, draws, torch.arange(rows), torch.tensor(drawn))
    return accepted(verification, parents, tokens, token_ids)[0]


def test_typical_takes_what_is_likely_enough() -> None:
    sure, unsure = [0.1, 0.8, 0.1], [0.34, 0.33, 0.33]
    # entropy of `sure` is 0.64: floor min(0.2, 0.5 * 0.53) = 0.2; of `unsure` 1.1: min(0.2, 0.17) = 0.17
    assert judged("typical", [sure, sure, sure], [], [1, 1], [0, 0, 2]) == [1, 1, 2]
    assert judged("typical", [sure, sure, sure], [], [0, 1], [2, 0, 2]) == [2]
    assert judged("typical", [unsure, unsure, sure], [], [2, 1], [0, 0, 2]) == [2, 1, 2]


def test_typical_takes_the_longest_way() -> None:
    even = [0.25, 0.25, 0.25, 0.25]
    parents, tokens = [-1, -1, 1], [0, 1, 2]
    assert judged("typical", [even] * 4, parents, tokens, [3, 3, 3, 0]) == [1, 2, 0]


def test_top_p_window() -> None:
    peaked, second = [0.7, 0.2, 0.1], [0.2, 0.7, 0.1]
    assert judged("top_p_window", [peaked, peaked, peaked], [], [0, 0], [1, 1, 2]) == [0, 0, 2], "in the top 60 %"
    assert judged("top_p_window", [peaked, peaked, peaked], [], [1, 0], [2, 1, 2]) == [2], "one match is no window"
    rows = [peaked, second, peaked, peaked]
    assert judged("top_p_window", rows, [], [1, 1, 0], [2, 2, 2, 2]) == [1, 1, 0, 2], "second, then two likeliest"


def test_a_window_makes_no_token_possible_that_is_not() -> None:
    """Where a row has one token left, all others came second: a bad word was accepted before two sure drafts."""
    sure = [0.0, 1.0, 0.0]
    assert judged("top_p_window", [sure] * 4, [], [2, 1, 1], [1, 1, 1, 1]) == [1]
    assert judged("top_p_window", [[1e-30, 1.0, 0.0], *[sure] * 3], [], [0, 1, 1], [1, 1, 1, 1]) == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("acceptance", "sampling"),
    [("exact", "greedy"), ("exact", "sampled"), ("rejection", "greedy"), ("rejection", "sampled")],
)
def test_lossless_modes_keep_the_distribution(tiny_llama: Path, tmp_path: Path, acceptance: str, sampling: str) -> None:
    """Two-sample χ² over the first three tokens of 1,500 seeds, against plain decoding with other seeds."""
    draft = make_tiny_llama(tmp_path / "draft", seed=0)  # the model's own weights, made a little different
    config = speculation_config(
        "draft_model", throttle="off", draft_model=str(draft), draft_sampling=sampling, acceptance=acceptance
    )
    _disturb(draft)
    plain, drafting = make_engine(tiny_llama), make_engine(tiny_llama, speculation=config)
    expected, _ = _counts(plain, 10_000)
    found, accepted = _counts(drafting, 20_000)
    assert accepted > 300, "drafts that are never taken prove nothing"
    cells = [key for key in expected | found if expected[key] + found[key] >= 10]
    statistic = sum((expected[key] - found[key]) ** 2 / (expected[key] + found[key]) for key in cells)
    rest = [sum(count for key, count in counts.items() if key not in cells) for counts in (expected, found)]
    statistic += (rest[0] - rest[1]) ** 2 / max(1, sum(rest))
    degrees = len(cells)
    assert degrees > 8 and statistic < degrees + 4 * (2 * degrees) ** 0.5


def _disturb(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    noisy = {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator) if tensor.dim() == 2 else tensor
        for name, tensor in tensors.items()
    }
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})


def _counts(engine: object, first_seed: int) -> tuple[Counter[tuple[int, ...]], int]:
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for start in range(0, 1500, 64):
        requests = [
            Request(
                [5, 6, 7, 8],
                SamplingParams(max_tokens=3, temperature=4.0, top_k=4, seed=first_seed + place, ignore_eos=True),
            )
            for place in range(start, min(1500, start + 64))
        ]
        for request in requests:
            engine.submit(request)  # type: ignore[attr-defined]
        run_steps(engine, {})  # type: ignore[arg-type]
        counts.update(tuple(request.output_token_ids) for request in requests)
        accepted += sum(request.num_accepted_tokens for request in requests)
    return counts, accepted


def test_the_planner_keeps_rows_free_and_does_not_flap() -> None:
    planner = DraftPlanner(free_tokens=64)
    request = Request([1], SamplingParams())
    request.speculation = Speculation("ngram", 7, "exact")

    def drafts(num_running: int) -> int:
        planner.begin_step(num_running)
        return planner.num_drafts(request)

    assert [drafts(count) for count in (1, 8, 16, 21)] == [7, 7, 3, 2]
    assert [drafts(count) for count in (22, 21, 17, 16)] == [0, 0, 0, 3], "room for three, to begin again"
    assert drafts(21) == 2
    request.speculation = None
    assert drafts(1) == 0


@pytest.mark.parametrize(
    ("quantization", "most"),  # of each of six requests: a sixth of the free rows, less the row that is there anyhow
    [
        ("none", 29),
        ("fp8", 30),
        ("block_wise_fp8", 30),
        ("w8a8_int8", 30),
        ("wint8", 14),
        ("wint4", 7),
        ("w4a8_fp8", 15),
    ],
)
def test_rows_are_free_by_how_the_weights_are_held(tiny_llama: Path, quantization: str, most: int) -> None:
    spec, gpu = read_spec(tiny_llama), Hardware(torch.device("cuda"), torch.bfloat16, torch.bfloat16)
    asked = EngineConfig(model=ModelConfig(quantization=quantization))
    assert drafts_of_six(make_planner(asked, spec, gpu)) == most
    if quantization != "none":
        stored = replace(spec, stored_format=StoredFormat(quantization, "channel"))
        assert drafts_of_six(make_planner(EngineConfig(), stored, gpu)) == most, "auto: as the checkpoint is stored"
    given = replace(asked, speculation=SpeculationConfig(free_tokens=60))
    assert drafts_of_six(make_planner(given, spec, gpu)) == 9
    cpu = Hardware(torch.device("cpu"), torch.float32, torch.float32)
    assert drafts_of_six(make_planner(asked, spec, cpu)) == 40, "no limit"


def test_every_quantization_has_its_free_rows(tiny_llama: Path) -> None:
    assert set(FREE_TOKENS) == set(NAMES) - {"auto"}
    gpu = Hardware(torch.device("cuda"), torch.float32, torch.float32)
    assert drafts_of_six(make_planner(EngineConfig(), read_spec(tiny_llama), gpu)) == 3


def drafts_of_six(planner: DraftPlanner) -> int:
    request = Request([1], SamplingParams())
    request.speculation = Speculation("ngram", 40, "exact")
    planner.begin_step(6)
    return planner.num_drafts(request)


def drafting_request(num_drafts: int, method: str = "ngram") -> Request:
    request = Request([1], SamplingParams())
    request.speculation = Speculation(method, num_drafts, "exact")
    return request


def test_the_planner_pauses_what_is_slower_than_plain_steps() -> None:
    planner = DraftPlanner(is_adaptive=True)
    request = drafting_request(4)
    for _ in range(40):
        planner.measure(MeasuredStep(8, 8, 0.010, 1.0))
        planner.measure(MeasuredStep(8, 40, 0.015, 2.0, "ngram"))  # 7.5 ms a token
    planner.begin_step(8)
    assert planner.num_drafts(request) == 4
    for _ in range(200):
        planner.measure(MeasuredStep(8, 40, 0.025, 2.0, "ngram"))
    planner.begin_step(9)
    assert planner.num_drafts(request) == 0, "about the same load"
    planner.begin_step(40)
    assert planner.num_drafts(request) == 4, "another load"
    for _ in range(1100):
        planner.measure(MeasuredStep(8, 8, 0.010, 1.0))
    planner.begin_step(8)
    assert planner.num_drafts(request) == 4, "tried again"


VERIFIED = {(4, 1, 4): 0.0042, (16, 4, 4): 0.0045, (64, 64, 8): 0.005, (256, 64, 8): 0.009, (512, 64, 8): 0.016}
COSTS = StepCosts(
    plain=((1, 0.004), (16, 0.0045), (64, 0.006)),
    verified=tuple((*size, seconds) for size, seconds in VERIFIED.items()),
    drafting={"mtp": ((1, 0.0005), (16, 0.0006), (64, 0.0008)), "medusa": ((1, 0.001), (64, 0.012))},
)


def test_the_planner_drafts_what_promises_most() -> None:
    planner = DraftPlanner(is_adaptive=True, costs=COSTS)
    request, costly = drafting_request(7, "mtp"), drafting_request(7, "medusa")

    def drafts(num_running: int, wanted: Request = request) -> int:
        for _ in range(16):  # decisions stand for some steps
            planner.begin_step(num_running)
        return planner.num_drafts(wanted)

    assert drafts(1) == 7 and drafts(1, costly) == 7
    assert drafts(64) == 3, "eight rows each take 16 ms"
    assert drafts(64, costly) == 0, "drafting takes longer than what it saves"
    assert drafts(65) == 0, "more than was measured"
    for _ in range(1000):
        planner.observe("mtp", 7, [0, 1, 2, 3])  # the first three are always right, the others never
    assert drafts(16) == 3 and drafts(1) == 3, "more rows cost more and bring nothing"
    for _ in range(9000):
        planner.observe("mtp", 3, [0])
    assert drafts(64) == 0, "not worth a verification"
    for _ in range(40):
        planner.measure(MeasuredStep(64, 256, 0.012, 2.9, "mtp"))
        planner.measure(MeasuredStep(64, 64, 0.012, 1.0))  # long contexts: both take longer than with an empty cache
    for _ in range(9000):
        planner.observe("mtp", 3, [0, 1, 2, 3])
    assert drafts(64) == 3


@pytest.mark.parametrize(("seconds_of_512_rows", "most"), [(0.0110, 3), (0.0210, 0)])
def test_a_full_server_drafts_if_its_steps_are_worth_it(
    tiny_llama: Path, seconds_of_512_rows: float, most: int
) -> None:
    """No number of rows is a limit where it was measured what they take."""
    gpu = Hardware(torch.device("cuda"), torch.bfloat16, torch.bfloat16)
    steps = {GraphShape(64, 1, 64): 0.0065, GraphShape(128, 1, 128): 0.0075}
    steps |= {GraphShape(256, 4, 64): 0.0090, GraphShape(512, 4, 128): seconds_of_512_rows}
    planner = make_planner(
        EngineConfig(), read_spec(tiny_llama), gpu, measured_costs(StepTimes(steps), {"mtp": {64: 0.001, 128: 0.0015}})
    )
    for num_running, expected in ((64, 3), (128, most), (129, 0), (64, 3)):
        planner.begin_step(num_running)
        assert planner.num_drafts(drafting_request(3, "mtp")) == expected
    limited = make_planner(
        EngineConfig(speculation=SpeculationConfig(free_tokens=256)),
        read_spec(tiny_llama),
        gpu,
        measured_costs(StepTimes(steps), {}),
    )
    limited.begin_step(128)
    assert limited.num_drafts(drafting_request(3, "mtp")) == 0, "one that is asked for is one"


def test_gains_of_a_tree_are_those_of_its_nodes() -> None:
    gains = DraftGains()
    for _ in range(1000):
        gains.add(4, [0, 2, 4])
        gains.add(2, [0, 2])
    tokens = gains.expected_tokens(4)
    assert tokens == pytest.approx([1, 1, 2, 2, 3], abs=0.05)
