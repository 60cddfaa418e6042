"""Ways to draft, filled by plain imports: a new one is a file here and a line below."""

# isort: off
from slipstream.runtime.speculation import draft_model, eagle, medusa, mtp, ngram  # noqa: F401  (register themselves)

from slipstream.runtime.speculation.proposer import PROPOSERS

# isort: on
__all__ = ["PROPOSERS"]
