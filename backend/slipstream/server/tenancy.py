"""Who calls, what that key may, and what it has used: priorities, cached prefixes, rates, sequences at once.

A Lease is one HTTP request's: guard.py begins and ends it, the endpoints ask it for sequences. Event loop thread.
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

if TYPE_CHECKING:
    from slipstream.server.catalog import Model
    from slipstream.server.generation import Generation, Response

_COUNTS = ("num_input_tokens", "num_output_tokens")
_CHARGED_AT_ONCE = 64  # tokens of a stream that are counted here before they are charged


class Tenants:
    """keys: none means that everybody may call, as one tenant without limits."""

    def __init__(self, keys: Sequence[ApiKey], max_priority: int, ledger: Ledger) -> None:
        self._keys, self._max_priority, self._ledger = keys, max_priority, ledger
        # Looked up under a secret of this process: how long it takes tells nothing of a key that is nearly right.
        self._secret = secrets.token_bytes(32)
        self._index_of = {self._blind(key.digest): index for index, key in enumerate(keys)}

    def anybody(self) -> Lease:
        return Lease(ApiKey("", b""), 0, self._max_priority, self._ledger)

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
        return Lease(self._keys[index], index, self._max_priority, self._ledger)

    def _blind(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


class Lease:
    def __init__(self, key: ApiKey, index: int, max_priority: int, ledger: Ledger) -> None:
        self._key, self._index, self._ledger = key, index, ledger
        self._max_priority = max_priority if key.max_priority is None else key.max_priority
        self._num_sequences = 0
        self._num_uncharged = 0

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
        """Count sequences that are about to run. Raises ApiError (429) if they are more than the key may have."""
        limit = self._key.max_num_seqs
        if limit and num_sequences > limit:
            message = f"The request has {num_sequences} sequences (n for each prompt), accepted: at most {limit}"
            raise ApiError(400, f"{message} (max_num_seqs of the key {self._key.name!r})", param="n")
        if self._key.digest and not self._ledger.enter(self._index, num_sequences, limit):
            running = self._ledger.num_sequences(self._index)
            message = f"{running} sequences of the key {self._key.name!r} are being generated"
            message += f", accepted: at most {limit} (max_num_seqs) with the {num_sequences} asked for; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)
        self._num_sequences += num_sequences if self._key.digest else 0

    def prepare(self, generations: Sequence[Generation], model: Model) -> None:
        """Give generations what the key says of priority and cached prefixes, and count them. Raises ApiError."""
        for generation in generations:
            self._set_priority(generation)
            self._set_salt(generation)
            if self._key.tokens_per_minute and model.outputs.issuperset(_COUNTS):
                generation.outputs += tuple(name for name in _COUNTS if name not in generation.outputs)
        self.enter(sum(generation.sampling.get("n", 1) for generation in generations))

    def end(self) -> None:
        self._charge()
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
                values = ("limit", limit), ("remaining", max(0, math.floor(limit - used + 1e-6)))
                pairs += [(f"x-ratelimit-{word}-{name}".encode(), b"%d" % value) for word, value in values]
                pairs.append((f"x-ratelimit-reset-{name}".encode(), b"%.3fs" % (used * MINUTE / limit)))
        return pairs

    # ---- tokens

    def meter(self) -> Meter | None:
        """What counts the tokens of one generation; None for a key without such a limit."""
        return Meter(self) if self._key.tokens_per_minute else None

    def add_tokens(self, count: int) -> None:
        self._num_uncharged += count
        if self._num_uncharged >= _CHARGED_AT_ONCE:
            self._charge()

    def _charge(self) -> None:
        if self._num_uncharged and self._key.tokens_per_minute:
            self._ledger.charge(TOKENS, self._index, self._key.tokens_per_minute, self._num_uncharged)
        self._num_uncharged = 0

    # ---- parts

    def _set_priority(self, generation: Generation) -> None:
        """A request that names none gets the model's, 0, or the most urgent that the key may have."""
        asked, most = generation.sampling.get("priority"), self._max_priority
        if asked is None:
            if most > 0:
                generation.sampling["priority"] = most
        elif asked < most:
            whose = f"max_priority of the key {self._key.name!r}" if self._key.digest else "--max-priority"
            message = f"priority: got {asked}, accepted: {most} or above, which is less urgent ({whose})"
            raise ApiError(400, message, param="priority")

    def _set_salt(self, generation: Generation) -> None:
        """The key's, and the client's own below it: no salt of one key reaches what another has cached."""
        salt, own = self._key.cache_salt, generation.sampling.get("cache_salt", "")
        if salt and own:
            generation.sampling["cache_salt"] = hmac.new(salt.encode(), own.encode(), "sha256").hexdigest()
        elif salt:
            generation.sampling["cache_salt"] = salt

    def _too_many(self, what: str, limit: int, wait_s: float) -> ApiError:
        message = f"Rate limit reached for the key {self._key.name!r}: {limit} {what} per minute. "
        message += f"Please try again in {wait_s:.1f} s."
        return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=max(1, math.ceil(wait_s)))


class Meter:
    """Tokens of one generation: its prompt once, and what each response brings."""

    def __init__(self, lease: Lease) -> None:
        self._lease, self._has_prompt = lease, False

    def add(self, response: Response) -> None:
        if _COUNTS[0] not in response.positions:
            return  # a model that counts no tokens
        count = sum(response.integers("num_output_tokens"))
        if not self._has_prompt:
            count += response.integer("num_input_tokens")
            self._has_prompt = True
        self._lease.add_tokens(count)
