"""Published checkpoints of heads, odd parts included: what is read, what is left out, what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
import torch.nn.functional as F
from engine_driver import make_engine, model_worker
from safetensors.torch import load_file, save_file
from slipstream.core.config import SpeculationConfig
from slipstream.core.errors import ConfigError
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.nn.heads.tensors import read_shapes, read_tensors
from speculation_config import speculation_config
from tiny_heads import make_eagle, make_eagle3, make_medusa, make_mtp
from tiny_model import make_tiny_llama
from transformers import LlamaForCausalLM

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model"), num_layers=4)


def drafts_of(model: Path, config: SpeculationConfig, prompt: list[int], num_steps: int = 1) -> list[list[int]]:
    """What a request has drafted after each of its first steps."""
    engine = make_engine(model, speculation=config)
    request = Request(list(prompt), GREEDY)
    engine.submit(request)
    found = []
    for _ in range(num_steps):
        engine.step()
        found.append(list(request.draft_token_ids))
    return found


def eagle(folder: Path, **more: object) -> SpeculationConfig:
    return speculation_config("eagle", throttle="off", eagle_head=str(folder), **more)  # type: ignore[arg-type]


PROMPT = [(11 * place) % 290 + 100 for place in range(19)]


def test_eagle_drafts_what_its_formulas_say(model: Path, tmp_path: Path) -> None:
    """EAGLE's first draft against plain torch over the whole prompt: projection with bias, no input norm, own table."""
    folder = make_eagle(model, tmp_path)
    ((first, *_),) = drafts_of(model, eagle(folder, eagle_top_k=1, num_draft_tokens=3), PROMPT)
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True)
    target = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        out = target(torch.tensor([PROMPT]), output_hidden_states=True)
        features = out.hidden_states[-1][0]  # after the final norm
        following = torch.tensor([*PROMPT[1:], int(out.logits[0, -1].argmax())])
        expected = _dense_eagle(stored, json.loads((model / "config.json").read_text()), features, following)
        assert first == int((expected[-1] @ target.lm_head.weight.T).argmax())


