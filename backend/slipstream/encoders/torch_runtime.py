"""PyTorch as the runtime of an encoder, and the module that build/build_encoder.py exports."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from slipstream.core.errors import ConfigError
from slipstream.encoders.checkpoint import CLASSIFIER, Checkpoint


class EncoderModule(torch.nn.Module):
    """A checkpoint with its pooling: token ids -> logits, or vectors of length 1."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        from transformers import AutoModel, AutoModelForSequenceClassification
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # a server's log is no terminal
        self.is_classifier = checkpoint.kind == CLASSIFIER
        kind = AutoModelForSequenceClassification if self.is_classifier else AutoModel
        self.pooling = checkpoint.pooling
        # eager attention: the ONNX export of the fused one has shapes that depend on the mask
        self.model = kind.from_pretrained(
            checkpoint.folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        extra = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **extra)
        if self.is_classifier:
            return output.logits
        hidden = output.last_hidden_state
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        else:
            mask = attention_mask[:, :, None].to(hidden.dtype)
            pooled = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled, dim=-1)


class TorchRuntime:
    def __init__(self, checkpoint: Checkpoint, device: str, num_threads: int) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device", device, "PyTorch sees no GPU here; accepted: cpu, auto")
        if num_threads:
            torch.set_num_threads(num_threads)
        is_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        self._device = torch.device("cuda" if is_gpu else "cpu")
        self._module = EncoderModule(checkpoint).to(self._device)

    def run(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        with torch.inference_mode():
            tensors = {name: torch.from_numpy(array).to(self._device) for name, array in batch.items()}
            return self._module(**tensors).float().cpu().numpy()
