"""A RequestOutput -> the bytes of one response: the outputs that the client wants, in Triton's serialisation.

Standard library only, no state; output thread. The common stream, text alone, takes one call of wire.bytes_response.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii
from math import prod

from slipstream.core.errors import CapacityError, RankLostError, RequestError
from slipstream.core.outputs import RequestOutput, TokenLogprobs
from slipstream.core.request import FinishReason
from slipstream.core.wire_messages import ErrorCode
from slipstream.protocol import wire
from slipstream.protocol.contract_generate import OUTPUTS
from slipstream.protocol.request_parser import ClientRequest

_INDEX = {spec.name: index for index, spec in enumerate(OUTPUTS)}
_DIMS = {spec.name: spec.dims for spec in OUTPUTS}
_TEXT = _INDEX["text_output"]
_LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity
MAX_WRITTEN_AT_ONCE = 4096  # log-probabilities of an output whose JSON is written at once: some 6 ms

Encoded = tuple[tuple[int, ...], bytes]  # shape, data


def error_code(fault: type[Exception]) -> ErrorCode:
    """Which code of Triton's a client gets for whose fault."""
    if issubclass(fault, RequestError):
        return ErrorCode.INVALID_ARG
    is_temporary = issubclass(fault, (CapacityError, RankLostError))
    return ErrorCode.UNAVAILABLE if is_temporary else ErrorCode.INTERNAL


def encode_response(client: ClientRequest, output: RequestOutput) -> bytes:
    """One entry of a RESPONSES frame. A failed request answers with its error."""
    if output.finish_reason is FinishReason.ERROR:
        return wire.error_response(client.handle, error_code(output.fault), output.error or "the request failed")
    flags = 1 if output.is_final else 0
    if client.is_text_only:
        return wire.bytes_response(client.handle, flags, _TEXT, output.text.encode("utf-8"))
    tensors = []
    for name in client.outputs:
        shape, data = ENCODERS[name](client, output)
        tensors.append((_INDEX[name], (1, *shape) if client.has_batch_dim else shape, data))
    return wire.tensor_response(client.handle, flags, tensors)


def response_frames(responses: Sequence[bytes]) -> list[bytes]:
    """A step's responses as frames of about FRAME_TARGET_BYTES, so that no frame grows with the number of requests."""
    if sum(map(len, responses)) <= wire.FRAME_TARGET_BYTES:
        return [wire.encode_responses(responses)]
    frames, start, num_bytes = [], 0, 0
    for end, response in enumerate(responses):
        if num_bytes and num_bytes + len(response) > wire.FRAME_TARGET_BYTES:
            frames.append(wire.encode_responses(responses[start:end]))
            start, num_bytes = end, 0
        num_bytes += len(response)
    return [*frames, wire.encode_responses(responses[start:])]


def is_gathered(client: ClientRequest) -> bool:
    """Whether n sequences share one response, as the vLLM backend's do when it does not stream.

    In TensorRT-LLM's form (a batch dimension, or a step of an ensemble) each has its own, as there.
    """
    if client.stream or client.has_batch_dim or client.wants_context or client.request is None:
        return False
    return client.request.params.n > 1


def encode_gathered(client: ClientRequest, outputs: Sequence[RequestOutput]) -> bytes:
    """The final response of a request that `is_gathered`. outputs: the whole of each sequence.

    An output of declared shape [-1] has an entry per sequence, one of [-1, -1] a row, padded with zeros to the longest;
    one of [1] is the first sequence's, but counts of drafts, and their share, are of all.
    """
    ordered = sorted(outputs, key=lambda output: output.request.sequence_index)
    tensors = []
    for name in client.outputs:
        if name in _OF_DRAFTS:
            tensors.append((_INDEX[name], *_of_drafts(name, ordered)))
            continue
        parts = [ENCODERS[name](client, output) for output in ordered]
        tensors.append((_INDEX[name], *(parts[0] if _DIMS[name] == (1,) else _stacked(parts))))
    return wire.tensor_response(client.handle, wire.ResponseFlag.FINAL, tensors)


def _stacked(parts: Sequence[Encoded]) -> Encoded:
    """Along the first dimension, without empty parts. Elements have four bytes (INT32, FP32)."""
    shape = (sum(shape[0] for shape, _ in parts), *(max(sizes) for sizes in zip(*(shape[1:] for shape, _ in parts))))
    if len(shape) == 1:
        return shape, b"".join(data for _, data in parts)
    width = 4 * prod(shape[1:])
    return shape, b"".join(data.ljust(found[0] * width, b"\0") for found, data in parts)


