"""The model of a request that names none, as vLLM's clients may send: the only one there is. Event loop thread."""

from __future__ import annotations

from slipstream.server.errors import ApiError
from slipstream.server.gateway import Gateway
from slipstream.server.schemas import EmbeddingRequest, NamedRequest, RerankRequest, ScoreRequest


async def only_model(gateway: Gateway, request: NamedRequest) -> str:
    """Its name in Triton; "" if none gives embeddings. Raises ApiError if several could answer, or none is ready."""
    if isinstance(request, EmbeddingRequest | ScoreRequest | RerankRequest):
        return _only(set(gateway.options.embedding_models), gateway.options.embedding_models)
    models = await gateway.catalog.all()
    if not models:
        raise ApiError(503, "No model is ready", code="unavailable", retry_after_s=1)
    return _only({model.triton_name for model in models}, [model.name for model in models])


def _only(targets: set[str], names: list[str] | tuple[str, ...]) -> str:
    if len(targets) > 1:
        raise ApiError(400, f"model: is missing, accepted: {', '.join(sorted(names))}", param="model")
    return next(iter(targets), "")
