"""A model in stages, which are processes over gloo, says what one process says, with several steps in them at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import GREEDY, Told, make_engine, run_all, run_steps
from key_means_of import draw_key_means
from nodes import Node
from patience import PATIENCE_S
from processes import children_of
from slipstream.core.adapters import Matrix
from slipstream.core.config import EngineConfig, ModelConfig, ParallelConfig
from slipstream.core.control import SLEEP, WAKE_UP, Control
from slipstream.core.errors import ConfigError, RankLostError
from slipstream.core.logits_processors import ProcessorCall
from slipstream.core.outputs import StepOutput
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.engine.ranks import LeadingWorker
from slipstream.nn.read_spec import read_spec
from slipstream.worker.memory_plan import MemoryPlan
from slipstream.worker.plan_memory import plan_memory
from slipstream.worker.resolve_hardware import resolve_hardware
from slipstream.worker.stages import balanced
from speculation_config import speculation_config
from stage_recorder import KINDS, LOGPROBS, NARROW, record, same
from tiny_checkpoints import make_checkpoint
from tiny_model import make_tiny_llama, save_tokenizer

BEAMS = SamplingParams(max_tokens=8, beam_width=3, n=3)
TWO = ParallelConfig(pipeline_parallel_size=2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("stages"), num_layers=4)


def beams(engine: Engine, prompt: list[int]) -> list[list[int]]:
    engine.submit(Request(list(prompt), BEAMS))
    told: dict[Request, Told] = {}
    run_steps(engine, told)
    return [one.token_ids for _, one in sorted(told.items(), key=lambda item: item[0].sequence_index)]


def test_three_stages_say_what_one_process_says(llama: Path, prompts: list[list[int]]) -> None:
    """Every kind of request at once, in chunks, preempted, from the prefix cache and the host; after a sleep too."""
    params = [*KINDS, *KINDS]
    texts = [prompts[4 + index % 8] for index in range(len(params))]
    alone = make_engine(llama)
    expected = run_all(alone, texts, params)
    cache = {"num_blocks": 40, "host_memory_bytes": 1 << 20}
    sizes = ParallelConfig(pipeline_parallel_size=3, pipeline_layers="1,2,1")
    engine = make_engine(llama, {"max_model_len": 128}, cache, NARROW, parallel=sizes)
    recorder = record(engine)
    try:
        same(run_all(engine, texts, params), expected)
        assert recorder.most_underway == 3 and recorder.num_resumed > 0
        same(run_all(engine, texts[1:4], params[1:4]), expected[1:4])
        assert beams(engine, prompts[5]) == beams(alone, prompts[5])
        for control in (Control(SLEEP, 1), Control(WAKE_UP)):
            engine.post(control)
            run_steps(engine, {})
        same(run_all(engine, texts[:2], params[:2]), expected[:2])
    finally:
        engine.close()


def compare(folder: Path, model: str, parallel: ParallelConfig, num_step_tokens: int = 16, **options: object) -> None:
    """options: of the model."""
    make_checkpoint(model, folder)
    save_tokenizer(folder)
    draw_key_means(folder)
    texts = [[3 + (7 * place + 5 * step) % 90 for step in range(2 + 9 * place)] for place in range(5)]
    params = replace(GREEDY, max_tokens=16, logprobs=1)
    told = []
    for one in (ParallelConfig(), parallel):
        steps = {"max_num_batched_tokens": num_step_tokens}
        engine = make_engine(folder, options, {"block_size": 4}, steps, parallel=one)
        told.append(run_all(engine, texts, params))
        assert (engine.memory_plan.groups.num_windowed > 0) is (model == "gemma3")
        engine.close()
    same(*told)


def test_layers_with_windows_in_stages_of_two_ranks(tmp_path: Path) -> None:
    """One stage has no layer of some KV group."""
    compare(tmp_path, "gemma3", ParallelConfig(2, pipeline_parallel_size=2, pipeline_layers="3,1"))


class Asked(Told):
    """The context's logits too."""

    context: Sequence[bytes] | None = None

    def take(self, output: StepOutput) -> None:
        super().take(output)
        self.context = self.context or output.context_logits


