"""Chat templates: what Hugging Face's renderer makes of them, refusals, and nothing that reaches the interpreter."""

from __future__ import annotations

import functools
import json
import re
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from slipstream.core.chat_messages import ArgumentObject, for_template
from slipstream.core.errors import ConfigError
from slipstream.server.chat import templated
from slipstream.server.chat_template import MAX_ADDED_CHARS, MAX_RENDERED_CHARS, ChatTemplate, load_template
from slipstream.server.errors import ApiError
from slipstream.server.schemas import Message

QWEN = (
    "{%- if tools %}{{- '<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '</tools>' }}{%- endif %}\n"
    "{%- for message in messages %}\n    {%- if loop.index > 9 %}{% break %}{% endif %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TALK = [{"role": "user", "content": "hi <é>"}, {"role": "assistant", "content": "yes"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b> & 'é'"}}]


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_as_hugging_face_renders_it(demo_model: Path, tools: list | None, add_generation_prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(demo_model))
    for source in (QWEN, tokenizer.chat_template):
        expected = tokenizer.apply_chat_template(
            TALK, tools=tools, chat_template=source, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        ours = ChatTemplate(source, {"bos_token": tokenizer.bos_token})
        assert ours.render(TALK, tools, add_generation_prompt) == expected


# as DeepSeek's templates: a turn with calls is told by its missing content, and the text of arguments is joined to more
JOINING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}{% for call in m['tool_calls'] %}"
    "{{ '[' + call['function']['name'] + ' ' + call['function']['arguments'] + ']' }}{% endfor %}"
    "{% else %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endif %}{% endfor %}"
)
# as Qwen's and Llama's
READING = (
    "{% for m in messages %}{% for call in m.tool_calls %}{% set a = call.function.arguments %}"
    "{% if a is mapping %}{{ a | tojson }} {{ a.items() | list }} {{ a.x }}{% endif %}{% endfor %}{{ m.content + '.' }}"
    "{% endfor %}"
)


@pytest.mark.parametrize("content", [None, "", []])
def test_calls_of_earlier_turns_are_shown_by_every_kind_of_template(content: object) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x":  1}'}}
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    for messages in (
        [templated(Message.model_validate(message), 0) for message in talk],
        [{**for_template(message, ""), "content": message["content"] or ""} for message in talk],
    ):
        assert ChatTemplate(JOINING, {}).render(messages) == 'user: hi\n[f {"x":  1}]'
        assert ChatTemplate(READING, {}).render(messages) == "hi.{\"x\": 1} [('x', 1)] 1."
    spoken = [*talk[:1], {**talk[1], "content": "well"}]
    messages = [templated(Message.model_validate(message), 0) for message in spoken]
    assert ChatTemplate(JOINING, {}).render(messages) == "user: hi\nassistant: well\n"


# as Phi-4-mini's: the tools are a text in the system message, and nothing else of them is read
PHI = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}"
    "{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}{{ '[' + m['tools'] + ']' }}{% endif %}"
    "{% endfor %}"
)


def test_tools_are_shown_where_the_template_looks_for_them() -> None:
    assert not ChatTemplate("{{ messages }}", {}).shows_tools and ChatTemplate(QWEN, {}).shows_tools
    template, call = ChatTemplate(PHI, {}), {"function": {"name": "f", "arguments": ArgumentObject({}, "{}")}}
    assert template.shows_tools and template.render(TALK) == "<user>hi <é><assistant>yes"
    shown = """[{"name": "f", "description": "<b> & 'é'"}]"""
    assert (
        template.render(TALK[:1], TOOLS) == f"<system>You are a helpful assistant with some tools.[{shown}]<user>hi <é>"
    )
    own = [{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": "", "tool_calls": [call, call]}]
    called = """<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]<|/tool_call|>"""
    assert template.render(own, TOOLS) == f"<system>Be brief.[{shown}]<assistant>{called}"


@pytest.mark.parametrize("in_files", [False, True])
def test_a_template_for_tools_as_hugging_face_takes_it(demo_model: Path, tmp_path: Path, in_files: bool) -> None:
    """Checkpoints such as Hermes 3 have one template for plain talk and one that shows tools."""
    transformers = pytest.importorskip("transformers")
    folder = Path(shutil.copytree(demo_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    plain = settings.pop("chat_template")
    if in_files:
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(plain)
        (folder / "additional_chat_templates/tool_use.jinja").write_text(QWEN)
    else:
        named = {"default": plain, "tool_use": QWEN}
        settings["chat_template"] = [{"name": name, "template": source} for name, source in named.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer, ours = transformers.AutoTokenizer.from_pretrained(str(folder)), load_template(folder)
    assert ours is not None and ours.tool_source == QWEN and ours.source == plain
    for tools in (None, TOOLS):
        expected = tokenizer.apply_chat_template(TALK, tools=tools, add_generation_prompt=True, tokenize=False)
        assert ours.render(TALK, tools) == expected
    assert {"tool", "message"} <= ours.words


def test_the_last_message_is_continued() -> None:
    text = ChatTemplate(QWEN, {}).render(TALK, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nyes")
    with pytest.raises(ApiError, match="continue_final_message"):
        ChatTemplate("{{ messages | length }}", {}).render(TALK, continue_final_message=True)


def test_refusals_of_the_template_are_the_clients_to_read() -> None:
    with pytest.raises(ApiError, match=r"chat template says: roles must alternate$") as error:
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(TALK)
    assert error.value.status_code == 400 and error.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "can only concatenate"),
        ("{{ messages.append(1) }}", "not safely|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% include '/etc/own.jinja' %}", "no loader"),
        ("{{ 'x'.encode('none') }}", "LookupError"),
    ],
)
def test_other_failures_are_the_logs(source: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ApiError) as error:
        ChatTemplate(source, {}).render(TALK)
    assert error.value.status_code == 400 and error.value.param == "messages"
    told = re.fullmatch(
        r"messages: the model's chat template cannot render them \(internal error (\w{8}): "
        r"the server's log has the reason under this number\)",
        error.value.message,
    )
    assert told, error.value.message
    assert told[1] in caplog.text and re.search(words, caplog.text)


def test_a_template_that_cannot_be_read() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("x\n{% for %}", {})


def test_where_templates_lie(tmp_path: Path) -> None:
    assert load_template(tmp_path) is None
    settings = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "rag", "template": "r"}]}
    settings["chat_template"].append({"name": "default", "template": "{{ bos_token }}!"})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_template(tmp_path).render([]) == "<s>!"
    (tmp_path / "chat_template.jinja").write_text("file {{ eos_token }}")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    assert load_template(tmp_path).render([]) == "file </s>"
    own = tmp_path / "own.jinja"
    own.write_text("{% generation %}mine{% endgeneration %}")
    assert load_template(tmp_path, own).render([]) == "mine"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_template(tmp_path)


