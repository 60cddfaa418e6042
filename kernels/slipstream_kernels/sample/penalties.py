"""apply_penalties, apply_bias: contracts and choice.  Both change the logits in place, before sampling."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slipstream_kernels.select import require_shape, require_unit_stride, select


class Penalties(NamedTuple):
    """Penalties of each row, [num_rows] fp32, or None (no row uses it); 1, 0 and 0 leave a row alone."""

    repetition: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    frequency: torch.Tensor | None = None

    def of(self, rows: slice) -> Penalties:
        return Penalties(*(None if values is None else values[rows] for values in self))


def apply_penalties(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    prompt_lens: torch.Tensor,
    num_tokens: torch.Tensor,
    penalties: Penalties,
    *,
    backend: str = "auto",
) -> None:
    """Penalise seen tokens in place: repetition first, then frequency and presence.

    logits: [num_rows, vocab_size] fp32.  token_ids: [num_rows, max_tokens] int32 or int64; row r holds its prompt in
    [0, prompt_lens[r]) and its output in [prompt_lens[r], num_tokens[r]); the rest is ignored, repeats are allowed.
    prompt_lens, num_tokens: [num_rows] int32.  repetition (prompt + output, once per distinct token): l / r if l > 0
    else l * r. frequency and presence (output only): l - frequency * count - presence * (count > 0).
    Source: CTRL, arXiv:1909.05858 in Hugging Face's form; OpenAI API reference.
    """
    _check_logits(logits)
    num_rows = logits.shape[0]
    if token_ids.dim() != 2 or token_ids.shape[0] != num_rows or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"token_ids: {token_ids.dtype} {tuple(token_ids.shape)}, expected int32 or int64 [{num_rows}, max_tokens]"
        )
    require_unit_stride("token_ids", token_ids)
    for name, tensor in (("prompt_lens", prompt_lens), ("num_tokens", num_tokens)):
        require_shape(name, tensor, (num_rows,))
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name}: dtype {tensor.dtype}, expected int32")
    for name, values in penalties._asdict().items():
        if values is not None:
            require_shape(name, values, (num_rows,))
            if values.dtype != torch.float32:
                raise ValueError(f"{name}: dtype {values.dtype}, expected float32")
    if any(values is not None for values in penalties):
        implementation = select("sample.penalties", backend, logits)
        implementation.apply_penalties(logits, token_ids, prompt_lens, num_tokens, penalties)


def apply_bias(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor, *, backend: str = "auto"
) -> None:
    """Add values[i] to logits[rows[i], token_ids[i]], in place; -inf forbids a token (bad words, min_tokens).

    rows, token_ids: [n] int64, distinct pairs (the sum of repeated pairs depends on their order in fp32).  values:
    [n] fp32.  The caller ensures 0 <= rows < num_rows and 0 <= token_ids < vocab_size; checked here only for tensors in
    host memory, because a check on the device would synchronise.
    """
    _check_logits(logits)
    require_shape("token_ids", token_ids, rows.shape)
    require_shape("values", values, rows.shape)
    for name, tensor, dtype in (
        ("rows", rows, torch.int64),
        ("token_ids", token_ids, torch.int64),
        ("values", values, torch.float32),
    ):
        if tensor.dim() != 1 or tensor.dtype != dtype:
            raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} [n]")
    if rows.numel():
        for name, tensor, size in (("rows", rows, logits.shape[0]), ("token_ids", token_ids, logits.shape[1])):
            if tensor.device.type == "cpu" and (int(tensor.min()) < 0 or int(tensor.max()) >= size):
                raise ValueError(f"{name}: from {int(tensor.min())} to {int(tensor.max())}, expected 0 to {size - 1}")
        select("sample.penalties", backend, logits).apply_bias(logits, rows, token_ids, values)


def _check_logits(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(
            f"logits: {logits.dtype} {tuple(logits.shape)}, expected contiguous float32 [num_rows, vocab_size]"
        )
