"""A random MTP module behind the last layer of tiny DeepSeek-V3 checkpoints, and its drafts in plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

FILE = "model.safetensors"
SIZES = {  # of the checkpoint, for formats of blocks and groups
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "moe_intermediate_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 128, "q_lora_rank": 128,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 4,  # every expert: rounding moves no token to others
}  # fmt: skip
NORMS = ("enorm", "hnorm", "shared_head.norm")


def add_mtp(folder: Path) -> None:
    """Tensors of the last layer, drawn anew under the next number, and those around it. Shares embedding and head."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / FILE)
    last, size = config["num_hidden_layers"] - 1, config["hidden_size"]
    generator = torch.Generator().manual_seed(4)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[1] ** -0.5)

    for name in [name for name in tensors if name.startswith(f"model.layers.{last}.")]:
        own = drawn(*tensors[name].shape) + ("norm" in name)
        tensors[name.replace(f".{last}.", f".{last + 1}.", 1)] = own
    prefix = f"model.layers.{last + 1}."
    tensors |= {f"{prefix}{name}.weight": 1 + drawn(size) for name in NORMS}
    tensors[f"{prefix}eh_proj.weight"] = drawn(size, 2 * size)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


@torch.no_grad()
def dense_mtp(folder: Path, prompt: list[int], num_drafts: int) -> list[int]:
    """Drafts after the token that the model predicts, each pass over all tokens so far."""
    model = DeepseekV3ForCausalLM.from_pretrained(folder, attn_implementation="eager")
    config, number = model.config, model.config.num_hidden_layers
    prefix = f"model.layers.{number}."
    own = {name.removeprefix(prefix): one for name, one in load_file(folder / FILE).items() if name.startswith(prefix)}
    layer = DeepseekV3DecoderLayer(config, number - 1).eval()
    layer.load_state_dict(_in_memory({name: one for name, one in own.items() if name not in _around(own)}))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps) * own[f"{name}.weight"]

    out = model(torch.tensor([prompt]), output_hidden_states=True)
    states, tokens, drafts = out.hidden_states[-1][0], [*prompt[1:], int(out.logits[0, -1].argmax())], []
    for _ in range(num_drafts):
        embedded = model.model.embed_tokens(torch.tensor(tokens))
        pair = torch.cat([norm(embedded, "enorm"), norm(states, "hnorm")], dim=-1) @ own["eh_proj.weight"].t()
        count = len(tokens)
        positions = model.model.rotary_emb(pair[None], torch.arange(count)[None])
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        raw = layer(pair[None], attention_mask=mask, position_embeddings=positions)
        raw = (raw if isinstance(raw, torch.Tensor) else raw[0])[0]
        drafts.append(int(model.lm_head(norm(raw[-1], "shared_head.norm")).argmax()))
        # the next pass reads the module's own result at the last token, and the model's before it
        states, tokens = torch.cat([states, raw[-1:]]), [*tokens, drafts[-1]]
    return drafts


def _around(own: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in own if name.startswith((*NORMS, "eh_proj"))}


def _in_memory(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as transformers holds them: one tensor of all."""
    parts = {name: one for name, one in stored.items() if ".experts." not in name}
    count = sum(name.endswith("down_proj.weight") and ".experts." in name for name in stored)

    def of(part: str) -> torch.Tensor:
        return torch.stack([stored[f"mlp.experts.{expert}.{part}_proj.weight"] for expert in range(count)])

    parts["mlp.experts.gate_up_proj"] = torch.cat([of("gate"), of("up")], dim=1)
    parts["mlp.experts.down_proj"] = of("down")
    return parts
