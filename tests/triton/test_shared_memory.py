"""Tensors in shared memory that a client has registered with the server: inputs are read there, outputs written."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from fake_backend import add_model
from triton_server import TritonServer
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

REGION_BYTES = 64


@pytest.fixture(scope="module")
def server(fake_backend_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("repository")
    for name in ("crossed", "counted"):
        add_model(repository, name, {"task": "tokenize"})  # one response a request
    with TritonServer(repository, fake_backend_dir) as started:
        yield started


class Region:
    """One region for the input and one for the output."""

    def __init__(self, client: grpcclient.InferenceServerClient) -> None:
        self._client = client
        self._names = [f"slipstream-{uuid.uuid4().hex}" for _ in range(2)]
        self.input, self.output = (
            shared_memory.create_shared_memory_region(name, f"/{name}", REGION_BYTES) for name in self._names
        )
        for name in self._names:
            client.register_system_shared_memory(name, f"/{name}", REGION_BYTES)

    def infer(self, model: str, text: bytes, num_output_bytes: int) -> None:
        data = serialize_byte_tensor(np.array([text], dtype=np.object_)).item()
        shared_memory.set_shared_memory_region(self.input, [np.frombuffer(data, np.uint8)])
        tensor = grpcclient.InferInput("text_input", [1], "BYTES")
        tensor.set_shared_memory(self._names[0], len(data))
        output = grpcclient.InferRequestedOutput("text_output")
        output.set_shared_memory(self._names[1], num_output_bytes)
        self._client.infer(model, [tensor], outputs=[output])

    def close(self) -> None:
        self._client.unregister_system_shared_memory()
        for region in (self.input, self.output):
            shared_memory.destroy_shared_memory_region(region)


@pytest.fixture
def region(server: TritonServer) -> Iterator[Region]:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        made = Region(client)
        yield made
        made.close()


def counts(server: TritonServer) -> tuple[int, int]:
    """Requests that succeeded and that failed."""
    [stats] = json.loads(server.get("/v2/models/counted/versions/1/stats")[1])["model_stats"]
    return stats["inference_stats"]["success"]["count"], stats["inference_stats"]["fail"]["count"]


def test_tensors_cross_in_shared_memory(region: Region) -> None:
    region.infer("crossed", b"seen", REGION_BYTES)
    written = shared_memory.get_contents_as_numpy(region.output, np.uint8, [REGION_BYTES]).tobytes()
    assert written[:9] == b"\x05\x00\x00\x00 seen"


def test_an_output_that_does_not_fit_its_region_is_a_failure(server: TritonServer, region: Region) -> None:
    with pytest.raises(InferenceServerException, match=r"\(4 bytes\) should be at least 9 bytes"):
        region.infer("counted", b"seen", 4)
    server.wait_until(lambda: counts(server) == (0, 1), "the failure to be counted")
    region.infer("counted", b"seen", 9)
    server.wait_until(lambda: counts(server) == (1, 1), "the success to be counted")
