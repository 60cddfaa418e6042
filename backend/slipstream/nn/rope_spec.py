"""RopeSpec: a rotary embedding as data. The maths is in nn/rotary.py, the reading of configs in nn/models/rope.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of the first `rotary_dim` features of a head; the maths is in nn/rotary.py.

    type: default, linear, dynamic, yarn, llama3 or longrope; the fields below `factor` serve those that need them.
    short_factors, long_factors: of longrope, what divides each frequency where the longest sequence that is served is
    within original_max_position_embeddings, and beyond: one choice for all sequences, as keys are cached once.
    query_beta, query_length: a query at position p is multiplied by 1 + query_beta · ln(1 + ⌊p / query_length⌋) after
    its rotation, as in Ministral 3; 0: by nothing.
    longest: tokens that are served at most; 0: what the others allow.
    is_interleaved: features (0, 1), (2, 3), … turn together, instead of each with the one half of rotary_dim further.
    """

    type: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    is_interleaved: bool = False
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    query_beta: float = 0.0
    query_length: int = 0
    longest: int = 0

    def max_model_len(self, max_position_embeddings: int) -> int:
        """The longest sequence (tokens): linear and dynamic stretch max_position_embeddings, yarn its original length;
        a llama3 config states the stretched length already. At most `longest`."""
        length = int(max_position_embeddings * (self.factor if self.type in ("linear", "dynamic") else 1))
        if self.type == "yarn":
            length = max(length, int(self.original_max_position_embeddings * self.factor))
        return min(length, self.longest or length)
