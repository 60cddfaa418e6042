"""GET /ready: which models answer requests now. Event loop thread."""

from __future__ import annotations

from slipstream.server.errors import ApiError
from slipstream.server.gateway import Gateway
from slipstream.server.sleep import is_awake


async def ready_models(gateway: Gateway) -> list[str]:
    """Raises ApiError if Triton does not answer, or no model is ready and awake."""
    if not await gateway.link.is_live():
        raise ApiError(503, f"Triton at {gateway.options.triton_url} does not answer", code="unavailable")
    models = await gateway.catalog.all()
    names = [model.name for model in models if await is_awake(gateway, model)]
    if not names:
        raise ApiError(503, "every model sleeps" if models else "no model is ready", code="unavailable")
    return names
