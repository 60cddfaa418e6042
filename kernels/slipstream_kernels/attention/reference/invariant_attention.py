"""invariant_attention in plain torch: the references of paged and, where there are trees, of decode attention."""

from __future__ import annotations

from slipstream_kernels.attention.attention_call import AttentionCall
from slipstream_kernels.attention.decode_call import DecodeCall
from slipstream_kernels.attention.reference import decode_attention, paged_attention


def invariant_attention(call: DecodeCall, max_seq_len: int) -> None:
    """See ops.invariant_attention; writes call.out."""
    if call.tree_mask is not None:
        return decode_attention.decode_attention(call)
    fields = {name: value for name, value in vars(call).items() if name in AttentionCall.__dataclass_fields__}
    paged_attention.paged_attention(AttentionCall(**fields, max_seq_len=max_seq_len, num_kv_splits=None))
