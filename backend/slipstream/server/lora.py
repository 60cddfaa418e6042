"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them, for the holder of the admin key.

Event loop thread. The model does it, if its lora_root allows it.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.responses import Response

from slipstream.core.control import LOAD_LORA, MAX_FOLDER_BYTES, UNLOAD_LORA
from slipstream.core.settings import MAX_LORA_NAME_BYTES
from slipstream.server.catalog import Model
from slipstream.server.control import tell
from slipstream.server.errors import ApiError
from slipstream.server.gateway import Gateway
from slipstream.server.sleep import check_admin


class LoraRequest(BaseModel):
    """lora_path: below the model's lora_root. model: may be left out if one model takes adapters."""

    lora_name: str = Field(min_length=1, max_length=MAX_LORA_NAME_BYTES)
    lora_path: str = Field("", max_length=MAX_FOLDER_BYTES)
    model: str = ""


def add_lora(app: FastAPI, admin_digest: bytes, responses: dict[int | str, dict[str, Any]]) -> None:
    """admin_digest: of the key that every call has to bring."""

    async def change(request: Request, asked: LoraRequest, command: str) -> Response:
        check_admin(request, admin_digest)
        gateway: Gateway = request.app.state.gateway
        model = await _named(gateway, asked.model)
        if command == LOAD_LORA:
            await _check_name(gateway, asked.lora_name, model)
        settings = {"lora_name": asked.lora_name, "lora_path": asked.lora_path}
        told = await tell(gateway.link, model.triton_name, command, **settings)
        gateway.catalog.forget()
        return JSONResponse(told)

    @app.post("/v1/load_lora_adapter", responses=responses)
    async def load(request: Request, asked: LoraRequest) -> Response:
        return await change(request, asked, LOAD_LORA)

    @app.post("/v1/unload_lora_adapter", responses=responses)
    async def unload(request: Request, asked: LoraRequest) -> Response:
        return await change(request, asked, UNLOAD_LORA)


async def _check_name(gateway: Gateway, name: str, model: Model) -> None:
    """Raises ApiError for an adapter that nobody could ask for, as another model has its name."""
    for known in await gateway.catalog.all():
        if known.name == name and (not known.adapter or known.triton_name != model.triton_name):
            told = (
                f"lora_name: {name!r} is the name of a model, which requests for it would get; accepted: another name"
            )
            raise ApiError(400, told, param="lora_name")


async def _named(gateway: Gateway, name: str) -> Model:
    if name:
        return await gateway.catalog.find(name)
    models = {model.triton_name: model for model in await gateway.catalog.all() if model.takes_adapters}
    if len(models) == 1:
        return next(iter(models.values()))
    known = ", ".join(sorted(models)) or "none has enable_lora"
    raise ApiError(400, f"model: accepted: the name of a model that takes adapters: {known}", param="model")
