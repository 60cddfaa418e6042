"""/sleep, /wake_up, /reload_weights and /is_sleeping, as vLLM has them, for the holder of the admin key.

Event loop thread. The model does it, if its enable_sleep_mode allows it; a command goes on if its client leaves.
"""

from __future__ import annotations

import hmac
import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response
from tritonclient.grpc import service_pb2

from slipstream.core.control import RELOAD, SLEEP, STATE, WAKE_UP
from slipstream.server.catalog import Model
from slipstream.server.errors import ApiError
from slipstream.server.gateway import Gateway
from slipstream.server.keys import digest_of


def add_sleep(app: FastAPI, admin_digest: bytes, responses: dict[int | str, dict[str, Any]]) -> None:
    """admin_digest: of the key that every call has to bring."""

    async def control(request: Request, model: str, command: str, **settings: str | int) -> Response:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(digest_of(given.encode("utf-8", "surrogateescape")), admin_digest):
            raise ApiError(
                401, "accepted: Authorization: Bearer, with the key of --admin-key-file", code="invalid_api_key"
            )
        gateway: Gateway = request.app.state.gateway
        return JSONResponse(await tell(gateway, await _named(gateway, model), command, **settings))

    @app.post("/sleep", responses=responses)
    async def sleep(request: Request, model: str = "", level: int = 1, mode: str = "wait") -> Response:
        return await control(request, model, SLEEP, sleep_level=level, sleep_mode=mode)

    @app.post("/wake_up", responses=responses)
    async def wake_up(request: Request, model: str = "") -> Response:
        return await control(request, model, WAKE_UP)

    @app.post("/reload_weights", responses=responses)
    async def reload_weights(request: Request, model: str = "", folder: str = "", mode: str = "wait") -> Response:
        return await control(request, model, RELOAD, reload_folder=folder, sleep_mode=mode)

    @app.get("/is_sleeping", responses=responses)
    async def is_sleeping(request: Request, model: str = "") -> Response:
        return await control(request, model, STATE)


async def tell(gateway: Gateway, model: Model, command: str, **settings: str | int) -> dict[str, Any]:
    """The model's state once it has done it. Raises ApiError."""
    request = service_pb2.ModelInferRequest(model_name=model.triton_name)
    request.outputs.add(name="text_output")
    for name, value in {"control": command, **settings}.items():
        if isinstance(value, int):
            request.parameters[name].int64_param = value
        elif value:
            request.parameters[name].string_param = value
    stream = gateway.link.open(request)
    await stream.start()
    response = await stream.read()
    if response is None:
        raise ApiError(500, "the model sent no response", code="internal_error")
    state: dict[str, Any] = json.loads(response.text("text_output"))
    while await stream.read() is not None:
        pass
    return state


async def is_awake(gateway: Gateway, model: Model) -> bool:
    """Whether requests are served now; only a model that may sleep is asked."""
    if not model.may_sleep:
        return True
    try:
        return not (await tell(gateway, model, STATE))["is_sleeping"]
    except ApiError:
        return False


async def _named(gateway: Gateway, name: str) -> Model:
    if name:
        return await gateway.catalog.find(name)
    models = {model.triton_name: model for model in await gateway.catalog.all() if model.may_sleep}
    if len(models) == 1:
        return next(iter(models.values()))
    known = ", ".join(sorted(models)) or "none has enable_sleep_mode"
    raise ApiError(400, f"model: accepted: the name of a model that may sleep: {known}", param="model")
