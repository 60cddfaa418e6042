"""OpenAI's own client against the gateway, the real server and the demo model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway import GatewayProcess
from llm_server import LlmServer
from patience import wait_until

PROMPT = "def add(a, b):\n"
MESSAGES = [{"role": "user", "content": "add two numbers"}]
RENDERED = "<|endoftext|># User: add two numbers\n\n"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["sum", "product"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
NO_BLANKS = {"temperature": 0, "frequency_penalty": 1.5}  # JSON allows white space without end, and the model likes it
TOOL = {"type": "function", "function": {"name": "set_kind", "parameters": SCHEMA}}


def test_models(client: openai.OpenAI) -> None:
    assert {"llm", "gpt-4o"} <= {model.id for model in client.models.list()}
    assert client.models.retrieve("llm").owned_by == "slipstream"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("llama-9")
    assert error.value.code == "model_not_found"


def test_a_completion_is_the_engines(client: openai.OpenAI, greedy: Callable[..., str]) -> None:
    answer = client.completions.create(model="llm", prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == greedy(PROMPT, 24)
    assert answer.usage.completion_tokens == 24 and answer.choices[0].finish_reason == "length"


def test_a_setting_of_the_engine_needs_no_code_in_the_gateway(client: openai.OpenAI) -> None:
    """allowed_token_ids and bad_words are rows of core/settings.py and nothing else here."""
    hot = {"model": "llm", "max_tokens": 12, "temperature": 2, "seed": 3}
    limited = {"allowed_token_ids": [17], "ignore_eos": True}
    [choice] = client.completions.create(**hot, prompt=PROMPT, logprobs=0, extra_body=limited).choices
    assert len(set(choice.logprobs.tokens)) == 1 and choice.text == choice.logprobs.tokens[0] * 12
    told = client.chat.completions.create(**hot, messages=MESSAGES, extra_body=limited).choices[0].message
    assert told.content == choice.text
    plain = {"model": "llm", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    word = client.completions.create(**plain).choices[0].text.split()[0]
    kept_out = client.completions.create(**plain, extra_body={"bad_words": [word]}).choices[0].text
    assert word and word not in kept_out
    for wrong, words in ([], "one at least"), ([-1], "greater than or equal to 0"), ([10**6], "not in the vocabulary"):
        with pytest.raises(openai.BadRequestError, match=words) as error:
            client.completions.create(**hot, prompt=PROMPT, extra_body={"allowed_token_ids": wrong})
        assert error.value.param.startswith("allowed_token_ids")


def test_a_chat_is_the_template_completed(
    client: openai.OpenAI, greedy: Callable[..., str], demo_model: object
) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(f"{demo_model}/tokenizer.json").encode(RENDERED, add_special_tokens=False).ids
    plain = client.completions.create(model="llm", prompt=ids, max_tokens=16, temperature=0)
    answer = client.chat.completions.create(model="gpt-4o", messages=MESSAGES, max_tokens=16, temperature=0)
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.usage.prompt_tokens == len(ids) and answer.model == "gpt-4o"


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    asked = {"model": "llm", "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens and not chunks[-1].choices
    assert len(chunks) >= 12, "tokens leave one by one"


def test_prompt_tokens_found_in_the_cache(client: openai.OpenAI) -> None:
    asked = {"model": "llm", "prompt": "cached = 1\n" * 60, "max_tokens": 1}
    first, second = (client.completions.create(**asked).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens == 0
    cached = second.prompt_tokens_details.cached_tokens
    assert second.prompt_tokens - 64 <= cached < second.prompt_tokens and cached % 64 == 0


def test_many_prompts_and_choices(client: openai.OpenAI, greedy: Callable[..., str]) -> None:
    prompts = ["import ", PROMPT]
    asked = {"model": "llm", "prompt": prompts, "max_tokens": 8, "temperature": 0, "n": 2}
    answer = client.completions.create(**asked)
    expected = [greedy(prompt, 8) for prompt in prompts for _ in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and answer.usage.completion_tokens == 32
    texts = [""] * 4
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected and chunk.usage.total_tokens == answer.usage.total_tokens


def test_echo(client: openai.OpenAI, greedy: Callable[..., str]) -> None:
    asked = {"model": "llm", "prompt": PROMPT, "temperature": 0, "echo": True}
    whole = client.completions.create(**asked, max_tokens=8).choices[0]
    assert whole.text == PROMPT + greedy(PROMPT, 8)
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, max_tokens=8, stream=True)]
    assert "".join(pieces) == whole.text
    scored = client.completions.create(**asked, max_tokens=0, logprobs=2)
    assert scored.choices[0].text == PROMPT and scored.usage.completion_tokens == 0
    probabilities = scored.choices[0].logprobs
    assert "".join(probabilities.tokens) == PROMPT and probabilities.token_logprobs[0] is None
    assert all(value < 0 for value in probabilities.token_logprobs[1:])


def test_without_answer_tokens_nothing_of_an_answer_is_shown(client: openai.OpenAI) -> None:
    """The engine makes one token all the same: streamed, among token ids, and behind an echo of token ids it showed."""
    asked: dict[str, Any] = {"model": "llm", "prompt": PROMPT, "temperature": 0, "max_tokens": 0, "logprobs": 1}
    ids = {"extra_body": {"return_token_ids": True}}
    whole = client.completions.create(**asked, **ids).choices[0]
    assert whole.text == "" and whole.token_ids == [] and whole.logprobs.tokens == []
    prompt = whole.prompt_token_ids
    chunks = list(client.completions.create(**asked, **ids, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 0 and chunks[-1].usage.total_tokens == len(prompt)
    [choice] = [choice for chunk in chunks for choice in chunk.choices]
    assert (choice.text, choice.finish_reason, choice.token_ids, choice.logprobs.tokens) == ("", "length", [], [])
    assert choice.prompt_token_ids == prompt
    for logprobs in (None, 1):
        shown = client.completions.create(**{**asked, "prompt": prompt, "logprobs": logprobs}, echo=True).choices[0]
        assert shown.text == PROMPT


def test_alternatives_of_completions_have_the_chosen_token(client: openai.OpenAI) -> None:
    """As OpenAI says: up to one more than asked for."""
    asked = {"model": "llm", "prompt": PROMPT, "max_tokens": 12, "temperature": 2, "seed": 3}
    for logprobs in (0, 1):
        told = client.completions.create(**asked, logprobs=logprobs).choices[0].logprobs
        assert all(top[name] == value for name, value, top in zip(told.tokens, told.token_logprobs, told.top_logprobs))
        assert max(map(len, told.top_logprobs)) == logprobs + 1


def test_settings_have_their_effect(client: openai.OpenAI, greedy: Callable[..., str]) -> None:
    asked = {"model": "llm", "prompt": PROMPT, "max_tokens": 24}
    plain = greedy(PROMPT, 24)
    stop = plain.split()[1]
    stopped = client.completions.create(**asked, temperature=0, stop=[stop]).choices[0]
    assert stopped.text == plain[: plain.index(stop)] and stopped.finish_reason == "stop"
    texts = [client.completions.create(**asked, temperature=1, seed=seed).choices[0].text for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]
    forced = client.completions.create(**asked, temperature=0, logit_bias={"300": 100})
    assert forced.choices[0].text != plain
    assert len(set(forced.choices[0].text.split())) <= 2, "one token over and over"


def test_log_probabilities(client: openai.OpenAI) -> None:
    asked = {
        "model": "llm",
        "messages": MESSAGES,
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert len(whole) == 4 and all(len(token.top_logprobs) == 3 for token in whole)
    assert all(
        token.top_logprobs[0].token == token.token and bytes(token.bytes).decode() == token.token for token in whole
    )
    streamed = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [token.token for token in streamed] == [token.token for token in whole]
    answer = client.completions.create(model="llm", prompt=PROMPT, max_tokens=3, temperature=0, logprobs=2)
    probabilities = answer.choices[0].logprobs
    assert "".join(probabilities.tokens) == answer.choices[0].text and probabilities.text_offset[0] == 0
    assert all(len(top) == 2 for top in probabilities.top_logprobs)


def test_json(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    asked = {"model": "llm", "messages": MESSAGES, "max_tokens": 300, **NO_BLANKS}
    answer = client.chat.completions.create(**asked, response_format=form)
    found = json.loads(answer.choices[0].message.content)
    assert isinstance(found["ok"], bool) and found["kind"] in ("sum", "product")
    loose = client.chat.completions.create(**asked | {"max_tokens": 8}, response_format={"type": "json_object"})
    assert loose.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_kind"}}])
def test_forced_tool_calls(client: openai.OpenAI, choice: object) -> None:
    asked = {"model": "llm", "messages": MESSAGES, "max_tokens": 300, **NO_BLANKS, "tools": [TOOL]}
    asked |= {"tool_choice": choice, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**asked).choices[0]
    [call] = answer.message.tool_calls
    assert call.function.name == "set_kind" and json.loads(call.function.arguments)["kind"] in ("sum", "product")
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    name, arguments = "", ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            name += part.function.name or ""
            arguments += part.function.arguments or ""
    assert name == "set_kind" and json.loads(arguments) == json.loads(call.function.arguments)


def test_speculation_belongs_to_the_request(client: openai.OpenAI, drafting: str) -> None:
    text = "a = 1\nb = 2\n" * 6
    asked = {"model": drafting, "messages": [{"role": "user", "content": text}], "max_tokens": 32, "temperature": 0}
    assert client.models.retrieve(drafting).speculative_methods == ["ngram"]

    def drafts(**options: object) -> tuple[str, int]:
        answer = client.chat.completions.create(**asked, **options)
        details = answer.usage.completion_tokens_details
        drafted = details.accepted_prediction_tokens + details.rejected_prediction_tokens
        return answer.choices[0].message.content, drafted

    plain, none = drafts(extra_body={"speculation": {"speculative_method": "none"}})
    assert none == 0
    assert drafts(extra_body={"speculation": {"num_draft_tokens": 4}}) == (plain, pytest.approx(60, abs=60))
    prediction = {"type": "content", "content": plain}
    predicted = client.chat.completions.create(**asked, prediction=prediction)
    assert predicted.choices[0].message.content == plain
    assert predicted.usage.completion_tokens_details.accepted_prediction_tokens > 8, "it knew what comes"
    ignored = client.chat.completions.create(**asked | {"model": "llm"}, prediction=prediction)
    assert ignored.choices[0].message.content == plain and ignored.usage.completion_tokens_details is None
    with pytest.raises(openai.BadRequestError, match="medusa"):
        drafts(extra_body={"speculation": {"speculative_method": "medusa"}})


def test_a_client_that_goes_frees_its_blocks(client: openai.OpenAI, llm_server: LlmServer) -> None:
    before = llm_server.settled("slipstream_cancellations_total")
    asked = {"model": "llm", "prompt": PROMPT, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(**asked, stream=True)
    next(iter(stream))
    stream.close()
    with pytest.raises(openai.APITimeoutError):
        client.completions.create(**asked, timeout=1)
    llm_server.wait_counted(before + 2, "slipstream_cancellations_total")


def test_the_client_example(gateway: GatewayProcess, client: openai.OpenAI, root: Path) -> None:
    asked = {"model": "llm", "messages": [{"role": "user", "content": "add"}], "max_tokens": 8, "temperature": 0}
    expected = client.chat.completions.create(**asked).choices[0].message.content
    command = [sys.executable, str(root / "client_examples/openai_stream.py"), "--url", gateway.url, "--prompt", "add"]
    done = subprocess.run([*command, "--max-tokens", "8"], capture_output=True, text=True, timeout=60)
    assert done.stdout == expected and "8 tokens" in done.stderr
    refused = subprocess.run([*command, "--model", "no"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "does not exist" in refused.stderr


def test_metrics_are_the_gateways_and_tritons(gateway: GatewayProcess, client: openai.OpenAI) -> None:
    client.completions.create(model="llm", prompt=PROMPT, max_tokens=1)
    client.completions.create(model="llm", prompt=PROMPT, max_tokens=2, stream=True).close()
    counted = 'slipstream_gateway_requests_total{endpoint="completions",status="200"}'
    wait_until(lambda: gateway.metrics().get(counted, 0) >= 2, "both to be counted")
    metrics = gateway.metrics()
    assert metrics['slipstream_gateway_first_byte_seconds_count{endpoint="completions"}'] >= 1
    assert any(name.startswith("slipstream_kv_blocks_total") for name in metrics), "Triton's are behind them"
    with pytest.raises(openai.BadRequestError, match="not in the vocabulary"):
        client.completions.create(model="llm", prompt=[10**6])
    refused = "slipstream_requests_refused_total{"
    wait_until(
        lambda: any(n.startswith(refused) and "invalid_arg" in n and v for n, v in gateway.metrics().items()),
        "the refusal to be counted",
    )
    assert gateway.get("/ready")[0] == 200
