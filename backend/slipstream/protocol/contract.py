"""One table of every tensor that Slipstream takes and gives, by task; declarations and documentation come from it.

Standard library only, no state. The rows are in settings.py, contract_generate.py and contract_tokenize.py.
client_settings.py and engine/tokenize_tasks.py read requests by them, build/make_docs.py writes docs/contracts.md.
"""

from __future__ import annotations

from typing import Any

from slipstream.core.wire_messages import OutputSpec as WireOutputSpec
from slipstream.protocol import contract_generate, contract_tokenize
from slipstream.protocol.tensor_spec import TYPE_NAMES, InputSpec, OutputSpec, TaskContract

GENERATE = TaskContract("generate", contract_generate.INPUTS, contract_generate.OUTPUTS, is_decoupled=True)
TOKENIZE = TaskContract(
    "tokenize", contract_tokenize.TOKENIZE_INPUTS, contract_tokenize.TOKENIZE_OUTPUTS, is_decoupled=False
)
DETOKENIZE = TaskContract(
    "detokenize", contract_tokenize.DETOKENIZE_INPUTS, contract_tokenize.DETOKENIZE_OUTPUTS, is_decoupled=False
)
TASKS = {contract.task: contract for contract in (GENERATE, TOKENIZE, DETOKENIZE)}

# For the READY frame: an output's index on the wire is its position here.
OUTPUTS: dict[str, tuple[WireOutputSpec, ...]] = {
    task: tuple(WireOutputSpec(spec.name, int(spec.dtype)) for spec in contract.outputs)
    for task, contract in TASKS.items()
}


def declarations() -> dict[str, Any]:
    """Inputs and outputs by task as Triton's ModelConfig JSON, with which the backend completes a configuration.

    max_batch_size is 0 and shapes are the vLLM backend's ([1], [n]). A config.pbtxt that says max_batch_size: 1
    keeps it and gets TensorRT-LLM's shapes ([1, 1], [1, n]) from the same dims: Triton then puts the batch in front.
    """
    return {task: _declaration(contract) for task, contract in TASKS.items()}


def _declaration(contract: TaskContract) -> dict[str, Any]:
    return {
        "input": [_input(spec) for spec in contract.inputs],
        "output": [_output(spec) for spec in contract.outputs],
        "max_batch_size": 0,
        "decoupled": contract.is_decoupled,
    }


def _input(spec: InputSpec) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": spec.name, "data_type": TYPE_NAMES[spec.dtype], "dims": list(spec.dims)}
    if spec.is_optional:
        entry["optional"] = True
    return entry


def _output(spec: OutputSpec) -> dict[str, Any]:
    return {"name": spec.name, "data_type": TYPE_NAMES[spec.dtype], "dims": list(spec.dims)}
