"""Applies the limits of API keys: priorities, cache salts, rates, concurrent sequences.

Each HTTP request has a Lease: guard.py begins and ends it, endpoints register their sequences with it. Event loop
thread.
"""

from __future__ import annotations

import hmac
import math
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.server.errors import RETRY_AFTER_S, ApiError
from slipstream.server.keys import ApiKey, digest_of
from slipstream.server.ledger import MINUTE, REQUESTS, TOKENS, Ledger
from slipstream.server.metrics import Metrics
from slipstream.server.request_log import RequestRecord
from slipstream.server.sampling import UNLIMITED_TOKENS

if TYPE_CHECKING:
    from slipstream.server.catalog import Model
    from slipstream.server.generation import Generation, Response

BYTES_PER_TOKEN = 4  # estimate for text prompts, until the model has counted the tokens
_COUNTS = ("num_input_tokens", "num_output_tokens")
_CHARGED_AT_ONCE = 64  # tokens of a stream per charge


class Tenants:
    """keys: empty: no key is needed, and all callers are one tenant without limits."""

    def __init__(self, keys: Sequence[ApiKey], max_priority: int, ledger: Ledger, metrics: Metrics) -> None:
        self._keys, self._max_priority, self._ledger, self._metrics = keys, max_priority, ledger, metrics
        # Keyed digests with a secret of this process, so that timing reveals nothing about keys.
        self._secret = secrets.token_bytes(32)
        self._index_of = {self._blind(key.digest): index for index, key in enumerate(keys)}

    def anybody(self) -> Lease:
        return self._lease(ApiKey("", b""), 0)

    def find(self, authorization: bytes) -> Lease:
        """The lease of a request's key. Raises ApiError (401) unless there are no keys."""
        if not self._keys:
            return self.anybody()
        scheme, _, key = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            message = "You did not provide an API key; send it as a header: Authorization: Bearer YOUR_KEY"
            raise ApiError(401, message, code="invalid_api_key")
        index = self._index_of.get(self._blind(digest_of(key.strip())))
        if index is None:
            raise ApiError(401, "Incorrect API key provided", code="invalid_api_key")
        return self._lease(self._keys[index], index)

    def _lease(self, key: ApiKey, index: int) -> Lease:
        return Lease(key, index, self._max_priority, self._ledger, self._metrics)

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