def _string(text: str) -> Encoded:
    return (1,), wire.bytes_tensor((text.encode("utf-8"),))


def _scalar(code: str, value: float) -> Encoded:
    return (1,), struct.pack("<" + code, value)


def _int32s(values: Sequence[int]) -> Encoded:
    return (len(values),), struct.pack(f"<{len(values)}i", *values)


def _row(encoded: Encoded) -> Encoded:
    return (1, *encoded[0]), encoded[1]


def _finish_reason(client: ClientRequest, output: RequestOutput) -> Encoded:
    return _string(output.finish_reason.value if output.finish_reason is not None else "")


def _stop_reason(client: ClientRequest, output: RequestOutput) -> Encoded:
    return _string("" if output.stop_reason is None else str(output.stop_reason))


def _sent_ids(client: ClientRequest, output: RequestOutput) -> list[int]:
    """The ids of this response's text: an echoed prompt's first (only responses that are whole echo)."""
    return output.request.prompt_token_ids + output.token_ids if client.echo_text else output.token_ids


def _prompt_token_ids(client: ClientRequest, output: RequestOutput) -> Encoded:
    return _int32s(output.request.prompt_token_ids if output.is_first and not output.request.sequence_index else [])


def _output_log_probs(client: ClientRequest, output: RequestOutput) -> Encoded:
    """Zeros where they were not computed, as TensorRT-LLM sends through an ensemble."""
    values = [0.0] * len(output.token_ids) if output.logprobs is None else [one.logprob for one in output.logprobs]
    return (1, len(values)), struct.pack(f"<{len(values)}f", *values)


