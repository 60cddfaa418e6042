"""EAGLE: a head of one layer drafts a tree that grows at its most probable nodes (EAGLE-2); heads are EAGLE-1 or -3.

At each level the eagle_top_k most probable nodes are fed to the head, each attending to its own branch. The most
probable num_draft_tokens of all candidates are verified. The tree is built on the device and read once. Each level
feeds all earlier rows again (one layer, a few rows), so that a branch needs no KV cache. With eagle_top_k=1 the tree is
a chain, and each token is fed once. Source: arXiv:2406.16858.
"""

from __future__ import annotations

from typing import Any

import torch
from slipstream_kernels import ops

from slipstream.core.draft_methods import EagleOptions
from slipstream.core.drafts import MAX_DRAFT_TOKENS
from slipstream.core.errors import ConfigError
from slipstream.nn.batch import ForwardBatch
from slipstream.nn.decoder import Decoder
from slipstream.nn.heads.eagle import EagleHead
from slipstream.worker.interface import DraftBudget, DraftTokens
from slipstream.worker.spec_decode.autoregressive_head import AutoregressiveHead
from slipstream.worker.spec_decode.interface import PROPOSERS, SpeculatorContext, read_head
from slipstream.worker.spec_decode.planning import DraftMemory, Planning

NUM_DRAFTS = 15
_LEVEL_STEP = 1e-4  # penalty per level, so that a node of probability 1 still ranks below its parent


