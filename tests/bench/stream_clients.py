"""Client processes for bench_triton: many gRPC streams at once over tritonclient, spread over processes.

One Python process counts some ten thousand responses a second; a batch of 256 streams needs several. Each process has
one connection and multiplexes its requests on one bidirectional stream, as tritonclient does it.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

Prompt = list[int]
MODEL = "llm"
TIMEOUT_S = 600.0


class StreamClients:
    """Processes that wait for work. Use as a context."""

    def __init__(self, grpc_url: str, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(grpc_url, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()  # imported and connected

    def __enter__(self) -> StreamClients:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)

    def timed(self, prompts: Sequence[Prompt], num_output: int, concurrency: int | None = None) -> float:
        """Seconds from the first request to the last token. Raises RuntimeError with a client's error.

        concurrency: so many requests are under way at once, spread over the processes; None: all.
        """
        total = min(len(prompts), concurrency or len(prompts))
        count = min(len(self._pipes), total)
        pipes = self._pipes[:count]
        for index, pipe in enumerate(pipes):
            pipe.send((prompts[index::count], num_output, len(range(index, total, count))))
        for pipe in pipes:
            pipe.recv()  # requests are made
        start = time.perf_counter()
        for pipe in pipes:
            pipe.send("go")
        answers = [pipe.recv() for pipe in pipes]
        elapsed = time.perf_counter() - start
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(answer)
        assert sum(answers) == len(prompts) * num_output, (answers, len(prompts), num_output)
        return elapsed


def serve(grpc_url: str, pipe: Connection) -> None:
    """A client process: (prompts, num_output, most at once) in, then "go", and the number of tokens that came out."""
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(grpc_url) as client:
        counter = _Counter()
        client.start_stream(counter)
        pipe.send("ready")
        while (work := pipe.recv()) is not None:
            prompts, num_output, concurrency = work
            requests = [inputs_of(triton, prompt, num_output) for prompt in prompts]
            outputs = [triton.InferRequestedOutput(name) for name in ("text_output", "num_output_tokens")]
            counter.expect(len(prompts), concurrency)
            pipe.send("made")
            pipe.recv()
            for inputs in requests:
                if not counter.await_seat():
                    break
                client.async_stream_infer(MODEL, inputs, outputs=outputs, enable_empty_final_response=True)
            pipe.send(counter.wait())


class _Counter:
    """The stream's callback: tokens and final responses."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._num_open, self._num_tokens, self._error = 0, 0, ""
        self._seats = threading.Semaphore(0)

    def expect(self, num_requests: int, concurrency: int) -> None:
        self._num_open, self._num_tokens, self._error = num_requests, 0, ""
        self._seats = threading.Semaphore(concurrency)
        self._done.clear()

    def await_seat(self) -> bool:
        """Wait until one more request may be under way; False: one has failed."""
        self._seats.acquire()
        return not self._error

    def __call__(self, result: Any, error: Any) -> None:
        if error is not None:
            self._error = str(error)
            self._done.set()
            self._seats.release()
            return
        response = result.get_response()
        if response.outputs:
            count = result.as_numpy("num_output_tokens")
            self._num_tokens += int(count.reshape(-1)[0])
        if response.parameters["triton_final_response"].bool_param:
            self._num_open -= 1
            self._seats.release()
            if self._num_open == 0:
                self._done.set()

    def wait(self) -> int | str:
        if not self._done.wait(TIMEOUT_S):
            return f"{self._num_open} requests unfinished after {TIMEOUT_S:.0f} s"
        return self._error or self._num_tokens


def inputs_of(triton: Any, prompt: Prompt, num_output: int) -> list[Any]:
    """The inputs of a greedy, streamed request for num_output tokens."""
    import numpy as np

    values = {
        "input_ids": ("INT32", np.array(prompt, dtype=np.int32)),
        "max_tokens": ("INT32", np.array([num_output], dtype=np.int32)),
        "temperature": ("FP32", np.array([0.0], dtype=np.float32)),
        "ignore_eos": ("BOOL", np.array([True])),
        "stream": ("BOOL", np.array([True])),
        "return_num_output_tokens": ("BOOL", np.array([True])),
    }
    inputs = []
    for name, (kind, array) in values.items():
        tensor = triton.InferInput(name, list(array.shape), kind)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs
