"""A whole answer, which may have megabytes, is read beside the event loop, on which all streams of a worker are."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from slipstream.server import chat, completions
from slipstream.server.generation import Generation, Response
from slipstream.server.messages import endpoint as messages
from slipstream.server.messages.schemas import MessagesRequest
from slipstream.server.responses import endpoint as responses
from slipstream.server.responses.schemas import ResponsesRequest
from slipstream.server.schemas import ChatRequest, CompletionRequest
from slipstream.server.tools.select import ToolUse

SAID = [{"role": "user", "content": "x"}]
CHAT = ChatRequest(model="llm", messages=SAID)
COMPLETION = CompletionRequest(model="llm", prompt="x")
MESSAGES = MessagesRequest(model="llm", messages=SAID, max_tokens=1)
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
    http = SimpleNamespace(state=SimpleNamespace(lease=SimpleNamespace(owner=b"", prepare=lambda *_: None)))
    reply = asyncio.run(answer(gateway, request_, http))
    assert reply.status_code == 200 and b"x" in reply.body
    on_loop = [thread for thread in gateway.threads if thread is threading.main_thread()]
    assert len(on_loop) == num_looks < len(gateway.threads)
