"""preprocessing and postprocessing: TensorRT-LLM's tensors in and out, and a stream joined again piece by piece."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import backend_wire
import pytest
import toy_tokenizers
from hub_cache import make_hub_cache
from slipstream.core.config import EngineConfig, ModelConfig, ServingConfig
from slipstream.core.errors import ConfigError, RequestError
from slipstream.core.request import FinishReason
from slipstream.core.setting_values import read_words_ids
from slipstream.engine import tokenize_tasks
from slipstream.engine.tokenize_server import TokenizeServer
from slipstream.engine.tokenize_tasks import DetokenizeTask, TokenizeTask, make_task, word_list
from slipstream.protocol import wire
from slipstream.protocol.contract import DETOKENIZE, TOKENIZE
from slipstream.tokenizer.detokenizer import context_token_ids, start_detokenizer
from slipstream.tokenizer.tokenizer import TextTokenizer
from wire_requests import answers, request, tensor

TOKENIZER = TextTokenizer(toy_tokenizers.sentencepiece())
TOKENIZE_TASK = TokenizeTask(EngineConfig(task="tokenize"), TOKENIZER)
DETOKENIZE_TASK = DetokenizeTask(EngineConfig(task="detokenize"), TOKENIZER)


def pre(outputs: tuple[str, ...] = (), task: TokenizeTask = TOKENIZE_TASK, **values: object) -> dict:
    tensors = [tensor(name, value, task=TOKENIZE) for name, value in values.items()]
    return answers(task.answer(request(*tensors, outputs=outputs)), "tokenize")


def post(tokens: list[list[int]], outputs: tuple[str, ...] = (), **values: object) -> list[str]:
    flat = [token_id for row in tokens for token_id in row]
    tensors = [tensor("TOKENS_BATCH", flat, (len(tokens), len(tokens[0])), DETOKENIZE)]
    tensors += [tensor(name, value, task=DETOKENIZE) for name, value in values.items()]
    return answers(DETOKENIZE_TASK.answer(request(*tensors, outputs=outputs)), "detokenize")["OUTPUT"][1]


def test_a_prompt_becomes_ids_and_the_rest_has_defaults() -> None:
    got = pre(QUERY="The quick")
    ids = TOKENIZER.encode("The quick")
    end_id = TOKENIZER.backend.token_to_id("</s>")
    assert got["INPUT_ID"] == ((len(ids),), ids) and got["REQUEST_INPUT_LEN"] == ((1,), [len(ids)])
    assert got["REQUEST_OUTPUT_LEN"] == ((1,), [16]) and got["OUT_END_ID"][1] == got["OUT_PAD_ID"][1] == [end_id]
    assert got["BAD_WORDS_IDS"] == ((2, 1), [0, -1]) and got["EMBEDDING_BIAS"] == ((0,), [])
    assert pre(QUERY="The quick", ADD_SPECIAL_TOKENS=False)["INPUT_ID"][1] == ids[1:]
    assert set(pre(("INPUT_ID",), QUERY="The quick")) == {"INPUT_ID"}


def test_words_are_laid_out_as_tensorrt_llm_does_and_read_back() -> None:
    words = ["quick", "fox"]
    shape, flat = pre(QUERY="x", STOP_WORDS_DICT=[*words, ""])["STOP_WORDS_IDS"]
    encoded = tuple(tuple(TOKENIZER.encode(word, False)) for word in words)
    assert shape == (2, sum(map(len, encoded)))
    assert read_words_ids("stop_words_list", flat) == encoded
    assert word_list([[5, 6], [7]]) == ([5, 6, 7], [2, 3, -1])


def test_bias_words_become_a_vector() -> None:
    shape, bias = pre(QUERY="x", EMBEDDING_BIAS_WORDS=["quick"], EMBEDDING_BIAS_WEIGHTS=[2.0])["EMBEDDING_BIAS"]
    assert shape == (TOKENIZER.vocab_size,)
    assert {i for i, value in enumerate(bias) if value} == set(TOKENIZER.encode("quick", False))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "QUERY: missing"),
        ({"QUERY": ""}, "QUERY: the prompt is empty"),
        ({"QUERY": b"\xff"}, "QUERY: not valid UTF-8"),
        ({"QUERY": ["a", "b"]}, "QUERY: got shape"),
        ({"QUERY": "a", "DECODER_QUERY": "b"}, "DECODER_QUERY: got 'b', accepted: .*because the model has no encoder"),
        ({"QUERY": "a", "EMBEDDING_BIAS_WORDS": ["b"]}, "EMBEDDING_BIAS_WEIGHTS: got"),
    ],
)
def test_what_preprocessing_refuses(values: dict, message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        pre(**values)


def test_rows_become_texts() -> None:
    quick, fox = TOKENIZER.encode("The quick", False), TOKENIZER.encode("fox", False)
    width = max(len(quick), len(fox))
    rows = [row + [0] * (width - len(row)) for row in (quick, fox)]
    assert post(rows, SEQUENCE_LENGTH=[len(quick), len(fox)]) == ["The quick", "fox"]


def test_pieces_of_a_stream_join_to_the_whole_text() -> None:
    """Token by token through the stateless task, with no character broken and no space lost."""
    prompt = TOKENIZER.encode("The quick")
    output = TOKENIZER.encode("brown 🦊 jumps ཀ über 你好", False)
    stream, joined = start_detokenizer(TOKENIZER, prompt), ""
    for at, token_id in enumerate(output):
        piece = stream.push([token_id])
        context = context_token_ids(TOKENIZER, prompt + output[:at])
        (text,) = post([[token_id]], CONTEXT_TOKENS=context, TEXT_LENGTH=len(piece))
        assert text == piece
        assert post([[token_id]], CONTEXT_TOKENS=context) == [piece]
        joined += text
    assert joined == " brown 🦊 jumps ཀ über 你好"


def test_what_postprocessing_refuses() -> None:
    for tokens, values, message in [
        ([[5, -1]], {}, "TOKENS_BATCH: got -1"),
        ([[5, 6]], {"SEQUENCE_LENGTH": [3]}, "SEQUENCE_LENGTH: got"),
        ([[5], [6]], {"CONTEXT_TOKENS": [4]}, "CONTEXT_TOKENS: given for 2 rows"),
    ]:
        with pytest.raises(RequestError, match=f"^{message}"):
            post(tokens, **values)
    assert post([[5, -1]], SEQUENCE_LENGTH=[1]) == [TOKENIZER.decode([5])]


def test_a_batch_dimension_comes_and_goes() -> None:
    batched = ServingConfig(max_batch_size=1)
    task = TokenizeTask(EngineConfig(task="tokenize", serving=batched), TOKENIZER)
    got = answers(task.answer(request(tensor("QUERY", "fox", (1, 1), TOKENIZE), outputs=())), "tokenize")
    ids = TOKENIZER.encode("fox")
    assert got["INPUT_ID"] == ((1, len(ids)), ids) and got["STOP_WORDS_IDS"][0] == (1, 2, 1)
    detokenize = DetokenizeTask(EngineConfig(task="detokenize", serving=batched), TOKENIZER)
    tokens = tensor("TOKENS_BATCH", ids, (1, 1, len(ids)), DETOKENIZE)
    assert answers(detokenize.answer(request(tokens, outputs=())), "detokenize")["OUTPUT"] == ((1, 1), ["fox"])


LOAD_TASK = (
    "import sys; from slipstream.core.config import *; from slipstream.engine.tokenize_tasks import make_task;"
    "task = make_task(EngineConfig(task='detokenize', model=ModelConfig(tokenizer=sys.argv[1])));"
    "assert task.outputs; assert not {'torch', 'transformers'} & set(sys.modules)"
)


def test_tasks_load_from_a_folder_without_torch(tmp_path: Path) -> None:
    TOKENIZER.backend.save(str(tmp_path / "tokenizer.json"))
    config = EngineConfig(task="tokenize", model=ModelConfig(tokenizer=str(tmp_path)))
    assert isinstance(make_task(config), TokenizeTask)
    subprocess.run([sys.executable, "-c", LOAD_TASK, str(tmp_path)], check=True, timeout=300)


def test_tasks_load_from_a_hub_id_without_torch(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    TOKENIZER.backend.save(str(tmp_path / "checkpoint/tokenizer.json"))
    environment = make_hub_cache(tmp_path / "home", "org/name", tmp_path / "checkpoint")
    for name, is_there in (("org/name", True), ("org/other", False)):
        done = subprocess.run(
            [sys.executable, "-c", LOAD_TASK, name], env=environment, capture_output=True, text=True, timeout=300
        )
        assert (done.returncode == 0) is is_there, done.stderr
    assert "ConfigError: tokenizer='org/other': no such folder, and not to be had from the hub" in done.stderr


def test_a_tokenizer_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"^tokenizer="):
            TextTokenizer.load(path)


def test_a_query_is_bounded_where_nothing_says_how_much_the_model_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 MiB of text were encoded: 8 MiB took 11 s and 2 GB."""
    TOKENIZER.backend.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(tokenize_tasks, "MAX_UNTOLD_TOKENS", 32)
    config = EngineConfig(task="tokenize", model=ModelConfig(tokenizer=str(tmp_path)))
    text = "a" * (32 * TOKENIZER.max_token_bytes)
    assert len(pre(task=make_task(config), QUERY=text)["INPUT_ID"][1]) > 32, "as many bytes could be as few tokens"
    with pytest.raises(RequestError, match=f"^QUERY: the prompt has {len(text) + 1} bytes, .*max_model_len=32 "):
        pre(task=make_task(config), QUERY=text + "a")
    ids = request(tensor("TOKENS_BATCH", [5] * 65, (1, 65), DETOKENIZE), outputs=())
    with pytest.raises(RequestError, match=r"got 65 token ids, accepted: at most 64 \(2 x max_model_len=32\)"):
        make_task(replace(config, task="detokenize")).check_size(ids)


