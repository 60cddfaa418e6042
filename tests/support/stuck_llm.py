"""An LLM of two ranks whose first one waits for ever, as for a kernel on a GPU that waits for a rank which is lost.

Arguments: a checkpoint, and where it waits: in the `load` or a `step`. Prints the error of each call and ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from processes import children_of
from slipstream import LLM, SamplingParams
from slipstream.core.errors import EngineError
from slipstream.worker.model_runner import ModelRunner
from slipstream.worker.worker import ModelWorker


def lose_rank_and_wait(*_: object) -> None:
    children_of(os.getpid(), "rank_main")[0].kill()
    threading.Event().wait()


def said(name: str, call: Callable[[], object]) -> None:
    begun = time.monotonic()
    try:
        call()
    except EngineError as error:
        print(f"{name}: {type(error).__name__}: {error}")
    print(f"{name} ended in time" if time.monotonic() - begun < 20 else f"{name} took too long", flush=True)


def main(model: str, place: str) -> None:
    def load() -> LLM:
        return LLM(model, device="cpu", num_blocks=64, tensor_parallel_size=2)

    if place == "load":
        ModelRunner._warm_up = lose_rank_and_wait  # type: ignore[method-assign]
        said("load", load)
        return
    llm = load()
    ModelWorker.result = lose_rank_and_wait  # type: ignore[assignment,method-assign]
    said("step", lambda: llm.generate("def", SamplingParams(max_tokens=4)))
    said("next", lambda: llm.generate("def", SamplingParams(max_tokens=4)))
    said("close", llm.close)


if __name__ == "__main__":
    main(*sys.argv[1:])
