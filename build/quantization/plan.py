"""The plan of a quantisation: method, algorithms, format, their valid combinations, and the resulting config.json."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from slipstream.core.config import GROUP_SIZES
from slipstream.nn.models.module_lists import HEAD, matches
from slipstream.nn.models.quantization import LEFT_OUT
from slipstream.nn.quant.choose import MIXED
from torch import Tensor

from quantization.grids import Grid, fp8_block_grid, fp8_grid, int4_grid, int8_grid

METHODS = ("fp8", "block_wise_fp8", "wint8", "w8a8_int8", "wint4", "w4a8_fp8", *MIXED)
ALGORITHMS = ("awq", "gptq", "smoothquant")
FORMATS = ("compressed-tensors", "awq", "gptq")
INT4_METHODS = ("wint4", "w4a8_fp8")
CHANNEL = -1  # group size of one group a row, which is 0 in a plan
GROUPS = tuple(size for size in GROUP_SIZES if size)
# as wide as they are, since engines rename merged products; transformers finds the experts' group by their name in it
EXPERTS_TARGET = r"re:.*\.experts\..*"
TARGETS = (r"re:.*\.self_attn\..*", r"re:.*\.mlp\.[^.]*_proj$", r"re:.*\.shared_[^.]*\..*")


def targets_of(linears: list[str]) -> list[str]:
    """Targets of a config group that mean these modules: of attention, dense MLPs and shared experts."""
    return [target for target in TARGETS if any(matches(target, module) for module in linears)]


@dataclass(frozen=True)
class Kept:
    """What stays unquantised besides lm_head. modules: linears. layers: prefixes of modules that are copied unread."""

    modules: list[str]
    layers: list[str]

    @property
    def patterns(self) -> list[str]:
        """Regular expressions of the layers' modules."""
        return [rf"{re.escape(layer)}\..*" for layer in self.layers]


