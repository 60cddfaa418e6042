"""`slipstream convert` of folders: tokenizers give sentencepiece's and tiktoken's own ids, pickled weights the same
logits; what is hostile or unclear is refused by reason."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_forward import PagedForward
from slipstream import LLM
from slipstream.cli import main
from slipstream.core.chat_messages import TEMPLATE_FOLDER
from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.convert import pickled, pieces, sentencepiece_model, tokenizer
from slipstream.nn.convert.folder import convert_folder
from slipstream.nn.convert.tokenizer import CHATGLM2_TOKENS, CHATGLM3_ROLES
from slipstream.nn.load import load_model
from slipstream.server.chat_template import load_template
from slipstream.tokenizer.tokenizer import TextTokenizer
from tiny_checkpoints import TinyCheckpoint, make_checkpoint, relative_error
from tokenizer_texts import COMBINING, HARD_TEXTS, random_texts, write_ranks
from toy_tokenizers import TEXTS
from transformers import PreTrainedTokenizerFast

TALK = [
    {"role": "user", "content": "The fox"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "x"},
]


# ---------------------------------------------------------------- sentencepiece


def train_sentencepiece(path: Path, **options: Any) -> Any:
    trainer = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    model = io.BytesIO()
    settings = {"model_type": "bpe", "vocab_size": 600, "byte_fallback": True, "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False, "character_coverage": 0.99, "minloglevel": 2, **options}  # fmt: skip
    trainer.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS * 3), model_writer=model, **settings)
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(model.getvalue())
    return trainer.SentencePieceProcessor(model_proto=model.getvalue())


SENTENCEPIECE = {
    "llama": {},
    "baichuan": {"add_dummy_prefix": False, "user_defined_symbols": ["<reserved_106>", "<reserved_107>"]},
    "gemma": {"add_dummy_prefix": False, "user_defined_symbols": ["\n\n", "<table>", "▁▁"]},
    "chatglm": {"remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc"},
    "no-bytes": {"byte_fallback": False},
    "split-digits": {"split_digits": True, "allow_whitespace_only_pieces": True},
}


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_ids_are_sentencepieces_own(kind: str, tmp_path: Path) -> None:
    theirs = train_sentencepiece(tmp_path, **SENTENCEPIECE[kind])
    convert_folder(tmp_path, tmp_path / "made")
    ours = TextTokenizer.load(tmp_path / "made")
    assert ours.vocab_size == theirs.get_piece_size()
    for text in [*HARD_TEXTS, *random_texts(400)]:
        if "<s>" in text or "</s>" in text:  # sentencepiece takes them for plain text, everyone else for tokens
            continue
        if text == COMBINING and "nfkc" in str(SENTENCEPIECE[kind]):
            continue
        ids = theirs.encode(text)
        assert ours.encode(text, False) == ids, text
        assert ours.decode(ids) == theirs.decode(ids).replace(" ⁇ ", "<unk>"), text


def test_bos_is_put_in_front_where_the_folder_says_so(tmp_path: Path) -> None:
    theirs = train_sentencepiece(tmp_path)
    for settings, has_bos in (({"tokenizer_class": "LlamaTokenizer"}, True), ({"add_bos_token": False}, False)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", **settings}))
        convert_folder(tmp_path, tmp_path / str(has_bos))
        ids = TextTokenizer.load(tmp_path / str(has_bos)).encode("The fox")
        assert ids == [1] * has_bos + theirs.encode("The fox")


# ---------------------------------------------------------------- ChatGLM and Baichuan, whole folders


def pickle_weights(checkpoint: TinyCheckpoint, num_files: int) -> None:
    """Store the weights as PyTorch files instead."""
    from safetensors.torch import load_file

    path = checkpoint.path
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = [f"pytorch_model-{index + 1:05d}-of-{num_files:05d}.bin" for index in range(num_files)]
    weight_map = {name: names[index % num_files] for index, name in enumerate(tensors)}
    for file in names:
        torch.save({name: tensors[name] for name, own in weight_map.items() if own == file}, path / file)
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def make_baichuan(path: Path) -> TinyCheckpoint:
    theirs = train_sentencepiece(path, **SENTENCEPIECE["baichuan"])
    sizes = {"vocab_size": theirs.get_piece_size(), "max_position_embeddings": 128}
    checkpoint = make_checkpoint("baichuan-alibi", path, **sizes)
    pickle_weights(checkpoint, 2)
    config = json.loads((path / "config.json").read_text())
    remote = {"AutoConfig": "configuration_baichuan.BaichuanConfig"}
    (path / "config.json").write_text(json.dumps({**config, "auto_map": remote}))
    roles = {f"{role}_token_id": theirs.piece_to_id(f"<reserved_10{n}>") for role, n in (("user", 6), ("assistant", 7))}
    (path / "generation_config.json").write_text(json.dumps({**roles, "top_k": 5, "repetition_penalty": 1.05}))
    settings = {"tokenizer_class": "BaichuanTokenizer", "auto_map": {}, "add_bos_token": False, "bos_token": "<s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return checkpoint


def test_baichuan_is_served_after_it(tmp_path: Path) -> None:
    checkpoint = make_baichuan(tmp_path / "published")
    for part in (
        lambda: load_model(ModelConfig(model=str(checkpoint.path))),
        lambda: TextTokenizer.load(checkpoint.path),
    ):
        with pytest.raises(ConfigError, match="slipstream convert"):
            part()
    assert main(["convert", str(checkpoint.path), str(tmp_path / "made")]) == 0
    ids = TextTokenizer.load(tmp_path / "made").encode(template := render(tmp_path / "made"), False)
    assert template == "<reserved_106>The fox<reserved_107>yes<reserved_106>x<reserved_107>"
    decoder = load_model(ModelConfig(model=str(tmp_path / "made"), device="cpu"))
    (logits,) = PagedForward(decoder, [ids]).run([64])
    assert relative_error(logits, checkpoint.logits(ids)) <= 1e-4
    with LLM(str(tmp_path / "made"), device="cpu", num_blocks=8) as llm:
        [answer] = llm.chat(TALK)
    assert answer.token_ids and answer.prompt_token_ids == ids
    assert "auto_map" not in json.loads((tmp_path / "made/config.json").read_text())
    weights, config = (tmp_path / "made" / name for name in ("model-00001.safetensors", "config.json"))
    assert weights.stat().st_mode == config.stat().st_mode  # another user may serve them


def test_every_chat_template_comes_along(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("llama2-mha", tmp_path / "published")
    pickle_weights(checkpoint, 1)
    templates = ("chat_template.jinja", "chat_template.json", f"{TEMPLATE_FOLDER}/tool_use.jinja")
    (checkpoint.path / TEMPLATE_FOLDER).mkdir()
    for name in templates:
        (checkpoint.path / name).write_text(name)
    convert_folder(checkpoint.path, tmp_path / "made")
    assert [(tmp_path / "made" / name).read_text() for name in templates] == list(templates)


def render(folder: Path) -> str:
    """By the gateway's renderer, which must be Hugging Face's."""
    template = load_template(folder)
    assert template is not None
    text = template.render(TALK)
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    assert fast.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True) == text
    return text


@pytest.mark.parametrize("generation", [2, 3])
def test_chatglms_tokens_follow_its_pieces(generation: int, tmp_path: Path) -> None:
    theirs = train_sentencepiece(tmp_path)
    num_pieces = theirs.get_piece_size()
    (tmp_path / "config.json").write_text('{"architectures": ["ChatGLMModel"], "model_type": "chatglm"}')
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    roles = f"role_special_tokens = {list(CHATGLM3_ROLES)}" if generation == 3 else ""
    (tmp_path / "tokenization_chatglm.py").write_text(f"raise SystemExit('never run')\n{roles}\n")
    convert_folder(tmp_path, tmp_path / "made")
    ours = TextTokenizer.load(tmp_path / "made")
    tokens = (*CHATGLM2_TOKENS, *(CHATGLM3_ROLES if generation == 3 else ()))
    assert [ours.backend.token_to_id(token) for token in tokens] == list(range(num_pieces, num_pieces + len(tokens)))
    gmask, sop = num_pieces + 1, num_pieces + 3
    assert ours.encode("The fox") == [gmask, sop, *theirs.encode("The fox")]
    ids = ours.encode(render(tmp_path / "made"), False)
    if generation == 3:  # as chatglm3-6b: [gMASK] sop <|user|> "▁" "\n" …
        user, assistant = (num_pieces + 5 + CHATGLM3_ROLES.index(f"<|{role}|>") for role in ("user", "assistant"))
        start = [gmask, sop, user, *theirs.encode("\n The fox"), assistant, *theirs.encode("\n yes")]
        assert ids[: len(start)] == start and ids[-1] == assistant
    else:
        question = "[Round 1]\n\n问：The fox\n\n答：yes\n\n[Round 2]\n\n问：x\n\n答："
        assert ids == [gmask, sop, *theirs.encode(question)]


# ---------------------------------------------------------------- refused by reason


def refused(folder: Path, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        convert_folder(folder, folder / "made")
    assert not (folder / "made").exists() and not list(folder.glob(".made*"))


def test_what_is_no_folder_to_convert(tmp_path: Path) -> None:
    refused(tmp_path, "nothing to convert in it; accepted: .*pytorch_model.bin")
    write_ranks(tmp_path / "qwen.tiktoken")
    (tmp_path / "config.json").write_text('{"model_type": "qwen"}')
    (tmp_path / "consolidated.00.pth").write_bytes(b"")
    refused(tmp_path, "has a config.json and no weights")
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(ConfigError, match=r"output=.*not empty"):
        convert_folder(tmp_path, tmp_path / "full")


class Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


def write_archive(file: Path, compression: int, **entries: bytes) -> None:
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(f"archive/{name.replace('_', '.')}", data)


def expanded() -> torch.Tensor:
    return torch.ones(1).expand(1 << 32)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"w": Runs()}, r"something else than tensors, .*GLOBAL getattr.*accepted: a state dict of tensors"),
        ({"w": torch.nn.Linear(2, 2)}, "something else than tensors"),
        ([torch.ones(2)], "holds a list; accepted: a state dict"),
        ({"w": "text"}, "w is a str; accepted: tensors by name"),
        ({"w": expanded()}, "tensor w is larger than what the file stores of it"),
        ({str(i): torch.ones(1 << 16)[:] for i in range(2)} | {"w": torch.ones(4).to_sparse()}, "tensor w is"),
    ],
    ids=["code", "module", "list", "text", "expanded", "sparse"],
)
def test_pickles_that_are_more_than_tensors(state: Any, named: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(state, tmp_path / "pytorch_model.bin")
    refused(tmp_path, named)
    assert not (tmp_path / "ran").exists()


def test_archives_that_would_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pytorch_model.bin"
    write_archive(file, zipfile.ZIP_DEFLATED, data_pkl=bytes(1 << 24))
    refused(tmp_path, "would unpack to 16777216 bytes from .*not compressed")
    monkeypatch.setattr(pickled, "MAX_PICKLE_BYTES", 100)
    write_archive(file, zipfile.ZIP_STORED, data_pkl=bytes(101))
    refused(tmp_path, "names and shapes take 101 bytes; accepted: 100")
    monkeypatch.undo()
    torch.save({"w": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    refused(tmp_path, "not an archive of torch.save")
    torch.save({"w": torch.ones(1000)}, file)
    file.write_bytes(file.read_bytes()[:-700])
    refused(tmp_path, "not an archive|damaged")
    shared = torch.ones(1 << 16)
    torch.save({str(index): shared for index in range(3)}, file)
    refused(tmp_path, "tensor 2 is larger than what the file stores")
    torch.save({str(index): shared for index in range(2)}, file)  # a tied head is no attack
    convert_folder(tmp_path, tmp_path / "made")


def test_indices_that_lead_elsewhere(tmp_path: Path) -> None:
    index = tmp_path / "pytorch_model.bin.index.json"
    for weight_map, named in (
        ({"w": "../secret.bin"}, "shards of .* are missing: ../secret.bin"),
        ({"w": "absent.bin"}, "missing: absent.bin"),
        (["w"], "must hold a weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(tmp_path, named)
    for name in ("a.bin", "b.bin"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    index.write_text(json.dumps({"weight_map": {"w": "a.bin", "x": "b.bin"}}))
    refused(tmp_path, "tensor w is in a.bin as well")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"AA== 0\nAA== 1\n", "line 2: accepted: base64 of 1 to 512 bytes and the rank 1"),
        (b"AA== 0\nAQ== 7\n", "line 2"),
        (b"AA== 0\n!!!! 1\n", "line 2"),
        (b"AA== 0\n" + base64.b64encode(bytes(600)) + b" 1\n", "line 2"),
        (b"AA== 0\n", "has no token for byte 1"),
    ],
)
def test_ranks_that_are_none(text: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "qwen.tiktoken").write_bytes(text)
    (tmp_path / "config.json").write_text('{"model_type": "qwen"}')
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, named)


def test_tokenizers_that_cannot_be_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ranks(tmp_path / "tokenizer.model")
    refused(tmp_path, "model_type None of config.json has no known pattern; accepted: chatglm, qwen, kimi_k2")
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\xff\xff no model")
    refused(tmp_path, "neither sentencepiece's nor tiktoken's format")
    monkeypatch.setattr(tokenizer, "TOKENIZER_BYTES", 10)
    refused(tmp_path, "has 12 bytes; accepted: at most 10")
    monkeypatch.undo()
    train_sentencepiece(tmp_path, model_type="unigram", vocab_size=480)
    refused(tmp_path, "is a unigram model; accepted: BPE")
    train_sentencepiece(tmp_path)
    for module, limit, named in (
        (pieces, "MAX_MERGES", "accepted: at most 3 merges"),
        (sentencepiece_model, "MAX_PIECES", "has 600 pieces; accepted: 1 to 3"),
        (sentencepiece_model, "MAX_PIECE_CHARS", "must have 1 to 3 characters"),
    ):
        sentencepiece_model._message.cache_clear()
        with monkeypatch.context() as smaller:
            smaller.setattr(module, limit, 3)
            refused(tmp_path, named)


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ({"5": {"content": "other"}}, "has .* at id 5, the folder's JSON files say 'other'"),
        ({"-1": {"content": "x"}}, "added_tokens=.-1: .*accepted: ids up to"),
        ({"99999999999": {"content": "x"}}, "added_tokens="),
        ({"700": {"content": ""}}, "added_tokens="),
        ({"700": "x"}, "added_tokens="),
        ([1], "added_tokens_decoder=.*must be a JSON object"),
    ],
)
def test_added_tokens_that_contradict(entries: Any, named: str, tmp_path: Path) -> None:
    train_sentencepiece(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
    refused(tmp_path, named)


def test_added_tokens_keep_their_ids(tmp_path: Path) -> None:
    theirs = train_sentencepiece(tmp_path)
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 650, "<|im_end|>": 610}')
    convert_folder(tmp_path, tmp_path / "made")
    ours = TextTokenizer.load(tmp_path / "made")
    assert ours.encode("The fox<|im_end|>", False) == [*theirs.encode("The fox"), 610]
    assert [ours.backend.token_to_id(token) for token in ("<pad>", "<|im_end|>")] == [650, 610]
