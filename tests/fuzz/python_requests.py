"""Fuzz the engine's reading of REQUEST frames: valid frames, damaged and recombined, through the code that serves them.

Whatever comes, `read_request` gives a request or answers the frame's own handle, and `parse_request` gives a
ClientRequest or raises RequestError; anything else is a defect. Not guided by coverage: valid frames of every input of
the contract are what its mutations start from.
"""

from __future__ import annotations

import logging
import random
import struct
import time
from dataclasses import dataclass, replace

import backend_wire
import toy_tokenizers
from slipstream.core.config import EngineConfig, ModelConfig, ServingConfig
from slipstream.core.errors import RequestError
from slipstream.core.wire_messages import DataType
from slipstream.engine.socket import read_request
from slipstream.protocol import wire
from slipstream.protocol.contract import GENERATE
from slipstream.protocol.request_parser import parse_request
from slipstream.tokenizer.tokenizer import TextTokenizer

CONFIGS = (
    EngineConfig(model=ModelConfig(max_model_len=512)),
    EngineConfig(model=ModelConfig(max_model_len=64), serving=ServingConfig(max_batch_size=1, is_decoupled=False)),
)
TOKENIZER = TextTokenizer(toy_tokenizers.sentencepiece())
NAMES = [spec.name for spec in GENERATE.inputs]
OUTPUTS = [spec.name for spec in GENERATE.outputs]
TEXTS = (
    b"",
    b"a",
    b"[1, 2]",
    b'{"temperature": 1, "n": 3}',
    b'{"json": {"type": "object"}}',
    b"\xff\xfe",
    b"1e999",
    b"-1",
)
NUMBERS = (0, 1, -1, 2, 20, 128, 2**31 - 1, -(2**31), 2**63 - 1)


@dataclass
class Counts:
    """cases: frames read. unreadable: answered by read_request. refused: by parse_request. accepted: the others."""

    cases: int = 0
    unreadable: int = 0
    refused: int = 0
    accepted: int = 0


def any_tensor(dice: random.Random) -> wire.Tensor:
    spec = dice.choice(GENERATE.inputs)
    shape = dice.choice(((1,), (1, 1), (2,), (0,), (2, 3), (), (-1,), (2**40, 2**40)))
    if spec.dtype is DataType.BYTES:
        data = wire.bytes_tensor(dice.choice(TEXTS) for _ in range(dice.choice((0, 1, 1, 1, 2))))
    else:
        data = b"".join(struct.pack("<q", dice.choice(NUMBERS)) for _ in range(3))[: dice.choice((0, 1, 2, 4, 8, 24))]
    dtype = int(spec.dtype) if dice.random() < 0.9 else dice.randrange(256)
    return wire.Tensor(spec.name, dtype, tuple(abs(size) for size in shape), data)


def any_value(dice: random.Random) -> wire.ParameterValue:
    values = (dice.choice(NUMBERS), dice.random(), float("nan"), True, dice.choice(TEXTS).decode("utf-8", "replace"))
    return dice.choice(values)


def any_request(dice: random.Random) -> wire.Request:
    prompt = wire.Tensor("text_input", int(DataType.BYTES), (1,), wire.bytes_tensor([b"def add(a, b):"]))
    inputs = [prompt] if dice.random() < 0.8 else []
    inputs += [any_tensor(dice) for _ in range(dice.randrange(3))]
    names = [*NAMES, "n", "logprobs", "guided_decoding", "sampling_parameters", "no such name", "timeout", "id"]
    return wire.Request(
        handle=dice.getrandbits(64),
        arrival_ns=0,
        timeout_us=dice.choice((0, 1, 10**9)),
        request_id=dice.choice(("", "one")),
        requested_outputs=tuple(dice.sample(OUTPUTS, dice.randrange(3))),
        inputs=tuple(inputs),
        parameters={dice.choice(names): any_value(dice) for _ in range(dice.randrange(4))},
    )


def damaged(payload: bytes, dice: random.Random) -> bytes:
    """As it is, cut, prolonged, or with bytes changed: never the handle, which the server itself writes."""
    handle, rest = payload[:8], bytearray(payload[8:])
    kind = dice.randrange(5)
    if kind == 1:
        del rest[dice.randrange(len(rest)) :]
    elif kind == 2:
        rest += dice.randbytes(dice.randrange(1, 9))
    elif kind >= 3:
        for _ in range(dice.randrange(1, 5)):
            rest[dice.randrange(len(rest))] = dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))
    return handle + bytes(rest)


def read_one(payload: bytes, config: EngineConfig, counts: Counts) -> None:
    """Raises whatever is not foreseen."""
    answers: list[bytes] = []
    counts.cases += 1
    raw = read_request(payload, answers.append)
    if raw is None:
        [response] = backend_wire.decode_responses(backend_wire.payload_of(answers[0]))
        assert response.handle == int.from_bytes(payload[:8], "little") and response.error_code
        counts.unreadable += 1
        return
    assert not answers and raw.handle == int.from_bytes(payload[:8], "little")
    try:
        parse_request(replace(raw, arrival_ns=0), config, TOKENIZER)
        counts.accepted += 1
    except RequestError as error:
        assert str(error).startswith(error.field)
        counts.refused += 1


def fuzz(seconds: float, seed: int = 0) -> Counts:
    """Read frames for so long. Raises AssertionError with the frame that shows a defect."""
    dice, counts, deadline = random.Random(seed), Counts(), time.monotonic() + seconds
    logging.disable(logging.CRITICAL)  # each unreadable frame is logged with its traceback
    try:
        while time.monotonic() < deadline:
            payload = damaged(backend_wire.payload_of(backend_wire.encode_request(any_request(dice))), dice)
            try:
                read_one(payload, dice.choice(CONFIGS), counts)
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}; frame {payload.hex()}") from error
    finally:
        logging.disable(logging.NOTSET)
    return counts
