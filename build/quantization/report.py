"""Results of an evaluation as a Markdown table, as JSON and as a plot."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from quantization.measures import Measures


@dataclass(frozen=True)
class Result:
    """One combination. weights: method, with its group size if it has groups, or the name of a checkpoint."""

    weights: str
    kv: str
    measures: Measures
    weight_bytes: int
    seconds: float


def perplexity_change(result: Result, reference: Measures) -> float:
    """In per cent."""
    return 100 * (result.measures.perplexity / reference.perplexity - 1)


def table(results: list[Result], reference: Measures) -> str:
    """Markdown: a row per combination, compared with the reference."""
    lines = [
        "| weights | KV cache | MB of weights | perplexity | change | KL, nats | top-1 agreement |",
        "| --- | --- | --: | --: | --: | --: | --: |",
    ]
    for result in results:
        measures, change = result.measures, perplexity_change(result, reference)
        lines.append(
            f"| {result.weights} | {result.kv} | {result.weight_bytes / 1e6:.1f} | {measures.perplexity:.4f} "
            f"| {change:+.2f} % | {measures.divergence:.5f} | {100 * measures.agreement:.1f} % |"
        )
    return "\n".join(lines)


def write_json(results: list[Result], about: dict[str, object], path: Path) -> None:
    """about: what was evaluated on what."""
    path.write_text(json.dumps({**about, "results": [asdict(result) for result in results]}, indent=1) + "\n")


def draw(results: list[Result], reference: Measures, path: Path) -> None:
    """Divergence (logarithmic) of every kind of weights, a colour per KV type; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(result.weights for result in results))
    figure, axes = pyplot.subplots(figsize=(8, 1.5 + 0.3 * len(names)), layout="constrained")
    for kv in dict.fromkeys(result.kv for result in results):
        chosen = [result for result in results if result.kv == kv and result.measures.divergence > 0]
        places = [names.index(result.weights) for result in chosen]
        axes.scatter([result.measures.divergence for result in chosen], places, label=f"KV cache {kv}", s=28)
    axes.set(
        xscale="log", xlabel="KL to the unquantised model, nats a token", yticks=range(len(names)), yticklabels=names
    )
    axes.invert_yaxis()
    axes.set_title(f"perplexity of the unquantised model: {reference.perplexity:.3f}", fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
