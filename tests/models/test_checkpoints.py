"""Checkpoints as they come: sharded, in old spellings, with extra tensors, or broken in ways that must be named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_forward import PagedForward
from safetensors.torch import load_file, save_file
from slipstream.core.config import EngineConfig, ModelConfig, ParallelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.checkpoint_path import resolve_checkpoint
from slipstream.nn.decoder import Decoder
from slipstream.nn.load import load_model, resolve_device, resolve_dtype
from slipstream.nn.models.family import LLAMA_NAMES
from slipstream.nn.read_spec import read_spec
from slipstream.worker.resolve_hardware import resolve_hardware
from tiny_checkpoints import TinyCheckpoint, make_checkpoint, make_model, relative_error
from tiny_variants import MAX_POSITIONS
from transformers import LlamaForCausalLM

PROMPT = [5, 17, 3, 90, 44, 44, 2, 61]
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return make_checkpoint("llama3-gqa-rope", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(checkpoint: TinyCheckpoint, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(checkpoint.path, tmp_path / "copy"))


def load(path: Path, **fields: object) -> Decoder:
    return load_model(ModelConfig(model=str(path), device="cpu", **fields))  # type: ignore[arg-type]


def logits(decoder: Decoder) -> torch.Tensor:
    return PagedForward(decoder, [PROMPT]).run([len(PROMPT)])[0]


def edit_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key, value in fields.items():
        config.pop(key, None) if value is ... else config.update({key: value})
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_sharded_files_give_the_same_logits(tmp_path: Path) -> None:
    sharded = make_checkpoint("qwen2", tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert relative_error(logits(load(tmp_path)), sharded.logits(PROMPT)) <= 1e-4


def test_shards_without_an_index_are_read_by_their_headers(tmp_path: Path) -> None:
    """As vLLM reads them; the means of keys beside them are no weights, and are not a shard."""
    sharded = make_checkpoint("qwen2", tmp_path, max_shard_size="60KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"0.k_mean": torch.ones(2)}, tmp_path / "key_means.safetensors")
    edit_config(tmp_path, dtype=..., torch_dtype=...)
    assert relative_error(logits(load(tmp_path)), sharded.logits(PROMPT)) <= 1e-4
    first, second = sorted(tmp_path.glob("model-*.safetensors"))[:2]
    (name, tensor), *_ = load_file(first).items()
    save_file({**load_file(second), name: tensor}, second)
    with pytest.raises(ConfigError, match=f"{second.name}'.*{name} is in {first.name} as well; accepted: each tensor"):
        load(tmp_path)


def test_bf16_checkpoint_loads_into_any_dtype(checkpoint: TinyCheckpoint, folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    edit_config(folder, dtype="bfloat16")
    decoder = load(folder)
    assert decoder.spec.dtype == torch.bfloat16
    assert decoder.context.dtype == torch.float32  # "auto" on a CPU
    assert relative_error(logits(decoder), checkpoint.logits(PROMPT)) < 0.05
    assert load(folder, dtype="bfloat16").embedding.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["one file", "sharded", "without index"])
def test_a_dtype_that_no_config_states_is_the_stored_one(stored: torch.dtype, form: str, tmp_path: Path) -> None:
    """It was float32, and so twice the memory on a GPU. Biases of routers may be of a wider type than the model."""
    model = make_model("glm4-moe").to(stored)
    model.save_pretrained(tmp_path, max_shard_size="1GB" if form == "one file" else "60KB")
    edit_config(tmp_path, dtype=..., torch_dtype=...)
    if form == "without index":
        (tmp_path / "model.safetensors.index.json").unlink()
    if form == "one file":
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        edit_tensors(tmp_path, lambda tensors: tensors.update({bias: tensors[bias].float()}))
    assert resolve_dtype("auto", read_spec(tmp_path), torch.device("cuda")) == stored
    edit_config(tmp_path, torch_dtype="float16")
    assert read_spec(tmp_path).dtype == torch.float16


def test_a_dtype_is_read_of_text_within_a_whole_and_of_no_weights(tmp_path: Path) -> None:
    make_checkpoint("mistral-seeing", tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    plain = {key: value for key, value in text.items() if key not in ("dtype", "torch_dtype")}
    edit_config(tmp_path, dtype=..., torch_dtype=..., text_config=plain)
    assert read_spec(tmp_path).dtype == torch.bfloat16
    edit_config(tmp_path, text_config={**plain, "dtype": "float16"})
    assert read_spec(tmp_path).dtype == torch.float16
    edit_config(tmp_path, text_config=plain)
    (tmp_path / "model.safetensors").unlink()
    assert read_spec(tmp_path).dtype == torch.float32  # as Hugging Face says of a config alone


def test_transformers_4_spelling_of_rope_and_dtype(checkpoint: TinyCheckpoint, folder: Path) -> None:
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    theta = rope.pop("rope_theta")
    edit_config(folder, rope_parameters=..., rope_theta=theta, rope_scaling=rope, dtype=..., torch_dtype="float32")
    assert relative_error(logits(load(folder)), checkpoint.logits(PROMPT)) <= 1e-4


def test_rotary_buffers_of_old_checkpoints_are_ignored(checkpoint: TinyCheckpoint, folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(4)}))
    assert relative_error(logits(load(folder)), checkpoint.logits(PROMPT)) <= 1e-4


def test_tied_table_stored_twice_is_accepted(tmp_path: Path) -> None:
    tied = make_checkpoint("llama-tied", tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert relative_error(logits(load(tmp_path)), tied.logits(PROMPT)) <= 1e-4


def test_tied_head_that_is_another_table_is_refused(tmp_path: Path) -> None:
    """transformers 5 would multiply with it, 4 and vLLM with the embedding."""
    make_checkpoint("llama-tied", tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 0.5}))
    with pytest.raises(ConfigError, match=r"tensor lm_head.weight differs from model.embed_tokens.weight, to which"):
        load(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    expected = LlamaForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert relative_error(logits(load(tmp_path)), expected(torch.tensor([PROMPT])).logits[0]) <= 1e-4


def _truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def _pointer_instead_of_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def _instead_of_config(file: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / "config.json").unlink()
        (folder / file).touch()

    return damage


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _missing_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    files = {name: f"model-0000{1 + (name == K_PROJ)}-of-00002.safetensors" for name in (K_PROJ, "lm_head.weight")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def _bad_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{")


def _index_of(file: str) -> Callable[[Path], object]:
    """An index whose tensors are in that file, beside a whole checkpoint in the folder above."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
        weight_map = {"lm_head.weight": file.format(above=folder.parent)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_truncate, "model.safetensors.*not a whole safetensors file"),
        (_pointer_instead_of_weights, "model.safetensors.*not a whole safetensors file.*run `git lfs pull`"),
        (_pickle_only, "pytorch_model.bin: `slipstream convert` writes"),
        (_missing_shard, "model-00002-of-00002.safetensors"),
        (_bad_index, "model.safetensors.index.json.*JSON"),
        (_index_of("../model.safetensors"), r"index.json.*names '../model.safetensors'; accepted: files of the same"),
        (_index_of("{above}/model.safetensors"), "index.json.*names '/.*; accepted: files of the same folder"),
        (_index_of(""), "index.json.*names ''; accepted: files of the same folder"),
        (lambda folder: (folder / "config.json").write_text("[" * 100_000), "config.json.*not readable as JSON"),
        (lambda folder: edit_tensors(folder, lambda t: t.pop(K_PROJ)), f"tensor {K_PROJ} missing"),
        (
            lambda folder: edit_tensors(folder, lambda t: t.update({"model.extra.weight": torch.ones(1)})),
            "tensor model.extra.weight unexpected",
        ),
        (
            lambda folder: edit_tensors(folder, lambda t: t.update({K_PROJ: torch.ones(16, 47)})),
            rf"{K_PROJ} has shape \[16, 47\], config.json implies \[16, 48\]",
        ),
        (
            lambda folder: edit_tensors(folder, lambda t: t.update({K_PROJ: t[K_PROJ].to(torch.int8)})),
            f"{K_PROJ} has type I8; accepted: F32",
        ),
        (lambda folder: edit_config(folder, attention_bias=True), "q_proj.bias.*and .* more missing"),
        (lambda folder: (folder / "config.json").unlink(), "config.json.*no such file"),
        (
            _instead_of_config("m.Q4_K_M.gguf"),
            r"config.json.*no such file; .*accepted: .*/m.Q4_K_M.gguf, the file itself",
        ),
        (_instead_of_config("adapter_config.json"), "config.json.*no such file; .*LoRA adapter: .*lora_modules"),
        (lambda folder: (folder / "config.json").write_text("{'a': 1}"), "config.json.*not readable as JSON"),
        (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe"), "config.json.*not readable as JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json.*must hold a JSON object"),
    ],
)
def test_broken_checkpoint_is_named(folder: Path, damage: Callable[[Path], object], named: str) -> None:
    damage(folder)
    with pytest.raises(ConfigError, match=f"(?s){named}"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel': models of this .* not served.*LlamaForCausalLM, .*Mistral.*Qwen3",
        ),
        ({"architectures": ...}, "architectures.*missing.*LlamaForCausalLM"),
        ({"hidden_act": "relu2"}, "hidden_act='relu2'.*silu"),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, "rope_type='spiral'.*default, linear"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters short_factor=None: is missing"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 0]}}, "a list of 4 numbers above 0"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters factor=None: is missing"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor=None: is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "factor='4': must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-300}}, "factor=1e-300: must be a number of at least 0.001"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "full_attention=.*one rope for all layers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"num_key_value_heads": 4}, "num_key_value_heads=4: must divide num_attention_heads=6"),
        ({"hidden_size": "48"}, "hidden_size='48': must be an integer"),
        ({"num_hidden_layers": ...}, "num_hidden_layers=None: is missing"),
        ({"head_dim": 7}, "head_dim=7.*even"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers=1000000: must be an integer of at most 1024"),
        ({"num_attention_heads": 10**9, "hidden_size": 10**9}, "num_attention_heads.*of at most 65536"),
        ({"vocab_size": 10**12}, "vocab_size=1000000000000: must be an integer of at most 2147483647"),
        ({"max_position_embeddings": 1 << 30}, "declares 1073741824 tokens, accepted: up to 16777216"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps=1.*: must be a number of at most 1e\\+30"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf: must be a number of at most 1e\\+30"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": float("inf")}},
            "factor=inf: must be a number of at most",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0}}, "rope_theta=1.0: .* above 1"),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 1}},
            "original_max_position_embeddings=1: must be at least 2",
        ),
        ({"eos_token_id": "2"}, "eos_token_id='2'"),
        ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn'.*bfloat16"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_unserved_config_is_refused_before_weights(folder: Path, fields: dict[str, object], named: str) -> None:
    (folder / "model.safetensors").unlink()
    edit_config(folder, **fields)
    with pytest.raises(ConfigError, match=f"(?s){named}"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dtype": "int8"}, "dtype='int8'.*float32"),
        ({"quantization": "w9a9"}, "quantization='w9a9'.*fp8, .*mxfp4, none"),
        ({"attention_backend": "magic"}, "attention_backend='magic'.*paged"),
        ({"max_model_len": MAX_POSITIONS + 1}, f"max_model_len={MAX_POSITIONS + 1}.*at most {MAX_POSITIONS}"),
    ],
)
def test_wish_that_cannot_be_served(checkpoint: TinyCheckpoint, fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(checkpoint.path, **fields)


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "mps", "nonsense:x"])
def test_device_that_is_not_there(checkpoint: TinyCheckpoint, device: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        load_model(ModelConfig(model=str(checkpoint.path), device=device))


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_a_gpu_that_no_kernel_serves_is_refused(
    checkpoint: TinyCheckpoint, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two GPUs is an Ampere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((7, 5), (8, 0))[index])
    if device == "cuda:1":
        assert resolve_device(device) == torch.device("cuda", 1)
        return
    reason = f"^device='{device}': cuda:0 has compute capability 7.5, kernels need 8.0; accepted: cpu, or another GPU$"
    with pytest.raises(ConfigError, match=reason):
        load_model(ModelConfig(model=str(checkpoint.path), device=device))
    config = EngineConfig(model=ModelConfig(model=str(checkpoint.path), device=device))
    with pytest.raises(ConfigError, match=reason):
        resolve_hardware(config, read_spec(checkpoint.path))


def test_every_rank_needs_a_gpu_that_kernels_serve(checkpoint: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((8, 0), (7, 0))[index])
    model = ModelConfig(model=str(checkpoint.path), device="cuda")
    config = EngineConfig(model=model, parallel=ParallelConfig(2))
    with pytest.raises(ConfigError, match=r"^device='cuda': cuda:1 has compute capability 7\.0"):
        resolve_hardware(config, read_spec(checkpoint.path))


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing", "nothing", "slipstream-test/no-such-model"])
def test_checkpoint_that_is_not_there(model: str) -> None:
    with pytest.raises(ConfigError, match=f"model='{model}': no such folder"):
        resolve_checkpoint(model)


def test_dummy_weights_are_reproducible_and_keep_the_scale(checkpoint: TinyCheckpoint, folder: Path) -> None:
    (folder / "model.safetensors").unlink()  # none is needed
    first, again, other = (logits(load(folder, load_format="dummy", seed=seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert 0.3 < first.std().item() < 3.0


# In a process of its own: an allocator that was used before hands out memory it already holds, and hides the load.
WATCHED_LOAD = """
import sys, threading, torch
from slipstream.core.config import ModelConfig
from slipstream.nn.load import load_model

def anonymous_bytes():  # memory that is not a mapped file
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) * 1024

def watch():
    while not stop.wait(0.0005):
        samples.append(anonymous_bytes())

before, samples, stop = anonymous_bytes(), [0], threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
decoder = load_model(ModelConfig(model=sys.argv[1], device="cpu"))
stop.set()
watcher.join()
samples.append(anonymous_bytes())  # the watcher may have had no turn for a while
largest = decoder.spec.layers[0].mlp.gate_up.num_parameters * 4
print(max(samples) - before, decoder.spec.weight_bytes(torch.float32), largest)
"""


def test_loading_holds_one_layer_beyond_the_model(tmp_path: Path) -> None:
    fields = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8}
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 512, "max_position_embeddings": 64, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    slots = load(tmp_path, load_format="dummy").weight_slots(LLAMA_NAMES)
    save_file({name: torch.full(slot.shape, 0.01) for name, slot in slots.items()}, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", WATCHED_LOAD, str(tmp_path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=400).stdout
    peak, model, largest_linear = map(int, output.split())
    assert 0.8 * model < peak <= model + largest_linear + (8 << 20)  # a linear exists twice while it is repacked
