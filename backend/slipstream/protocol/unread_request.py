"""A large request before it is read: what is known of it then, and its answer if it ends so.

Standard library only, no state; any thread. Reading it encodes its text (engine/request_pool.py); this looks at its
small tensors and parameters.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.core.config import EngineConfig
from slipstream.core.outputs import RequestOutput
from slipstream.core.request import FinishReason, Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.core.wire_messages import Request as WireRequest
from slipstream.protocol.client_settings import TENSORS, read_settings
from slipstream.protocol.prompts import TextCodec, check_prompt_bytes
from slipstream.protocol.request_parser import (
    ClientRequest,
    check_one_response,
    read_deadline,
    read_outputs,
    settle_beams,
)
from slipstream.protocol.responses import encode_gathered, encode_response, is_gathered

_PEEKED_BYTES = 4096  # of a tensor or parameter


def peek(raw: WireRequest, config: EngineConfig, tokenizer: TextCodec) -> ClientRequest | None:
    """The id by which it may be stopped, its deadline, and how to answer it if it ends unread; its prompt is empty.
    None for a stop or a command, in which nothing is encoded.

    Raises RequestError where the small tensors and parameters are enough for it, and for a text that cannot fit.
    """
    small = [tensor for tensor in raw.inputs if len(tensor.data) <= _PEEKED_BYTES]
    given = {name: value for name, value in raw.parameters.items() if len(str(value)) <= _PEEKED_BYTES}
    serving, max_model_len = config.serving, config.model.max_model_len
    has_batch_dim = serving.max_batch_size > 0
    peeked = replace(raw, inputs=tuple(small), parameters=given)
    settings = read_settings(peeked, has_batch_dim, serving.ignored_request_parameters)
    settle_beams(settings)
    for tensor in raw.inputs:
        if tensor.name == "text_input" and max_model_len and "truncate_prompt_tokens" not in settings:
            check_prompt_bytes(tensor.name, len(tensor.data) - 4, tokenizer, max_model_len)  # after its length
    if any(tensor.name in TENSORS and TENSORS[tensor.name].target == "prompt_token_ids" for tensor in raw.inputs):
        settings.setdefault("prompt_token_ids", ())  # which outputs there are depends on it
    if settings.get("stop_request") or settings.get("control"):
        return None
    outputs, params = read_outputs(raw, settings), SamplingParams(n=settings.get("n", 1))
    if not serving.is_decoupled:  # it may end before `parse_request` sees it
        check_one_response(settings, has_batch_dim or "context_ids" in outputs)
    return ClientRequest(
        raw.handle,
        Request([], params, deadline=read_deadline(raw, settings), handle=raw.handle),
        request_id=raw.request_id or settings.get("request_id", ""),
        stream=settings.get("stream", False),
        outputs=outputs,
        has_batch_dim=has_batch_dim,
        is_text_only=outputs == ("text_output",) and not has_batch_dim,
        wants_context="context_ids" in outputs,
    )


def encode_unread(client: ClientRequest, reason: FinishReason) -> list[bytes]:
    """The responses of a request of `peek`: its n sequences, without tokens, as the engine ends what waits there."""
    assert client.request is not None
    sequences = [replace(client.request, sequence_index=index) for index in range(client.request.params.n)]
    outputs = [RequestOutput(sequence, "", [], finish_reason=reason) for sequence in sequences]
    outputs[-1].is_final = True
    if is_gathered(client):
        return [encode_gathered(client, outputs)]
    return [encode_response(client, output) for output in outputs]
