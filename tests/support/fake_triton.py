"""A fake of Triton's gRPC with scripted models, so that the gateway is tested alone.

A prompt is JSON such as {"pieces": ["Hel", "lo"], "fail": ["UNAVAILABLE", "the engine died"]}: the pieces are sent one
by one, then the request ends or fails. {"hang": true} sends nothing more until its client cancels. `cancelled` is set
only by a client that leaves before the end of its answer. The model `blocking` has the tensors of
model_repository/guarded but counts no tokens; {"blocked": ["answer", "violence"]} are the reason and categories of its
last response.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

INPUTS = ("text_input", "input_ids", "sampling_parameters", "stream")
OUTPUTS = (
    "text_output",
    "finish_reason",
    "num_input_tokens",
    "num_output_tokens",
    "kv_cache_reused_blocks",
    "sequence_index",
    "logprobs",
)
GUARDED = Path(__file__).resolve().parents[2] / "model_repository/guarded/config.pbtxt"
STRING, FP32 = model_config_pb2.TYPE_STRING, model_config_pb2.TYPE_FP32


def string(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "little") + data


class Stream:
    """cancelled: to be set if the client leaves before it has its answer."""

    def __init__(self, cancelled: threading.Event) -> None:
        self._cancelled = cancelled
        self.has_ended, self.is_answered = threading.Event(), threading.Event()

    def end(self) -> None:
        if not self.is_answered.is_set():
            self._cancelled.set()
        self.has_ended.set()


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """models: name -> parameters of a generating model. states: name -> (state, reason) of others in the index."""

    def __init__(self, models: dict[str, dict[str, str]], states: dict[str, tuple[str, str]] | None = None) -> None:
        self.models, self.states = models, states or {}
        self.requests: list[service_pb2.ModelInferRequest] = []
        self.sampling: list[dict[str, Any]] = []
        self.cancelled = threading.Event()
        self.live_s, self.num_live = 0.0, 0  # how long it takes to say that it lives, and how often it was asked
        self.num_answered = 0  # streams whose last response was taken, or is the next to be
        self._server = grpc.server(ThreadPoolExecutor(16))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> FakeTriton:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0)

    # ------------------------------------------------------------ the service (names are those of the protocol)

    def ServerLive(self, request: Any, context: Any) -> Any:
        self.num_live += 1
        time.sleep(self.live_s)
        return service_pb2.ServerLiveResponse(live=True)

    def RepositoryIndex(self, request: Any, context: Any) -> Any:
        reply = service_pb2.RepositoryIndexResponse()
        for name in (*self.models, "encoder", "batched_encoder"):
            reply.models.add(name=name, version="1", state="READY")
        for name, (state, reason) in self.states.items():
            reply.models.add(name=name, version="1", state=state, reason=reason)
        return reply

    def ModelConfig(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelConfigResponse(config=self._config(request.name))

    def _config(self, model: str) -> Any:
        config = model_config_pb2.ModelConfig(name=model)
        if model == "blocking":
            config = text_format.Parse(GUARDED.read_text(), model_config_pb2.ModelConfig())
            for output in [entry for entry in config.output if entry.name.startswith("num_")]:
                config.output.remove(output)
        elif model in self.models:
            for name in INPUTS:
                config.input.add(name=name, optional=True)
            for name in (*OUTPUTS, "safety") if model == "guarded" else OUTPUTS:
                config.output.add(name=name)
        else:
            config.max_batch_size = 8 if model == "batched_encoder" else 0
            config.input.add(name="text", data_type=STRING)
            config.output.add(name="embedding", data_type=FP32)
            config.output.add(name="score", data_type=FP32)
        for key, value in self.models.get(model, {}).items():
            config.parameters[key].string_value = value
        return config

    def _refusal(self, request: Any) -> str:
        """Triton's words for a tensor that the model does not declare; "" if there is none."""
        config = self._config(request.model_name)
        pairs = (("input", request.inputs, config.input), ("output", request.outputs, config.output))
        for kind, asked, declared in pairs:
            unknown = sorted({tensor.name for tensor in asked} - {tensor.name for tensor in declared})
            if unknown:
                return f"unexpected inference {kind} '{unknown[0]}' for model '{request.model_name}'"
        return ""

    def ModelInfer(self, request: Any, context: Any) -> Any:
        """An embedding of three numbers: length of the text, number of spaces, 0.5; of "nan" it has that number."""
        self.requests.append(request)
        data, texts = request.raw_input_contents[0], []
        while data:
            size = int.from_bytes(data[:4], "little")
            texts.append(data[4 : 4 + size].decode())
            data = data[4 + size :]
        reply = service_pb2.ModelInferResponse(model_name=request.model_name)
        reply.outputs.add(name="embedding", datatype="FP32", shape=[len(texts), 3])
        last = [float(text) if text == "nan" else 0.5 for text in texts]
        vectors = np.array([[len(text), text.count(" "), number] for text, number in zip(texts, last)], np.float32)
        reply.raw_output_contents.append(vectors.tobytes())
        return reply

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        stream = Stream(self.cancelled)
        context.add_callback(stream.end)
        try:
            yield from self._answers(request_iterator, context, stream)
        except Exception:  # context.abort; one who leaves has ended the stream before
            stream.is_answered.set()
            raise
        stream.is_answered.set()

    def _answers(self, request_iterator: Any, context: Any, stream: Stream) -> Iterator[Any]:
        for request in request_iterator:
            self.requests.append(request)
            if refusal := self._refusal(request):
                yield service_pb2.ModelStreamInferResponse(error_message=refusal)
                return
            given = {tensor.name: request.raw_input_contents[i] for i, tensor in enumerate(request.inputs)}
            self.sampling.append(json.loads(given["sampling_parameters"][4:]))
            script, _ = json.JSONDecoder().raw_decode(given["text_input"][4:].decode())  # a template may add to it
            names = [output.name for output in request.outputs]
            pieces = script.get("pieces", ["hello"]) * script.get("repeat", 1)
            if given["stream"] == bytes(1):
                pieces = ["".join(pieces)]
            for number, piece in enumerate(pieces):
                is_last = number == len(pieces) - 1 and "fail" not in script and "hang" not in script
                if is_last:
                    self.num_answered += 1
                    stream.is_answered.set()
                yield self._reply(names, piece, script.get("reason", "stop") if is_last else "", script)
            if "hang" in script:
                stream.has_ended.wait(60)
            if "fail" in script:
                code, message = script["fail"]
                if code:
                    context.abort(grpc.StatusCode[code], message)
                yield service_pb2.ModelStreamInferResponse(error_message=message)

    def _reply(self, names: list[str], piece: str, reason: str, script: dict[str, Any]) -> Any:
        why, *categories = script.get("blocked", [""]) if reason else [""]
        values = {
            "text_output": string(piece),
            "finish_reason": string(reason),
            "num_input_tokens": (5).to_bytes(4, "little"),
            "num_output_tokens": (1).to_bytes(4, "little"),
            "kv_cache_reused_blocks": (0).to_bytes(4, "little"),
            "sequence_index": (0).to_bytes(4, "little"),
            "logprobs": string("[]"),
            "safety": string('{"flagged": true, "categories": ["violence"]}' if reason == "content_filter" else ""),
            "blocked": bytes([bool(why)]),
            "block_reason": string(why),
            "block_categories": b"".join(string(name) for name in categories),
        }
        reply = service_pb2.ModelStreamInferResponse()
        for name in names:
            reply.infer_response.outputs.add(name=name)
            reply.infer_response.raw_output_contents.append(values[name])
        return reply
