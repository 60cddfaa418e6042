"""A fake of the module `tensorrt` on a CPU: the calls of its documented Python API that this project makes.

An engine's output is the sum of the input ids of each row, which detects padding in results.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
WIDTH = 16


class FakeContext:
    """Reads and writes memory by address, as the real one does."""

    def __init__(self) -> None:
        self.shape: tuple[int, int] = (0, 0)
        self.addresses: dict[str, int] = {}

    def set_input_shape(self, name: str, shape: tuple[int, int]) -> bool:
        assert name in INPUTS
        self.shape = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return True

    def get_tensor_shape(self, name: str) -> tuple[int, int]:
        assert name == "output"
        return (self.shape[0], WIDTH)

    def run(self) -> None:
        import ctypes

        rows, tokens = self.shape
        ids = (ctypes.c_int64 * (rows * tokens)).from_address(self.addresses["input_ids"])
        sums = torch.tensor(list(ids)).reshape(rows, tokens).sum(1, keepdim=True).float().repeat(1, WIDTH).contiguous()
        ctypes.memmove(self.addresses["output"], sums.data_ptr(), sums.numel() * 4)


class FakeTensorRt(ModuleType):
    """One build and its engine; lower-case attributes record the requested options."""

    __version__ = "10.0"

    def __init__(self) -> None:
        super().__init__("tensorrt")
        self.flags: list[str] = []
        self.profiles: dict[str, Any] = {}
        self.contexts: list[FakeContext] = []
        self.is_readable = True
        self.parses = True
        self.TensorIOMode = SimpleNamespace(INPUT="input", OUTPUT="output")
        self.MemoryPoolType = SimpleNamespace(WORKSPACE="workspace")
        self.BuilderFlag = SimpleNamespace(FP16="FP16")
        self.Logger = type("Logger", (), {"WARNING": 2, "__init__": lambda logger, level: None})

    def Runtime(self, logger: object) -> Any:
        return SimpleNamespace(deserialize_cuda_engine=lambda plan: self._engine() if self.is_readable else None)

    def _engine(self) -> Any:
        names = [*INPUTS, "output"]
        return SimpleNamespace(
            num_io_tensors=len(names),
            get_tensor_name=lambda index: names[index],
            get_tensor_mode=lambda name: "input" if name in INPUTS else "output",
            get_tensor_profile_shape=lambda name, profile: self.profiles[name],
            create_execution_context=self._context,
        )

    def _context(self) -> FakeContext:
        self.contexts.append(FakeContext())
        return self.contexts[-1]

    def Builder(self, logger: object) -> Any:
        profile = SimpleNamespace(set_shape=lambda name, *shapes: self.profiles.update({name: shapes}))
        cache = SimpleNamespace(serialize=lambda: b"timings")
        config = SimpleNamespace(
            set_memory_pool_limit=lambda pool, size: None,
            set_flag=self.flags.append,
            add_optimization_profile=lambda given: 0,
            create_timing_cache=lambda data: cache,
            set_timing_cache=lambda given, ignore_mismatch: True,
            get_timing_cache=lambda: cache,
        )
        return SimpleNamespace(
            create_network=lambda flags: SimpleNamespace(),
            create_builder_config=lambda: config,
            create_optimization_profile=lambda: profile,
            build_serialized_network=lambda network, given: b"plan",
        )

    def OnnxParser(self, network: object, logger: object) -> Any:
        return SimpleNamespace(
            parse_from_file=lambda path: self.parses, num_errors=1, get_error=lambda index: "unsupported operator"
        )
