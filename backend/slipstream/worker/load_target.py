"""Loads the target model, and what the parts of a start share. Engine thread."""

from __future__ import annotations

import torch

from slipstream.core.config import EngineConfig
from slipstream.core.start_up import StartUp
from slipstream.nn.decoder import Decoder
from slipstream.nn.load import load_model
from slipstream.nn.spec import DecoderSpec
from slipstream.worker.cores import set_threads
from slipstream.worker.memory_plan import Hardware
from slipstream.worker.residency import pages_without_holes


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


def enter_device(device: torch.device) -> None:
    """Make the device current for this thread: in a new thread the current device is the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