def test_a_query_that_cannot_fit_is_refused_before_it_is_encoded(tmp_path: Path) -> None:
    TOKENIZER.backend.save(str(tmp_path / "tokenizer.json"))
    text = "a" * (32 * TOKENIZER.max_token_bytes + 1)
    config = EngineConfig(task="tokenize", model=ModelConfig(tokenizer=str(tmp_path)))
    scaling = '{"rope_type": "linear", "factor": 2.0}'
    (tmp_path / "config.json").write_text(f'{{"max_position_embeddings": 16, "rope_scaling": {scaling}}}')
    by_parameter = replace(config, model=replace(config.model, max_model_len=31))
    by_file = replace(config, model=ModelConfig(tokenizer=str(tmp_path / "tokenizer.json")))
    for told, length in ((config, 32), (by_file, 32), (by_parameter, 31)):
        with pytest.raises(RequestError, match=f"^QUERY: the prompt has {len(text)} bytes, .*max_model_len={length} "):
            pre(task=make_task(told), QUERY=text)


@pytest.mark.parametrize("name", ["BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS"])
def test_word_lists_have_an_end(name: str) -> None:
    for words, got in (["a"] * 1025, "1025 entries"), (["a" * 65537], "65537 characters"):
        with pytest.raises(RequestError, match=f"^{name}: got {got}"):
            pre(QUERY="x", **{name: words})


