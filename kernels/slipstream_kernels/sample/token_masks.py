"""apply_token_masks: contract and choice.  Changes the logits in place, before sampling."""

from __future__ import annotations

import torch

from slipstream_kernels.select import require_shape, require_unit_stride, select


def apply_token_masks(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor, *, backend: str = "auto") -> None:
    """Set the logits of forbidden tokens to -inf, in place: bits[i] says which of row rows[i].  Other rows stay.

    logits: [num_rows, vocab_size] fp32; rows may be strided.  rows: [n] int64, distinct.  bits: contiguous [n,
    num_words] int32; bit b of word w is that of token 32 * w + b, 0 forbids.  Bits beyond the vocabulary mean nothing;
    logits beyond the bits stay.  The caller ensures 0 <= rows < num_rows; checked here only for rows in host memory,
    because a check on the device would synchronise.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"logits: {logits.dtype} {tuple(logits.shape)}, expected float32 [num_rows, vocab_size]")
    require_unit_stride("logits", logits)
    if rows.dim() != 1 or rows.dtype != torch.int64:
        raise ValueError(f"rows: {rows.dtype} {tuple(rows.shape)}, expected int64 [n]")
    if bits.dim() != 2 or bits.dtype != torch.int32 or not bits.is_contiguous():
        raise ValueError(f"bits: {bits.dtype} {tuple(bits.shape)}, expected contiguous int32 [n, num_words]")
    require_shape("bits", bits, (rows.shape[0], bits.shape[1]))
    if not rows.numel():
        return
    if rows.device.type == "cpu" and (int(rows.min()) < 0 or int(rows.max()) >= logits.shape[0]):
        raise ValueError(f"rows: from {int(rows.min())} to {int(rows.max())}, expected 0 to {logits.shape[0] - 1}")
    select("sample.token_masks", backend, logits).apply_token_masks(logits, rows, bits)