def brought(engine: Engine, prompt: list[int]) -> list[tuple[list[int], list[np.ndarray]]]:
    """Tokens and logits of requests with a processor of the operator's, with logits, and with a table of the model's
    own embeddings, all in the same steps."""
    forced = replace(GREEDY, logits_processors=(ProcessorCall("Force", {"token": 7}),), max_tokens=6)
    both = replace(GREEDY, max_tokens=6, return_context_logits=True, return_generation_logits=True)
    worker = engine.worker.worker if isinstance(engine.worker, LeadingWorker) else engine.worker
    rows = worker.runner.model.embedding.weight[prompt[4:9]].half()  # type: ignore[attr-defined]
    table = Matrix("e", tuple(rows.shape), rows.numpy().tobytes())
    first = engine.spec.vocab_size
    tabled = [*prompt[:4], *range(first, first + 5), *prompt[9:]]
    asked = [Request(list(prompt), forced), Request(list(prompt), both), Request(tabled, GREEDY, prompt_table=table)]
    told: dict[Request, Told] = {engine.submit(request)[0]: Asked() for request in asked}
    run_steps(engine, told)
    assert not any(one.error for one in told.values())
    found = []
    for one in told.values():
        assert isinstance(one, Asked)
        logits = [*(one.context or ()), *(entry.logits for entry in one.logprobs if entry.logits)]
        found.append((one.token_ids, [np.frombuffer(row, np.float32) for row in logits]))
    return found


