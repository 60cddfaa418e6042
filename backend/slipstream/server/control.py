"""Commands to a model over Triton (core/control.py): its answer as JSON. Event loop thread."""

from __future__ import annotations

import json
from typing import Any

from tritonclient.grpc import service_pb2

from slipstream.server.errors import ApiError
from slipstream.server.triton import TritonLink


async def tell(link: TritonLink, triton_name: str, command: str, **settings: str | int) -> dict[str, Any]:
    """The model's state once it has done it. Raises ApiError."""
    request = service_pb2.ModelInferRequest(model_name=triton_name)
    request.outputs.add(name="text_output")
    for name, value in {"control": command, **settings}.items():
        if isinstance(value, int):
            request.parameters[name].int64_param = value
        elif value:
            request.parameters[name].string_param = value
    stream = link.open(request)
    await stream.start()
    response = await stream.read()
    if response is None:
        raise ApiError(500, "the model sent no response", code="internal_error")
    state: dict[str, Any] = json.loads(response.text("text_output"))
    while await stream.read() is not None:
        pass
    return state
