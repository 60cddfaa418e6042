"""The adapter that a request brings with it or names by a number, as TensorRT-LLM's clients do."""

from __future__ import annotations

from slipstream.core.adapters import SentAdapter
from slipstream.core.setting_values import refuse
from slipstream.protocol.client_settings import Settings


def read_sent_adapter(settings: Settings) -> SentAdapter | None:
    """Raises RequestError for tensors without a number, or one without the other."""
    task_id, sent = settings.get("lora_task_id", 0), [settings.get(name) for name in ("lora_weights", "lora_config")]
    matrices = [matrix if matrix is not None and matrix.data else None for matrix in sent]
    if not task_id:
        if matrices != [None, None]:
            raise refuse("lora_task_id", 0, "the number of the adapter that lora_weights and lora_config are")
        return None
    if settings.get("lora_name"):
        raise refuse("lora_task_id", task_id, "0 beside lora_name: a request has one adapter")
    if (matrices[0] is None) != (matrices[1] is None):
        raise refuse("lora_config", None, "both lora_weights and lora_config, or none of them")
    return SentAdapter(task_id, *matrices)
