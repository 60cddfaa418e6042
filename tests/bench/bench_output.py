"""CPU time of the text path, one core: detokenising, the output thread's whole work, reading a request.

    python tests/bench/bench_output.py [checkpoint folder]

Prints microseconds per token (best of five). Targets: 10 for detokenising, 12 for process + encode of a simple stream.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from slipstream.core.config import EngineConfig
from slipstream.core.outputs import StepOutput
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.output_processor import OutputProcessor
from slipstream.protocol import wire
from slipstream.protocol.contract import OUTPUTS
from slipstream.protocol.request_parser import ClientRequest, parse_request
from slipstream.protocol.responses import encode_response
from slipstream.tokenizer.detokenizer import Tokenizer, start_detokenizer
from slipstream.tokenizer.tokenizer import TextTokenizer

ROOT = Path(__file__).resolve().parents[2]
CODE = Path(wire.__file__).read_text()
CJK = "你好，世界！今天天气很好。いろはにほへと ちりぬるを。다람쥐 헌 쳇바퀴에 타고파. 👩‍👩‍👧‍👦 " * 40
NUM_STREAMS = 64
NUM_TOKENS = 300


class ByWindows:
    """The same tokenizer without its table."""

    token_table = None

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.character_endings = tokenizer.character_endings
        self.decode = tokenizer.decode


def best_us(work: Callable[[], float], repeats: int = 5) -> float:
    return min(work() for _ in range(repeats)) * 1e6


def detokenize(tokenizer: Tokenizer, token_ids: list[int]) -> float:
    """Seconds per token, one at a time."""
    detokenizer = start_detokenizer(tokenizer, token_ids[:4])
    start = time.perf_counter()
    for token_id in token_ids:
        detokenizer.push((token_id,))
    return (time.perf_counter() - start) / len(token_ids)


def stream(tokenizer: TextTokenizer, client_options: dict, **sampling: object) -> float:
    """Seconds per token of process + encode, NUM_STREAMS requests a step."""
    processor = OutputProcessor(tokenizer, lambda request, stop: None, lambda handle: None)
    params = SamplingParams(max_tokens=NUM_TOKENS, **sampling)
    requests = [Request([5, 6, 7], params, handle=handle) for handle in range(NUM_STREAMS)]
    clients = [ClientRequest(one.handle, one, stream=True, **client_options) for one in requests]
    for client in clients:
        processor.add(client)
    token_ids = tokenizer.encode(CODE)[:NUM_TOKENS]
    steps = [[StepOutput(one, [token_id]) for one in requests] for token_id in token_ids]
    start = time.perf_counter()
    for step in steps:
        outputs = processor.process(step)
        wire.encode_responses([encode_response(clients[output.request.handle], output) for output in outputs])
    return (time.perf_counter() - start) / (NUM_STREAMS * NUM_TOKENS)


def parse(tokenizer: TextTokenizer, num_requests: int = 2000) -> float:
    names = tuple(spec.name for spec in OUTPUTS["generate"])
    text = wire.bytes_tensor([b"def add(a, b):"])
    sampling = wire.bytes_tensor([b'{"temperature": 0.5, "top_k": 5, "max_tokens": 64}'])
    tensors = (wire.Tensor("text_input", 13, (1,), text), wire.Tensor("sampling_parameters", 13, (1,), sampling))
    raw = wire.Request(1, time.time_ns(), 0, "id", names, tensors)
    start = time.perf_counter()
    for _ in range(num_requests):
        parse_request(raw, EngineConfig(), tokenizer)
    return (time.perf_counter() - start) / num_requests


def main() -> None:
    tokenizer = TextTokenizer.load(sys.argv[1] if len(sys.argv) > 1 else ROOT / "models" / "slipstream-demo-code")
    for name, text in (("code", CODE), ("CJK and emoji", CJK)):
        token_ids = tokenizer.encode(text)[:4000]
        by_table = best_us(lambda ids=token_ids: detokenize(tokenizer, ids))
        by_windows = best_us(lambda ids=token_ids: detokenize(ByWindows(tokenizer), ids))
        print(f"detokenize {name}: {by_table:.2f} us/token by table, {by_windows:.2f} by windows")
    ids = {"wants_context": True, "outputs": ("output_ids", "context_ids", "text_length"), "is_text_only": False}
    for name, options, sampling in (
        ("text", {}, {}),
        ("text, 2 stop strings", {}, {"stop": ("### END", "\n\nUser:")}),
        ("text, stream_interval 4", {"stream_interval": 4}, {}),
        ("ids, context, length (ensemble)", ids, {}),
    ):
        us = best_us(lambda o=options, s=sampling: stream(tokenizer, o, **s))
        print(f"process + encode {name}: {us:.2f} us/token")
    print(f"parse_request: {best_us(lambda: parse(tokenizer)):.1f} us/request")


if __name__ == "__main__":
    main()
