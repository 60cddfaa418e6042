"""A fake engine process: speaks the wire protocol and follows scripts, so that the C++ backend is tested alone.

Started by the backend like the real one: fake_engine.py --socket PATH --token HEX.  Two places hold a script:
the model's parameters (how to start: `load`, `step_ms`, `burst`, ...) and each request's text_input, which is JSON
such as {"tokens": 20, "then": "crash"}; any other text is echoed word by word.  `"word": "replica"` makes the number
of this replica each token.  One thread; one frame per step.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "backend"))
from slipstream.protocol import wire

OUTPUTS = (
    wire.OutputSpec("text_output", wire.DataType.BYTES),
    wire.OutputSpec("num_output_tokens", wire.DataType.INT32),
    wire.OutputSpec("request_handle", wire.DataType.UINT64),
    wire.OutputSpec("seen", wire.DataType.BYTES),
)
TEXT, NUM_OUTPUT_TOKENS, REQUEST_HANDLE, SEEN = range(4)

METRICS = (
    wire.MetricSpec("slipstream_fake_tokens_total", wire.MetricKind.COUNTER, "Tokens sent"),
    wire.MetricSpec("slipstream_fake_running", wire.MetricKind.GAUGE, "Requests running", (("state", "running"),)),
    wire.MetricSpec("slipstream_fake_running", wire.MetricKind.GAUGE, "Requests running", (("state", "waiting"),)),
    wire.MetricSpec("slipstream_fake_ttft_seconds", wire.MetricKind.HISTOGRAM, "TTFT", (), (0.1, 1.0, 10.0)),
    wire.MetricSpec("slipstream_fake_cancelled_total", wire.MetricKind.COUNTER, "Requests cancelled"),
)


@dataclass
class Running:
    """One request being answered.  then: final, empty_final, crash, exit, linger, garbage, hang, error,
    unknown_handle."""

    request: wire.Request
    words: list[bytes] | None
    num_tokens: int
    then: str = "final"
    num_sent: int = 0
    token: bytes = b" token"

    def word(self) -> bytes:
        return self.words[self.num_sent] if self.words is not None else self.token


def parse(request: wire.Request, replica: int) -> Running:
    """The script in a request's text_input (or its token_ids, for a detokenize model)."""
    inputs = {tensor.name: tensor for tensor in request.inputs}
    text = wire.bytes_elements(inputs["text_input"].data)[0] if "text_input" in inputs else b"x"
    if not text.startswith(b"{"):
        words = [b" " + word for word in text.split()] or [b""]
        return Running(request, words, len(words))
    script = json.loads(text)
    token = str(replica).encode() if script.get("word") == "replica" else b" token"
    return Running(request, None, int(script.get("tokens", 1)), script.get("then", "final"), token=token)


def describe(request: wire.Request) -> bytes:
    """A received request as JSON; tests compare it with what the client sent."""
    seen = {
        "id": request.request_id,
        "timeout_us": request.timeout_us,
        "age_s": time.time() - request.arrival_ns / 1e9,
        "outputs": request.requested_outputs,
        "inputs": {t.name: [t.dtype, t.shape, t.data.hex()] for t in request.inputs},
        "parameters": request.parameters,
    }
    return json.dumps(seen).encode()


