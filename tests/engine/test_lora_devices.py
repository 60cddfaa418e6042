"""LoRA adapters on several ranks, which are processes over gloo, and in CUDA graphs: the same answers as without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from engine_driver import GREEDY, make_engine, model_worker, run_steps
from lora_adapters import PROMPT, answers, as_sent, make_adapter, sent, serving, three_adapters
from processes import children_of
from slipstream.core.config import ModelConfig, ParallelConfig
from slipstream.core.control import LOAD_LORA, SLEEP, WAKE_UP, Control
from slipstream.core.request import Request
from slipstream.nn.adapter_files import AdapterModel, read_adapter
from slipstream.nn.load import load_model, lora_targets
from slipstream.nn.lora import LoraLinear
from slipstream.nn.models.family import FAMILIES
from slipstream.nn.parallel import SINGLE, Parallel
from tiny_checkpoints import make_checkpoint
from tiny_model import make_tiny_llama

TWO = ParallelConfig(tensor_parallel_size=2)
STAGES = ParallelConfig(pipeline_parallel_size=2)
BOTH = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)


@pytest.mark.parametrize("sizes", [TWO, STAGES, BOTH], ids=["tensor parallel", "stages", "both"])
def test_ranks_say_what_one_says(
    sizes: ParallelConfig, tiny_llama: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    """Mixed batches, more adapters than slots, one loaded later, one that a client sends, slots that sleep emptied."""
    adapters = three_adapters(tmp_path / "adapters", tiny_llama)
    later = make_adapter(tmp_path / "later", tiny_llama, 7, size=0.8)
    asked = list(zip(("all", "", "queries", "rooted"), prompts[5:]))
    told = []
    for parallel in (sizes, None):
        engine = serving(tiny_llama, adapters, parallel, max_loras=2, lora_root=str(tmp_path), lora_cache_bytes=1 << 20)
        num_ranks = 1 if parallel is None else parallel.num_ranks
        assert len(children_of(os.getpid(), "rank_main")) == num_ranks - 1
        found = [answers(engine, asked, max_tokens=8)]
        engine.adapters.carry_out(Control(LOAD_LORA, name="later", folder=later.name))
        found.append(answers(engine, [("later", PROMPT), *asked[:2]], max_tokens=8))
        weights = sent(3, *as_sent(adapters["queries"], 2.0))
        [request] = engine.submit(Request(PROMPT, GREEDY, sent_adapter=weights))
        run_steps(engine, {})
        found.append([request.token_ids])
        for control in (Control(SLEEP, 1), Control(WAKE_UP)):
            order = engine.post(control)
            run_steps(engine, {})
            order.wait()
        found.append(answers(engine, asked, max_tokens=8))
        engine.close()
        told.append(found)
    assert told[0] == told[1] and told[0][0] == told[0][-1]
    assert len({tuple(tokens) for tokens in told[0][0]}) == len(asked)


def test_ranks_share_modules_that_are_stored_as_one(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("phi3", tmp_path / "phi3").path
    adapter = make_adapter(tmp_path / "adapter", checkpoint, 5, modules=("qkv_proj", "gate_up_proj", "o_proj"))
    config = ModelConfig(model=str(checkpoint), device="cpu", enable_lora=True, max_loras=1, max_lora_rank=4)
    decoders = [load_model(config, parallel=parallel) for parallel in (SINGLE, Parallel(0, 2), Parallel(1, 2))]
    for decoder in decoders:
        targets = lora_targets(decoder)
        model = AdapterModel(targets.targets, FAMILIES.get(decoder.spec.architecture), 4)
        targets.load(0, read_adapter(adapter, model, torch.float32))
    whole, *ranks = [[one for layer in decoder.layers for one in layer.linears()] for decoder in decoders]
    for linear, first, second in zip(whole, *ranks, strict=True):
        assert isinstance(linear, LoraLinear) and isinstance(first, LoraLinear) and isinstance(second, LoraLinear)
        if linear.spec.shard == "row":
            assert torch.equal(torch.cat([first.a, second.a], dim=-1), linear.a)
            assert torch.equal(first.b, linear.b) and torch.equal(second.b, linear.b)
            continue
        assert torch.equal(first.a, linear.a) and torch.equal(second.a, linear.a) and linear.a.any()
        own, others = ([rows for _, rows in one.spec.parts] for one in (first, linear))
        halves = zip(first.b.split(own, dim=-1), second.b.split(own, dim=-1), strict=True)
        for pair, together in zip(halves, linear.b.split(others, dim=-1), strict=True):
            assert torch.equal(torch.cat(pair, dim=-1), together) and together.any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("no_tf32")
def test_rows_with_and_without_adapters_in_graphs_say_what_they_say_without(
    tmp_path: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, so that the batch does not matter; padded, since six requests are in a graph of eight."""
    checkpoint = make_tiny_llama(tmp_path / "llama", head_dim=64)
    adapters = three_adapters(tmp_path / "adapters", checkpoint)
    asked = [(name, prompts[4 + index]) for index, name in enumerate(("", "all", "queries", "", "rooted", "all"))]

    on_gpu, cache = {"device": "cuda", "dtype": "float32"}, {"block_size": 16}
    eager, graphs = (
        serving(checkpoint, adapters, cache=cache, cuda_graphs=sizes, **on_gpu) for sizes in ("off", "1,4,8")
    )
    runner = model_worker(graphs).runner
    assert runner._adapters is not None and runner._adapters.graphs is not None
    replayed, replay = [], runner._adapters.graphs.replay
    monkeypatch.setattr(runner._adapters.graphs, "replay", lambda shape: replayed.append(shape) or replay(shape))
    found = answers(graphs, asked)
    assert found == answers(eager, asked) and len(replayed) > GREEDY.max_tokens / 2
    alone = make_engine(checkpoint, on_gpu, cache)
    plain = [index for index, (name, _) in enumerate(asked) if not name]
    assert [found[index] for index in plain] == answers(alone, [asked[index] for index in plain])
    assert len({tuple(tokens) for tokens in found}) == len(asked)
    [running] = graphs.submit(Request(PROMPT, GREEDY, adapter_name="all"))  # alone, then beside the model as it is
    run_steps(graphs, {}, 3)
    graphs.submit(Request(PROMPT, GREEDY))
    run_steps(graphs, {})
    assert running.token_ids[len(PROMPT) :] == answers(eager, [("all", PROMPT)])[0]
