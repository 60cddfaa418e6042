"""Ways to draft, filled by plain imports: a new one is a file here and a line below."""

# isort: off
from slipstream.worker.spec_decode import draft_model, eagle, medusa, mtp, ngram  # noqa: F401  (register themselves)

from slipstream.worker.spec_decode.interface import PROPOSERS

# isort: on
__all__ = ["PROPOSERS"]
