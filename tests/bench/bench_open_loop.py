"""Goodput under an open-loop load (open_loop.py): Slipstream through tritonserver, or vLLM, on one GPU.

    python tests/bench/bench_open_loop.py --loads 8,16,24:2048,16:0:0.5 --out ours.jsonl
    python tests/bench/bench_open_loop.py --engine vllm --loads 8,16,24:2048,16:0:0.5 --out vllm.jsonl

A load is RATE[:SHARED PREFIX[:RATE OF 8K PROMPTS]]; rates are requests a second. Slipstream's clients are tritonclient
processes with gRPC streams, and every token has its text. vLLM runs as its own server does, AsyncLLM with the engine in
another process, but without HTTP and without text. Prefix caching is on in both; all else is each engine's default but
for the options here.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests/bench"
sys.path[:0] = [str(HERE), str(ROOT / "tests/support")]

from bench_vllm import ENVIRONMENT, FORMATS, engine_options  # noqa: E402
from measures import add_settings, emit  # noqa: E402
from open_loop import Arrival, Load, Timeline, draw_arrivals, summarise  # noqa: E402
from shapes import SHAPES  # noqa: E402

Play = Callable[[Sequence[Arrival]], list[Timeline]]
AHEAD_S = 0.5  # a load begins so much after all clients have its requests
TIMEOUT_S = 300.0
WARM_UP, WARM_UP_S = Load(8.0), 5.0


# ------------------------------------------------------------------------------------------- through tritonserver


def play_streams(grpc_url: str, pipe: Connection) -> None:
    """A client process: arrivals in, then the clock's reading at which the load begins; timelines out."""
    import tritonclient.grpc as triton
    from stream_clients import MODEL, inputs_of

    with triton.InferenceServerClient(grpc_url) as client:
        recorder = _Recorder()
        client.start_stream(recorder)
        pipe.send("ready")
        while (arrivals := pipe.recv()) is not None:
            requests = [inputs_of(triton, one.prompt, one.num_output) for one in arrivals]
            outputs = [triton.InferRequestedOutput(name) for name in ("text_output", "num_output_tokens")]
            pipe.send("made")
            recorder.begin(len(arrivals), pipe.recv())
            for index, (arrival, inputs) in enumerate(zip(arrivals, requests)):
                recorder.sleep_until(arrival.at_s)
                client.async_stream_infer(
                    MODEL, inputs, outputs=outputs, request_id=str(index), enable_empty_final_response=True
                )
            pipe.send(recorder.wait())


class _Recorder:
    """The stream's callback: when each response came."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._begin, self._num_open, self._error = 0.0, 0, ""
        self._timelines: list[Timeline] = []

    def begin(self, num_requests: int, begin: float) -> None:
        self._begin, self._num_open, self._error = begin, num_requests, ""
        self._timelines = []
        self._done.clear()
        if num_requests == 0:
            self._done.set()

    def sleep_until(self, at_s: float) -> None:
        """And note that the next request is sent then."""
        time.sleep(max(0.0, self._begin + at_s - time.monotonic()))
        self._timelines.append(Timeline(time.monotonic() - self._begin))

    def __call__(self, result: Any, error: Any) -> None:
        now = time.monotonic() - self._begin
        if error is not None:
            self._error = str(error)
            self._done.set()
            return
        response = result.get_response()
        # what brings no token, such as text that was held back, is no first token
        if response.outputs and (count := int(result.as_numpy("num_output_tokens").reshape(-1)[0])):
            self._timelines[int(response.id)].responses.append((now, count))
        if response.parameters["triton_final_response"].bool_param:
            self._num_open -= 1
            if self._num_open == 0:
                self._done.set()

    def wait(self) -> list[Timeline] | str:
        if not self._done.wait(TIMEOUT_S):
            return f"{self._num_open} requests unfinished after {TIMEOUT_S:.0f} s"
        return self._error or self._timelines


@contextmanager
def triton_player(arguments: argparse.Namespace) -> Iterator[Play]:
    """Raises SystemExit without a server."""
    from bench_triton import write_model, write_repository
    from llm_server import backends_dir, missing_server
    from triton_server import TritonServer

    backends = backends_dir()
    if backends is None or missing_server():
        raise SystemExit(missing_server())
    with tempfile.TemporaryDirectory() as name:
        model = write_model(Path(name) / "model", SHAPES[arguments.shape])
        repository = write_repository(Path(name) / "repository", model, arguments)
        with TritonServer(repository, backends, start_timeout_s=300) as server:
            context = multiprocessing.get_context("spawn")
            pipes, processes = [], []
            for _ in range(arguments.clients):
                ours, theirs = context.Pipe()
                processes.append(context.Process(target=play_streams, args=(server.grpc_url, theirs), daemon=True))
                processes[-1].start()
                pipes.append(ours)
            assert all(pipe.recv() == "ready" for pipe in pipes)
            yield lambda arrivals: _play_spread(pipes, arrivals)
            for pipe in pipes:
                pipe.send(None)
            for process in processes:
                process.join(10)


def _play_spread(pipes: Sequence[Connection], arrivals: Sequence[Arrival]) -> list[Timeline]:
    """Every process sends each of so many requests. Raises RuntimeError with a client's error."""
    for index, pipe in enumerate(pipes):
        pipe.send(arrivals[index :: len(pipes)])
    for pipe in pipes:
        pipe.recv()
    begin = time.monotonic() + AHEAD_S
    for pipe in pipes:
        pipe.send(begin)
    timelines = [Timeline(0.0)] * len(arrivals)
    for index, pipe in enumerate(pipes):
        answer = pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        timelines[index :: len(pipes)] = answer
    return timelines


