"""What an API key may: priorities, cached prefixes of its own, rates and sequences at once, over all workers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from fake_triton import FakeTriton
from gateway import GatewayProcess
from llm_server import LlmServer
from patience import wait_until
from slipstream.core.errors import ConfigError
from slipstream.server import ledger as ledgers
from slipstream.server.keys import read_keys
from slipstream.server.ledger import REQUESTS, TOKENS, Ledger, make_ledger

KEYS = {
    "keys": [
        {"name": "web", "key": "sk-web"},
        {"name": "batch", "sha256": hashlib.sha256(b"sk-batch").hexdigest(), "max_priority": 10},
        {"name": "urgent", "key": "sk-urgent", "max_priority": -5, "cache_salt": ""},
        {"name": "team 1", "key": "sk-team-1", "cache_salt": "the team's"},
        {"name": "team 2", "key": "sk-team-2", "cache_salt": "the team's"},
        {"name": "small", "key": "sk-small", "max_num_seqs": 2},
        {"name": "slow", "key": "sk-slow", "requests_per_minute": 3},
        {"name": "reader", "key": "sk-reader", "requests_per_minute": 2},
        {"name": "short", "key": "sk-short", "tokens_per_minute": 30},
        {"name": "burst", "key": "sk-burst", "tokens_per_minute": 200},
        {"name": "settled", "key": "sk-settled", "tokens_per_minute": 600},
        {"name": "brief", "key": "sk-brief", "tokens_per_minute": 100, "default_max_tokens": 12},
        {"name": "alone", "key": "sk-alone", "tokens_per_minute": 20},
        {"name": "gone", "key": "sk-gone", "tokens_per_minute": 1000},
    ]
}


@pytest.fixture(scope="module")
def keyed(fake_triton: FakeTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_text(json.dumps(KEYS))
    arguments = ["--api-key-file", str(file), "--workers", "2", "--embedding-model", "encoder"]
    with GatewayProcess(fake_triton.url, arguments) as running:
        yield running


def client_of(gateway: GatewayProcess, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, timeout=120)


def ask(gateway: GatewayProcess, key: str, script: dict | None = None, **options: object) -> object:
    messages = [{"role": "user", "content": json.dumps(script or {"pieces": ["ok"]})}]
    return client_of(gateway, key).chat.completions.create(model="plain", messages=messages, **options)


def test_each_key_has_cached_prefixes_of_its_own(keyed: GatewayProcess, fake_triton: FakeTriton) -> None:
    def salt(key: str, own: str = "") -> str | None:
        ask(keyed, key, extra_body={"cache_salt": own} if own else {})
        client_of(keyed, key).completions.create(
            model="plain", prompt='{"pieces": ["ok"]}', extra_body={"cache_salt": own} if own else {}
        )
        assert fake_triton.sampling[-1].get("cache_salt") == fake_triton.sampling[-2].get("cache_salt")
        return fake_triton.sampling[-1].get("cache_salt")

    web, batch = salt("sk-web"), salt("sk-batch")
    assert web and batch and web != batch and web == salt("sk-web"), "own, and the same in both workers"
    assert salt("sk-team-1") == salt("sk-team-2") == "the team's"
    assert salt("sk-urgent") is None and salt("sk-urgent", "x") == "x", "told to share with all"
    assert len({web, salt("sk-web", "x"), salt("sk-batch", "x"), salt("sk-web", "y"), "x"}) == 5
    assert salt("sk-web", batch) != batch, "who learns another's salt cannot ask with it"
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        ask(keyed, "sk-web", extra_body={"cache_salt": "x" * 257})


@pytest.mark.parametrize(
    ("key", "asked", "sent", "limit"),
    [
        ("sk-web", None, None, None),
        ("sk-web", 3, 3, None),
        ("sk-web", -1, None, "accepted: 0 or above"),
        ("sk-batch", None, 10, None),
        ("sk-batch", 9, None, "accepted: 10 or above.* the key 'batch'"),
        ("sk-batch", 12, 12, None),
        ("sk-urgent", -5, -5, None),
        ("sk-urgent", None, None, None),
        ("sk-urgent", -6, None, "accepted: -5 or above"),
    ],
)
def test_priorities_only_up_to_what_a_key_may(
    keyed: GatewayProcess, fake_triton: FakeTriton, key: str, asked: int | None, sent: int | None, limit: str | None
) -> None:
    body = {} if asked is None else {"priority": asked}
    if limit is None:
        ask(keyed, key, extra_body=body)
        assert fake_triton.sampling[-1].get("priority") == sent
        return
    with pytest.raises(openai.BadRequestError, match=limit) as error:
        ask(keyed, key, extra_body=body)
    assert error.value.param == "priority"


def test_no_way_around(keyed: GatewayProcess) -> None:
    for name, value in (("priority", -100), ("cache_salt", "x"), ("n", 100), ("max_tokens", 9)):
        with pytest.raises(openai.BadRequestError, match=f"{name}: unknown setting of speculation"):
            ask(keyed, "sk-web", extra_body={"speculation": {name: value}})


def test_one_key_cannot_take_all_sequences(keyed: GatewayProcess) -> None:
    held = [ask(keyed, "sk-small", {"pieces": ["a"], "hang": True}, stream=True) for _ in range(2)]
    before = refusals(keyed, "max_num_seqs", "small")
    for _ in range(4):  # whichever worker it reaches
        with pytest.raises(openai.RateLimitError, match=r"2 sequences of the key 'small'.*at most 2") as error:
            ask(keyed, "sk-small")
        assert error.value.response.headers["retry-after"] == "1" and error.value.code == "rate_limit_exceeded"
        assert ask(keyed, "sk-web").choices, "others are served"
    assert refusals(keyed, "max_num_seqs", "small") == before + 4
    held[0].close()

    def is_served() -> bool:
        with contextlib.suppress(openai.RateLimitError):
            return bool(ask(keyed, "sk-small").choices)
        return False

    wait_until(is_served, "room for one more")
    with pytest.raises(openai.RateLimitError):
        ask(keyed, "sk-small", n=2)
    held[1].close()
    with pytest.raises(openai.BadRequestError, match=r"has 3 sequences.*accepted: at most 2"):
        client_of(keyed, "sk-small").completions.create(model="plain", prompt=["{}"] * 3)
    wait_until(lambda: all(is_served() for _ in range(4)), "every seat to be given back")


def test_kept_answers_are_read_and_deleted_within_the_limits(keyed: GatewayProcess) -> None:
    client = client_of(keyed, "sk-reader")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError):
        client.responses.delete("resp_1")
    with pytest.raises(openai.RateLimitError, match="2 requests per minute"):
        client.responses.retrieve("resp_1")


def test_requests_per_minute(keyed: GatewayProcess) -> None:
    """Counted over both workers; what is refused for its content counts, as with OpenAI, and embeddings do."""
    client = client_of(keyed, "sk-slow")
    first = client.chat.completions.with_raw_response.create(
        model="plain", messages=[{"role": "user", "content": '{"pieces": ["ok"]}'}]
    )
    assert first.headers["x-ratelimit-limit-requests"] == "3" and first.headers["x-ratelimit-remaining-requests"] == "2"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    client.embeddings.create(model="encoder", input="x")
    with pytest.raises(openai.BadRequestError):
        ask(keyed, "sk-slow", temperature=-1)
    for _ in range(3):
        with pytest.raises(openai.RateLimitError, match=r"3 requests per minute\. Please try again in") as error:
            ask(keyed, "sk-slow")
        headers = error.value.response.headers
        assert 1 <= int(headers["retry-after"]) <= 20 and headers["x-ratelimit-remaining-requests"] == "0"
        assert error.value.body["type"] == "rate_limit_error"
    assert client.models.list().data, "only what generates is counted"
    assert "x-ratelimit-limit-requests" not in ask_raw(keyed, "sk-web").headers


def ask_raw(gateway: GatewayProcess, key: str) -> object:
    client = client_of(gateway, key)
    return client.completions.with_raw_response.create(model="plain", prompt='{"pieces": ["ok"]}')


def test_tokens_per_minute(keyed: GatewayProcess) -> None:
    """Counted when they are made, in streams and whole answers; what is above the limit is paid back by waiting."""
    before = int(ask_raw(keyed, "sk-short").headers["x-ratelimit-remaining-tokens"])
    assert before <= 30
    for chunk in ask(keyed, "sk-short", {"pieces": ["a"], "repeat": 40}, stream=True, max_tokens=1):
        assert "usage" not in (chunk.model_extra or {}), "asked for by the gateway, not by the client"
    before = refusals(keyed, "tokens_per_minute", "short")
    with pytest.raises(openai.RateLimitError, match="30 tokens per minute") as error:
        ask(keyed, "sk-short")
    assert refusals(keyed, "tokens_per_minute", "short") == before + 1
    headers = error.value.response.headers
    assert headers["x-ratelimit-remaining-tokens"] == "0" and int(headers["retry-after"]) >= 10


def refusals(gateway: GatewayProcess, reason: str, key: str = "") -> float:
    return gateway.metrics().get(f'slipstream_gateway_refused_total{{reason="{reason}",key="{key}"}}', 0)


def remaining_tokens(gateway: GatewayProcess, key: str) -> int:
    """As the next answer says; its own tokens are set aside then."""
    return int(ask_raw(gateway, key).headers["x-ratelimit-remaining-tokens"])


def test_a_burst_does_not_pass_before_the_first_tokens_are_counted(keyed: GatewayProcess) -> None:
    """Two of 60 + 60 tokens fit into 200, whichever worker has them; nothing of them has been charged."""
    script = {"pieces": ["a"], "hang": True}
    held = [ask(keyed, "sk-burst", script, stream=True, max_tokens=60) for _ in range(2)]
    for _ in range(4):
        with pytest.raises(openai.RateLimitError, match=r"200 tokens per minute.*may cost .*at most 90: max_tokens"):
            ask(keyed, "sk-burst", max_tokens=90)
    assert ask(keyed, "sk-burst", max_tokens=2).choices, "what fits is served"
    for stream in held:
        stream.close()

    def is_served() -> bool:
        with contextlib.suppress(openai.RateLimitError):
            return bool(ask(keyed, "sk-burst", max_tokens=90).choices)
        return False

    wait_until(is_served, "what those that left have not used")


def test_a_request_pays_what_it_has_used(keyed: GatewayProcess) -> None:
    """400 tokens are set aside, 6 are used; then again, whole and streamed, also by one that is refused."""
    for _ in range(3):
        ask(keyed, "sk-settled", max_tokens=400)
        list(ask(keyed, "sk-settled", stream=True, max_tokens=400))
        with pytest.raises(openai.BadRequestError):
            ask(keyed, "sk-settled", {"fail": ["", "top_k: got -7, accepted: 0 or more [INVALID_ARG]"]}, max_tokens=400)
    assert remaining_tokens(keyed, "sk-settled") > 500


@pytest.mark.parametrize(("stream", "least", "most"), [(False, 400, 500), (True, 5, 100)])
def test_who_leaves_before_the_answer_pays(
    keyed: GatewayProcess, fake_triton: FakeTriton, stream: bool, least: int, most: int
) -> None:
    """A whole answer may have been generated to its end; of a stream nothing had come, so there was only the prompt."""
    gone = 'slipstream_gateway_requests_total{endpoint="chat",status="499"}'
    num_gone, before = keyed.metrics().get(gone, 0), remaining_tokens(keyed, "sk-gone")
    started = time.monotonic()
    with pytest.raises(openai.APITimeoutError):
        ask(keyed, "sk-gone", {"pieces": [], "hang": True}, max_tokens=400, stream=stream, timeout=0.3)
    wait_until(lambda: keyed.metrics().get(gone, 0) > num_gone, "the gateway to notice")
    paid_back = (time.monotonic() - started) * 1000 / 60
    paid = before - remaining_tokens(keyed, "sk-gone")
    assert least - paid_back - 5 <= paid <= most


def test_without_max_tokens(keyed: GatewayProcess, fake_triton: FakeTriton) -> None:
    ask(keyed, "sk-brief")
    assert fake_triton.sampling[-1]["max_tokens"] == 12, "the key's"
    ask(keyed, "sk-brief", max_tokens=13)
    assert fake_triton.sampling[-1]["max_tokens"] == 13
    assert remaining_tokens(keyed, "sk-brief") < 100 - 12, "its own 12 are set aside"
    assert ask(keyed, "sk-alone").choices, "may cost the model's length: let in, as the key has used none"
    with pytest.raises(openai.RateLimitError, match=r"may cost 20 \(prompt about") as error:
        ask(keyed, "sk-alone")
    prompt, answer = re.findall(r"prompt about (\d+), answer at most (\d+)", str(error.value))[0]
    assert int(prompt) + int(answer) == 512, "what the model's length leaves behind the prompt"


def test_nobody_sees_in_cached_tokens_what_another_key_asked(llm_server: LlmServer) -> None:
    secret = "The password of the vault is 4711 and nobody else knows it. " * 20
    arguments = ["--api-key", "sk-a", "--api-key", "sk-b"]
    with GatewayProcess(llm_server.grpc_url, arguments) as running:

        def cached(key: str) -> int:
            body = client_of(running, key).completions.create(model="llm", prompt=secret, max_tokens=1)
            return body.usage.prompt_tokens_details.cached_tokens

        assert cached("sk-a") == 0 < cached("sk-a")
        assert cached("sk-b") == 0, "a right guess looks like a wrong one"
    with GatewayProcess(llm_server.grpc_url) as running:
        assert cached("anybody") == 0


# ---------------------------------------------------------------- the file, the ledger


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"key": "x"}, r"keys\[0\].name.*a text of 1 to 128"),
        ({"name": "a"}, "one of `key` and `sha256`"),
        ({"name": "a", "key": "x", "sha256": "0" * 64}, "one of `key` and `sha256`"),
        ({"name": "a", "sha256": "xy" * 32}, "64 hexadecimal digits"),
        ({"name": "a", "key": ""}, r"keys\[0\].key.*a text of 1 to 4096"),
        ({"name": "a", "key": "x", "max_seqs": 1}, "max_seqs.*unknown setting, accepted: name, key"),
        ({"name": "a", "key": "x", "max_num_seqs": -1}, "max_num_seqs=-1: accepted: an integer from 0"),
        ({"name": "a", "key": "x", "requests_per_minute": True}, "requests_per_minute=True"),
        ({"name": "a", "key": "x", "cache_salt": "x" * 257}, "cache_salt"),
    ],
)
def test_wrong_entries_of_a_key_file(tmp_path: Path, entry: dict, words: str) -> None:
    file = tmp_path / "keys"
    file.write_text(json.dumps({"keys": [entry]}))
    with pytest.raises(ConfigError, match=words):
        read_keys(file)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("# none\n", "holds no key"),
        ('{"keys": []}', "holds no key"),
        ('{"key": []}', "list `keys`"),
        ('{"keys": ["x"]}', "a list of objects"),
        ("{", "is not JSON"),
        ('[{"name": "a", "key": "x"}]', "list `keys`"),
        ('\n[\n  {\n    "name": "a",\n    "key": "x"\n  }\n]\n', "list `keys`"),
        ('["x", "y"]', "list `keys`"),
        ("[\n]", "list `keys`"),
        ("x\nx\n", "one key twice"),
        ('{"keys": [{"name": "a", "key": "x"}, {"name": "a", "key": "y"}]}', "one name twice"),
    ],
)
def test_wrong_key_files(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_keys(file)


def test_a_plain_file_is_a_key_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nsk-one\n\n  sk-two\n")
    keys = read_keys(file, ["sk-zero"])
    assert [key.digest for key in keys] == [hashlib.sha256(k).digest() for k in (b"sk-zero", b"sk-one", b"sk-two")]
    assert len({key.cache_salt for key in keys}) == 3 and all(key.max_num_seqs == 0 for key in keys)


def test_the_ledger_is_of_one_size_and_counts_over_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_ledger(tmp_path / "ledger", num_keys=3, num_workers=2)
    size = path.stat().st_size
    clock = [1000.0]
    monkeypatch.setattr(ledgers.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(ledgers, "is_alive", lambda process: process != 0)
    one, two = Ledger(3, path), Ledger(3, path)
    assert [ledger.use(REQUESTS, 1, 2) for ledger in (one, two)] == [0.0, 0.0]
    assert one.use(REQUESTS, 1, 2) == pytest.approx(30) and one.use(REQUESTS, 0, 2) == 0.0
    clock[0] += 30.1
    assert two.use(REQUESTS, 1, 2) == 0.0 < two.use(REQUESTS, 1, 2)
    assert one.reserve(2, 100, 60) == 0 == two.reserve(2, 100, 40), "beside each other"
    assert two.reserve(2, 100, 10) == pytest.approx(6) and one.num_reserved(2) == 100
    clock[0] += 1000
    assert two.reserve(2, 100, 10) == pytest.approx(6), "it is paid back by no waiting"
    two.release(2, 40)
    assert one.num_reserved(2) == 60
    one.charge(TOKENS, 2, 100, 250)
    assert two.used(TOKENS, 2, 100) == pytest.approx(250)
    clock[0] += 90
    assert two.used(TOKENS, 2, 100) == pytest.approx(100) and two.used(REQUESTS, 1, 2) == 0
    assert one.enter(1, 3, 4) and not two.enter(1, 2, 4) and two.enter(1, 1, 4)
    assert one.num_sequences(1) == 4
    monkeypatch.setattr(ledgers, "is_alive", lambda process: False)
    replaced = Ledger(3, path)  # the first worker has died with three sequences
    assert replaced.num_sequences(1) == 1 and replaced.num_reserved(2) == 0
    for number in range(1000):
        replaced.charge(TOKENS, number % 3, 10, 10**6)
    assert path.stat().st_size == size
