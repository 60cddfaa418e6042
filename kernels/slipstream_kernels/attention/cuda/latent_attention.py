"""Latent attention in CUDA: fills the kernels' arguments and launches them.  Hopper (compute capability 9.0) only.

No device value is read on the host, and the grid depends on shapes alone: CUDA-graph safe.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from slipstream_kernels.attention.arguments import MAX_QUERY_LEN
from slipstream_kernels.attention.latent_call import LatentCall
from slipstream_kernels.cuda.build import build_refusal, load
from slipstream_kernels.cuda.device import count_sms, hopper_refusal
from slipstream_kernels.cuda.launch import addresses, fields, launch
from slipstream_kernels.dependent_launch import launches_dependently

SOURCE = "sm90_latent_attention.cu"
RANK, ROPE_DIM = 512, 64
# Rows (tokens x heads) of a CTA, keys of a tile.
ROWS, KEYS = (16, 24, 32, 64), 64
FP8_ROWS = ("SLIPSTREAM_FP8_ROWS=1",)
# The costs of one sum per request lie where two tiles of keys come later.
MAX_REQUESTS = 2 * KEYS * (RANK + ROPE_DIM) // 2
# From so many requests on the CTA that leaves the last part of a unit adds up all: one after the other, and few.
MANY_REQUESTS = 16
# CTAs that take different rows of the same keys at the same time.
MAX_LANES = 4
POINTERS = (
    "q", "latent_cache", "out", "block_tables", "query_start_loc", "seq_lens", "tree_mask", "partial_out",
    "partial_state", "plan", "arrivals",
)  # fmt: skip
STRIDES = ("table_stride", "num_blocks")
COUNTS = (
    "num_tokens", "num_requests", "num_heads", "block_size_log2", "num_shares", "num_lanes", "unit_cost", "min_share",
    "slack", "is_dependent", "is_prefix_settled",
)  # fmt: skip


class LatentParams(ctypes.Structure):
    """csrc/params/latent_params.h, field by field."""

    _fields_ = [*fields(POINTERS, STRIDES, COUNTS), ("scale", ctypes.c_float)]


@dataclass(frozen=True)
class Schedule:
    """How the tiles of all keys are cut into shares: csrc/schedule/latent_work.cuh.

    unit_cost: what beginning and ending a CTA's rows takes, in tiles.  min_share: tiles of a share, at least; smaller
    ones make more parts to add up.  slack: tiles that a share of equal units may be longer, to be whole units or an
    even part of one.  rows: of a CTA.  is_joined: the last CTA adds up a unit's parts, not a second kernel.
    """

    num_shares: int
    num_lanes: int
    unit_cost: int = 1
    min_share: int = 3
    slack: int = 3
    rows: int = ROWS[-1]
    is_joined: bool = False


@dataclass(frozen=True)
class Workspace:
    """What the CTAs of one launch leave for each other; launches must follow each other (one stream).

    arrivals: how many parts of a unit are there, by the CTA of its first; zeros between launches.
    """

    partial_out: torch.Tensor
    partial_state: torch.Tensor
    arrivals: torch.Tensor


def refusal(call: LatentCall) -> str | None:
    """Why this version cannot take the call; None if it can."""
    if (reason := hopper_refusal(call.q.device, "q is")) is not None:
        return reason
    if call.q.dtype != torch.bfloat16 or not (call.cache.is_fp8 or call.rows.dtype == torch.bfloat16):
        return f"q is {call.q.dtype} and the cache {call.rows.dtype}, not bfloat16, the cache FP8 rows at most"
    if (call.rank, call.rope_dim) != (RANK, ROPE_DIM):
        return f"latents have {call.rank} + {call.rope_dim} features, not {RANK} + {ROPE_DIM}"
    num_blocks, _, block_size, _ = call.rows.shape
    if block_size < KEYS or block_size & (block_size - 1):
        return f"block_size {block_size} is not a power of two >= {KEYS}"
    if max(num_blocks * block_size, call.q.shape[0] * call.q.shape[1]) >= 1 << 31:
        return "the cache or q has 2^31 rows or more"
    if call.metadata.max_query_len > MAX_QUERY_LEN:
        return f"max_query_len {call.metadata.max_query_len} is more than {MAX_QUERY_LEN}"
    if call.metadata.num_requests > MAX_REQUESTS:
        return f"{call.metadata.num_requests} requests are more than {MAX_REQUESTS}"
    if call.q.data_ptr() % 16 or call.rows.data_ptr() % 16:
        return "q or the cache does not begin at a multiple of 16 bytes"
    return build_refusal(SOURCE, defines_of(call, rows_of(call)))


def rows_of(call: LatentCall) -> int:
    """Rows of a CTA: as few as a request of the mean number of rows needs."""
    rows_of_request = mean_rows(call)
    return next((rows for rows in ROWS if rows >= rows_of_request), ROWS[-1])


def mean_rows(call: LatentCall) -> int:
    """The mean number of rows of the call's requests, rounded up."""
    return -(-call.q.shape[0] * call.q.shape[1] // call.metadata.num_requests)


def defines_of(call: LatentCall, rows: int) -> tuple[str, ...]:
    """Macros of the variant for CTAs of so many rows and the rows of this cache."""
    of_rows = () if rows == ROWS[-1] else (f"SLIPSTREAM_ROWS={rows}",)
    return (*of_rows, *(FP8_ROWS if call.cache.is_fp8 else ()))


def variants() -> list[tuple[str, ...]]:
    """All variants, for building ahead of time."""
    of_rows = [(), *((f"SLIPSTREAM_ROWS={rows}",) for rows in ROWS[:-1])]
    return [(*defines, *fp8) for defines in of_rows for fp8 in ((), FP8_ROWS)]


def latent_attention(call: LatentCall) -> None:
    """See ops.latent_attention; writes call.out.  One launch, two for few requests."""
    if call.q.shape[0] == 0 or call.metadata.num_requests == 0:
        return
    schedule = choose_schedule(call, count_sms(call.q.device))
    run(call, schedule)


def run(call: LatentCall, schedule: Schedule) -> None:
    """The call with a given schedule, whose CTAs must fit on the device at once or run in any order."""
    device = call.q.device  # one workspace for all schedules of a device, which have as many CTAs as SMs or a few less
    space = workspace(device, max(count_sms(device), schedule.num_shares * schedule.num_lanes))
    params, _plan = arguments(call, schedule, space)
    launch("latent_attention", load(SOURCE, defines_of(call, schedule.rows)), params, device)


def choose_schedule(call: LatentCall, num_sms: int) -> Schedule:
    """One CTA to an SM; as many to a share as a request of the mean number of rows needs."""
    rows = rows_of(call)
    num_lanes = min(-(-mean_rows(call) // rows), MAX_LANES, num_sms)
    if call.metadata.num_requests < MANY_REQUESTS:
        return Schedule(num_sms // num_lanes, num_lanes, rows=rows)
    return Schedule(num_sms // num_lanes, num_lanes, unit_cost=2, min_share=6, rows=rows, is_joined=True)


def workspace_bytes(num_sms: int) -> int:
    """Bytes of a device's workspace, which it keeps."""
    return _workspace_rows(num_sms) * (RANK + 2) * 4 + num_sms * 4


def _workspace_rows(num_ctas: int) -> int:
    """A CTA leaves at most two parts: of the unit that came to it from another, and of the one that it hands on."""
    return 2 * num_ctas * ROWS[-1]


@lru_cache
def workspace(device: torch.device, num_ctas: int) -> Workspace:
    """The device's workspace, made on first use: run a step before capturing CUDA graphs."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("latent_attention: first use here lies inside a graph capture; run it once before")
    rows = _workspace_rows(num_ctas)
    return Workspace(
        partial_out=torch.empty(rows * RANK, dtype=torch.float32, device=device),
        partial_state=torch.empty(rows * 2, dtype=torch.float32, device=device),
        arrivals=torch.zeros(num_ctas, dtype=torch.int32, device=device),
    )


def arguments(call: LatentCall, schedule: Schedule, space: Workspace) -> tuple[LatentParams, torch.Tensor | None]:
    """The kernels' arguments, and the second one's tensor of this call alone, which must be kept until the launch."""
    metadata, (num_tokens, num_heads, _) = call.metadata, call.q.shape
    plan = None
    if not schedule.is_joined:
        plan = torch.empty(num_tokens * num_heads * 2, dtype=torch.int32, device=call.q.device)
    tensors = {
        "q": call.q, "latent_cache": call.rows, "out": call.out, "block_tables": metadata.block_tables,
        "query_start_loc": metadata.query_start_loc, "seq_lens": metadata.seq_lens, "tree_mask": metadata.tree_mask,
        "partial_out": space.partial_out, "partial_state": space.partial_state, "plan": plan,
        "arrivals": space.arrivals if schedule.is_joined else None,
    }  # fmt: skip
    params = LatentParams(
        **addresses(tensors),
        table_stride=metadata.block_tables.stride(0),
        num_blocks=call.rows.shape[0],
        num_tokens=num_tokens,
        num_requests=metadata.num_requests,
        num_heads=num_heads,
        block_size_log2=call.rows.shape[2].bit_length() - 1,
        num_shares=schedule.num_shares,
        num_lanes=schedule.num_lanes,
        unit_cost=schedule.unit_cost,
        min_share=schedule.min_share,
        slack=schedule.slack,
        is_dependent=launches_dependently(call.q.device),
        is_prefix_settled=metadata.is_prefix_settled,
        scale=call.scale,
    )
    return params, plan
