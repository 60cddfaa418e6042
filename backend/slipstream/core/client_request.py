"""What a client asked for: one request as the server process and `LLM` keep it beside the engine's own `Request`."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.request import Request


@dataclass(slots=True, eq=False)
class ClientRequest:
    """handle: the server's number of the request. request_id: the client's name for it, may be "".

    request: ready for Engine.submit; its params.n sequences answer under one handle. None when is_stop.
    is_stop: not a generation but "stop the request of this request_id".
    echo_text: the prompt, when it is to precede the output ("" otherwise).
    outputs: names of the output tensors to send; is_text_only: that is text_output alone.
    has_batch_dim: the model has max_batch_size > 0, so every tensor's first dimension is the batch (1).
    """

    handle: int
    request: Request | None
    request_id: str = ""
    is_stop: bool = False
    stream: bool = False
    stream_interval: int = 1
    echo_text: str = ""
    outputs: tuple[str, ...] = ("text_output",)
    has_batch_dim: bool = False
    is_text_only: bool = True
    wants_context: bool = False
