"""Requests on gRPC streams of their own, ended as asked."""

from __future__ import annotations

import json
import queue
import threading
import time
from typing import Any

from asked import Asked
from llm_client import GrpcStream, grpc_infer
from outcome import Outcome
from tritonclient.utils import InferenceServerException

CLIENT_DEADLINES_S = (0.02, 0.1, 0.4)  # by `after`
CLOSING_S = 20.0  # for a stream that has had its last answer


def over_grpc(asked: Asked, grpc_url: str, patience_s: float) -> Outcome:
    """Ask and receive, to the end that is asked for."""
    outcome = Outcome(asked)
    deadline_s = CLIENT_DEADLINES_S[min(asked.after, 2)] if asked.ending == "client deadline" else None
    stream = GrpcStream(grpc_url, deadline_s)
    settings = {**asked.known.settings, **asked.extras}
    inputs = {"text_input": asked.known.prompt, "sampling_parameters": json.dumps(settings)}
    try:
        stream.send(
            asked.model,
            {**inputs, "stream": asked.is_streamed, "exclude_input_in_output": True},
            outputs=("text_output", "sequence_index"),
            request_id=asked.request_id,
        )
    except InferenceServerException as error:  # a deadline may pass before anything is sent
        outcome.cut() if asked.ending == "client deadline" else outcome.end(str(error))
        stream.close(cancel=True)
        return outcome
    try:
        _receive(stream, asked, outcome, grpc_url, patience_s)
    except queue.Empty:
        outcome.end(f"no answer in {patience_s:.0f} s")
        outcome.is_overdue = True
    cancels = outcome.was_cut or outcome.is_overdue or asked.ending == "cancel at the last"
    _close(stream, cancels, outcome)
    return outcome


def _receive(stream: GrpcStream, asked: Asked, outcome: Outcome, grpc_url: str, patience_s: float) -> None:
    latest = time.monotonic() + patience_s
    if asked.ending == "cancel" and asked.after == 0:
        outcome.cut()
        return
    while True:
        outputs, is_last, error = stream.receive(max(0.01, latest - time.monotonic()))
        if error:
            is_own = asked.ending == "client deadline" and "Deadline Exceeded" in error
            outcome.cut() if is_own else outcome.end(error)
            return
        _add(outputs, asked, outcome)
        outcome.num_finals += is_last
        if is_last:
            outcome.end("")
            return
        if asked.ending == "cancel" and outcome.num_responses >= asked.after:
            outcome.cut()
            return
        if asked.ending == "stop" and outcome.num_responses == max(1, asked.after):
            grpc_infer(grpc_url, asked.model, {"stop": True}, request_id=asked.request_id)


def _add(outputs: dict[str, Any], asked: Asked, outcome: Outcome) -> None:
    if "text_output" not in outputs:
        return
    outcome.received()
    texts = [text.decode() for text in outputs["text_output"].reshape(-1)]
    if asked.is_streamed:
        outcome.add(int(outputs["sequence_index"].reshape(-1)[0]), texts[0])
    else:
        outcome.texts = texts


def _close(stream: GrpcStream, cancels: bool, outcome: Outcome) -> None:
    """On a thread of its own: without a cancel, closing waits for the server to end the stream, too."""
    closing = threading.Thread(target=stream.close, args=(cancels,), daemon=True)
    closing.start()
    closing.join(CLOSING_S)
    if closing.is_alive():
        outcome.end("the server did not end a stream whose request had its last answer")
        outcome.is_overdue = True
    while not outcome.was_cut and not outcome.is_overdue and not stream.answers.empty():
        _, _, error = stream.answers.get()
        if error is None or is_answer(outcome):
            outcome.num_finals += 1  # an answer behind the last


def is_answer(outcome: Outcome) -> bool:
    """Whether an error behind the last answer is more than the echo of the client's own cancel or deadline."""
    return outcome.asked.ending not in ("cancel at the last", "client deadline")