def nested(count: int) -> dict[str, Any]:
    """So many numbers, 190 deep."""
    return {"parameters": functools.reduce(lambda inner, _: [inner], range(190), [1] * count)}


INDENTING = "{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}"


@pytest.mark.parametrize("sign", ["+", "~"])
def test_a_text_that_grows_by_each_message_is_not_copied_without_bound(sign: str) -> None:
    """10,000 system messages of 400 characters took DeepSeek's template 10 s of the thread that renders all prompts."""
    text = f"{{% set ns.text = ns.text {sign} '\\n\\n' {sign} message.content %}}"
    source = "{% set ns = namespace(text='') %}{% for message in messages %}" + text + "{% endfor %}{{ ns.text }}"
    template = ChatTemplate(source, {})
    some = [{"role": "system", "content": f"rule {index}"} for index in range(500)]
    assert template.render(some) == "".join(f"\n\nrule {index}" for index in range(500))
    many = [{"role": "system", "content": "x" * 400}] * 10_000
    with pytest.raises(ApiError, match=f"{MAX_ADDED_CHARS} on the way") as error:
        template.render(many)
    assert error.value.status_code == 400 and error.value.param == "messages"


def test_arguments_that_are_added_to_a_text_count_as_it_does() -> None:
    source = "{% set ns = namespace(text='') %}{% for message in messages %}{% for call in message.tool_calls %}"
    source += "{% set ns.text = ns.text + call.function.arguments %}{% endfor %}{% endfor %}{{ ns.text | length }}"
    template, call = ChatTemplate(source, {}), {"function": {"arguments": ArgumentObject({}, "{" + " " * 10_000 + "}")}}
    assert template.render([{"role": "assistant", "tool_calls": [call] * 10}]) == "100020"
    with pytest.raises(ApiError, match=f"{MAX_ADDED_CHARS} on the way"):
        template.render([{"role": "assistant", "tool_calls": [call] * 100}] * 10)


def test_what_is_put_together_may_be_no_text() -> None:
    template = ChatTemplate("{{ 1 ~ none ~ missing ~ messages[0].content ~ (2 + 3) ~ ([1] + [2]) }}", {})
    assert template.render([{"role": "user", "content": "é"}]) == "1Noneé5[1, 2]"


@pytest.mark.parametrize(
    ("source", "tools"),
    [
        (INDENTING, [nested(30_000)]),
        ("{% macro shown() %}" + INDENTING + "{% endmacro %}{{ shown() }}", [nested(300)] * 100),
        ("{% for tool in tools %}{{ messages[0].content }}{% endfor %}", [{}] * 100),
    ],
)
def test_a_prompt_that_its_template_blows_up_ends_at_a_limit(source: str, tools: list[dict[str, Any]]) -> None:
    """Indented JSON grows with its depth: a body of 4 MiB made 1.5 billion characters."""
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match=f"accepted: .* at most {MAX_RENDERED_CHARS}") as error:
            ChatTemplate(source, {}).render([{"role": "user", "content": "x" * 500_000}], tools)
        assert tracemalloc.get_traced_memory()[1] < 4 * MAX_RENDERED_CHARS
    finally:
        tracemalloc.stop()
    assert error.value.status_code == 400 and error.value.param == "messages"