def test_no_more_is_decoded_than_a_prompt_and_its_answer() -> None:
    task = DetokenizeTask(EngineConfig(task="detokenize"), TextTokenizer(toy_tokenizers.byte_level()), 50)
    for name in ("TOKENS_BATCH", "CONTEXT_TOKENS"):
        given = {"TOKENS_BATCH": tensor("TOKENS_BATCH", [5], (1, 1), DETOKENIZE)}
        task.answer(request(*given.values(), outputs=()))
        shape = (1, 101) if name == "TOKENS_BATCH" else (101,)
        given[name] = tensor(name, [5] * 101, shape, DETOKENIZE)
        with pytest.raises(
            RequestError, match=rf"^{name}: got 101 token ids, accepted: at most 100 \(2 x max_model_len"
        ):
            task.answer(request(*given.values(), outputs=()))
    many_empty_rows = replace(tensor("TOKENS_BATCH", [], (0, 0), DETOKENIZE), shape=(1 << 33, 0))
    with pytest.raises(RequestError, match=r"^TOKENS_BATCH: got 8589934592 rows, accepted: at most 1024"):
        task.answer(request(many_empty_rows, outputs=()))


@pytest.mark.parametrize(
    ("reason", "code"),
    [(FinishReason.CANCELLED, wire.ErrorCode.CANCELLED), (FinishReason.TIMEOUT, wire.ErrorCode.UNAVAILABLE)],
)
def test_a_request_that_ends_unread_says_how(reason: FinishReason, code: wire.ErrorCode) -> None:
    sent: list[bytes] = []
    server = object.__new__(TokenizeServer)
    server._link = SimpleNamespace(send=sent.append)  # type: ignore[assignment]
    server.end(7, None, reason)
    [answer] = backend_wire.decode_responses(backend_wire.payload_of(sent[0]))
    assert (answer.handle, answer.error_code) == (7, code) and "waited to be tokenised" in answer.error_message
