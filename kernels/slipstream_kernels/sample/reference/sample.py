"""sample in plain torch.  Works on chunks of rows that fit the cache; sorts only the tokens that the filters need."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slipstream_kernels.sample.metadata import SamplingMetadata

PIECE_ELEMENTS = 1 << 18
SORT_WIDTH = 256
LOG_ZERO = float("-inf")


def sample(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See ops.sample."""
    temperature, (top_k, top_p, min_p) = metadata.temperature, metadata.filters
    token_ids = torch.argmax(logits, dim=-1, out=out)
    if temperature is None:
        return token_ids
    assert seeds is not None and positions is not None
    # A row in which all tokens are forbidden has no distribution: it stays greedy.
    is_random = (temperature > 0) & (logits.gather(1, token_ids[:, None]).view(-1) > LOG_ZERO)
    random_rows = is_random.nonzero().view(-1)
    for rows in random_rows.split(max(1, PIECE_ELEMENTS // logits.shape[1])):
        x = logits[rows].float()
        # z <= 0 and 0 at the maximum, so exp(z) never overflows however small the temperature.
        z = (x - x.amax(dim=-1, keepdim=True)) * (1.0 / temperature[rows])[:, None]
        kept = kept_tokens(x, z, _pick(top_k, rows), _pick(top_p, rows), _pick(min_p, rows))
        token_ids[rows] = _draw(z, kept, seeds[rows], positions[rows] + 1)
    return token_ids


def _pick(values: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[rows]


def kept_tokens(
    x: torch.Tensor,
    z: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
) -> torch.Tensor | None:
    """Which tokens survive the filters, [n, vocab_size] bool; None if no row filters."""
    kept = None
    cut = _sorted_cut(x, z, top_k, top_p)
    if cut is not None:
        kept = x >= cut[:, None]
    if min_p is not None and bool((min_p > 0).any()):
        above = z >= min_p.clamp(min=0).log()[:, None]
        kept = above if kept is None else kept & above
    return kept


def _sorted_cut(
    x: torch.Tensor, z: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor | None:
    """The smallest logit kept by top-k, then top-p, per row [n]; None if no row uses either."""
    n, vocab_size = x.shape
    k = torch.full((n,), vocab_size, device=x.device) if top_k is None else top_k.long()
    k = torch.where((k <= 0) | (k > vocab_size), vocab_size, k)
    p = torch.ones(n, device=x.device) if top_p is None else top_p
    p = torch.where(p >= 1, float("inf"), p)
    rows = ((k < vocab_size) | (p < 1)).nonzero().view(-1)
    if not rows.numel():
        return None
    cut = torch.full((n,), LOG_ZERO, device=x.device)
    # Sort the best few first: they suffice for most rows; repeat with a larger width for the others.
    widest_k = int((k * (k < vocab_size)).max())
    width = widest_k if bool((k[rows] < vocab_size).all()) else min(vocab_size, max(SORT_WIDTH, widest_k))
    while rows.numel():
        cut[rows], is_short = _cut_within(x[rows], z[rows], k[rows], p[rows], width)
        rows = rows[is_short]
        width = min(vocab_size, 8 * width)
    return cut


def _cut_within(
    x: torch.Tensor, z: torch.Tensor, k: torch.Tensor, p: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cut among the `width` best tokens of each row, and which rows need more.  p is inf where top-p is off."""
    vocab_size = x.shape[1]
    values, ids = torch.topk(x, width, dim=-1)
    last = (k - 1).clamp(max=width - 1)
    limits_p = p < 1
    if bool(limits_p.any()):
        kth = values.gather(1, last[:, None]).masked_fill_((k == vocab_size)[:, None], LOG_ZERO)
        # softmax reduces each row in the same order whatever n is (sum does not), and its maximum is 1 / total.
        total = 1.0 / torch.softmax(z.masked_fill(x < kth, LOG_ZERO), dim=-1).amax(dim=-1)
        mass_before = F.pad(z.gather(1, ids).exp_().cumsum(dim=-1), (1, 0))[:, :-1]
        last = torch.minimum(last, (mass_before < (p * total)[:, None]).sum(dim=-1).clamp(min=1) - 1)
    is_short = limits_p & (last == width - 1) & (k > width) & (width < vocab_size)
    return values.gather(1, last[:, None]).view(-1), is_short


def _draw(z: torch.Tensor, kept: torch.Tensor | None, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Gumbel-max over the kept tokens: argmax of z - log(E), E ~ Exp(1).  positions: of what is drawn.

    Noise is computed only for tokens that can win.
    """
    if kept is None:
        ids = torch.arange(z.shape[1], device=z.device, dtype=torch.int32)
        return (z - log_exponential(row_keys(seeds, positions)[..., None], ids)).argmax(dim=-1)
    rows, ids = kept.nonzero(as_tuple=True)
    noise = log_exponential(row_keys(seeds, positions)[:, rows], ids.int())
    scores = torch.full_like(z, LOG_ZERO)
    scores[rows, ids] = z[rows, ids] - noise
    return scores.argmax(dim=-1)


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """64 bits of key per row: [2, n] int32 from int64 seeds and positions."""
    low, high, position = seeds.int(), (seeds >> 32).int(), positions.int()
    first = _mix(_mix(_mix(low) ^ high) ^ position)
    second = _mix(_mix(_mix(high ^ 0x5851F42D) ^ low) ^ position)
    return torch.stack((first, second))


def log_exponential(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """log of the Exp(1) noise of (row key, token id).

    31 bits of hash, most precise near 0, where the winning values are.
    """
    bits = _mix(_mix(ids * -1640531527 + keys[0]).bitwise_xor_(keys[1])).bitwise_and_(0x7FFFFFFF)
    uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """lowbias32, a bijection of 32 bits (source: nullprogram.com/blog/2018/07/31).  int32 products wrap;
    >> is made logical.
    """
    x = x ^ ((x >> 16) & 0xFFFF)
    x.mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15) & 0x1FFFF)
    x.mul_(0x846CA68B - (1 << 32))
    return x.bitwise_xor_((x >> 16) & 0xFFFF)
