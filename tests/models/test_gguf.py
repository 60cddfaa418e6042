"""GGUF files: the same logits as the checkpoint they were made of, its tokens and its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paged_forward import PagedForward
from slipstream.cli import main
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.checkpoint_path import resolve_checkpoint, resolve_tokenizer
from slipstream.nn.gguf.convert import convert
from slipstream.nn.gguf.metadata import Metadata, config_json
from slipstream.nn.gguf.tokenizer import PRE_TOKENIZERS, write_tokenizer
from slipstream.nn.load import load_model
from slipstream.tokenizer.tokenizer import TextTokenizer
from tiny_checkpoints import relative_error
from tiny_variants import classes_of
from toy_tokenizers import TEXTS, sentencepiece
from transformers import AutoTokenizer, PreTrainedModel

gguf = pytest.importorskip("gguf")

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "models/slipstream-demo-code"
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "attn_implementation": "eager",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {
    "block_count": 2, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96, "vocab_size": 97,
    "attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-6, "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16, "rope.scaling.yarn_beta_fast": 8.0,
    "rope.scaling.yarn_beta_slow": 2.0,
}  # fmt: skip
TOKENS = list(range(3, 40))
TEMPLATE = "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    config_class, model_class = classes_of(family)
    model = model_class(config_class(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return model


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"


def rows_of_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Llama's q and k as GGUF files store them: what rotates together lies side by side."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path, model: PreTrainedModel, architecture: str, kind: str, pre: str = "gpt-2", **more: Any
) -> None:
    """Store the model; it then holds the values that the file's format rounds to.  more: further keys."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "vocab_size": config.vocab_size,
    }.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_parameters["rope_theta"])
    add_tokenizer(writer, pre)
    for key, value in more.items():
        writer.add_key_value(f"{architecture}.{key}", value, gguf.GGUFValueType.get_type(value))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.numpy().copy()
        stored = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else gguf.GGMLQuantizationType[kind]
        raw = gguf.quants.quantize(values, stored)
        parameter.copy_(torch.from_numpy(gguf.quants.dequantize(raw, stored).astype(np.float32).reshape(values.shape)))
        num_heads = next((count for part, count in heads.items() if part in name), 0)
        if num_heads and architecture == "llama":
            raw = rows_of_pairs(raw, num_heads)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=stored)
    if (factors := llama3_divisors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_divisors(config: Any) -> np.ndarray | None:
    if config.rope_parameters["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    theta, size = config.rope_parameters["rope_theta"], config.head_dim
    plain = 1.0 / theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    return (plain / scaled.numpy()).astype(np.float32)


def add_tokenizer(writer: Any, pre: str) -> None:
    """The demo model's tokenizer as a GGUF file holds one."""
    model = json.loads((DEMO / "tokenizer.json").read_text())
    vocab = sorted(model["model"]["vocab"], key=model["model"]["vocab"].get)
    special = {token["content"] for token in model["added_tokens"]}
    pieces = [*vocab, *sorted(special - set(vocab), key=str)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces)
    writer.add_token_types([3 if piece in special else 1 for piece in pieces])
    writer.add_token_merges([" ".join(merge) for merge in model["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


CASES = {
    "llama-f32": ("llama", {}, "F32"),
    "llama-q8_0": ("llama", {}, "Q8_0"),
    "llama-tied-q4_0": ("llama", {"tie_word_embeddings": True}, "Q4_0"),
    "llama-q4_1": ("llama", {}, "Q4_1"),
    "llama3-rope-bf16": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}}, "BF16"),
    "qwen2-f16": ("qwen2", {}, "F16"),
    "qwen3-q8_0": ("qwen3", {}, "Q8_0"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_logits_equal_those_of_the_stored_weights(case: str, tmp_path: Path) -> None:
    family, changes, kind = CASES[case]
    model = tiny_model(family, **changes)
    write_gguf(tmp_path / "model.gguf", model, family, kind)
    convert(tmp_path / "model.gguf", tmp_path / "checkpoint", dtype="float32")
    config = json.loads((tmp_path / "checkpoint/config.json").read_text())
    config["vocab_size"] = SIZES["vocab_size"]  # the tokenizer is the demo model's, and larger
    (tmp_path / "checkpoint/config.json").write_text(json.dumps(config))
    decoder = load_model(ModelConfig(model=str(tmp_path / "checkpoint"), device="cpu"))
    (ours,) = PagedForward(decoder, [TOKENS]).run([5, 64])
    with torch.no_grad():
        theirs = model(torch.tensor([TOKENS])).logits[0]
    assert relative_error(ours, theirs) <= 1e-4


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"), "llama", "F16")
    return tmp_path / "tiny.gguf"


def test_a_file_is_a_model_converted_once(file: Path) -> None:
    folder = resolve_checkpoint(str(file))
    written = (folder / "config.json").stat().st_mtime_ns
    assert resolve_checkpoint(str(file)) == resolve_tokenizer(str(file)) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_tokens_and_chat_template_come_out_of_the_file(file: Path) -> None:
    folder = resolve_checkpoint(str(file))
    text = "def add(a, b): return a + b # über"  # the demo model splits at line breaks, digits and spaces of its own
    demo = TextTokenizer.load(DEMO).encode(text, add_special_tokens=False)
    assert TextTokenizer.load(folder).encode(text) == demo
    messages = [{"role": "user", "content": "hello"}]
    assert AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False) == "<|user|>hello"


def test_the_verb_writes_a_folder_and_keeps_what_is_there(file: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["convert", str(file), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/tokenizer.json").is_file()
    assert main(["convert", str(file), str(tmp_path / "out")]) == 1
    assert "not empty" in capsys.readouterr().err


SPLITS = {
    "gpt-2": ["It", "'s", "Ġ12345", "ĠDOGS", "'", "S", "Ċ"],
    "smollm": ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠDOGS", "'", "S", "Ċ"],
    "llama-bpe": ["It", "'s", "Ġ", "123", "45", "ĠDOGS", "'S", "Ċ"],
    "qwen2": ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠDOGS", "'S", "Ċ"],
}


@pytest.mark.parametrize("pre", list(SPLITS))
def test_texts_are_split_by_the_named_pattern(pre: str) -> None:
    assert [piece for piece, _ in PRE_TOKENIZERS[pre]().pre_tokenize_str("It's 12345 DOGS'S\n")] == SPLITS[pre]


def test_a_sentencepiece_vocabulary_gives_its_own_tokens(tmp_path: Path) -> None:
    toy = sentencepiece()
    vocab = toy.get_vocab()
    pieces = sorted(vocab, key=lambda piece: vocab[piece])
    special = [piece for piece, token in toy.get_added_tokens_decoder().items()]
    metadata = Metadata(
        "toy",
        {
            "general.architecture": "llama",
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": pieces,
            "tokenizer.ggml.scores": [-float(token_id) for token_id in range(len(pieces))],
            "tokenizer.ggml.token_type": [3 if token_id in special else 1 for token_id in range(len(pieces))],
            "tokenizer.ggml.bos_token_id": vocab["<s>"],
        },
    )
    write_tokenizer(metadata, tmp_path)
    ours = TextTokenizer.load(tmp_path)
    for text in (*TEXTS, "an unseen word, über 日本 \U0001f600", "  two  spaces "):
        assert ours.encode(text) == toy.encode(text).ids
        assert ours.decode(ours.encode(text)) == toy.decode(toy.encode(text).ids)


@pytest.mark.parametrize(
    ("pre", "more", "message"),
    [
        ("gpt-2", {"expert_count": 8}, "mixture-of-experts"),
        ("of-tomorrow", {}, "tokenizer.ggml.pre of-tomorrow is not known"),
        ("gpt-2", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "rotary scaling longrope"),
        ("gpt-2", {"rope.dimension_count": 8}, "rotates 8 of 16 features"),
        ("gpt-2", {"attention.scale": 0.5}, r"llama.attention.scale of the GGUF file is not served; accepted: 1"),
        ("gpt-2", {"rope.scaling.yarn_attn_factor": 1.5}, r"llama.rope.scaling.yarn_attn_factor of the GGUF file"),
        (
            "gpt-2",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": "4"},
            "factor of the GGUF file is '4'; accepted",
        ),
    ],
    ids=["experts", "pre-tokenizer", "rope", "partial rotary", "scale of scores", "factor of yarn", "no number"],
)
def test_what_cannot_be_converted_is_refused_by_name(
    pre: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "odd.gguf", tiny_model("llama"), "llama", "F32", pre, **more)
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "odd.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("key", "count"), [("head_count", 0), ("head_count", 7), ("head_count_kv", 3)])
def test_rows_that_are_not_of_so_many_heads_are_refused(key: str, count: int, file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(damaged(data, f"llama.attention.{key}".encode(), 4, count.to_bytes(4, "little")))
    part = "attn_q" if key == "head_count" else "attn_k"
    with pytest.raises(ConfigError, match=rf"tensor blk.0.{part}.weight has \d+ rows, which are no {count} heads"):
        resolve_checkpoint(str(file))


def test_yarns_borders_are_read(tmp_path: Path) -> None:
    metadata = Metadata(
        "toy", {"general.architecture": "qwen2", **{f"qwen2.{key}": value for key, value in YARN.items()}}
    )
    scaling = config_json(metadata, (), None)["rope_scaling"]
    assert scaling == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0, "beta_slow": 2.0,
    }  # fmt: skip


def test_one_file_of_several_is_refused() -> None:
    metadata = Metadata("toy", {"general.architecture": "qwen2", "split.count": 3})
    with pytest.raises(ConfigError, match=r"one file of several \(split.count\); accepted: one file"):
        config_json(metadata, (), None)


def test_a_token_that_the_vocabulary_lacks_is_named() -> None:
    names = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_id": 2}
    metadata = Metadata("toy", {"general.architecture": "qwen2", **{f"qwen2.{k}": v for k, v in YARN.items()}, **names})
    with pytest.raises(ConfigError, match=r"tokenizer.ggml.eos_token_id of the GGUF file is 2, none of its tokens"):
        config_json(metadata, (), None)


def damaged(data: bytes, key: bytes, offset: int, value: bytes) -> bytes:
    """data with other bytes so many after a key."""
    at = data.index(key) + len(key) + offset
    return data[:at] + value + data[at + len(value) :]


@pytest.mark.parametrize(
    ("key", "offset", "value", "message"),
    [
        (b"tokenizer.ggml.tokens", 8, (1 << 60).to_bytes(8, "little"), "not a GGUF file that can be read: ends "),
        (b"tokenizer.ggml.tokens", 4, (4).to_bytes(4, "little"), "a GGUF file"),
        (b"tokenizer.ggml.tokens", 24, b"\xff", "not a GGUF file that can be read: 'utf-8' codec"),
        (b"tokenizer.ggml.merges", 24, b"~~", "the tokenizer of the GGUF file cannot be built: .* out of vocabulary"),
    ],
    ids=["more than the file has", "numbers for texts", "no utf-8", "merge of no token"],
)
def test_a_damaged_file_is_refused(key: bytes, offset: int, value: bytes, message: str, file: Path) -> None:
    file.write_bytes(damaged(file.read_bytes(), key, offset, value))
    with pytest.raises(ConfigError, match=message):
        resolve_checkpoint(str(file))


def test_no_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.gguf").write_bytes(b"GGUX" + bytes(64))
    with pytest.raises(ConfigError, match=r"not a GGUF file"):
        resolve_checkpoint(str(tmp_path / "no.gguf"))
