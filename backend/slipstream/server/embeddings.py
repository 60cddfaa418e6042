"""POST /v1/embeddings, and embeddings for ranking.py, by the encoder models that the gateway's options name.

Such a model takes texts in one BYTES input and gives one vector per text in an FP32 output, named `embedding` or
`embeddings` if there are several; both with or without a batch dimension.
"""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from tritonclient.grpc import service_pb2

from slipstream.server.errors import ApiError, model_not_found
from slipstream.server.gateway import Gateway
from slipstream.server.schemas import EmbeddingRequest
from slipstream.server.sse import json_answer, to_bytes
from slipstream.server.tenancy import Lease, num_prompt_tokens

_NAMES = ("embedding", "embeddings")
_COUNT = "num_input_tokens"
_STARTED = int(time.time())
_BYTES, _FP32 = "TYPE_STRING", "TYPE_FP32"


async def embed(gateway: Gateway, request: EmbeddingRequest, http: HttpRequest) -> Response:
    texts = [request.input] if isinstance(request.input, str) else request.input
    vectors, num_tokens = await embed_texts(gateway, request.model, texts, http, "input")
    if request.dimensions not in (None, vectors.shape[1]):
        message = f"dimensions: got {request.dimensions}, accepted: {vectors.shape[1]}, what this model gives"
        raise ApiError(400, message, param="dimensions")
    return json_answer(await asyncio.to_thread(_answer, request, vectors, num_tokens))


def _answer(request: EmbeddingRequest, vectors: np.ndarray, num_tokens: int) -> bytes:
    """Not on the event loop: 2,048 texts may have two million numbers."""
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, request.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return to_bytes({"object": "list", "data": data, "model": request.model, "usage": usage})


async def embed_texts(
    gateway: Gateway, name: str, texts: list[str], http: HttpRequest, param: str
) -> tuple[np.ndarray, int]:
    """[num_texts, dimension] float32, and the number of tokens. name: of an embedding model, as clients say it.

    Raises ApiError for a model that gives no embeddings, for an empty text, and for the limits of the key.
    """
    http.state.body.end_turn()  # many requests of many texts run at a time
    served = gateway.options.embedding_models
    if not served:
        raise ApiError(404, "no embeddings are served here: start the gateway with --embedding-model", param="model")
    model = gateway.options.aliases.get(name, name)
    if model not in served:
        if any(known.name == name for known in await gateway.catalog.all()):
            raise model_not_found(name, list(served), "gives no embeddings; models that do are")
        raise model_not_found(name, list(served))
    if not all(texts):
        raise ApiError(400, f"{param}: has an empty text, accepted: text of at least one character", param=param)
    config = await gateway.link.config(model)
    lease: Lease = http.state.lease
    lease.enter(1)
    if any(output.name == _COUNT for output in config.output):
        lease.reserve(sum(num_prompt_tokens(text) for text in texts))
    vectors, num_tokens = await _vectors(gateway, config, texts)
    lease.add_tokens(num_tokens)
    http.state.record.count(num_tokens, 0)
    return vectors, num_tokens


async def cards(gateway: Gateway) -> list[dict[str, Any]]:
    """The embedding models that are ready, as /v1/models shows them, aliases included."""
    served = gateway.options.embedding_models
    if not served:
        return []
    ready = {entry.name for entry in await gateway.link.index() if entry.state == "READY"}
    aliases = {alias: name for alias, name in gateway.options.aliases.items() if name in served}
    names = {**{name: name for name in served}, **aliases}
    kind = {"object": "model", "created": _STARTED, "owned_by": "slipstream", "task": "embedding"}
    return [{"id": name, **kind, "triton_name": target} for name, target in names.items() if target in ready]


def _encoded(vector: np.ndarray, form: str | None) -> Any:
    return base64.b64encode(vector.tobytes()).decode() if form == "base64" else vector.tolist()


async def _vectors(gateway: Gateway, config: Any, texts: list[str]) -> tuple[np.ndarray, int]:
    """[num_texts, dimension] float32, and the number of tokens if the model says it."""
    size = config.max_batch_size or len(texts)
    batches = [texts[at : at + size] for at in range(0, len(texts), size)]
    parts = await asyncio.gather(*(_batch(gateway, config, batch) for batch in batches))
    return np.concatenate([vectors for vectors, _ in parts]), sum(count for _, count in parts)


async def _batch(gateway: Gateway, config: Any, texts: list[str]) -> tuple[np.ndarray, int]:
    text_input, output = _tensors(config)
    request = service_pb2.ModelInferRequest(model_name=config.name)
    shape = [len(texts), 1] if config.max_batch_size else [len(texts)]
    request.inputs.add(name=text_input, datatype="BYTES", shape=shape)
    encoded = [text.encode("utf-8") for text in texts]
    request.raw_input_contents.append(b"".join(len(data).to_bytes(4, "little") + data for data in encoded))
    for name in [output, *(entry.name for entry in config.output if entry.name == _COUNT)]:
        request.outputs.add(name=name)
    response = await gateway.link.infer(request)
    found = {entry.name: response.raw_output_contents[index] for index, entry in enumerate(response.outputs)}
    vectors = np.frombuffer(found[output], dtype="<f4")
    if vectors.size == 0 or vectors.size % len(texts):
        raise ApiError(500, f"the model {config.name!r} gave {vectors.size} numbers for {len(texts)} texts")
    if not np.isfinite(vectors).all():  # JSON has no such numbers; they would become null
        raise ApiError(500, f"the model {config.name!r} gave numbers that are not finite", code="internal_error")
    counts = np.frombuffer(found.get(_COUNT, b""), dtype="<i4")
    return vectors.reshape(len(texts), -1), int(counts.sum())


def _tensors(config: Any) -> tuple[str, str]:
    """Names of the text input and the vector output. Raises ApiError if the model has no such pair."""
    data_type = config.DESCRIPTOR.fields_by_name["input"].message_type.fields_by_name["data_type"].enum_type
    inputs = [e.name for e in config.input if data_type.values_by_number[e.data_type].name == _BYTES and not e.optional]
    outputs = [e.name for e in config.output if data_type.values_by_number[e.data_type].name == _FP32]
    named = [name for name in outputs if name in _NAMES] or outputs
    if len(inputs) != 1 or len(named) != 1:
        message = (
            f"the model {config.name!r} gives no embeddings: its text inputs are {inputs}, its FP32 outputs {outputs}"
        )
        raise ApiError(500, message, code="internal_error")
    return inputs[0], named[0]
