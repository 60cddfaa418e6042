"""Loads the target model, and what the parts of a start share. Engine thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.start_up import StartUp
from slipstream.nn.decoder import Decoder
from slipstream.nn.load import load_model
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.cores import set_threads
from slipstream.worker.hardware import Hardware
from slipstream.worker.residency import pages_without_holes

P = ParamSpec("P")
R = TypeVar("R")


def load_target(config: EngineConfig, spec: DecoderSpec, hardware: Hardware, phases: StartUp) -> Decoder:
    """The model, on its device; heads are made for it before its runner, whose graphs depend on them."""
    if (device := hardware.device).type == "cpu":
        set_threads(config.model.num_threads, hardware.parallel.num_ranks)
    else:
        torch.backends.cuda.preferred_blas_library("cublaslt")  # faster for 17 to 64 rows of 16 bits
    enter_device(device)
    with pages_without_holes(device):
        model = load_model(config.model, spec, device, hardware.dtype, hardware.kv_dtype, hardware.parallel)
    phases.join()
    finish_phase(phases, "weights", hardware)
    return model


def finish_phase(phases: StartUp, name: str, hardware: Hardware) -> None:
    if hardware.device.type == "cuda":
        torch.cuda.synchronize(hardware.device)
    phases.finish(name)
    hardware.parallel.note(name)


def in_inference_mode(call: Callable[P, R]) -> Callable[P, R]:
    """torch.inference_mode for a function of every step: a thread that is in it already, as one that makes all steps
    should be, does not enter it again, which takes 10 us of a step."""
    entering: Callable[P, R] = torch.inference_mode()(call)

    @wraps(call)
    def in_mode(*args: P.args, **kwargs: P.kwargs) -> R:
        return call(*args, **kwargs) if torch.is_inference_mode_enabled() else entering(*args, **kwargs)

    return in_mode


def enter_device(device: torch.device) -> None:
    """Make the device current for this thread: in a new thread the current device is the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