# ------------------------------------------------------------------------------------------------------------ vLLM


@contextmanager
def vllm_player(arguments: argparse.Namespace) -> Iterator[Play]:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # its engine process imports vllm_dummy_fill
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as name:
        options = engine_options(arguments, SHAPES[arguments.shape], Path(name))
        options["max_num_batched_tokens"] = arguments.max_num_batched_tokens

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

        engine, numbers = loop.run_until_complete(start()), iter(range(1 << 30))

        async def ask(arrival: Arrival, begin: float) -> Timeline:
            await asyncio.sleep(max(0.0, begin + arrival.at_s - time.monotonic()))
            timeline = Timeline(time.monotonic() - begin)
            params = SamplingParams(
                temperature=0.0,
                max_tokens=arrival.num_output,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": arrival.prompt}
            async for output in engine.generate(prompt, params, str(next(numbers))):
                if count := len(output.outputs[0].token_ids):
                    timeline.responses.append((time.monotonic() - begin, count))
            return timeline

        async def play(arrivals: Sequence[Arrival]) -> list[Timeline]:
            begin = time.monotonic() + AHEAD_S
            return list(await asyncio.gather(*(ask(one, begin) for one in arrivals)))

        yield lambda arrivals: loop.run_until_complete(play(arrivals))
        engine.shutdown()


def loads_of(text: str) -> list[Load]:
    """The option's type."""
    try:
        return [Load.parse(load) for load in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Exits with the option that is wrong, before an engine is started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("slipstream", "vllm"), default="slipstream")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    loads = "RATE[:SHARED PREFIX[:RATE OF 8K PROMPTS]], with commas; one that is there twice has other prompts then"
    parser.add_argument("--loads", type=loads_of, default="8,16,24,32", help=loads)
    parser.add_argument("--seconds", type=float, default=20.0, help="in which the requests of a load arrive")
    add_settings(parser)
    parser.add_argument("--format", choices=sorted(FORMATS), default="none", help="of vLLM's weights")
    parser.add_argument("--kv-cache-dtype", default="auto", help="vLLM's")
    parser.add_argument("--max-model-len", type=int, default=33792)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--clients", type=int, default=8, help="client processes of tritonserver")
    parser.add_argument("--out", type=Path, help="JSON lines are appended to this file")
    arguments = parser.parse_args(words)
    if arguments.engine == "vllm" and arguments.set:
        parser.error("--set: is Slipstream's; vLLM has --format and --kv-cache-dtype")
    if arguments.engine != "vllm" and (arguments.format, arguments.kv_cache_dtype) != ("none", "auto"):
        parser.error("--format and --kv-cache-dtype: are vLLM's; accepted: --set quantization=, --set kv_cache_dtype=")
    if arguments.clients < 1:
        parser.error(f"--clients: {arguments.clients}, accepted: at least 1")
    max_model_len = min(arguments.max_model_len, SHAPES[arguments.shape].max_len)
    for load, seconds in [(WARM_UP, WARM_UP_S), *((load, arguments.seconds) for load in arguments.loads)]:
        if (refusal := load.refusal(seconds, max_model_len)) is not None:
            parser.error(f"--loads: {load}: {refusal}")
    arguments.prefix_caching, arguments.tensor_parallel, arguments.adapters = True, 1, []
    return arguments


def main() -> None:
    arguments = parse()
    player = vllm_player if arguments.engine == "vllm" else triton_player
    settings = {"engine": arguments.engine, "shape": arguments.shape}
    settings["set"] = arguments.set if arguments.engine != "vllm" else [arguments.format, arguments.kv_cache_dtype]
    shape = SHAPES[arguments.shape]
    with player(arguments) as play:
        play(draw_arrivals(shape, WARM_UP, WARM_UP_S, seed=-1))
        for index, load in enumerate(arguments.loads):
            # the same prompts once more would be hits of the prefix cache
            arrivals = draw_arrivals(shape, load, arguments.seconds, seed=arguments.loads[:index].count(load))
            emit({**settings, **summarise(load, arrivals, play(arrivals), arguments.seconds)}, arguments.out)


if __name__ == "__main__":
    main()