class Lease:
    """is_refused: the request was refused here and the reason counted."""

    def __init__(self, key: ApiKey, index: int, max_priority: int, ledger: Ledger, metrics: Metrics) -> None:
        self._key, self._index, self._ledger, self._metrics = key, index, ledger, metrics
        self._max_priority = max_priority if key.max_priority is None else key.max_priority
        self._num_sequences = 0
        self._num_uncharged = 0
        self._num_reserved = 0  # tokens reserved and not charged yet
        self._num_prompt = 0  # tokens of it reserved for prompts
        self.is_refused = False

    @property
    def owner(self) -> bytes:
        """Who may read again what this request leaves: its key, or everybody where there are none."""
        return self._key.digest

    @property
    def key_name(self) -> str:
        return self._key.name

    def count_refusal(self, reason: str) -> None:
        """reason: one of metrics.REASONS."""
        self._metrics.count_refusal(reason, self._key.name)
        self.is_refused = True

    # ---- once a request

    def begin(self) -> None:
        """Count a request. Raises ApiError (429) if the key has used up its requests or tokens of a minute."""
        key, limit = self._key, self._key.tokens_per_minute
        if limit and (excess := self._ledger.used(TOKENS, self._index, limit) - limit) >= 0:
            raise self._too_many("tokens", limit, (excess + 1) * MINUTE / limit)
        if limit := key.requests_per_minute:
            wait_s = self._ledger.use(REQUESTS, self._index, limit)
            if wait_s > 0:
                raise self._too_many("requests", limit, wait_s)

    def enter(self, num_sequences: int) -> None:
        """Count sequences that are about to run. Raises ApiError (429) if the key exceeds its limit."""
        limit = self._key.max_num_seqs
        if limit and num_sequences > limit:
            message = f"The request has {num_sequences} sequences (n for each prompt), accepted: at most {limit}"
            message += f" (max_num_seqs of the key {self._key.name!r})"
            self.count_refusal("max_num_seqs")
            raise ApiError(400, message, param="n")
        if self._key.digest and not self._ledger.enter(self._index, num_sequences, limit):
            running = self._ledger.num_sequences(self._index)
            message = f"{running} sequences of the key {self._key.name!r} are being generated"
            message += f", accepted: at most {limit} (max_num_seqs) with the {num_sequences} asked for; try again later"
            self.count_refusal("max_num_seqs")
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)
        self._num_sequences += num_sequences if self._key.digest else 0

    def prepare(self, generations: Sequence[Generation], model: Model) -> None:
        """Apply the key's settings to generations, count them and reserve their tokens. Raises ApiError."""
        for generation in generations:
            self._set_priority(generation)
            self._set_salt(generation)
            self._set_max_tokens(generation)
            if model.outputs.issuperset(_COUNTS):  # for the log, and the quota of the key
                generation.outputs += tuple(name for name in _COUNTS if name not in generation.outputs)
        self.enter(sum(generation.sampling.get("n", 1) for generation in generations))
        if model.outputs.issuperset(_COUNTS):
            self.reserve(
                sum(num_prompt_tokens(generation.prompt) for generation in generations),
                sum(most_output_tokens(generation, model) for generation in generations),
            )

    def reserve(self, num_prompt: int, num_output: int = 0) -> None:
        """Reserve the tokens that a request may cost. Raises ApiError (429) if its key has too few left.

        A request that may cost more than a minute's quota is admitted when the key has used none of it.
        """
        limit = self._key.tokens_per_minute
        if not limit:
            return
        count = min(num_prompt + num_output, limit)
        wait_s = self._ledger.reserve(self._index, limit, count)
        if wait_s > 0:
            held = self._ledger.num_reserved(self._index)
            about = (
                f"This request may cost {count} (prompt about {num_prompt}, answer at most {num_output}: max_tokens)"
            )
            raise self._too_many("tokens", limit, wait_s, f"{about} beside {held} of requests that run. ")
        self._num_reserved += count
        self._num_prompt = min(num_prompt, count)

    def abandon(self, is_streamed: bool) -> None:
        """Charge a request whose client left before the first response, which would have said what it cost: of a
        stream the prompt alone, of a whole answer all that is reserved, since the engine may have been at its end."""
        self.add_tokens(self._num_prompt if is_streamed else self._num_reserved)

    def end(self) -> None:
        self._charge()
        self._release(self._num_reserved)
        if self._num_sequences:
            self._ledger.leave(self._index, self._num_sequences)
            self._num_sequences = 0

    def headers(self) -> list[tuple[bytes, bytes]]:
        """x-ratelimit-*, by OpenAI's names, of the limits that the key has."""
        pairs: list[tuple[bytes, bytes]] = []
        limits = (REQUESTS, "requests", self._key.requests_per_minute), (TOKENS, "tokens", self._key.tokens_per_minute)
        for kind, name, limit in limits:
            if limit:
                used = self._ledger.used(kind, self._index, limit)
                used += self._ledger.num_reserved(self._index) if kind == TOKENS else 0
                values = ("limit", limit), ("remaining", max(0, math.floor(limit - used + 1e-6)))
                pairs += [(f"x-ratelimit-{word}-{name}".encode(), b"%d" % value) for word, value in values]
                pairs.append((f"x-ratelimit-reset-{name}".encode(), b"%.3fs" % (used * MINUTE / limit)))
        return pairs

    # ---- tokens

    def add_tokens(self, count: int) -> None:
        self._num_uncharged += count
        if self._num_uncharged >= _CHARGED_AT_ONCE:
            self._charge()

    def _charge(self) -> None:
        """Charge the generated tokens and release their reservation."""
        if self._num_uncharged and self._key.tokens_per_minute:
            self._ledger.charge(TOKENS, self._index, self._key.tokens_per_minute, self._num_uncharged)
            self._release(min(self._num_uncharged, self._num_reserved))
        self._num_uncharged = 0

    def _release(self, count: int) -> None:
        if count:
            self._ledger.release(self._index, count)
            self._num_reserved -= count

    # ---- parts

    def _set_priority(self, generation: Generation) -> None:
        """Without a priority of its own, a request gets 0, or the most urgent one that its key allows."""
        asked, most = generation.sampling.get("priority"), self._max_priority
        if asked is None:
            if most > 0:
                generation.sampling["priority"] = most
        elif asked < most:
            whose = f"max_priority of the key {self._key.name!r}" if self._key.digest else "--max-priority"
            message = f"priority: got {asked}, accepted: {most} or above, which is less urgent ({whose})"
            self.count_refusal("max_priority")
            raise ApiError(400, message, param="priority")

    def _set_salt(self, generation: Generation) -> None:
        """Combine the key's salt with the client's, so that keys cannot reach each other's cached prefixes."""
        salt, own = self._key.cache_salt, generation.sampling.get("cache_salt", "")
        if salt and own:
            generation.sampling["cache_salt"] = hmac.new(salt.encode(), own.encode(), "sha256").hexdigest()
        elif salt:
            generation.sampling["cache_salt"] = salt

    def _set_max_tokens(self, generation: Generation) -> None:
        if self._key.default_max_tokens and generation.sampling.get("max_tokens") in (None, UNLIMITED_TOKENS):
            generation.sampling["max_tokens"] = self._key.default_max_tokens

    def _too_many(self, what: str, limit: int, wait_s: float, why: str = "") -> ApiError:
        message = f"Rate limit reached for the key {self._key.name!r}: {limit} {what} per minute. {why}"
        message += f"Please try again in {wait_s:.1f} s."
        self.count_refusal(f"{what}_per_minute")
        return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=max(1, math.ceil(wait_s)))


def num_prompt_tokens(prompt: str | Sequence[int]) -> int:
    """Number of prompt tokens, estimated for text; the model's count is charged."""
    if not isinstance(prompt, str):
        return len(prompt)
    return -(-len(prompt.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def most_output_tokens(generation: Generation, model: Model) -> int:
    """Max output tokens over all sequences; without `max_tokens` the model's default, for chats what its length leaves
    behind the prompt."""
    asked = generation.sampling.get("max_tokens", model.default_max_tokens)
    fitting = (model.max_model_len or UNLIMITED_TOKENS) - num_prompt_tokens(generation.prompt)
    return generation.sampling.get("n", 1) * min(asked, max(1, fitting))


class Meter:
    """Counts the tokens of one generation: its prompt once, then those of each response; and notes how it ended."""

    def __init__(self, lease: Lease, record: RequestRecord) -> None:
        self._lease, self._record, self._has_prompt = lease, record, False

    def add(self, response: Response) -> None:
        self._record.end = response.text("finish_reason") or self._record.end
        if _COUNTS[0] not in response.positions:
            return  # a model that counts no tokens
        num_output = sum(response.integers("num_output_tokens"))
        num_prompt = 0 if self._has_prompt else response.integer("num_input_tokens")
        self._has_prompt = True
        self._record.count(num_prompt, num_output)
        self._lease.add_tokens(num_prompt + num_output)
