"""How often drafts are right, for benchmarks with random weights: per draft position, of the guess of each rank, given
that those before it were. Assumptions after published figures. Standard library only.

medusa: heads of Medusa-1 on Vicuna-7B (arXiv:2401.10774: next-next token about 60 % top-1, over 80 % top-5; the
published tree then takes some 2.5 tokens a step). mtp: DeepSeek-V3's 85-90 % for the second token (arXiv:2412.19437,
5.4.3), falling as one module is used again. eagle: about EAGLE-3 on Llama-3.1-8B (arXiv:2503.01840). ngram: measured
on held-out code. draft_model: a draft of a tenth the size.
"""

from __future__ import annotations

_TAIL = [0.03, 0.025, 0.02, 0.015, 0.012, 0.01, 0.01]
PROFILES: dict[str, list[list[float]]] = {
    "medusa": [[0.57, 0.10, 0.05, *_TAIL], [0.41, 0.09, 0.05, *_TAIL], [0.34, 0.08, 0.04, *_TAIL], [0.30, 0.07, 0.04]],
    "mtp": [[0.87], [0.75], [0.65]],
    "eagle": [[0.76, 0.08, 0.03, 0.02]] * 6,
    "ngram": [[0.79], [0.70], [0.65], [0.63], [0.62]],
    "draft_model": [[0.75]] * 4,
}
