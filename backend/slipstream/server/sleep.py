"""/sleep, /wake_up, /reload_weights and /is_sleeping, as vLLM has them, for the holder of the admin key.

Event loop thread. The model does it, if its enable_sleep_mode allows it; a command goes on if its client leaves.
"""

from __future__ import annotations

import hmac
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from slipstream.core.control import RELOAD, SLEEP, STATE, WAKE_UP
from slipstream.server.catalog import Model
from slipstream.server.control import tell
from slipstream.server.errors import ApiError
from slipstream.server.gateway import Gateway
from slipstream.server.keys import digest_of

_NAMES = {"sleep_level": "level", "sleep_mode": "mode", "reload_folder": "folder"}  # the model's -> those of the paths


def add_sleep(app: FastAPI, admin_digest: bytes, responses: dict[int | str, dict[str, Any]]) -> None:
    """admin_digest: of the key that every call has to bring."""

    async def control(request: Request, model: str, command: str, **settings: str | int) -> Response:
        check_admin(request, admin_digest)
        gateway: Gateway = request.app.state.gateway
        named = await _named(gateway, model)
        try:
            return JSONResponse(await tell(gateway.link, named.triton_name, command, **settings))
        except ApiError as error:
            raise _by_its_own_name(error) from None

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


def check_admin(request: Request, admin_digest: bytes) -> None:
    """Raises ApiError for a caller without the operator's key."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(digest_of(given.encode("utf-8", "surrogateescape")), admin_digest):
        raise ApiError(401, "accepted: Authorization: Bearer, with the key of --admin-key-file", code="invalid_api_key")


def _by_its_own_name(error: ApiError) -> ApiError:
    """A refusal of the model names its setting; the caller knows the parameter of the path."""
    ours = error.param or ""
    if (name := _NAMES.get(ours)) is None:
        return error
    return ApiError(error.status_code, name + error.message.removeprefix(ours), code=error.code, param=name)


async def is_awake(gateway: Gateway, model: Model) -> bool:
    """Whether requests are served now; only a model that may sleep is asked."""
    if not model.may_sleep:
        return True
    try:
        return not (await tell(gateway.link, model.triton_name, STATE))["is_sleeping"]
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
