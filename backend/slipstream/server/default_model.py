"""The model of a request that names none, as vLLM's clients may send: the only one there is. Event loop thread."""

from __future__ import annotations

from collections.abc import Collection

from slipstream.server.errors import ApiError
from slipstream.server.gateway import Gateway
from slipstream.server.schemas import EmbeddingRequest, NamedRequest, RerankRequest, ScoreRequest


async def only_model(gateway: Gateway, request: NamedRequest) -> str:
    """Its name in Triton; "" if none gives embeddings. Raises ApiError if several could answer, or none is ready.

    A model that is being restarted counts: its clients must not hear from another one meanwhile.
    """
    if isinstance(request, EmbeddingRequest | ScoreRequest | RerankRequest):
        return _only(gateway.options.embedding_models, gateway.options.embedding_models)
    targets = await gateway.catalog.generating()
    if not targets:
        raise ApiError(503, "No model is ready", code="unavailable", retry_after_s=1)
    return _only(targets, {model.name for model in await gateway.catalog.all()} if len(targets) > 1 else targets)


def _only(targets: Collection[str], accepted: Collection[str]) -> str:
    if len(set(targets)) > 1:
        names = ", ".join(sorted({*targets, *accepted}))
        raise ApiError(400, f"model: is missing, accepted: {names}", param="model")
    return next(iter(targets), "")
