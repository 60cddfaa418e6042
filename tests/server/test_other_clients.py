"""LangChain's and LiteLLM's clients, which people have in their programs: chat, streams, tools, embeddings."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import openai
import pytest
from gateway import GatewayProcess

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

TURNS = [{"role": "system", "content": "Be short"}, {"role": "user", "content": "add"}]
CALLS = ["Let me see.", '<tool_call>{"name": "f", "argum', 'ents": {"a": 1}}</tool_call>']
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "title": "Verdict"}


def script(**what: object) -> str:
    return json.dumps(what)


@pytest.fixture(scope="module")
def plain(client: openai.OpenAI) -> Any:
    """What OpenAI's own client is told."""
    return client.chat.completions.create(model="llm", messages=TURNS, temperature=0, max_tokens=8)


# ---------------------------------------------------------------- LangChain


def chat_of(gateway: GatewayProcess, model: str, key: str = "sk-right", **settings: Any) -> ChatOpenAI:
    langchain = pytest.importorskip("langchain_openai")
    url = f"{gateway.url}/v1"
    return langchain.ChatOpenAI(model=model, base_url=url, api_key=key, max_retries=0, timeout=120, **settings)


def test_langchain_says_what_openai_says(gateway: GatewayProcess, plain: Any) -> None:
    chat = chat_of(gateway, "llm", temperature=0, max_tokens=8, stream_usage=True)
    answer = chat.invoke(TURNS)
    assert answer.content == plain.choices[0].message.content
    assert answer.usage_metadata["input_tokens"] == plain.usage.prompt_tokens
    assert answer.response_metadata["finish_reason"] == "length"
    chunks = list(chat.stream(TURNS))
    assert "".join(chunk.content for chunk in chunks) == answer.content and len(chunks) > 8
    assert [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata] == [8]
    by_responses = chat_of(gateway, "llm", temperature=0, max_tokens=8, use_responses_api=True).invoke(TURNS)
    assert by_responses.text == answer.content


def test_langchain_gets_json_of_a_schema(gateway: GatewayProcess) -> None:
    chat = chat_of(gateway, "llm", temperature=0, frequency_penalty=1.5, max_tokens=200)
    assert isinstance(chat.with_structured_output(SCHEMA, method="json_schema").invoke(TURNS)["ok"], bool)


def test_langchain_calls_tools_and_answers_them(fake_gateway: GatewayProcess) -> None:
    chat = chat_of(fake_gateway, "hermes").bind_tools([TOOL])
    answer = chat.invoke(script(pieces=CALLS))
    [call] = answer.tool_calls
    assert (answer.content, call["name"], call["args"]) == ("Let me see.", "f", {"a": 1})
    whole = None
    for chunk in chat.stream(script(pieces=CALLS)):
        whole = chunk if whole is None else whole + chunk
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [("f", {"a": 1})]
    result = {"role": "tool", "tool_call_id": call["id"], "content": script(pieces=["sunny"])}
    assert chat.invoke([{"role": "user", "content": "?"}, answer, result]).content == "sunny"


def test_langchain_embeds_texts_and_is_told_that_token_ids_are_refused(
    fake_gateway: GatewayProcess, fake_client: openai.OpenAI
) -> None:
    langchain = pytest.importorskip("langchain_openai")
    where = {"model": "encoder", "base_url": f"{fake_gateway.url}/v1", "api_key": "sk-right", "max_retries": 0}
    embeddings = langchain.OpenAIEmbeddings(**where, check_embedding_ctx_length=False)
    assert embeddings.embed_documents(["one two", "a"]) == [[7.0, 1.0, 0.5], [1.0, 0.0, 0.5]]
    assert embeddings.embed_query("a") == [1.0, 0.0, 0.5]
    for token_ids in [[1, 2, 3]], [4, 5]:  # what it sends without that setting: ids of OpenAI's tokenizer
        with pytest.raises(openai.BadRequestError, match=r"input: token ids.*check_embedding_ctx_length=False"):
            fake_client.embeddings.create(model="encoder", input=token_ids)


# ---------------------------------------------------------------- LiteLLM


@pytest.fixture(scope="module")
def litellm() -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its prices; else it asks the network for them
    return pytest.importorskip("litellm")


def of(gateway: GatewayProcess, model: str) -> dict[str, Any]:
    """The arguments with which LiteLLM calls a server of OpenAI's API."""
    return {"model": f"openai/{model}", "api_base": f"{gateway.url}/v1", "api_key": "sk-right", "timeout": 120}


def test_litellm_says_what_openai_says(gateway: GatewayProcess, plain: Any, litellm: Any) -> None:
    asked = {**of(gateway, "llm"), "messages": TURNS, "temperature": 0, "max_tokens": 8}
    answer = litellm.completion(**asked)
    text = plain.choices[0].message.content
    assert answer.choices[0].message.content == text and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8 and answer.usage.prompt_tokens == plain.usage.prompt_tokens
    chunks = list(litellm.completion(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text and len(chunks) > 8
    by_responses = litellm.responses(**of(gateway, "llm"), input="add", temperature=0, max_output_tokens=8)
    assert by_responses.output[0].content[0].text


def test_litellm_knows_a_prompt_that_is_too_long(gateway: GatewayProcess, litellm: Any) -> None:
    for words in 3000, 30_000:
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**of(gateway, "llm"), messages=[{"role": "user", "content": "word " * words}])


def test_litellm_calls_tools_and_embeds(fake_gateway: GatewayProcess, litellm: Any) -> None:
    turns = [{"role": "user", "content": script(pieces=CALLS)}]
    answer = litellm.completion(**of(fake_gateway, "hermes"), messages=turns, tools=[TOOL])
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("f", {"a": 1})
    assert answer.choices[0].finish_reason == "tool_calls"
    vectors = litellm.embedding(**of(fake_gateway, "encoder"), input=["one two", "a"])
    assert [one["embedding"] for one in vectors.data] == [[7.0, 1.0, 0.5], [1.0, 0.0, 0.5]]


def test_litellm_names_our_errors(fake_gateway: GatewayProcess, litellm: Any) -> None:
    turns = [{"role": "user", "content": "{}"}]
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**of(fake_gateway, "plain"), messages=turns, temperature=-1)
    with pytest.raises(litellm.NotFoundError, match="no-such-model"):
        litellm.completion(**of(fake_gateway, "no-such-model"), messages=turns)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**of(fake_gateway, "plain"), "api_key": "sk-wrong"}, messages=turns)
