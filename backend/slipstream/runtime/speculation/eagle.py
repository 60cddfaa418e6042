"""EAGLE: a head of one layer drafts a tree that grows where it is surest of itself (EAGLE-2), from EAGLE-1 or -3 heads.

Level by level the eagle_top_k likeliest nodes are fed to the head, each seeing its own branch; of all guesses the
likeliest num_draft_tokens are verified. The tree is built on the device and read once. What is fed is fed again at each
level, one layer over a few rows, so that a branch needs no cache of its own. Source: arXiv:2406.16858.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from slipstream.core.drafts import MAX_DRAFT_TOKENS
from slipstream.core.errors import ConfigError
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.nn.checkpoint_path import resolve_checkpoint
from slipstream.nn.heads.eagle import FIELD, EagleHead
from slipstream.runtime.host_copy import HostCopy, to_device
from slipstream.runtime.kv_pool import allocate_pool
from slipstream.runtime.speculation.draft_batch import Span
from slipstream.runtime.speculation.follower import Follower
from slipstream.runtime.speculation.proposer import PROPOSERS, Drafts, StepResult, Surroundings, Wish

NUM_DRAFTS = 15


class _Tree:
    """The nodes of all requests' trees, on the device. A node is a guess; those fed to the head are `beams`.

    All [num_requests, number of nodes]: tokens, scores (log-probability of the whole branch), parents (place of a node,
    -1 the root). Nodes stand in the order of their levels.
    """

    def __init__(self, tokens: torch.Tensor, scores: torch.Tensor) -> None:
        self.tokens, self.scores = tokens, scores
        self.parents = torch.full_like(tokens, -1)
        self.beams = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)  # of the last level
        self.beam_scores = scores

    def grow(self, tokens: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """Give each beam its guesses, [num_requests, num_beams, top_k], and take the best of all as the next beams.

        Returns of each new beam the place of its parent among the old ones, [num_requests, top_k].
        """
        top_k = tokens.shape[2]
        scores = (self.beam_scores[..., None] + log_probs).flatten(1)
        first = self.tokens.shape[1]
        self.tokens = torch.cat([self.tokens, tokens.flatten(1)], dim=1)
        self.scores = torch.cat([self.scores, scores], dim=1)
        self.parents = torch.cat([self.parents, self.beams.repeat_interleave(top_k, dim=1)], dim=1)
        self.beam_scores, best = scores.topk(top_k, dim=1)
        self.beams = first + best
        return best // top_k

    def best(self, num_nodes: int) -> torch.Tensor:
        """[num_requests, 3, up to num_nodes]: places, tokens and parents of the likeliest nodes, by place."""
        chosen = self.scores.topk(min(num_nodes, self.scores.shape[1]), dim=1).indices.sort(dim=1).values
        return torch.stack([chosen, self.tokens.gather(1, chosen), self.parents.gather(1, chosen)], dim=1)


@PROPOSERS.register("eagle")
class EagleProposer:
    drafts_trees = True

    def __init__(self, surroundings: Surroundings) -> None:
        config, target = surroundings.config, surroundings.target
        assert target is not None
        speculation, num_positions = config.speculation, surroundings.plan.max_model_len
        if speculation.eagle_head:
            self._head = EagleHead.load(target, Path(resolve_checkpoint(speculation.eagle_head)), num_positions)
        elif config.model.load_format == "dummy":
            self._head = EagleHead.dummy(target, num_positions)
        else:
            raise ConfigError(FIELD, "", "needed for speculative_method eagle: the folder of the head")
        target.feature_layers = self._head.feature_layers
        self._device = surroundings.hardware.device
        self._top_k, self._depth = speculation.eagle_top_k, speculation.eagle_depth
        num_fed = self._top_k * (self._depth - 1)
        if num_fed >= MAX_DRAFT_TOKENS:
            accepted = f"(eagle_depth - 1) * eagle_top_k below {MAX_DRAFT_TOKENS}"
            raise ConfigError("eagle_depth", self._depth, f"with eagle_top_k={self._top_k}, accepted: {accepted}")
        chain = self._depth if self._top_k == 1 else NUM_DRAFTS
        self.num_drafts = speculation.num_draft_tokens or chain
        self.num_scratch_slots = num_fed + 1
        (self._cache,) = allocate_pool(self._head.spec, surroundings.hardware, surroundings.plan).layers
        self._follower = Follower("eagle", surroundings)

    @staticmethod
    def refusal(params: SamplingParams) -> str | None:
        return None

    @torch.inference_mode()
    def propose(self, result: StepResult, wishes: Sequence[Wish]) -> list[Drafts]:
        followed = self._follower.follow(result)
        drafts = [Drafts() for _ in wishes]
        if followed is None:
            return drafts
        assert result.hidden is not None
        features = self._head.first_features(result.hidden[to_device(followed.rows, torch.int64, self._device)])
        out = self._head.forward(followed.batch, features, self._cache)
        live = [place for place, wish in enumerate(wishes) if wish.has_scratch and wish.computed in followed.last_rows]
        if live:
            chosen = [wishes[place] for place in live]
            ends = [followed.last_rows[wish.computed] for wish in chosen]
            for place, tree in zip(live, self._trees(chosen, out[to_device(ends, torch.int64, self._device)])):
                drafts[place] = tree
        return drafts

    def forget(self, requests: Sequence[Request]) -> None:
        self._follower.forget(requests)

    def _trees(self, wishes: Sequence[Wish], features: torch.Tensor) -> list[Drafts]:
        """features: the head's output at each request's last row, [num_requests, size]."""
        tokens, log_probs = self._guess(features)
        tree = _Tree(tokens, log_probs)
        num_requests, top_k = tokens.shape
        fed_tokens = tokens  # [num_requests, rows fed so far]
        fed_features = features[:, None].expand(-1, top_k, -1)
        bits = torch.arange(top_k, device=self._device).expand_as(tokens)
        masks = torch.ones_like(tokens) << bits
        for level in range(1, min(self._depth, max(wish.depth for wish in wishes))):
            out = self._feed(wishes, level, fed_tokens, fed_features, masks)[:, -top_k:]
            tokens, log_probs = (part.unflatten(0, (num_requests, top_k)) for part in self._guess(out.flatten(0, 1)))
            parents = tree.grow(tokens, log_probs)
            rows = level * top_k + bits
            masks = torch.cat([masks, masks[:, -top_k:].gather(1, parents) | (torch.ones_like(rows) << rows)], dim=1)
            fed_tokens = torch.cat([fed_tokens, tree.tokens.gather(1, tree.beams)], dim=1)
            of_parents = out.gather(1, parents[..., None].expand(-1, -1, out.shape[2]))
            fed_features = torch.cat([fed_features, of_parents], dim=1)
        (found,) = HostCopy((tree.best(max(wish.num_drafts for wish in wishes)),)).lists()
        return [_drafts(wish, *nodes) for wish, nodes in zip(wishes, found)]

    def _feed(
        self,
        wishes: Sequence[Wish],
        level: int,
        tokens: torch.Tensor,
        features: torch.Tensor,
        masks: torch.Tensor,
    ) -> torch.Tensor:
        """The head over all beams of `level` levels: [num_requests, rows, size]."""
        num_rows = tokens.shape[1]
        spans = [Span(wish.request, wish.request.num_tokens - 1, num_rows) for wish in wishes]
        depths = [row // self._top_k for row in range(num_rows)] * len(wishes)
        batch = self._follower.batches.build(spans, tokens.flatten(), depths, masks.flatten())
        return self._head.forward(batch, features.flatten(0, 1), self._cache).unflatten(0, (-1, num_rows))

    def _guess(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens after each row and their log-probabilities, [rows, top_k] each."""
        log_probs = torch.log_softmax(self._head.logits(features).float(), dim=-1)
        best = log_probs.topk(self._top_k, dim=-1)
        return self._head.token_ids(best.indices), best.values


def _drafts(wish: Wish, places: list[int], tokens: list[int], parents: list[int]) -> Drafts:
    """Nodes by falling level order, cut to what the request may have; a node without its parent falls away."""
    rows: dict[int, int] = {}
    depths: dict[int, int] = {-1: 0}
    drafts = Drafts()
    for place, token_id, parent in zip(places, tokens, parents):
        if parent in depths and depths[parent] < wish.depth and len(drafts.token_ids) < wish.num_drafts:
            depths[place] = depths[parent] + 1
            rows[place] = len(drafts.token_ids)
            drafts.token_ids.append(token_id)
            drafts.parents.append(rows.get(parent, -1))
    return drafts
