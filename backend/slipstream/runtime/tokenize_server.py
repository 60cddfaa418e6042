"""Serving a `tokenize` or `detokenize` model: one thread, each request answered as it comes, in order.

Order matters: through an ensemble the pieces of one stream pass here one after another. No torch in this process.
"""

from __future__ import annotations

import logging

from slipstream.core import wire
from slipstream.core.config import EngineConfig
from slipstream.core.contract import OUTPUTS
from slipstream.core.errors import SlipstreamError
from slipstream.runtime.answers import error_answer
from slipstream.runtime.link import EngineLink
from slipstream.runtime.tokenize_tasks import make_task

logger = logging.getLogger(__name__)


class TokenizeServer:
    """Loads the tokenizer (ConfigError when it cannot); `serve` returns the exit status of the process."""

    def __init__(self, link: EngineLink, config: EngineConfig) -> None:
        self._link = link
        self._outputs = OUTPUTS[config.task]
        self._task = make_task(config)

    def serve(self) -> int:
        """Answer until the backend closes the socket or drains: whatever was asked before is answered by then."""
        self._link.send(wire.encode_ready(self._outputs, ()))
        for kind, payload in self._link.frames():
            if kind is wire.FrameType.REQUEST:
                self._link.send(self._answer(wire.decode_request(payload)))
            elif kind is wire.FrameType.DRAIN:
                self._link.send(wire.encode_drained())
                return 0
        return 0

    def _answer(self, request: wire.Request) -> bytes:
        try:
            return wire.encode_responses([self._task.answer(request)])
        except SlipstreamError as error:
            return error_answer(request.handle, error)
        except Exception as error:
            logger.exception("a request failed in an unforeseen way")
            return error_answer(request.handle, error)