@dataclass(frozen=True)
class Plan:
    """algorithms: any of ALGORITHMS, applied in that order. group_size: 0 is one group a row.

    has_zeros: 4-bit weights with zero-points. smoothing: SmoothQuant's strength.
    """

    method: str
    algorithms: tuple[str, ...] = ()
    format: str = "compressed-tensors"
    group_size: int = 128
    has_zeros: bool = False
    smoothing: float = 0.5
    with_head: bool = False
    with_kv_scales: bool = False

    def check(self) -> None:
        """Raises ValueError for invalid combinations."""
        for kind, value, accepted in (
            ("method", self.method, METHODS), ("format", self.format, FORMATS),
            *(("algorithm", name, ALGORITHMS) for name in self.algorithms),
        ):  # fmt: skip
            if value not in accepted:
                raise ValueError(f"{kind}: {value!r} is not one of {', '.join(accepted)}")
        if self.format != "compressed-tensors" and self.method != "wint4":
            raise ValueError(f"format: {self.format} checkpoints hold wint4 only, not {self.method}")
        if self.format == "awq" and not self.has_zeros:
            raise ValueError("format: awq checkpoints hold zero-points; add --zeros")
        if self.format == "awq" and self.with_head:
            raise ValueError("format: awq checkpoints leave lm_head alone")
        if self.has_zeros and self.method != "wint4":
            raise ValueError(f"zeros: only of wint4, not of {self.method}")
        if "awq" in self.algorithms and self.of_experts.method not in INT4_METHODS:
            raise ValueError(f"algorithm: awq is for {', '.join((*INT4_METHODS, *MIXED))}, not {self.method}")
        if "smoothquant" in self.algorithms and self.method != "w8a8_int8":
            raise ValueError(f"algorithm: smoothquant is for w8a8_int8, not {self.method}")

    @property
    def of_experts(self) -> Plan:
        """The plan for experts."""
        return self._part(1)

    @property
    def of_linears(self) -> Plan:
        """The plan for all other linears; AWQ applies only to 4-bit weights."""
        return self._part(0)

    def _part(self, place: int) -> Plan:
        method = MIXED[self.method][place] if self.method in MIXED else self.method
        has_awq = method in INT4_METHODS
        return replace(
            self, method=method, algorithms=tuple(name for name in self.algorithms if has_awq or name != "awq")
        )

    @property
    def folds_factors(self) -> bool:
        """Whether an algorithm scales input features."""
        return not {"awq", "smoothquant"}.isdisjoint(self.algorithms)

    @property
    def layout(self) -> str:
        """How tensors are stored: awq, gptq or a format of compressed-tensors."""
        return _SCHEMES[self.method][2] if self.format == "compressed-tensors" else self.format

    @property
    def needs_text(self) -> bool:
        return bool(self.algorithms) or self.with_kv_scales

    def scale_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The dtype of stored scales: AWQ and GPTQ readers expect float16."""
        return model_dtype if self.format == "compressed-tensors" else torch.float16

    def grid(self, weight: Tensor, importance: Tensor | None, model_dtype: torch.dtype) -> Grid:
        """weight: [out, in] fp32. importance: [in], mean squares of the inputs."""
        scale_dtype = self.scale_dtype(model_dtype)
        if self.method in INT4_METHODS:
            return int4_grid(weight, self.group_size, self.has_zeros, importance, scale_dtype)
        if self.method in ("wint8", "w8a8_int8"):
            return int8_grid(weight, scale_dtype)
        return (fp8_grid if self.method == "fp8" else fp8_block_grid)(weight, scale_dtype)

    def config(self, linears: list[str], kept: Kept) -> dict[str, object]:
        """quantization_config of config.json. linears: modules that are quantised, without experts and lm_head."""
        if self.format == "compressed-tensors":
            return self._compressed_tensors(linears, kept)
        common = {"quant_method": self.format, "bits": 4, "group_size": self.group_size or -1}
        if self.format == "awq":
            left_out = [*kept.modules, *kept.layers]
            return {**common, "zero_point": True, "version": "gemm", "modules_to_not_convert": left_out or None}
        sym, rules = not self.has_zeros, [f"{re.escape(module)}$" for module in kept.modules] + kept.patterns
        dynamic = {"dynamic": {f"{LEFT_OUT}{rule}": {} for rule in rules}} if rules else {}
        own = {"sym": sym, "desc_act": False, "checkpoint_format": "gptq", "lm_head": self.with_head}
        return {**common, **own, **dynamic}

    def _compressed_tensors(self, linears: list[str], kept: Kept) -> dict[str, object]:
        groups = {"group_0": self._group(["Linear"])} if self.method not in MIXED else {
            "group_0": self.of_linears._group([*targets_of(linears), *([HEAD] if self.with_head else [])]),
            "group_1": self.of_experts._group([EXPERTS_TARGET]),
        }  # fmt: skip
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
        patterns = [f"re:{pattern}" for pattern in kept.patterns]
        return {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision" if self.method in MIXED else self.layout,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": [*kept.modules, *patterns, *([] if self.with_head else [HEAD])],
            "kv_cache_scheme": scheme if self.with_kv_scales else None,
        }

    def _group(self, targets: list[str]) -> dict[str, object]:
        weights, inputs, stored = _SCHEMES[self.method]
        weights = {"dynamic": False, "symmetric": not self.has_zeros, **weights}
        if self.method in INT4_METHODS:
            grouped = {"strategy": "group", "group_size": self.group_size}
            weights |= grouped if self.group_size else {"strategy": "channel"}
        return {"targets": targets, "weights": weights, "input_activations": inputs, "format": stored}


def _token(kind: str) -> dict[str, object]:
    return {"num_bits": 8, "type": kind, "strategy": "token", "symmetric": True, "dynamic": True}


# method -> weights, input_activations, format of compressed-tensors
_BLOCKS = {"strategy": "block", "block_structure": [128, 128]}
_SCHEMES: dict[str, tuple[dict[str, object], dict[str, object] | None, str]] = {
    "fp8": ({"num_bits": 8, "type": "float", "strategy": "channel"}, _token("float"), "float-quantized"),
    "block_wise_fp8": (
        {"num_bits": 8, "type": "float", **_BLOCKS},
        {**_token("float"), "strategy": "group", "group_size": 128},
        "float-quantized",
    ),
    "wint8": ({"num_bits": 8, "type": "int", "strategy": "channel"}, None, "pack-quantized"),
    "w8a8_int8": ({"num_bits": 8, "type": "int", "strategy": "channel"}, _token("int"), "int-quantized"),
    "wint4": ({"num_bits": 4, "type": "int"}, None, "pack-quantized"),
    "w4a8_fp8": ({"num_bits": 4, "type": "int"}, _token("float"), "pack-quantized"),
}
