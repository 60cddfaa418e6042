"""Which method a model's linear layers use: the configured one, or the one its checkpoint is stored in."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.core.config import ModelConfig
from slipstream.core.errors import ConfigError
from slipstream.nn.quant.fp8 import Fp8
from slipstream.nn.quant.fp8_block import BlockWiseFp8
from slipstream.nn.quant.method import QUANT_METHODS, QuantMethod
from slipstream.nn.spec import DecoderSpec
from slipstream.nn.stored_format import StoredFormat

AUTO, UNQUANTIZED = "auto", "none"
# what a StoredFormat.method is read by
STORED: dict[str, Callable[[StoredFormat], QuantMethod]] = {"fp8": Fp8, "block_wise_fp8": BlockWiseFp8}


def choose_method(config: ModelConfig, spec: DecoderSpec) -> tuple[str, QuantMethod, QuantMethod]:
    """(name, method of the layers' linears, method of lm_head).

    lm_head stays unquantised unless the checkpoint stores it quantised. Dummy weights have no stored layout: they are
    quantised as they are drawn. Raises ConfigError for an unknown method, or one that is not the checkpoint's.
    """
    stored, asked = spec.stored_format, "" if config.quantization == AUTO else config.quantization
    head = QUANT_METHODS.get(UNQUANTIZED)
    if stored is None:
        name = asked or UNQUANTIZED
        return name, QUANT_METHODS.get(name), head
    if asked not in ("", stored.method):
        reason = f"the checkpoint is stored in {stored.method}; accepted: {AUTO}, {stored.method}"
        raise ConfigError("quantization", asked, reason)
    is_dummy = config.load_format == "dummy"
    method: QuantMethod = QUANT_METHODS.get(stored.method) if is_dummy else STORED[stored.method](stored)
    return stored.method, method, method if stored.quantized_head else head
