"""What the memory plan reserves for drafters is what they hold: every layout, dense models and experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_driver import make_engine, model_worker
from safetensors.torch import save_file
from slipstream.core.config import EngineConfig, ModelConfig, SpeculationConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.heads import draft_vocabulary
from slipstream.nn.parallel import SINGLE
from slipstream.nn.read_spec import read_spec
from slipstream.worker.draft_memory import draft_memory
from slipstream.worker.hardware import Hardware
from slipstream.worker.spec_decode.planning import DraftMemory
from speculation_config import speculation_config
from tiny_heads import make_eagle, make_eagle3, make_medusa, make_mtp
from tiny_model import make_tiny_llama

CPU = torch.device("cpu")
NUM_SLOTS = 8 * 512  # of make_engine's pools
LAYOUTS = {
    "medusa": lambda model, folder: ("medusa", {"medusa_heads": str(make_medusa(model, folder))}),
    "medusa_pt": lambda model, folder: (
        "medusa",
        {"medusa_heads": str(make_medusa(model, folder, is_pickled=True, own_head=False))},
    ),
    "mtp": lambda model, folder: ("mtp", {"mtp_module": str(make_mtp(model, folder))}),
    "eagle": lambda model, folder: ("eagle", {"eagle_head": str(make_eagle(model, folder))}),
    "eagle3": lambda model, folder: ("eagle", {"eagle_head": str(make_eagle3(model, folder))}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), num_layers=6)


def held_by(drafter: object, target: object) -> DraftMemory:
    """Tensors that hang on a drafter and not on the model; those of its cache by token."""
    shared = tensors_of(target, set())
    own = sum(size for key, size in tensors_of(drafter, set()).items() if key not in shared)
    cache = sum(tensors_of(getattr(drafter, "_cache", None), set()).values())
    return DraftMemory(own - cache, cache // NUM_SLOTS)


def tensors_of(thing: object, seen: set[int]) -> dict[int, int]:
    """Bytes by address of all tensors that can be reached, tables of angles among them."""
    if id(thing) in seen:
        return {}
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        if thing.is_mkldnn:  # packed for a CPU's products: has no address
            return {id(thing): thing.numel() * thing.element_size()}
        return {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()}
    if isinstance(thing, dict):
        children = list(thing.values())
    elif isinstance(thing, list | tuple):
        children = list(thing)
    elif type(thing).__module__.startswith("slipstream"):
        names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
        skipped = {"_seen", "_after", "_compaction", "_graphs", "_tree", "_ranks", "_target", "_plan"}
        children = [getattr(thing, name) for name in names if name not in skipped and hasattr(thing, name)]
    else:
        return {}
    return {key: size for child in children for key, size in tensors_of(child, seen).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_plan_is_what_a_head_holds(model: Path, tmp_path: Path, layout: str, dtype: str) -> None:
    """Files are float32 here: what counts is the type that they are read into."""
    method, fields = LAYOUTS[layout](model, tmp_path)
    engine = make_engine(model, {"dtype": dtype}, speculation=speculation_config(method, **fields))
    check(engine, method)


@pytest.mark.parametrize("method", ["medusa", "mtp", "eagle"])
@pytest.mark.parametrize("num_experts", [0, 4])
def test_the_plan_is_what_a_dummy_holds(tmp_path: Path, model: Path, method: str, num_experts: int) -> None:
    """EAGLE's layer is dense whatever the model's are; an MTP module's is of the model's own kind."""
    folder = model
    if num_experts:
        folder = tmp_path / "experts"
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((model / name).read_bytes())
        config = json.loads((model / "config.json").read_text())
        experts = {"num_local_experts": num_experts, "num_experts_per_tok": 2, "sliding_window": None}
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **experts}
        (folder / "config.json").write_text(json.dumps(config))
    check(make_engine(folder, {"load_format": "dummy"}, speculation=speculation_config(method)), method)


def check(engine: object, method: str) -> None:
    drafter = model_worker(engine).speculator._drafters[method]  # type: ignore[arg-type]
    target = model_worker(engine).runner.model  # type: ignore[arg-type]
    spec, config, plan = engine.spec, engine.config, engine.memory_plan  # type: ignore[attr-defined]
    hardware = Hardware(CPU, target.context.dtype, target.context.dtype)
    planned = draft_memory(config, spec, hardware)
    assert planned == held_by(drafter, target)
    alone = replace(config, speculation=speculation_config())
    assert draft_memory(alone, spec, hardware) == DraftMemory()
    assert plan.draft_block_bytes == planned.kv_bytes_per_token * 8


def test_vocabularies_of_drafting_are_planned_in_fp8_on_a_gpu(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Medusa's own matrices; a copy of the model's for heads that have none; nothing beside a tied or quantised one."""
    monkeypatch.setattr(draft_vocabulary.ops, "fp8_refusal", lambda device, dtype: None)
    spec = read_spec(model)
    matrix, scales = spec.vocab_size * spec.hidden_size, 4 * spec.vocab_size
    bf16, gpu = torch.bfloat16, torch.device("cuda")

    def more(speculation: SpeculationConfig, quantized: bool = False, tied: bool = False) -> int:
        """Bytes beyond those on a CPU."""
        model_config = ModelConfig(str(model), quantization="fp8" if quantized else "none", quantize_lm_head=quantized)
        config = EngineConfig(model=model_config, speculation=speculation)
        own = replace(spec, tie_word_embeddings=tied)
        found = [draft_memory(config, own, Hardware(device, bf16, bf16)).weight_bytes for device in (gpu, CPU)]
        return found[0] - found[1]

    medusa = speculation_config("medusa", medusa_heads=str(make_medusa(model, tmp_path / "m")))
    eagle = speculation_config("eagle", eagle_head=str(make_eagle(model, tmp_path / "e")))
    eagle3 = speculation_config("eagle", eagle_head=str(make_eagle3(model, tmp_path / "e3")))
    mtp = speculation_config("mtp", mtp_module=str(make_mtp(model, tmp_path / "t")))
    tolerance = 3 * 4096  # counters of FP8 products
    assert more(medusa) == pytest.approx(3 * (scales - matrix), abs=tolerance)
    assert more(eagle) == pytest.approx(matrix + scales, abs=tolerance)
    assert more(eagle, quantized=True) == more(eagle, tied=True) == more(eagle3) == more(mtp) == 0


