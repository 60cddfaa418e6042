"""MoE layers under quantisation: experts hold what the method says, stored is made at load, refusals name the field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import Tensors, load, logits, rms_error, store
from safetensors.torch import load_file, save_file
from slipstream import LLM, SamplingParams
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.experts import Experts
from slipstream.nn.load import weight_bytes
from slipstream.nn.read_spec import read_spec
from slipstream_kernels import ops
from stored_experts import gptq, make_mixtral
from tiny_checkpoints import make_checkpoint
from tiny_model import make_tiny_llama
from transformers import AutoConfig, MixtralConfig, MixtralForCausalLM

EXPERT, DENSE = (".w1.weight", ".w2.weight", ".w3.weight"), "_proj.weight"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixtral(tmp_path_factory.mktemp("mixtral"))


def held(weight: torch.Tensor, form: str) -> torch.Tensor:
    """What a weight stands for once it is quantised."""
    if form == "int4":
        return ops.dequantize_int4(ops.quantize_int4(weight, 128))
    if form == "int8":
        integers = ops.quantize_int8_weight(weight)
        return integers.values.float() * integers.scales[:, None]
    if form == "blocks":
        values, blocks = ops.quantize_fp8_blocks(weight)
        return values.float() * blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
    rows = ops.quantize_fp8(weight)
    return rows.values.float() * rows.scales


def with_held_weights(full: Path, folder: Path, experts: str, dense: str) -> Path:
    (folder / "config.json").write_text((full / "config.json").read_text())
    tensors: Tensors = load_file(full / "model.safetensors")
    for name, weight in tensors.items():
        form = experts if name.endswith(EXPERT) else dense if name.endswith(DENSE) else ""
        tensors[name] = held(weight, form) if form else weight
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("method", "experts", "dense", "bound"),
    [
        ("wint4", "int4", "int4", 1e-5),
        ("fp8", "fp8", "fp8", 0.1),
        ("w4a8_fp8", "int4", "int4", 0.1),
        ("a8w8_fp8_wint4", "int4", "fp8", 0.16),
        ("wint8", "int8", "int8", 1e-5),
        ("w8a8_int8", "int8", "int8", 0.05),
        ("block_wise_fp8", "blocks", "blocks", 0.1),
    ],
)
def test_quantised_at_load(full: Path, tmp_path: Path, method: str, experts: str, dense: str, bound: float) -> None:
    ours = logits(load(full, quantization=method))
    assert rms_error(ours, logits(load(with_held_weights(full, tmp_path, experts, dense)))) < bound
    assert 0.005 < rms_error(ours, logits(load(full))) < 0.4


@pytest.mark.parametrize(
    ("method", "bound"),
    [("fp8", 0.1), ("wint8", 0.02), ("w8a8_int8", 0.05), ("wint4", 0.2), ("w4a8_fp8", 0.25), ("mxfp4", 0.25)],
)
def test_experts_that_are_stored_transposed_are_quantised_at_load(tmp_path: Path, method: str, bound: float) -> None:
    """gpt-oss in 16 bits has them as [in, out], gate and up in turns."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_attention_heads": 4}
    full = make_checkpoint("gpt-oss", tmp_path, **sizes, num_experts_per_tok=6).path  # all: rounding chooses no others
    assert rms_error(logits(load(full, quantization=method)), logits(load(full))) < bound


def test_mixed_formats_are_held_where_they_belong(full: Path) -> None:
    layer = load(full, quantization="a8w8_fp8_wint4").layers[0]
    assert isinstance(layer.mlp, Experts)
    assert layer.attention.qkv.weights["weight"].dtype == torch.float8_e4m3fn
    assert layer.mlp.gate_up.weights["packed"].shape == (4 * 512, 64)
    assert layer.mlp.router.weights.keys() & {"weight", "packed"}  # 16 or 32 bits: no scales
    assert "scale" not in layer.mlp.router.weights


@pytest.mark.parametrize("method", ["none", "fp8", "wint4", "a8w8_fp8_wint4", "block_wise_fp8", "w8a8_int8"])
def test_planned_bytes_are_held_bytes(full: Path, method: str) -> None:
    decoder = load(full, quantization=method, load_format="dummy")
    kept = [decoder.embedding.weight, decoder.final_norm.weight]
    for layer in decoder.layers:
        kept += [norm.weight for _, norm in layer.norms()]
        kept += [tensor for linear in layer.linears() for tensor in linear.weights.values()]
    kept += decoder.lm_head.weights.values()  # type: ignore[union-attr]
    config = ModelConfig(model=str(full), device="cpu", quantization=method)
    assert weight_bytes(config, decoder.spec, torch.float32) == sum(tensor.nbytes for tensor in kept)


def by_channel(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith((*EXPERT, DENSE))]:
        rows = ops.quantize_fp8(tensors[name])
        tensors |= {name: rows.values, name.replace("weight", "weight_scale"): rows.scales}


def by_words(tensors: Tensors) -> None:
    """As compressed-tensors packs 4 bits."""
    for name in [name for name in tensors if name.endswith((*EXPERT, DENSE))]:
        weight = ops.quantize_int4(tensors.pop(name), 128)
        module = name.removesuffix("weight")
        tensors[f"{module}weight_packed"] = weight.packed.view(torch.int32)
        tensors[f"{module}weight_scale"] = weight.scales
        tensors[f"{module}weight_shape"] = torch.tensor([weight.out_features, weight.in_features])


def stored_format(weights: dict[str, object], inputs: dict[str, object] | None, form: str) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    ignored = ["lm_head", "re:.*block_sparse_moe.gate"]
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": ignored
    }  # fmt: skip


