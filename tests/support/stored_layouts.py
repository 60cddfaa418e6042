"""Tiny checkpoints of families without a class in Hugging Face, or with another published layout.

Each rewrites the folder of a model with the same maths to the family's published layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedModel

Tensors = dict[str, torch.Tensor]
ALIBI_SLOPES = {  # by the number of heads, as the paper's code has them
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    8: [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625],
}
CHATGLM_NAMES = (
    ("model.embed_tokens", "transformer.embedding.word_embeddings"),
    ("model.layers.", "transformer.encoder.layers."),
    ("model.norm", "transformer.encoder.final_layernorm"),
    ("lm_head", "transformer.output_layer"),
    ("self_attn.o_proj", "self_attention.dense"),
    ("self_attn.", "self_attention."),
    ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
    ("mlp.down_proj", "mlp.dense_4h_to_h"),
)


def rewrite(path: Path, tensors: Callable[[Tensors], Tensors], config: Callable[[dict], dict]) -> None:
    file = path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors(load_file(file)).items()}, file)
    values = config(json.loads((path / "config.json").read_text()))
    (path / "config.json").write_text(json.dumps(values))


def join_qkv(tensors: Tensors, joined: str) -> Tensors:
    """The same with queries, keys and values stored as one."""
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        tensors[name.replace(".q_proj.", f".{joined}.")] = torch.cat(parts)
    return tensors


def chatglm(path: Path, _: PreTrainedModel) -> None:
    def tensors(stored: Tensors) -> Tensors:
        renamed = {}
        for name, tensor in join_qkv(stored, "query_key_value").items():
            for old, new in CHATGLM_NAMES:
                name = name.replace(old, new)
            renamed[name] = tensor
        return renamed

    def config(values: dict) -> dict:
        return {
            "architectures": ["ChatGLMModel"],
            "model_type": "chatglm",
            "num_layers": values["num_hidden_layers"],
            "hidden_size": values["hidden_size"],
            "ffn_hidden_size": values["intermediate_size"],
            "num_attention_heads": values["num_attention_heads"],
            "multi_query_attention": True,
            "multi_query_group_num": values["num_key_value_heads"],
            "kv_channels": values["head_dim"],
            "padded_vocab_size": values["vocab_size"],
            "seq_length": values["max_position_embeddings"],
            "layernorm_epsilon": values["rms_norm_eps"],
            "rope_ratio": values["rope_parameters"]["rope_theta"] / 10_000,
            "add_qkv_bias": True,
            "eos_token_id": values["eos_token_id"],
            "torch_dtype": "float32",
        }

    rewrite(path, tensors, config)


class AlibiModel(LlamaForCausalLM):
    """Baichuan-13B's maths: rotations by no angle, and ALiBi as a mask; 2^(-8i/n) and every second one of twice n."""

    def forward(self, input_ids: torch.Tensor, **_: object) -> object:
        self.model.rotary_emb.inv_freq.zero_()
        distance = torch.arange(input_ids.shape[1])[None] - torch.arange(input_ids.shape[1])[:, None]
        bias = torch.tensor(ALIBI_SLOPES[self.config.num_attention_heads]).view(1, -1, 1, 1) * distance
        return super().forward(input_ids, attention_mask=bias.masked_fill(distance > 0, torch.finfo().min))


def baichuan(path: Path, model: PreTrainedModel) -> None:
    """Of Baichuan2, by its vocabulary, rows of the head are stored with any length, and multiplied with length 1."""
    if model.config.vocab_size == 125_696:
        with torch.no_grad():
            model.lm_head.weight /= model.lm_head.weight.norm(dim=1, keepdim=True)

    def config(values: dict) -> dict:
        kept = {key: value for key, value in values.items() if key != "num_key_value_heads"}
        return {**kept, "architectures": ["BaichuanForCausalLM"], "model_type": "baichuan"}

    rewrite(path, lambda stored: join_qkv(stored, "W_pack"), config)


def baichuan_alibi(path: Path, model: PreTrainedModel) -> None:
    baichuan(path, model)

    def config(values: dict) -> dict:
        length = values.pop("max_position_embeddings")
        return {**values, "model_max_length": length}

    rewrite(path, lambda stored: stored, config)


def with_draft_layer(path: Path, _: PreTrainedModel) -> None:
    """A layer for multi-token prediction behind the decoder's."""

    def tensors(stored: Tensors) -> Tensors:
        count = 1 + max(int(name.split(".")[2]) for name in stored if name.startswith("model.layers."))
        return {**stored, f"model.layers.{count}.eh_proj.weight": torch.ones(48, 96)}

    rewrite(path, tensors, lambda values: values)


def renamed(architecture: str, **fields: object) -> Callable[[Path, PreTrainedModel], None]:
    """For families with the maths and names of another one, but an architecture and perhaps fields of their own."""

    def layout(path: Path, _: PreTrainedModel) -> None:
        rewrite(path, lambda stored: stored, lambda values: {**values, "architectures": [architecture], **fields})

    return layout


def mimo(path: Path, model: PreTrainedModel) -> None:
    """With a tensor of the layer for multi-token prediction."""
    renamed("MiMoForCausalLM", model_type="mimo", attention_bias=True)(path, model)
    rewrite(path, lambda stored: {**stored, "model.mtp_layers.0.input_proj.weight": torch.ones(4, 8)}, dict)


def seeing(architecture: str, is_published: bool, projector: str) -> Callable[[Path, PreTrainedModel], None]:
    """As part of a model with eyes: as published, or as transformers 5 saves it."""

    def tensors(stored: Tensors) -> Tensors:
        renamed = {"vision_tower.embeddings.weight": torch.ones(2, 2), f"{projector}.w": torch.ones(2)}
        for name, tensor in stored.items():
            inner = name.replace("model.", "model.language_model.", 1) if not name.startswith("lm_head") else name
            renamed[f"language_model.{name}" if is_published else inner] = tensor
        return renamed

    def config(values: dict) -> dict:
        return {"architectures": [architecture], "text_config": values, "vision_config": {}, "dtype": "float32"}

    return lambda path, model: rewrite(path, tensors, config)


LAYOUTS: dict[str, Callable[[Path, PreTrainedModel], None]] = {
    "baichuan": baichuan,
    "baichuan-alibi": baichuan_alibi,
    "chatglm": chatglm,
    "gemma3-seeing": seeing("Gemma3ForConditionalGeneration", True, "model.multi_modal_projector"),
    "glm4-moe": with_draft_layer,
    "internlm3": renamed("InternLM3ForCausalLM"),
    "mimo": mimo,
    "kimi-seeing": seeing("KimiK25ForConditionalGeneration", True, "mm_projector"),
    "mistral-seeing": seeing("Mistral3ForConditionalGeneration", False, "model.multi_modal_projector"),
}
