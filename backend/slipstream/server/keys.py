"""API keys and their permissions, read from a file once at start. No state; any thread.

A file is a key a line, or JSON with settings per key (docs/gateway.md). Keys are kept as digests.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError
from slipstream.core.setting_values import MAX_INT32
from slipstream.core.settings import MAX_CACHE_SALT_BYTES

_OPTION = "--api-key-file"
_HEX = re.compile("[0-9a-f]{64}")
_JSON = re.compile(r"\s*(?:\{|\[\s*[{\"\]])")  # an object, or a list, which is refused
_LIMITS = {  # minimum values
    "max_priority": -MAX_INT32 - 1,
    "max_num_seqs": 0,
    "requests_per_minute": 0,
    "tokens_per_minute": 0,
    "default_max_tokens": 0,
}


@dataclass(frozen=True)
class ApiKey:
    """digest: SHA-256 of the key; b"" is for callers without a key. Limits: 0 is none.

    max_priority: the most urgent (lowest) priority of a request; None: the gateway's.
    default_max_tokens: `max_tokens` of requests without it; 0: the model's.
    cache_salt: separates the cached prefixes of this key; "" shares with all keys without a salt.
    """

    name: str
    digest: bytes
    max_priority: int | None = None
    max_num_seqs: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    default_max_tokens: int = 0
    cache_salt: str = ""


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def own_salt(digest: bytes) -> str:
    """The salt of a key without one; it cannot be computed without the key or its digest."""
    return hmac.new(digest, b"slipstream cache salt", "sha256").hexdigest()


def plain_key(key: str, number: int) -> ApiKey:
    digest = digest_of(key.encode("utf-8", "surrogateescape"))
    return ApiKey(f"key {number}", digest, cache_salt=own_salt(digest))


def read_keys(path: Path | None, given: Sequence[str] = ()) -> tuple[ApiKey, ...]:
    """Keys of --api-key, then of the file. Raises ConfigError for a file without keys and for duplicates."""
    if "" in given:
        raise ConfigError("--api-key", "", "accepted: a key that is not empty")
    keys = [plain_key(key, number) for number, key in enumerate(given, 1)]
    if path is not None:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(_OPTION, str(path), f"cannot be read: {error}") from None
        read = _from_json(path, text) if _JSON.match(text) else _from_lines(text)
        if not read:
            raise ConfigError(_OPTION, str(path), "holds no key; without the option everybody may call")
        keys += read
        if len({key.name for key in read}) < len(read):
            raise ConfigError(_OPTION, str(path), "has one name twice, accepted: a name for each key")
    if len({key.digest for key in keys}) < len(keys):
        raise ConfigError(_OPTION, str(path or ""), "has one key twice")
    return tuple(keys)


def read_admin_digest(path: Path | None) -> bytes:
    """The digest of the one key in the file of --admin-key-file; b"" without one. Raises ConfigError."""
    if path is None:
        return b""
    try:
        keys = path.read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--admin-key-file", str(path), f"cannot be read: {error}") from None
    if len(keys) != 1:
        raise ConfigError("--admin-key-file", str(path), f"holds {len(keys)} keys, accepted: one")
    return digest_of(keys[0].encode("utf-8"))


def _from_lines(text: str) -> list[ApiKey]:
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    return [plain_key(key, number) for number, key in enumerate(keys, 1)]


def _from_json(path: Path, text: str) -> list[ApiKey]:
    try:
        entries = json.loads(text)["keys"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(_OPTION, str(path), f"is not JSON with a list `keys`: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(_OPTION, str(path), "`keys`: accepted: a list of objects")
    return [_read_entry(f"keys[{index}]", dict(entry)) for index, entry in enumerate(entries)]


def _read_entry(where: str, entry: dict[str, Any]) -> ApiKey:
    name = _text(where, "name", entry.pop("name", None), 1, 128)
    if ("key" in entry) == ("sha256" in entry):
        raise ConfigError(f"{_OPTION}: {where}", name, "accepted: one of `key` and `sha256`")
    if "key" in entry:
        digest = digest_of(_text(where, "key", entry.pop("key"), 1, 4096).encode("utf-8"))
    else:
        text = _text(where, "sha256", entry.pop("sha256"), 64, 64).lower()
        if not _HEX.fullmatch(text):
            raise ConfigError(f"{_OPTION}: {where}.sha256", text, "accepted: 64 hexadecimal digits")
        digest = bytes.fromhex(text)
    salt = entry.pop("cache_salt", None)
    salt = own_salt(digest) if salt is None else _text(where, "cache_salt", salt, 0, MAX_CACHE_SALT_BYTES)
    limits = {name: _integer(where, name, entry.pop(name), low) for name, low in _LIMITS.items() if name in entry}
    if entry:
        accepted = f"name, key, sha256, cache_salt, {', '.join(_LIMITS)}"
        raise ConfigError(f"{_OPTION}: {where}.{next(iter(entry))}", "", f"unknown setting, accepted: {accepted}")
    return ApiKey(name, digest, cache_salt=salt, **limits)


def _text(where: str, field: str, value: object, low: int, high: int) -> str:
    if isinstance(value, str) and low <= len(value.encode("utf-8", "replace")) <= high:
        return value
    shown = "" if field in ("key", "sha256") else value
    raise ConfigError(f"{_OPTION}: {where}.{field}", shown, f"accepted: a text of {low} to {high} bytes")


def _integer(where: str, field: str, value: object, low: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= MAX_INT32:
        return value
    raise ConfigError(f"{_OPTION}: {where}.{field}", value, f"accepted: an integer from {low} to {MAX_INT32}")
