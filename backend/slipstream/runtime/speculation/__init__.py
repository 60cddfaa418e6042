"""Ways to draft, filled by plain imports: a new one is a file here and a line below."""

# isort: off
from slipstream.runtime.speculation import ngram  # noqa: F401  (each registers itself)

# isort: on