class FakeEngine:
    def __init__(self, connection: socket.socket, config: wire.Config) -> None:
        self.connection = connection
        self.frames = wire.FrameBuffer()
        self.running: dict[int, Running] = {}
        self.num_cancelled = 0
        self.draining = False
        declared = json.loads(config.config_json)
        parameters, self.replica = declared.get("parameters", {}), declared.get("replica", 0)
        self.options = {name: value["string_value"] for name, value in parameters.items()}
        self.step_s = float(self.options.get("step_ms", "0")) / 1e3
        self.burst = int(self.options.get("burst", "1"))
        self.is_decoupled = self.options.get("task", "generate") == "generate"

    def serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self.connection, selectors.EVENT_READ)
        while not (self.draining and not self.running):
            busy = any(one.then != "hang" or one.num_sent < one.num_tokens for one in self.running.values())
            if selector.select(0 if busy else None):
                self.receive()
            self.step()
            if busy and self.step_s:
                time.sleep(self.step_s)
        self.connection.sendall(wire.encode_drained())

    def receive(self) -> None:
        data = self.connection.recv(1 << 20)
        if not data:
            raise SystemExit(0)
        for kind, payload in self.frames.feed(data):
            if kind == wire.FrameType.REQUEST:
                self.admit(wire.decode_request(payload))
            elif kind == wire.FrameType.CANCEL:
                self.cancel(wire.decode_cancel(payload))
            elif kind == wire.FrameType.DRAIN:
                print(f"I draining with {len(self.running)} requests", file=sys.stderr, flush=True)
                self.draining = True
                if self.options.get("drain") == "die":
                    os.kill(os.getpid(), signal.SIGKILL)

    def admit(self, request: wire.Request) -> None:
        if request.requested_outputs == ("seen",):  # a client that names no outputs requests all
            data = wire.bytes_tensor([describe(request)])
            self.send([wire.tensor_response(request.handle, 1, [(SEEN, (1,), data)])])
            return
        if "control" in request.parameters:
            self.control(request)
            return
        if request.parameters.get("stop") is True:
            self.stop(request)
            return
        self.running[request.handle] = parse(request, self.replica)

    def control(self, request: wire.Request) -> None:
        """`control_fails` is the number of the replica that refuses, `control_hangs` of one that never answers."""
        print(f"I told to {request.parameters['control']}", file=sys.stderr, flush=True)
        if self.options.get("control_fails") == str(self.replica):
            self.send([wire.error_response(request.handle, wire.ErrorCode.INVALID_ARG, f"{self.replica} cannot")])
            return
        if self.options.get("control_hangs") == str(self.replica):
            return
        self.send([wire.bytes_response(request.handle, wire.ResponseFlag.FINAL, TEXT, b"done")])

    def stop(self, request: wire.Request) -> None:
        """Ends the requests of that id; its own text is how many there were."""
        ended = [handle for handle, one in self.running.items() if one.request.request_id == request.request_id]
        for handle in ended:
            self.cancel(handle)
        told = wire.bytes_response(request.handle, wire.ResponseFlag.FINAL, TEXT, str(len(ended)).encode())
        self.send([told])

    def cancel(self, handle: int) -> None:
        if handle in self.running and self.options.get("ignore_cancel") != "true":
            sent = self.running.pop(handle).num_sent
            self.num_cancelled += 1
            print(f"I cancelled after {sent}", file=sys.stderr, flush=True)
            self.send([wire.final_response(handle)])
            self.connection.sendall(wire.encode_metrics([(4, [1.0])]))

    def step(self) -> None:
        """Every running request gets `burst` responses."""
        responses: list[bytes] = []
        for handle, one in list(self.running.items()):
            for _ in range(self.burst):
                if one.num_sent < one.num_tokens:
                    responses.append(self.next_response(handle, one))
                if one.num_sent >= one.num_tokens:
                    self.send(responses)
                    responses = []
                    self.end(handle, one)
                    break
        self.send(responses)

    def next_response(self, handle: int, one: Running) -> bytes:
        is_last = one.num_sent + 1 == one.num_tokens and one.then == "final"
        word = one.word()
        one.num_sent += 1
        flags = wire.ResponseFlag.FINAL if is_last else 0
        wanted = one.request.requested_outputs
        if "seen" in wanted or wanted == ("text_output",):
            return wire.bytes_response(handle, flags, TEXT, word)
        outputs = []
        if "text_output" in wanted:
            outputs.append((TEXT, (1,), wire.bytes_tensor([word])))
        if "num_output_tokens" in wanted:
            outputs.append((NUM_OUTPUT_TOKENS, (1,), one.num_sent.to_bytes(4, "little")))
        if "request_handle" in wanted:
            outputs.append((REQUEST_HANDLE, (1,), handle.to_bytes(8, "little")))
        return wire.tensor_response(handle, flags, outputs)

    def end(self, handle: int, one: Running) -> None:
        if one.then == "hang":
            return
        del self.running[handle]
        self.connection.sendall(wire.encode_metrics([(0, [float(one.num_sent)]), (1, [len(self.running)])]))
        self.connection.sendall(wire.encode_metrics([(3, [0.05, 0.5])]))
        if one.then == "crash":
            print("E about to crash near /srv/models/weights.bin\nI a table of the memory", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        elif one.then == "exit":
            raise SystemExit(7)
        elif one.then == "linger":  # as a process does that has much memory to give back
            self.connection.shutdown(socket.SHUT_RDWR)
            time.sleep(0.8)
            raise SystemExit(7)
        elif one.then == "garbage":
            self.connection.sendall(b"\xff" * 64)
            time.sleep(60)
        elif one.then == "unknown_handle":
            self.send([wire.bytes_response(1 << 60, 0, TEXT, b"nobody"), wire.final_response(handle)])
        elif one.then == "error":
            self.send([wire.error_response(handle, wire.ErrorCode.INVALID_ARG, "scripted error: temperature")])
        elif one.then == "empty_final":
            self.send([wire.final_response(handle)])

    def send(self, responses: list[bytes]) -> None:
        if responses:
            self.connection.sendall(wire.encode_responses(responses))


def stray_connections(path: str, token: bytes) -> None:
    """Connections of broken or hostile processes before the engine's HELLO."""
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(path)
    for data in (b"GET / HTTP/1.1\r\n\r\n" * 4, b"\x00" * 3, wire.encode_hello(b"\x00" * 16), b"\xff" * 27):
        stray = socket.socket(socket.AF_UNIX)
        stray.connect(path)
        stray.sendall(data)
        stray.close()
    globals()["_keep_open"] = silent
    if os.geteuid() != 0:
        return
    other_user = os.fork()  # has the right token
    if other_user == 0:
        os.setuid(65534)
        stray = socket.socket(socket.AF_UNIX)
        stray.connect(path)
        stray.sendall(wire.encode_hello(token))
        os._exit(0)
    os.waitpid(other_user, 0)


def start_up(connection: socket.socket, config: wire.Config) -> None:
    """Follow model parameter `load` (ok, fail, die, garbage); fail_file and slow_file act while that file exists."""
    options = {name: value["string_value"] for name, value in json.loads(config.config_json)["parameters"].items()}
    load = options.get("load", "ok")
    if "fail_file" in options:
        load = "die" if Path(options["fail_file"]).exists() else load
    while "slow_file" in options and Path(options["slow_file"]).exists():
        time.sleep(0.02)
    if "worker" in options:
        subprocess.Popen(["sleep", "600"])
    if load == "fail":
        connection.sendall(wire.encode_load_failed("model.safetensors: tensor 'lm_head.weight' is missing"))
        raise SystemExit(1)
    if load == "die":
        print("Traceback: out of luck\nE the last words of the engine", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if load == "garbage":
        connection.sendall(b"\x00" * 4 + b"\x63")
        time.sleep(60)
    connection.sendall(wire.encode_ready(OUTPUTS, METRICS))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--token", required=True)
    arguments = parser.parse_args()
    address = "\0" + arguments.socket[1:]  # "@name": an abstract address
    time.sleep(float(os.environ.get("FAKE_ENGINE_SLEEP_S", "0")))
    if os.environ.get("FAKE_ENGINE_STRAYS"):
        stray_connections(address, bytes.fromhex(arguments.token))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    connection.sendall(wire.encode_hello(bytes.fromhex(arguments.token)))
    header = connection.recv(wire.FRAME_HEADER_BYTES, socket.MSG_WAITALL)
    length = int.from_bytes(header[:4], "little")
    config = wire.decode_config(connection.recv(length, socket.MSG_WAITALL))
    print(f"I serving {config.model_name} version {config.model_version} from {config.model_dir}", file=sys.stderr)
    sys.stderr.flush()
    if "model_config_name" in (declared := json.loads(config.config_json)):
        print(f"I by the configuration {declared['model_config_name']}", file=sys.stderr, flush=True)
    start_up(connection, config)
    FakeEngine(connection, config).serve()


if __name__ == "__main__":
    main()
