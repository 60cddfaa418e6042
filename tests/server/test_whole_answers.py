"""What may have megabytes, a request's messages or a whole answer, is read beside the event loop, on which all streams
of a worker are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from slipstream.server import chat, completions, tokenize
from slipstream.server.errors import ApiError
from slipstream.server.gateway import MAX_PLANNED_AT_ONCE_BYTES, Gateway
from slipstream.server.generation import Generation, Response
from slipstream.server.messages import endpoint as messages
from slipstream.server.messages.schemas import CountTokensRequest, MessagesRequest
from slipstream.server.responses import endpoint as responses
from slipstream.server.responses.schemas import ResponsesRequest
from slipstream.server.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from slipstream.server.tools.select import ToolUse

SAID = [{"role": "user", "content": "x"}]
CHAT = ChatRequest(model="llm", messages=SAID)
COMPLETION = CompletionRequest(model="llm", prompt="x")
MESSAGES = MessagesRequest(model="llm", messages=SAID, max_tokens=1)
COUNTED = CountTokensRequest(model="llm", messages=SAID)
TOKENIZED = TokenizeRequest(model="llm", messages=SAID)
RESPONSES = ResponsesRequest(model="llm", input="x")


class StubGateway:
    """Answers with one response; notes the threads on which its texts are read."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        model = SimpleNamespace(name="llm", outputs=frozenset(), has_speculation=False, block_size=1)
        model.tokenizer = SimpleNamespace(is_there=False)
        self.catalog = SimpleNamespace(find=self._find)
        self.store = SimpleNamespace(keeps=False)
        self._model = model
        self._planning = ThreadPoolExecutor(1)

    plan = Gateway.plan  # type: ignore[assignment]  # as the gateway does

    async def _find(self, name: str) -> Any:
        return self._model

    async def run(self, http: Any, generations: list[Generation]) -> list[Response]:
        gateway = self

        class Noted(Response):
            def texts(self, name: str) -> list[str]:
                gateway.threads.append(threading.current_thread())
                return super().texts(name)

            def text(self, name: str) -> str:
                gateway.threads.append(threading.current_thread())
                return super().text(name)

        text = (1).to_bytes(4, "little") + b"x"
        return [Noted({"text_output": 0, "finish_reason": 1}, [text, (4).to_bytes(4, "little") + b"stop"])]


def http_of(num_bytes: int) -> Any:
    """A request whose body has so many bytes."""
    lease = SimpleNamespace(owner=b"", prepare=lambda *_: None)
    return SimpleNamespace(state=SimpleNamespace(lease=lease, body=SimpleNamespace(num_bytes=num_bytes)))


@pytest.mark.parametrize(
    ("answer", "request_", "num_looks"),
    [
        (chat.chat, CHAT, 0),
        (completions.complete, COMPLETION, 0),
        (messages.send, MESSAGES, 2),  # for a time-out
        (responses.respond, RESPONSES, 2),
    ],
)
def test_it_is_not_read_on_the_event_loop(
    answer: Callable[..., Awaitable[Any]], request_: Any, num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = Generation("llm", "x", {}, ())
    for module in (chat, messages, responses):
        monkeypatch.setattr(module, "plan_answer", lambda *_: (generation, ToolUse()))
    monkeypatch.setattr(completions, "make_generations", lambda *_: [generation])
    gateway = StubGateway()
    reply = asyncio.run(answer(gateway, request_, http_of(1)))
    assert reply.status_code == 200 and b"x" in reply.body
    on_loop = [thread for thread in gateway.threads if thread is threading.main_thread()]
    assert len(on_loop) == num_looks < len(gateway.threads)


@pytest.mark.parametrize(
    ("answer", "request_"),
    [
        (chat.chat, CHAT),
        (messages.send, MESSAGES),
        (messages.count_tokens, COUNTED),
        (responses.respond, RESPONSES),
        (tokenize.tokenize, TOKENIZED),
    ],
)
@pytest.mark.parametrize("is_large", [False, True])
def test_a_large_request_is_rendered_beside_the_event_loop(
    answer: Callable[..., Awaitable[Any]], request_: Any, is_large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 messages with calls took 0.9 s of it, in which no stream of the worker went on."""
    rendered: list[threading.Thread] = []

    def render(*_: object) -> str:
        rendered.append(threading.current_thread())
        raise ApiError(400, "rendered")

    for module in (chat, messages, tokenize):
        monkeypatch.setattr(module, "render", render)
    gateway = StubGateway()
    gateway._model.tool_format, gateway._model.reasoning_format = None, ""
    http = http_of(MAX_PLANNED_AT_ONCE_BYTES + is_large)
    with pytest.raises(ApiError, match="rendered"):
        asyncio.run(answer(gateway, request_, http))
    assert [thread is threading.main_thread() for thread in rendered] == [not is_large]
