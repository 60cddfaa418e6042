"""PyTorch as the runtime of an encoder, and the module that build/build_encoder.py exports."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch

from slipstream.core.errors import ConfigError
from slipstream.encoders.checkpoint import CLASSIFIER, Checkpoint
from slipstream.encoders.runtime import RuntimeSettings
from slipstream.encoders.static_shapes import Prepared, StaticShapes, captured

_log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_CPU_ROWS = 32  # beyond it, padding to the longest costs more on a CPU than a second run
MAX_GPU_ROWS = 256
MAX_GRAPH_TOKENS = 16384  # padded tokens of a run: beyond it the GPU, not the launches, takes the time


class EncoderModule(torch.nn.Module):
    """A checkpoint with its pooling: token ids -> logits, or vectors of length 1."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, attention: str | None = None
    ) -> None:
        """attention: Hugging Face's name of an implementation; None is the fastest that the model has."""
        super().__init__()
        from transformers import AutoModel, AutoModelForSequenceClassification
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # a server's log is no terminal
        self.is_classifier = checkpoint.kind == CLASSIFIER
        kind = AutoModelForSequenceClassification if self.is_classifier else AutoModel
        self.pooling = checkpoint.pooling
        self.model = kind.from_pretrained(
            checkpoint.folder, dtype=dtype, attn_implementation=attention, local_files_only=True
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
        return torch.nn.functional.normalize(pooled.float(), dim=-1)


class TorchRuntime:
    """On a GPU small runs are CUDA graphs of padded shapes."""

    def __init__(self, checkpoint: Checkpoint, settings: RuntimeSettings) -> None:
        """Raises ConfigError for a GPU that is not there, and for graphs of a model that cannot be captured."""
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device", settings.device, "PyTorch sees no GPU here; accepted: cpu, auto")
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        is_gpu = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
        if settings.cuda_graphs == "on" and not is_gpu:
            raise ConfigError("cuda_graphs", "on", "there is no GPU to capture on; accepted: auto, off")
        self._device = torch.device("cuda" if is_gpu else "cpu")
        automatic = "float16" if is_gpu else "float32"
        dtype = DTYPES[automatic if settings.dtype == "auto" else settings.dtype]
        self._module = EncoderModule(checkpoint, dtype).to(self._device)
        self._width = checkpoint.width
        self.max_rows = MAX_GPU_ROWS if is_gpu else MAX_CPU_ROWS
        self._shapes = StaticShapes(checkpoint, (self.max_rows, checkpoint.max_tokens), self._device, self._capture)
        self._has_graphs = False
        if is_gpu and settings.cuda_graphs != "off":
            self._pool = torch.cuda.graph_pool_handle()
            self._has_graphs = self._can_be_captured(checkpoint, settings.cuda_graphs == "on")

    def run(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        with torch.inference_mode():
            rows, tokens = self._shapes.padded(*batch["input_ids"].shape)
            if self._has_graphs and rows * tokens <= MAX_GRAPH_TOKENS:
                return self._shapes.run(batch)
            tensors = {name: torch.from_numpy(array).to(self._device) for name, array in batch.items()}
            return self._module(**tensors).float().cpu().numpy()

    def _can_be_captured(self, checkpoint: Checkpoint, is_demanded: bool) -> bool:
        """Whether a CUDA graph can be captured, tried on one text; models that read values on the host cannot."""
        batch = {name: np.ones((1, 2), np.int64) for name in checkpoint.input_names}
        try:
            with torch.inference_mode():
                self._shapes.run(batch)
        except RuntimeError as error:
            told = f"{checkpoint.folder} cannot be captured: {str(error).splitlines()[0]}"
            if is_demanded:
                raise ConfigError("cuda_graphs", "on", f"{told}; accepted: auto, off") from error
            _log.warning("%s; it runs without CUDA graphs", told)
            return False
        return True

    def _capture(self, inputs: dict[str, torch.Tensor]) -> Prepared:
        # without padding some models leave their mask out: what runs before the capture must be what is captured
        inputs["attention_mask"][:, -1] = 0
        inputs["attention_mask"][:, 0] = 1
        output = torch.empty((len(inputs["input_ids"]), self._width), device=self._device)

        def compute() -> None:
            output.copy_(self._module(**inputs))

        return Prepared(output, captured(compute, self._pool))