def _logits(rows: Sequence[bytes] | None) -> Encoded:
    return ((len(rows), len(rows[0]) // 4), b"".join(rows)) if rows else ((0, 0), b"")


def _generation_logits(client: ClientRequest, output: RequestOutput) -> Encoded:
    if not output.request.params.return_generation_logits or not output.logprobs:
        return (0, 0, 0), b""
    return _row(_logits([entry.logits for entry in output.logprobs]))


def write_logprobs(client: ClientRequest, entries: Sequence[TokenLogprobs]) -> None:
    """Write the JSON of a step's entries now: one long answer's at its end would hold up the answers of others.

    The text takes a third of the memory of the entries, too. Sequences of a beam search share the entries of the tokens
    that they begin with. Many entries at once are left to engine/long_outputs.py.
    """
    if client.stream or "logprobs" not in client.outputs or num_unwritten(entries) > MAX_WRITTEN_AT_ONCE:
        return
    for entry in entries:
        write_entry(entry, client.token_text)


def write_entry(entry: TokenLogprobs, token_text: Callable[[int], str]) -> None:
    if not entry.json:
        entry.json, entry.top, entry.asked = _entry_json(entry, token_text), [], []


def num_unwritten(entries: Sequence[TokenLogprobs | None]) -> int:
    """Tokens and alternatives whose JSON is to be written, each of which takes one or two microseconds."""
    return sum(1 + len(entry.top) + len(entry.asked) for entry in entries if entry is not None and not entry.json)


def _entry_json(entry: TokenLogprobs, token_text: Callable[[int], str]) -> bytes:
    """vLLM's form: token id -> logprob, rank and text; the token itself first, then the likeliest, then those asked
    for, whose rank is null. Written piece by piece: dictionaries for json.dumps take four times as long."""
    found = {entry.token_id: _alternative(entry.token_id, entry.logprob, str(entry.rank), token_text)}
    for rank, (token_id, logprob) in enumerate(entry.top, 1):
        if token_id not in found:
            found[token_id] = _alternative(token_id, logprob, str(rank), token_text)
    for token_id, logprob in entry.asked:
        if token_id not in found:
            found[token_id] = _alternative(token_id, logprob, "null", token_text)
    return f"{{{', '.join(found.values())}}}".encode("ascii")


def _alternative(token_id: int, logprob: float, rank: str, token_text: Callable[[int], str]) -> str:
    number = repr(max(logprob, _LOWEST_LOGPROB)) if logprob == logprob else "NaN"  # of a model that computes none
    text = encode_basestring_ascii(token_text(token_id))
    return f'"{token_id}": {{"logprob": {number}, "rank": {rank}, "decoded_token": {text}}}'


def _logprobs_json(client: ClientRequest, entries: Sequence[TokenLogprobs | None] | None) -> Encoded:
    """A list of the entries. They may be 100 MB, and each copy of them takes 25 ms or more: this makes one."""
    if not entries:
        return _string("null" if entries is None else "[]")
    texts = [b"null" if entry is None else entry.json or _entry_json(entry, client.token_text) for entry in entries]
    num_bytes = sum(map(len, texts)) + len("[]") + len(", ") * (len(texts) - 1)
    texts[0] = wire.bytes_length(num_bytes) + b"[" + texts[0]
    texts[-1] += b"]"
    return (1,), b", ".join(texts)


def _share(part: int, whole: int) -> Encoded:
    return _scalar("f", part / whole if whole else 0.0)


# Outputs made of the numbers of accepted and of drafted tokens of a response's sequences.
_OF_DRAFTS: dict[str, Callable[[int, int], Encoded]] = {
    "acceptance_rate": _share,
    "total_accepted_draft_tokens": lambda accepted, drafted: _scalar("i", accepted),
    "total_draft_tokens": lambda accepted, drafted: _scalar("i", drafted),
}


def _of_drafts(name: str, outputs: Sequence[RequestOutput]) -> Encoded:
    requests = [output.request for output in outputs]
    counts = ((request.num_accepted_tokens, request.num_drafted_tokens) for request in requests)
    return _OF_DRAFTS[name](*map(sum, zip(*counts)))


# One row per output of the contract (tests/unit/test_contract.py holds the two together).
ENCODERS: dict[str, Callable[[ClientRequest, RequestOutput], Encoded]] = {
    "text_output": lambda c, o: _string(o.text),
    "finish_reason": _finish_reason,
    "stop_reason": _stop_reason,
    "cumulative_logprob": lambda c, o: _scalar("f", o.cumulative_logprob),
    "logprobs": lambda c, o: _logprobs_json(c, o.logprobs),
    "prompt_logprobs": lambda c, o: _logprobs_json(c, o.prompt_logprobs),
    "prompt_token_ids": _prompt_token_ids,
    "num_input_tokens": lambda c, o: _scalar("I", o.request.num_prompt_tokens),
    "num_output_tokens": lambda c, o: _scalar("I", len(o.token_ids)),
    "output_ids": lambda c, o: _row(_int32s(_sent_ids(c, o))),
    "sequence_length": lambda c, o: _scalar("i", len(_sent_ids(c, o))),
    "context_ids": lambda c, o: _int32s(o.context_token_ids),
    "text_length": lambda c, o: _scalar("i", len(o.text)),
    "request_handle": lambda c, o: _scalar("Q", c.handle),
    "cum_log_probs": lambda c, o: _scalar("f", o.cumulative_logprob),
    "output_log_probs": _output_log_probs,
    "context_logits": lambda c, o: _logits(o.context_logits),
    "generation_logits": _generation_logits,
    "batch_index": lambda c, o: _scalar("i", 0),
    "sequence_index": lambda c, o: _scalar("i", o.request.sequence_index),
    "kv_cache_alloc_new_blocks": lambda c, o: _scalar("i", o.request.num_new_blocks),
    "kv_cache_reused_blocks": lambda c, o: _scalar("i", o.request.num_reused_blocks),
    "kv_cache_alloc_total_blocks": lambda c, o: _scalar("i", o.request.num_new_blocks + o.request.num_reused_blocks),
    "kv_cache_reused_block": lambda c, o: _scalar("i", o.request.num_reused_blocks),
    "kv_cache_missed_block": lambda c, o: _scalar("i", o.request.num_new_blocks),
    "kv_cache_hit_rate": lambda c, o: _share(
        o.request.num_reused_blocks, o.request.num_new_blocks + o.request.num_reused_blocks
    ),
    "arrival_time_ns": lambda c, o: _scalar("q", o.request.times.arrival_ns),
    "first_scheduled_time_ns": lambda c, o: _scalar("q", o.request.times.first_scheduled_ns),
    "first_token_time_ns": lambda c, o: _scalar("q", o.request.times.first_token_ns),
    "last_token_time_ns": lambda c, o: _scalar("q", o.request.times.last_token_ns),
    "acceptance_rate": lambda c, o: _of_drafts("acceptance_rate", [o]),
    "total_accepted_draft_tokens": lambda c, o: _of_drafts("total_accepted_draft_tokens", [o]),
    "total_draft_tokens": lambda c, o: _of_drafts("total_draft_tokens", [o]),
}