class _Tree:
    """The nodes of all requests' trees, on the device. A node is a candidate token; those fed to the head are `beams`.

    All [num_requests, number of nodes]: tokens, scores (log-probability of the whole branch), parents (index of a node,
    -1 the root). Nodes stand in the order of their levels.
    """

    def __init__(self, tokens: torch.Tensor, scores: torch.Tensor) -> None:
        self.tokens, self.scores = tokens, scores
        self.parents = torch.full_like(tokens, -1)
        self._top_k, self._num_levels = tokens.shape[1], 1
        self.beams = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)  # of the last level
        self.beam_scores = scores

    def grow(self, tokens: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """Give each beam its candidates, [num_requests, num_beams, top_k], and take the best of all as the next beams.

        Returns of each new beam the index of its parent among the old ones, [num_requests, top_k].
        """
        top_k = self._top_k
        self._num_levels += 1
        scores = (self.beam_scores[..., None] + log_probs).flatten(1)
        first = self.tokens.shape[1]
        self.tokens = torch.cat([self.tokens, tokens.flatten(1)], dim=1)
        self.scores = torch.cat([self.scores, scores], dim=1)
        self.parents = torch.cat([self.parents, self.beams.repeat_interleave(top_k, dim=1)], dim=1)
        self.beam_scores, best = scores.topk(top_k, dim=1)
        self.beams = first + best
        return best // top_k

    def best(self, num_nodes: int) -> torch.Tensor:
        """[num_requests, 5, up to num_nodes]: of the likeliest nodes, the likeliest first, their indices, tokens,
        parents, mask words as rows of a verification, and depths. A parent stands before its children."""
        levels = torch.arange(self.scores.shape[1], device=self.scores.device)
        levels = torch.where(levels < self._top_k, 0, (levels - self._top_k) // self._top_k**2 + 1)
        nodes = min(num_nodes, self.scores.shape[1])
        chosen = (self.scores - _LEVEL_STEP * levels).topk(nodes, dim=1).indices
        parents = self.parents.gather(1, chosen)
        is_parent = (chosen[:, None, :] == parents[:, :, None]).long()
        own = 1 + (torch.full_like(chosen[:1], 2) << torch.arange(nodes, device=chosen.device))
        words = own.expand_as(chosen)
        for _ in range(self._num_levels - 1):
            words = own | (is_parent * words[:, None, :]).sum(dim=2)
        return torch.stack([chosen, self.tokens.gather(1, chosen), parents, words, levels[chosen] + 1], dim=1)


@PROPOSERS.register("eagle")
class EagleDrafter(AutoregressiveHead):
    def __init__(self, context: SpeculatorContext) -> None:
        target, speculation = context.target, context.config.speculation
        self._head = _load(context, target)
        super().__init__(context, self._head.spec)
        target.feature_layers = self._head.feature_layers
        options = speculation.options_of(EagleOptions)
        self._top_k, self._depth = options.eagle_top_k, options.eagle_depth
        self.drafts_trees = self._top_k > 1
        self.num_levels = self._depth
        num_fed = _num_fed(options)
        num_nodes = self._top_k + self._top_k**2 * (self._depth - 1)
        self.num_drafts = min(speculation.num_draft_tokens or NUM_DRAFTS, num_nodes)
        self.num_scratch_slots = num_fed + 1

    @staticmethod
    def planned(planning: Planning) -> DraftMemory:
        head = read_head(planning.config, "eagle", lambda folder: EagleHead.empty(planning.target, folder))
        _num_fed(planning.config.speculation.options_of(EagleOptions))
        return planning.memory_of(head.tensors(), head.spec)

    def drafts(self, wanted: DraftBudget, tokens: list[Any]) -> DraftTokens:
        """tokens: of a tree as _Tree.best gives them, of a chain its tokens."""
        if not wanted.has_scratch:
            return DraftTokens()
        if self.drafts_trees:
            return _cut(wanted, *tokens[:3])
        return DraftTokens(tokens[: min(wanted.num_drafts, wanted.depth)])

    def rows_of(self, tokens: torch.Tensor, num_drafts: int) -> ops.DraftRows:
        if not self.drafts_trees:
            return ops.DraftRows(tokens[:, :num_drafts])
        _, token_ids, _, words, depths = tokens[:, :, :num_drafts].unbind(dim=1)
        return ops.DraftRows(token_ids, words, depths)

    def _first_pass(self, batch: ForwardBatch, hidden: torch.Tensor) -> torch.Tensor:
        return self._head.forward(batch, self._head.first_features(hidden), self._cache)

    def _levels(self, batch: ForwardBatch, last: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `drafts`."""
        return self._tree(batch, last, states) if self.drafts_trees else self._chain(batch, last, states)

    def _chain(self, batch: ForwardBatch, last: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """[num_requests, num_drafts]."""
        levels = [self._likeliest(states)]
        for level in range(1, self.num_drafts):
            rows = self._after(batch, last, levels[-1], level - 1)
            states = self._head.forward(rows, states, self._cache)
            levels.append(self._likeliest(states))
        return torch.stack(levels, dim=1)

    def _likeliest(self, features: torch.Tensor) -> torch.Tensor:
        logits = self._head.logits(features)
        known = ops.greedy(logits).clamp(0, logits.shape[1] - 1)  # padding rows may hold any number
        return self._head.token_ids(known)

    def _tree(self, batch: ForwardBatch, last: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The nodes of each request's tree, as _Tree.best gives them."""
        tokens, log_probs = self._candidates(states)
        tree = _Tree(tokens, log_probs)
        num_requests, top_k = tokens.shape
        fed_tokens = tokens  # [num_requests, rows fed so far]
        fed_states = states[:, None].expand(-1, top_k, -1)
        bits = torch.arange(top_k, device=tokens.device).expand_as(tokens)
        masks = torch.ones_like(tokens) << bits
        for level in range(1, self._depth):
            rows = self._after(batch, last, fed_tokens.flatten(), 0, top_k, masks.flatten())
            out = self._head.forward(rows, fed_states.flatten(0, 1), self._cache).unflatten(0, (num_requests, -1))
            out = out[:, -top_k:]
            tokens, log_probs = (
                part.unflatten(0, (num_requests, top_k)) for part in self._candidates(out.flatten(0, 1))
            )
            parents = tree.grow(tokens, log_probs)
            indices = level * top_k + bits
            own = torch.ones_like(indices) << indices
            masks = torch.cat([masks, masks[:, -top_k:].gather(1, parents) | own], dim=1)
            fed_tokens = torch.cat([fed_tokens, tree.tokens.gather(1, tree.beams)], dim=1)
            of_parents = out.gather(1, parents[..., None].expand(-1, -1, out.shape[2]))
            fed_states = torch.cat([fed_states, of_parents], dim=1)
        return tree.best(self.num_drafts)

    def _candidates(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens after each row and their log-probabilities, [rows, top_k] each."""
        logits = self._head.logits(features)
        any_token = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        best = ops.top_logprobs(logits, self._top_k, any_token)
        known = best.token_ids.clamp(0, logits.shape[1] - 1)  # padding rows may hold any number
        return self._head.token_ids(known), best.values


def _load(context: SpeculatorContext, target: Decoder) -> EagleHead:
    num_positions = context.plan.max_model_len
    folder = read_head(context.config, "eagle", lambda folder: folder)
    return EagleHead.load(target, folder, num_positions)


def _num_fed(options: EagleOptions) -> int:
    """Rows that a tree feeds to the head behind its first. Raises ConfigError for more than a mask has bits."""
    num_fed = options.eagle_top_k * (options.eagle_depth - 1)
    if num_fed >= MAX_DRAFT_TOKENS:
        accepted = f"accepted: (eagle_depth - 1) * eagle_top_k below {MAX_DRAFT_TOKENS}"
        raise ConfigError("eagle_depth", options.eagle_depth, f"with eagle_top_k={options.eagle_top_k}, {accepted}")
    return num_fed


def _cut(wanted: DraftBudget, indices: list[int], tokens: list[int], parents: list[int]) -> DraftTokens:
    """Cut the nodes (most probable first) to the request's budget and depth. A node without its parent is dropped."""
    rows: dict[int, int] = {}
    depths: dict[int, int] = {-1: 0}
    drafts = DraftTokens()
    for index, token_id, parent in zip(indices, tokens, parents):
        if parent in depths and depths[parent] < wanted.depth and len(drafts.token_ids) < wanted.num_drafts:
            depths[index] = depths[parent] + 1
            rows[index] = len(drafts.token_ids)
            drafts.token_ids.append(token_id)
            drafts.parents.append(rows.get(parent, -1))
    return drafts
