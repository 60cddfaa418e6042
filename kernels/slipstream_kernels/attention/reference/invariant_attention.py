"""invariant_attention in plain torch: the references of paged and, where there are trees, of decode attention."""

from __future__ import annotations

from dataclasses import replace

from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.reference import decode_attention, paged_attention


def invariant_attention(call: AttentionCall) -> None:
    """See ops.invariant_attention; writes call.out.  Nothing is rounded."""
    if call.metadata.tree_mask is not None:
        return decode_attention.decode_attention(call)
    if call.options.key_mean is not None:
        call = replace(call, options=replace(call.options, key_mean=None))
    paged_attention.paged_attention(call)