def test_what_requests_bring_and_ask_for_in_stages(llama: Path, prompts: list[list[int]]) -> None:
    """Logits processors, logits of contexts and answers, tables of prompts; in chunks."""
    found = []
    for parallel in (ParallelConfig(), TWO):
        processors = {"logits_processors": "own_processors:Force", "max_model_len": 128}
        engine = make_engine(llama, processors, scheduler={"max_num_batched_tokens": 16}, parallel=parallel)
        found.append(brought(engine, prompts[8]))
        engine.close()
    alone, staged = found
    assert staged[0][0] == [7] * 6
    assert [tokens for tokens, _ in staged] == [tokens for tokens, _ in alone]
    assert [len(logits) for _, logits in staged] == [0, len(prompts[8]) + 6, 0]
    for (_, own), (_, theirs) in zip(staged, alone, strict=True):
        for one, other in zip(own, theirs, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_cancelled_request_leaves_the_stages_to_the_others(llama: Path, prompts: list[list[int]]) -> None:
    """While its step is in them, with rows of prompt log-probabilities that nobody asks for any more. Then a stage
    is stopped, and every request ends."""
    (expected,) = run_all(make_engine(llama), [prompts[9]], LOGPROBS)
    engine = make_engine(llama, scheduler={"max_num_batched_tokens": 16}, parallel=TWO)
    first = engine.submit(Request(list(prompts[11]), LOGPROBS, handle=1))[0]
    second = engine.submit(Request(list(prompts[9]), LOGPROBS, handle=2))[0]
    told: dict[Request, Told] = {}
    run_steps(engine, told, 2)
    engine.cancel(1)
    run_steps(engine, told)
    assert told[first].finish_reason == FinishReason.CANCELLED
    same([told[second]], [expected])
    assert isinstance(engine.worker, LeadingWorker)
    assert not engine.worker.worker.runner._prompt_logprobs._entries  # type: ignore[attr-defined]
    requests = [engine.submit(Request(list(prompt), replace(GREEDY, max_tokens=60)))[0] for prompt in prompts[4:8]]
    run_steps(engine, told, 5)
    (stage,) = children_of(os.getpid(), "rank_main")
    stage.send_signal(signal.SIGSTOP)
    run_steps(engine, told)
    assert isinstance(engine.error, RankLostError) and "rank 1" in str(engine.error)
    assert [told[one].finish_reason for one in requests] == [FinishReason.ERROR] * 4
    engine.close()


def test_experts_in_stages_on_two_nodes(tmp_path: Path) -> None:
    """Whose prompts attend in FP8: each node has the means of its layers' keys."""
    with Node(tmp_path, b"a secret of two machines") as node:
        nodes = replace(TWO, num_nodes=2, rank_address=node.address, rank_secret_file=str(node.secret))
        nodes = replace(nodes, node_start_timeout_s=PATIENCE_S)
        compare(tmp_path / "model", "qwen3-moe", nodes, 128, prefill_attention_dtype="fp8")


def plan(model: Path, parallel: ParallelConfig, **changes: Any) -> MemoryPlan:
    config = EngineConfig(model=ModelConfig(model=str(model), device="cpu"), parallel=parallel, **changes)
    spec = read_spec(model)
    return plan_memory(spec, config, resolve_hardware(config, spec), 1 << 30)


def test_a_stage_plans_for_its_layers(llama: Path) -> None:
    whole, two = plan(llama, ParallelConfig()), plan(llama, replace(TWO, pipeline_layers="1,3"))
    assert [stage.layers for stage in two.stages] == [range(1), range(1, 4)]
    assert sum(stage.bytes_per_block for stage in two.stages) == whole.bytes_per_block
    assert sum(stage.weight_bytes for stage in two.stages) == whole.weight_bytes
    assert two.num_blocks == whole.num_blocks, "as many as max_num_seqs needs"
    said = str(two)
    assert "stage 0: layers 0 to 0" in said and "stage 1: layers 1 to 3" in said and not whole.stages


def test_the_cut_counts_drafters(llama: Path, tmp_path: Path) -> None:
    deep = make_tiny_llama(tmp_path, num_layers=8)
    drafting = speculation_config("draft_model", draft_model=str(llama))
    plain, drafted = plan(deep, TWO), plan(deep, TWO, speculation=drafting)
    assert [len(stage.layers) for stage in plain.stages] == [3, 5]
    assert [len(stage.layers) for stage in drafted.stages] == [1, 7]
    assert str(drafted).count("KV pool, ") == 1 and "of it the drafter's" in str(drafted)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_parallel_size": 5}, "pipeline_parallel_size=5: accepted: at most 4, the model's layers"),
        ({"pipeline_layers": "1,2"}, "pipeline_layers='1,2': accepted: 2 numbers of layers, together 4"),
        ({"pipeline_layers": "4"}, "pipeline_layers='4': accepted: 2 numbers of layers, together 4"),
        ({"pipeline_parallel_size": 1, "pipeline_layers": "4"}, "pipeline_layers='4': accepted with pipeline_parallel"),
        (
            {"tensor_parallel_size": 8},
            "=8: 16 processes of a machine; accepted on a CPU: .* up to 8",
        ),
        ({"expert_parallel": True}, "expert_parallel=True: accepted with tensor_parallel_size above 1"),
    ],
)
def test_stages_that_cannot_be_are_refused(changes: dict[str, Any], reason: str, llama: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan(llama, replace(TWO, **changes))


@pytest.mark.parametrize(
    ("costs", "ends", "num_stages", "expected"),
    [
        ([1] * 6, 0, 3, (2, 2, 2)),
        ([1] * 8, 2, 2, (3, 5)),
        ([1] * 3, 100, 3, (1, 1, 1)),
        ([5, 1, 1, 1], 0, 2, (1, 3)),
        ([1, 1, 1, 5], 0, 2, (3, 1)),
    ],
)
def test_layers_by_memory(costs: list[int], ends: int, num_stages: int, expected: tuple[int, ...]) -> None:
    """ends: the embedding and the head, which the first stage has besides."""
    assert balanced(costs, ends, num_stages) == expected