def test_a_draft_model_is_planned_in_its_own_type(model: Path, tmp_path: Path) -> None:
    draft = make_tiny_llama(tmp_path, seed=4, num_layers=3)
    config = EngineConfig(
        model=ModelConfig(str(model)), speculation=speculation_config("draft_model", draft_model=str(draft))
    )
    spec = read_spec(model)
    found = draft_memory(config, spec, Hardware(torch.device("cuda"), torch.bfloat16, torch.bfloat16))
    own = read_spec(draft)
    own = replace(own, vocab_size=SINGLE.vocabulary_width(own.vocab_size))
    assert own.dtype == torch.float32, "as it is stored"
    table = own.max_model_len * own.attentions[0].head_dim * 4
    assert found == DraftMemory(4 * own.num_parameters + table, own.kv_bytes_per_token(torch.float32))


@pytest.mark.parametrize("field", ["medusa_heads", "mtp_module", "eagle_head"])
def test_a_head_that_cannot_be_read_is_refused_before_the_model_is(model: Path, tmp_path: Path, field: str) -> None:
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())  # a model without weights
    heads = tmp_path / "heads"
    heads.mkdir()
    save_file({"nothing.of.a.head": torch.zeros(2)}, heads / "model.safetensors")
    (heads / "config.json").write_text("{}")
    method = field.split("_")[0]
    with pytest.raises(ConfigError) as caught:
        make_engine(tmp_path, speculation=speculation_config(method, **{field: str(heads)}))
    assert caught.value.field == field or "config.json" in str(caught.value)
