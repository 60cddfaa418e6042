"""A prompt that the prefix cache takes for computed, so that steps behind a long context cost no prefill."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.kv_cache import KVCacheManager
from slipstream.core.prefix import Prefix
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams


def register_prefix(cache: KVCacheManager, token_ids: Sequence[int]) -> None:
    """Publish the full blocks of a prompt with whatever they hold. The pool must have room for them."""
    request = Request(list(token_ids), SamplingParams())
    cache.hash_prompt([request])
    cache.admit(request, Prefix([]))
    request.num_computed_tokens = len(token_ids)
    cache.commit(request)
    cache.free(request)
