"""Layered prefill: where even the shortest chunk of a prompt would make a step of decodes too long, steps take some of
its layers each. Engine thread.

Behind a long context a few tokens read all keys of all layers. Their rows wait between steps where the last layers left
them, so only the time of a step changes, not what is computed. The idea: arXiv:2510.08055.
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.core.request import Request

# A prompt's last token goes through all layers at once, as a token of a decode does.
REST = 1


@dataclass(frozen=True, slots=True)
class LayeredChunk:
    """Tokens of a prompt, from first_token on, that go through the layers first_layer to end_layer - 1 in this step."""

    request: Request
    first_token: int
    num_tokens: int
    first_layer: int
    end_layer: int


class LayeredPrefill:
    """The chunk that is underway; one at a time. num_layers: of the model; 0: prompts have no such chunks."""

    def __init__(self, num_layers: int = 0) -> None:
        self._num_layers = num_layers
        self._last: LayeredChunk | None = None
        self._num_preemptions = 0  # of its request, when it began

    def takes(self, request: Request, num_missing: int) -> bool:
        """Not with an adapter, given embeddings or log-probabilities of the prompt, nor its last tokens."""
        is_plain = request.adapter is None and request.prompt_rows is None and request.params.prompt_logprobs is None
        return self._num_layers > 0 and is_plain and num_missing > 2 * REST

    def underway(self, request: Request) -> LayeredChunk | None:
        """What has gone through some layers, unless the request was preempted meanwhile, or has gone on otherwise."""
        last = self._last
        if last is None or last.request is not request or last.first_token != request.num_computed_tokens:
            return None
        return last if self._num_preemptions == request.num_preemptions else None

    @staticmethod
    def length_of(most: int, num_missing: int) -> int:
        """Tokens of a new chunk: the last two share what is left, as the kernels for few rows read keys more slowly."""
        left = num_missing - REST
        return min(most, left) if left >= 2 * most or left <= most else -(-left // 2)

    def next(self, request: Request, num_tokens: int, weight: float, most: float) -> LayeredChunk:
        """Go on with the request's chunk, or begin one of num_tokens. weight: of a token. most: weight that fits; one
        layer does always. The steps that a chunk still takes share its layers evenly. With its last layer the chunk's
        tokens count as computed."""
        first_layer = 0
        if (last := self.underway(request)) is not None:
            num_tokens, first_layer = last.num_tokens, last.end_layer
        num_fitting = max(1, int(self._num_layers * most / (num_tokens * weight)))
        num_left = self._num_layers - first_layer
        end_layer = first_layer + -(-num_left // -(-num_left // num_fitting))
        chunk = LayeredChunk(request, request.num_computed_tokens, num_tokens, first_layer, end_layer)
        is_whole = end_layer == self._num_layers
        self._last, self._num_preemptions = None if is_whole else chunk, request.num_preemptions
        if is_whole:
            request.num_computed_tokens += num_tokens
        return chunk

    def share_of(self, chunk: LayeredChunk) -> float:
        """The part of a prompt chunk's work that these layers are."""
        return (chunk.end_layer - chunk.first_layer) / self._num_layers