def _dense_eagle(stored: Tensors, config: dict[str, int], features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    head, count, layer = config["head_dim"], len(tokens), "layers.0."
    pair = torch.cat([stored["embed_tokens.weight"][tokens], features], dim=-1)
    x = pair @ stored["fc.weight"].T + stored["fc.bias"]
    q, k, v = (
        (x @ stored[f"{layer}self_attn.{name}_proj.weight"].T).view(count, -1, head).transpose(0, 1) for name in "qkv"
    )
    angles = torch.arange(count)[:, None] / 10000.0 ** (torch.arange(0, head, 2) / head)
    cos, sin = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))
    turned = [
        t * cos + torch.cat([-t[..., head // 2 :], t[..., : head // 2]], dim=-1) * sin
        for t in (q, k.repeat_interleave(q.shape[0] // k.shape[0], dim=0))
    ]
    spread = v.repeat_interleave(q.shape[0] // v.shape[0], dim=0)
    attended = F.scaled_dot_product_attention(turned[0], turned[1], spread, is_causal=True).transpose(0, 1).flatten(1)
    x = x + attended @ stored[f"{layer}self_attn.o_proj.weight"].T
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"])
    normed = normed * stored[f"{layer}post_attention_layernorm.weight"]
    gate, up = (normed @ stored[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (F.silu(gate) * up) @ stored[f"{layer}mlp.down_proj.weight"].T


def test_eagles_odd_parts_are_read_or_left_out(model: Path, tmp_path: Path) -> None:
    """Without bias, with the model's own table, with the model's head beside it, and `model.` before every name: each
    is another spelling of the same head."""
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    stored = torch.load(make_eagle(model, tmp_path / "a") / "pytorch_model.bin", weights_only=True)
    plain = {**stored, "fc.bias": torch.zeros_like(stored["fc.bias"]), "embed_tokens.weight": table}
    spare = {name: tensor for name, tensor in plain.items() if name not in ("fc.bias", "embed_tokens.weight")}
    named = {f"model.{name}": tensor for name, tensor in spare.items()} | {"lm_head.weight": torch.randn(3, 2)}
    config = (tmp_path / "a" / "config.json").read_bytes()
    found = []
    for number, tensors in enumerate((plain, spare, named)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_bytes(config)
        torch.save(tensors, folder / "pytorch_model.bin")
        found.append(drafts_of(model, eagle(folder), PROMPT, 3))
    assert found[0] == found[1] == found[2] and len(found[0][0]) == 15
    assert found[0] != drafts_of(model, eagle(tmp_path / "a"), PROMPT, 3), "bias and table do count"


def test_eagle3_names_the_models_tokens(model: Path, tmp_path: Path) -> None:
    """Row i of a reduced vocabulary is token i + d2t[i]; t2d says the same. Without d2t rows are tokens."""
    folder = make_eagle3(model, tmp_path / "reduced")
    stored = load_file(folder / "model.safetensors")
    reduced = drafts_of(model, eagle(folder), PROMPT, 3)
    assert all(token % 2 == 0 for drafts in reduced for token in drafts), "the head has even tokens only"
    full = torch.full((2 * len(stored["d2t"]), stored["lm_head.weight"].shape[1]), 0.0)
    full[torch.arange(len(stored["d2t"])) + stored["d2t"]] = stored["lm_head.weight"]
    size = stored["t2d"].shape[0]
    whole = {name: tensor for name, tensor in stored.items() if name not in ("d2t", "t2d")}
    other = tmp_path / "whole"
    other.mkdir()
    (other / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({**whole, "lm_head.weight": full[:size].contiguous()}, other / "model.safetensors")
    engines = [make_engine(model, speculation=eagle(place)) for place in (folder, other)]
    heads = [model_worker(engine).speculator._drafters["eagle"]._head for engine in engines]  # type: ignore[attr-defined]
    features = torch.randn(5, stored["lm_head.weight"].shape[1], generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        own, wide = (head.logits(features) for head in heads)
    rows = torch.arange(own.shape[1])
    assert torch.equal(heads[0].token_ids(rows), rows + stored["d2t"]) and torch.equal(heads[1].token_ids(rows), rows)
    torch.testing.assert_close(wide[:, heads[0].token_ids(rows)], own)


def test_medusa_2_files_hold_the_model_too(model: Path, tmp_path: Path) -> None:
    """Heads of two layers among the model's own tensors, spread over files, `medusa_head.` or nothing in front."""
    stored = _medusa(model, tmp_path / "a")
    whole = load_file(model / "model.safetensors")
    found = []
    for number, prefix in enumerate(("medusa_head.", "")):
        folder = tmp_path / str(number)
        folder.mkdir()
        named = [(prefix + name, tensor) for name, tensor in stored.items()]
        save_file({**whole, **dict(named[::2])}, folder / "model-00001-of-00002.safetensors")
        save_file(dict(named[1::2]), folder / "model-00002-of-00002.safetensors")
        config = speculation_config("medusa", throttle="off", medusa_heads=str(folder))
        found.append(drafts_of(model, config, PROMPT, 3))
    assert found[0] == found[1] and len(found[0][0]) > 20


def _medusa(model: Path, folder: Path) -> Tensors:
    """Two heads of two residual layers each."""
    one = load_file(make_medusa(model, folder, num_heads=4) / "heads.safetensors")
    layer = lambda head: {name: one[f"medusa_head.{head}.0.linear.{name}"] for name in ("weight", "bias")}  # noqa: E731
    tensors = {}
    for head in range(2):
        for place in range(2):
            tensors |= {f"{head}.{place}.linear.{name}": tensor for name, tensor in layer(2 * head + place).items()}
        tensors[f"{head}.2.weight"] = one[f"medusa_head.{head}.1.weight"]
    return tensors


def test_a_module_behind_the_models_last_layer_is_found(model: Path, tmp_path: Path) -> None:
    """As DeepSeek-V3 stores it: in the model's checkpoint, one after another; the first is taken."""
    stored = load_file(make_mtp(model, tmp_path / "alone") / "model.safetensors")
    second = {name.replace("layers.4.", "layers.5."): torch.zeros_like(tensor) for name, tensor in stored.items()}
    folder = tmp_path / "both"
    folder.mkdir()
    save_file({**load_file(model / "model.safetensors"), **second, **stored}, folder / "model.safetensors")
    alone, inside = (
        drafts_of(model, speculation_config("mtp", throttle="off", mtp_module=str(place)), PROMPT, 3)
        for place in (tmp_path / "alone", folder)
    )
    assert alone == inside and len(alone[0]) == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a pickled state dict"),
        (b"hello world", "not a pickled state dict"),
        ([torch.zeros(2)], "holds a list; accepted: tensors by name"),
        ({"0.0.linear.weight": [1.0]}, "0.0.linear.weight is a list; accepted: tensors by name"),
        ("cut", "not a whole file"),
        ("code", "not a pickled state dict"),
        ({"nothing": torch.zeros(1)}, "holds no tensors of such a head"),
    ],
    ids=["empty", "text", "list", "no tensor", "cut", "code", "other names"],
)
@pytest.mark.parametrize("read", [read_tensors, read_shapes])
def test_files_that_are_no_state_dicts_are_refused_by_name(
    tmp_path: Path, read: object, content: object, says: str
) -> None:
    file = tmp_path / "medusa_lm_head.pt"
    if content == "code":
        import pickle

        file.write_bytes(pickle.dumps(Path, protocol=2))
    elif content == "cut":
        torch.save({"0.0.linear.weight": torch.zeros(100, 100)}, file)
        file.write_bytes(file.read_bytes()[:3000])
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(ConfigError, match=says) as caught:
        read("medusa_heads", tmp_path, lambda name: name.startswith("0."))  # type: ignore[operator]
    assert caught.value.field == "medusa_heads"


def test_shapes_are_those_of_the_tensors(model: Path, tmp_path: Path) -> None:
    for folder in (make_eagle(model, tmp_path / "bin"), make_eagle3(model, tmp_path / "safetensors")):
        tensors = read_tensors("eagle_head", folder)
        assert read_shapes("eagle_head", folder) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_a_head_of_the_hub_may_be_pickled(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickled files of a repository are fetched where it has no others; one that is not there is named."""
    folder = make_medusa(model, tmp_path, is_pickled=True)
    fetched: list[str] = []

    def snapshot(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        if name != "org/heads":
            raise OSError("there is none")
        fetched.extend(file.name for file in folder.iterdir() if any(file.match(pattern) for pattern in allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    config = speculation_config("medusa", throttle="off", medusa_heads="org/heads")
    assert drafts_of(model, config, PROMPT)[0]
    assert "medusa_lm_head.pt" in fetched
    heads = (("medusa", "medusa_heads"), ("eagle", "eagle_head"), ("mtp", "mtp_module"))
    for method, field in (*heads, ("draft_model", "draft_model")):
        with pytest.raises(ConfigError, match="no such folder") as caught:
            make_engine(model, speculation=speculation_config(method, **{field: "org/other"}))
        assert caught.value.field == field


def test_the_models_own_module_is_looked_for_in_what_the_model_is_made_of(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of the hub may have pickled weights beside the others: nobody reads them, for a module either."""
    patterns: set[str] = set()

    def snapshot(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        patterns.update(allow_patterns)
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ConfigError, match=r"^mtp_module='': needed"):
        make_engine(Path("org/model"), speculation=speculation_config("mtp"))
    assert "*.safetensors" in patterns and not {"*.bin", "*.pt"} & patterns
