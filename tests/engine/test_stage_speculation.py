"""Drafts of a model in stages: the first stage drafts, all verify, and the text is that of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_driver import GREEDY, make_engine, run_all, run_steps
from prompted_heads import Prompter
from slipstream.core.config import ParallelConfig
from slipstream.core.control import SLEEP, WAKE_UP, Control
from slipstream.core.request import Request, RequestStatus
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.step import ScheduledRequest, ScheduledStep
from slipstream.engine.engine import Engine
from slipstream.engine.step_inputs import StepInputs
from slipstream.worker.interface import AcceptedBranches, DraftInput, DraftResult
from speculation_config import speculation_config
from stage_recorder import EDITED, GUIDED, KINDS, NARROW, SEEDED, record, same
from tiny_heads import EAGLE, make_eagle, make_eagle3, make_medusa, make_mtp
from tiny_model import make_tiny_llama, make_tiny_windowed

WIDER = {"max_num_batched_tokens": 72}
NUM_WINDOWED = 68
MakeHead = Callable[[Path, Path], Path]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("stages"), num_layers=4)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_drafts_in_stages(llama: Path, prompts: list[list[int]], tensor_parallel_size: int) -> None:
    """Drafting requests beside others: chunked, preempted, from the prefix cache and the host; a sleep between."""
    methods = ("ngram", "draft_model")
    drafted = [replace(one, speculative_method=method) for method in methods for one in (GREEDY, SEEDED, EDITED)]
    params = [
        *drafted,
        replace(GUIDED, speculative_method="ngram"),
        *(replace(one, num_draft_tokens=0) for one in KINDS),
    ]
    params = [replace(one, max_tokens=20) for one in params]
    texts = [prompts[4 + index % 8] for index in range(len(params))]
    expected = run_all(make_engine(llama), texts, [replace(one, speculative_method=None) for one in params])
    speculation = speculation_config(",".join(methods), throttle="off", ngram_min=1, draft_model=str(llama))
    cache = {"num_blocks": 26, "host_memory_bytes": 1 << 20}
    sizes = ParallelConfig(pipeline_parallel_size=2, tensor_parallel_size=tensor_parallel_size)
    engine = make_engine(llama, {"max_model_len": 128}, cache, NARROW, speculation, parallel=sizes)
    try:
        first, second = engine.memory_plan.stages
        assert first.bytes_per_block > second.bytes_per_block and first.weight_bytes > second.weight_bytes
        recorder = record(engine)
        same(run_all(engine, texts, params), expected)
        assert recorder.num_drafts > 100 and recorder.num_resumed > 0
        for control in (Control(SLEEP, 1), Control(WAKE_UP)):
            order = engine.post(control)
            run_steps(engine, {})
            order.wait()
        same(run_all(engine, texts[1::3], params[1::3]), expected[1::3])
    finally:
        engine.close()


def drafts_of(engine: Engine, texts: list[list[int]], params: list[SamplingParams]) -> dict[tuple[int, int], Any]:
    """Drafts and their parents after each step, by request and its number of tokens."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        assign = engine._drafting.assign

        def note(step: ScheduledStep, drafts: DraftInput, result: DraftResult) -> None:
            assign(step, drafts, result)
            for one in step.requests:
                if one.draft_token_ids:
                    found[one.handle, one.num_tokens] = list(one.draft_token_ids), list(one.draft_parents)

        patch.setattr(engine._drafting, "assign", note)
        run_all(engine, texts, params)
    return found


@pytest.mark.parametrize(
    ("sizes", "make_head", "num_blocks"),
    [
        (ParallelConfig(pipeline_parallel_size=3, pipeline_layers="1,2,1"), make_eagle3, 40),
        (ParallelConfig(2, pipeline_parallel_size=2), make_eagle, NUM_WINDOWED),
    ],
    ids=["three stages", "two of two ranks with windows"],
)
def test_heads_in_stages(
    sizes: ParallelConfig, make_head: MakeHead, num_blocks: int, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Heads draft what they draft in one process; EAGLE-3 reads layers of other stages. Then they are prompted, and all
    stages move the accepted branches of trees, beside other requests, as above."""
    make_model = make_tiny_windowed if num_blocks == NUM_WINDOWED else partial(make_tiny_llama, num_layers=4)
    model = make_model(tmp_path / "model")
    methods = ("medusa", "mtp", "eagle")
    heads = {
        "medusa_heads": make_medusa(model, tmp_path / "medusa"),
        "mtp_module": make_mtp(model, tmp_path / "mtp"),
        "eagle_head": make_head(model, tmp_path / "eagle"),
    }
    drafted = [replace(one, speculative_method=method) for method in methods for one in (GREEDY, SEEDED, EDITED)]
    params = [
        *drafted,
        replace(GUIDED, speculative_method="medusa"),
        *(replace(one, num_draft_tokens=0) for one in KINDS),
    ]
    params = [replace(one, max_tokens=15) for one in params]
    texts = [prompts[4 + index % 8] for index in range(len(params))]
    expected = run_all(make_engine(model), texts, [replace(one, speculative_method=None) for one in params])
    speculation = speculation_config(
        ",".join(methods), throttle="off", **EAGLE, **{name: str(folder) for name, folder in heads.items()}
    )
    once = texts[: len(drafted)], [replace(one, max_tokens=6) for one in drafted]
    drafts = drafts_of(make_engine(model, scheduler=WIDER, speculation=speculation), *once)
    engine = make_engine(model, {"max_model_len": 128}, {"num_blocks": num_blocks}, WIDER, speculation, parallel=sizes)
    try:
        of_layer = 8 * 2 * 2 * 16 * 4  # tokens, keys and values of two heads of 16 features in fp32
        of_stages = [stage.draft_block_bytes for stage in engine.memory_plan.stages]
        assert of_stages == [2 * of_layer, *[0] * (len(of_stages) - 1)], "MTP's and EAGLE's layer, whole on every rank"
        found = drafts_of(engine, *once)  # not after a step that leaves no blocks to draft in
        assert found == {key: drafts[key] for key in found} and len(found) > 3 * len(drafted)
        prompter = Prompter(
            {place: [*text, *told.token_ids] for place, (text, told) in enumerate(zip(texts, expected))}, rate=0.95
        )
        prompter.attend(engine)
        recorder = record(engine)
        same(run_all(engine, texts, params), expected)
        assert recorder.most_underway == sizes.pipeline_parallel_size and recorder.num_resumed > 0
        assert recorder.num_moved > 0, "three to 25, by when the masks of the grammar come"
    finally:
        engine.close()


def test_stages_move_branches_of_requests_that_have_kept_their_blocks() -> None:
    """Blocks of the others may be in use already; a path that needs no moves is not told either."""
    inputs, empty = StepInputs(has_stages=True), ScheduledStep()
    kinds = (RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.FINISHED, RequestStatus.RUNNING)
    requests = [Request([5, 6], GREEDY, draft_token_ids=[7, 8, 9], draft_parents=[-1, -1, 1]) for _ in kinds]
    step = ScheduledStep.of([ScheduledRequest(one, 1, 4, True, 3) for one in requests])
    assert inputs.build(1, step).accepted == []
    for request, kind in zip(requests, kinds):
        request.status = kind
    inputs.note_accepted(1, step, {0: [0, 2, 3], 1: [0, 2], 2: [0, 2], 3: [0, 1]})
    assert inputs.build(2, empty).accepted == [AcceptedBranches(1, {0: [0, 2, 3]})]
    assert inputs.build(3, empty).accepted == []
