"""A checkpoint's chat template: messages -> the prompt's text, by Jinja in its sandbox, as Hugging Face renders it.

No transformers here: importing its renderer imports torch where that is installed. Immutable once made; any thread.
Templates come from the checkpoint or the command line, never from a client.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from slipstream.core.chat_messages import TEMPLATE_FOLDER
from slipstream.core.errors import ConfigError, internal_error
from slipstream.server.errors import ApiError
from slipstream.server.tools.system_tools import reads_system_tools, with_system_tools

logger = logging.getLogger(__name__)

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
TOOL_TEMPLATE = f"{TEMPLATE_FOLDER}/tool_use.jinja"
_NONE = re.compile(r"\bcontent\b['\"\]]*\s+is\s+(not\s+)?[nN]one\b")  # a template that asks whether there is a content
_CONTINUE = "\u2400continue\u2400"
# Among the variables, the room of all indented JSON of a prompt and of all texts that are put together by +.
_INDENTED, _ADDED = "\u2400indented\u2400", "\u2400added\u2400"
MAX_RENDERED_CHARS = 16 << 20  # of a prompt: four bodies of the largest size
MAX_ADDED_CHARS = 1 << 30  # half a second; a text that grows by 10,000 messages of 400 characters is 40 times as many


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; rendered, it is its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RefusalError(jinja2.TemplateError):
    """The template refuses the messages; its text is the only one that clients may see."""


class _TooLongError(Exception):
    """The prompt, or what it is made of, has too many characters."""


def _raise(message: str) -> str:
    raise _RefusalError(message)


class _Room:
    """Room for so many characters, the same for all calls."""

    def __init__(self, num_chars: int = MAX_RENDERED_CHARS) -> None:
        self._num_left = num_chars

    def take(self, num_chars: int) -> None:
        """Raises _TooLongError if they are too many."""
        self._num_left -= num_chars
        if self._num_left < 0:
            raise _TooLongError

    def join(self, pieces: Iterable[str]) -> str:
        """Raises _TooLongError as soon as they are too long."""
        text = io.StringIO()
        for piece in pieces:
            self.take(len(piece))
            text.write(piece)
        return text.getvalue()


class _Sums(NodeTransformer):
    """`a ~ b` becomes a sum of texts, which the environment is asked for."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        texts: list[nodes.Expr] = [nodes.Filter(self.visit(part), "string", [], [], None, None) for part in node.nodes]
        return functools.reduce(nodes.Add, texts)


class _Environment(ImmutableSandboxedEnvironment):
    """Counts texts that are put together: DeepSeek's templates add each system message to all before it."""

    intercepted_binops = frozenset({"+"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Sums().visit(super()._parse(source, name, filename)).set_environment(self)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        added = super().call_binop(context, operator, left, right)
        if isinstance(added, str):  # also of a text and an ArgumentObject
            context[_ADDED].take(len(added))
        return added


@jinja2.pass_context
def _to_json(
    context: Context, value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """In pieces where it is indented: two characters that are nested 190 deep become 770, 1.5 GB of a body of 4 MiB."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, **options)
    return encoder.encode(value) if indent is None else context[_INDENTED].join(encoder.iterencode(value))


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class ChatTemplate:
    """source: the template's text. tokens: what it may name, such as bos_token. tool_source: the text of the template
    for requests with tools, which is another one in some checkpoints (Hermes 3). shows_tools: whether it reads them."""

    def __init__(self, source: str, tokens: dict[str, str], tool_source: str | None = None) -> None:
        self.source, self.tool_source = source, tool_source or source
        # among them every key of a message that a template names
        self.words = frozenset(re.findall(r"\w+", f"{source} {self.tool_source}"))
        self._template = _compiled(source)
        self._tool_template = self._template if self.tool_source == source else _compiled(self.tool_source)
        names = meta.find_undeclared_variables(_environment().parse(self.tool_source))
        self._reads_system_tools = "tools" not in names and reads_system_tools(self.tool_source)
        self.shows_tools = "tools" in names or self._reads_system_tools
        self._tokens = tokens
        self._takes_none = _NONE.search(f"{source}\n{self.tool_source}") is not None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises ApiError (400) with the template's message if it called raise_exception, for one of more
        than MAX_RENDERED_CHARS or MAX_ADDED_CHARS, else with a number under which the log has the reason."""
        if tools and self._reads_system_tools:
            messages = with_system_tools(messages, tools)
        if self._takes_none:
            messages = [_without_empty_content(message) for message in messages]
        if continue_final_message:
            messages = _marked(messages)
        variables: dict[str, Any] = {**self._tokens, "documents": None, **(extra or {})}
        variables |= {"messages": list(messages), "tools": list(tools) if tools else None}
        variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
        try:
            template = self._tool_template if tools else self._template
            rooms = {_INDENTED: _Room(), _ADDED: _Room(MAX_ADDED_CHARS)}
            text = _Room().join(template.generate({**variables, **rooms}))
        except _RefusalError as error:
            message = f"messages: the model's chat template says: {error.message}"
            raise ApiError(400, message, param="messages") from None
        except _TooLongError:
            accepted = f"accepted: of which it makes at most {MAX_RENDERED_CHARS}, or {MAX_ADDED_CHARS} on the way"
            message = f"messages: the model's chat template makes too many characters of them, {accepted}"
            raise ApiError(400, message, param="messages") from None
        except Exception as error:  # a template may raise any exception
            told = internal_error(logger, "a chat template failed", error)
            message = f"messages: the model's chat template cannot render them ({told})"
            raise ApiError(400, message, param="messages") from None
        return _cut(text) if continue_final_message else text


def _compiled(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError("chat_template", f"line {error.lineno}", str(error.message)) from None


def _without_empty_content(message: dict[str, Any]) -> dict[str, Any]:
    """With None for the content of a turn that has calls alone, as templates of DeepSeek tell such turns."""
    return {**message, "content": message.get("content") or None} if message.get("tool_calls") else message


def _marked(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    *before, last = messages
    return [*before, {**last, "content": f"{last.get('content') or ''}{_CONTINUE}"}]


def _cut(text: str) -> str:
    """Cut the prompt after the last message's text, before what the template appends to it."""
    head, mark, _ = text.rpartition(_CONTINUE)
    if not mark:
        message = "continue_final_message: the model's chat template changes or leaves out the last message"
        raise ApiError(400, message, param="continue_final_message")
    return head


def load_template(folder: Path, override: Path | None = None) -> ChatTemplate | None:
    """The template of a checkpoint folder, or None if it has none. Raises ConfigError for one that cannot be used."""
    settings = _read_json(folder / "tokenizer_config.json")
    source, tool_source = (override.read_text("utf-8"), None) if override is not None else _sources(folder, settings)
    if source is None:
        return None
    named = {**_read_json(folder / "special_tokens_map.json"), **settings}
    tokens = {name: _content(named[name]) for name in _TOKEN_NAMES if named.get(name)}
    return ChatTemplate(source, tokens, tool_source)


def _sources(folder: Path, settings: dict[str, Any]) -> tuple[str | None, str | None]:
    """The template for plain talk, and the one for talk with tools where the checkpoint has another."""
    file, tool_file = folder / "chat_template.jinja", folder / TOOL_TEMPLATE
    if file.is_file():
        return file.read_text("utf-8"), tool_file.read_text("utf-8") if tool_file.is_file() else None
    found = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if not isinstance(found, list):
        return found, None
    by_name = {entry["name"]: entry["template"] for entry in found}
    return by_name.get("default") or next(iter(by_name.values()), None), by_name.get("tool_use")


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError("checkpoint", str(path), f"cannot be read: {error}") from None