FLOAT8 = {"num_bits": 8, "type": "float"}
CHANNELS = stored_format(
    {**FLOAT8, "strategy": "channel"}, {**FLOAT8, "strategy": "token", "dynamic": True}, "float-quantized"
)
WORDS = stored_format({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None, "pack-quantized")


@pytest.mark.parametrize(
    ("quantization", "change", "method"), [(CHANNELS, by_channel, "fp8"), (WORDS, by_words, "wint4")]
)
def test_stored_experts(full: Path, tmp_path: Path, quantization: dict[str, object], change, method: str) -> None:
    stored = store(full, tmp_path, quantization, change)
    assert torch.equal(logits(load(stored)), logits(load(full, quantization=method)))
    with pytest.raises(ConfigError, match="quantization='a8w8_fp8_wint4': the checkpoint is stored in"):
        load(stored, quantization="a8w8_fp8_wint4")


def test_a_lost_expert_is_named(full: Path, tmp_path: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    with pytest.raises(ConfigError, match=f"tensor {name} missing"):
        load(store(full, tmp_path, {}, lambda tensors: tensors.pop(name)))


def test_blocks_lie_within_an_expert(tmp_path: Path) -> None:
    narrow = make_mixtral(tmp_path, intermediate_size=320)
    with pytest.raises(ConfigError, match=r"block_wise_fp8': .*gate\.0.* has 320 outputs, not a multiple of 128"):
        load(narrow, quantization="block_wise_fp8", load_format="dummy")
    with pytest.raises(ConfigError, match="=128: down of 4 experts has 320 inputs, not a multiple of 128"):
        load(narrow, quantization="wint4", quantization_group_size=128, load_format="dummy")


def test_wishes_that_cannot_be_served(full: Path, tmp_path: Path) -> None:
    dense = make_tiny_llama(tmp_path / "dense")
    with pytest.raises(ConfigError, match=r"a8w8_fp8_wint4.*LlamaForCausalLM has no experts; accepted: fp8"):
        load(dense, quantization="a8w8_fp8_wint4")
    config = json.loads((full / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 5}))
    with pytest.raises(ConfigError, match="num_experts_per_tok=5: must be at most num_local_experts=4"):
        read_spec(tmp_path)


def make_served(folder: Path, head_dim: int) -> MixtralForCausalLM:
    """A checkpoint with a tokenizer, of sizes that quantisation divides."""
    config = AutoConfig.from_pretrained(make_tiny_llama(folder, head_dim=head_dim)).to_dict()
    torch.manual_seed(1)
    same = ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id", "head_dim")
    model = MixtralForCausalLM(
        MixtralConfig(
            **{name: config[name] for name in same}, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, num_local_experts=6, initializer_range=0.3,
        )
    ).float().eval()  # fmt: skip
    model.save_pretrained(folder)
    return model


PROMPTS = ["def read(", "import os\n\n\nclass Stack:", "for i in"]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def test_engine_serves_experts(tmp_path: Path) -> None:
    """A batch's texts are those of its members alone, and greedy text is Hugging Face's."""
    model = make_served(tmp_path, 16)
    with LLM(str(tmp_path), device="cpu", num_blocks=64) as llm:
        together = llm.generate(PROMPTS, PARAMS)
        assert [one.text for one in together] == [llm.generate(prompt, PARAMS)[0].text for prompt in PROMPTS]
    for one in together:
        prompt, made = one.prompt_token_ids, one.token_ids
        with torch.no_grad():
            best = model(torch.tensor([[*prompt, *made]])).logits[0].argmax(-1)
        assert len(made) == 12 and best[len(prompt) - 1 : -1].tolist() == list(made)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "quantization", ["none", "fp8", "wint4", "a8w8_fp8_wint4", "wint8", "w8a8_int8", "block_wise_fp8"]
)
def test_graphs_say_what_eager_steps_say(tmp_path: Path, quantization: str) -> None:
    make_served(tmp_path, 64)
    assert_graphs_agree(tmp_path, quantization)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("quantization", "group_size"), [("wint4", 64), ("w4a8_fp8", 128)])
def test_orders_of_experts_in_graphs(tmp_path: Path, quantization: str, group_size: int) -> None:
    make_served(tmp_path, 64)
    store_in_orders(tmp_path, group_size)
    assert_graphs_agree(tmp_path, quantization)


def store_in_orders(path: Path, group_size: int) -> None:
    """A served checkpoint as GPTQ stores it with desc_act."""
    tensors: Tensors = load_file(path / "model.safetensors")
    gptq(group_size, sym=True, desc_act=True)(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    stored = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": True, "sym": True}
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))


def assert_graphs_agree(path: Path, quantization: str) -> None:
    """Graphs with padding, but for 4-bit weights beside 16-bit rows: kernels for other numbers of rows round otherwise
    there, which this model's texts show. Their prompts have 64 tokens in all, the rows of a graph."""
    sizes = enumerate((20, 30, 14))
    filling = [[(11 * place + 7 * step) % 90 + 33 for step in range(size)] for place, size in sizes]
    prompts = filling if quantization == "wint4" else PROMPTS
    told = []
    for graphs in ("off", "auto"):
        fields = {"device": "cuda", "dtype": "bfloat16", "quantization": quantization, "cuda_graphs": graphs}
        with LLM(str(path), num_blocks=64, max_num_seqs=8, **fields) as llm:
            told.append([one.token_ids for one in llm.generate(prompts, PARAMS)])
    assert told[0] == told[1] and all(len(token_ids) == PARAMS.max_tokens for token_ids in told[0])
