"""A speculation method that is in this file alone: one row and one class. Run by tests/engine/test_made_up_method.py.

    python tests/support/made_up_method.py FOLDER    # model/ and projection/ in it; prints what was seen, as JSON

The row comes before the imports of the tables that are made from it, as the rows of core/draft_methods.py do.
"""

# ruff: noqa: E402
from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from slipstream.core.draft_methods import DRAFT_METHODS, DraftMethod, option
from slipstream.core.parameter import between


@dataclass(frozen=True)
class ProjectionOptions:
    projection: str = option("", "For `projected`: the folder of the matrix.", ("projector",))
    projection_depth: int = option(2, "Drafts of `projected` per step.", **between(1, 4))


DRAFT_METHODS.register("projected")(
    DraftMethod("projected", __name__, ProjectionOptions, "projection", "the folder of the matrix")
)

import torch
from slipstream import LLM, SamplingParams
from slipstream.cli import main as command
from slipstream.core.config_parse import config_from_values
from slipstream.core.errors import ConfigError, SlipstreamError
from slipstream.core.request import Request
from slipstream.core.stats import METRICS, Stats, accepted_metric, drafted_metric
from slipstream.nn.heads.tensors import copy_slot, fill, read_tensors
from slipstream.worker.interface import DraftBudget, DraftTokens
from slipstream.worker.launched_step import ComputedRows
from slipstream.worker.spec_decode.draft_graphs import GraphedHead
from slipstream.worker.spec_decode.interface import (
    PROPOSERS,
    SpeculatorContext,
    read_head,
)
from slipstream.worker.spec_decode.planning import DraftMemory, Planning
from slipstream_kernels import ops


@PROPOSERS.register("projected")
class ProjectedHead(GraphedHead):
    """Draft i is the likeliest token after the matrix was applied i + 1 times to the last hidden state."""

    drafts_trees = False

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__()
        self._target = context.target
        size, own = context.target.spec.hidden_size, context.target.context
        self._matrix = torch.empty(size, size, device=own.device, dtype=own.dtype)
        folder = read_head(context.config, "projected", lambda folder: folder)
        assert folder is not None
        fill("projection", folder, {"weight": copy_slot(self._matrix)}, read_tensors("projection", folder))
        self.num_levels = context.config.speculation.options_of(ProjectionOptions).projection_depth
        self.num_drafts = self.num_levels

    @staticmethod
    def refusal(params: SamplingParams) -> str | None:
        return "it drafts for greedy requests only" if params.temperature else None

    @staticmethod
    def planned(planning: Planning) -> DraftMemory:
        size = planning.target.spec.hidden_size
        return planning.memory_of([torch.empty(size, size, device="meta", dtype=planning.target.context.dtype)])

    def drafts(self, wanted: DraftBudget, tokens: list[int]) -> DraftTokens:
        return DraftTokens(tokens[: min(wanted.num_drafts, wanted.depth)])

    def rows_of(self, tokens: torch.Tensor, num_drafts: int) -> ops.DraftRows:
        return ops.DraftRows(tokens[:, :num_drafts])

    def _draft(self, rows: ComputedRows) -> torch.Tensor:
        hidden, levels = self._target.final(rows.hidden)[rows.last], []
        for _ in range(self.num_levels):
            hidden = hidden @ self._matrix.T
            levels.append(ops.greedy(self._target.lm_head(hidden)))
        return torch.stack(levels, dim=1)


def refusal_of(**values: object) -> str:
    try:
        config_from_values({"model": "m", "speculative_method": "projected", **values})
    except ConfigError as error:
        return str(error)
    return ""


def counted(stats: Stats) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for _ in range(2):  # what was published, and what was kept back
        counts.update({stats.specs[index].family: sum(values) for index, values in stats.drain()})
        stats.publish()
    return dict(counts)


def generated(model: Path, **parameters: object) -> dict[str, object]:
    greedy = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with LLM(str(model), device="cpu", num_blocks=32, max_model_len=256, **parameters) as llm:
        found: dict[str, object] = {"token_ids": llm.generate([[5, 6, 7]], greedy)[0].token_ids}
        found["counted"] = counted(llm.engine.stats)
        found["weight_bytes"] = llm.engine.memory_plan.weight_bytes
        try:
            llm.engine.submit(Request([5, 6, 7], SamplingParams(temperature=0.5)))
        except SlipstreamError as error:
            found["refusal"] = str(error)
    return found


def main(folder: Path) -> None:
    model, matrix = folder / "model", folder / "projection"
    (stored,) = read_tensors("projection", matrix).values()
    print(json.dumps({
        "matrix_bytes": stored.nbytes,
        "missing": refusal_of(),
        "no folder": refusal_of(projector=str(folder / "nowhere")),
        "out of bounds": refusal_of(projection=str(matrix), projection_depth=5),
        "metrics": [METRICS[index("projected", 1)].labels["method"] for index in (drafted_metric, accepted_metric)],
        "plain": generated(model),
        "drafted": generated(model, speculative_method="projected", projection=str(matrix), projection_depth=3),
        "validate": command(["validate", str(folder / "llm")]),
    }))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
