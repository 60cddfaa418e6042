"""What Triton itself refuses of a config.pbtxt, for `slipstream validate`: a load would end before our engine starts.

`declared` is Triton's ModelConfig message. Pure functions, apart from a look at the version folders and the GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.core.config_parse import refuse_sequences
from slipstream.core.errors import ConfigError
from slipstream.protocol.tensor_spec import TaskContract


def check_scheduling(declared: Any, task: TaskContract) -> None:
    """Raises ConfigError for ways of scheduling and caching that a model of this task cannot have."""
    chosen = declared.WhichOneof("scheduling_choice")
    if chosen == "sequence_batching":
        refuse_sequences()
    if chosen == "ensemble_scheduling":
        raise ConfigError("ensemble_scheduling", "given", "accepted: none with a backend; an ensemble has a platform")
    policy = declared.model_transaction_policy
    is_decoupled = task.is_decoupled and not (declared.HasField("model_transaction_policy") and not policy.decoupled)
    if declared.response_cache.enable and is_decoupled:
        told = "Response Cache does not currently support model cache with 'decoupled' transaction policy, Triton says"
        instead = "the KV cache reuses the prefixes of prompts (enable_prefix_caching)"
        raise ConfigError("response_cache", "enable: true", f"{told}; accepted: enable: false; {instead}")


def check_placement(declared: Any) -> None:
    """Raises ConfigError for instances on GPUs where there is none."""
    if "KIND_GPU" not in [type(group).Kind.Name(group.kind) for group in declared.instance_group]:
        return
    import torch

    if not torch.cuda.is_available():
        told = "this machine has no GPU that can be used; accepted here: KIND_CPU, KIND_MODEL, or leave kind out"
        raise ConfigError("instance_group", "KIND_GPU", told)


def check_dims(declared: Any) -> None:
    for side, given in (("input", declared.input), ("output", declared.output)):
        for entry in given:
            if not entry.dims:
                raise ConfigError(f"{side} {entry.name}", "", "must specify 'dims'; accepted: dims, or leave it out")


def served_version(declared: Any, folder: Path) -> int:
    """The newest version that the model's policy serves. Raises ConfigError when there is none."""
    versions = [int(entry.name) for entry in folder.iterdir() if entry.is_dir() and entry.name.isdigit()]
    if not versions:
        told = "it has no version folder, which Triton needs; make one, which may stay empty"
        raise ConfigError("model_dir", str(folder), f"{told}: mkdir {folder / '1'}")
    if declared.version_policy.WhichOneof("policy_choice") != "specific":
        return max(versions)
    wanted = list(declared.version_policy.specific.versions)
    served = set(wanted) & set(versions)
    if not served:
        found = f"at least one version must be available; the folder has {sorted(versions)}"
        raise ConfigError("version_policy", f"specific {wanted}", found)
    return max(served)
