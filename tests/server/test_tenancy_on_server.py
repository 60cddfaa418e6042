"""Keys through the real gateway and the real server: nobody starves, and prefixes are parted where keys say so.

Each test holds its opposite beside it: without ageing the same request starves, with one salt the same prompt is seen.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import openai
import pytest
from gateway import GatewayProcess
from llm_server import LlmServer
from patience import wait_until

KEYS = [
    {"name": "urgent", "key": "sk-urgent"},
    {"name": "batch", "key": "sk-batch", "max_priority": 4},
    {"name": "team 1", "key": "sk-team-1", "cache_salt": "the team's"},
    {"name": "team 2", "key": "sk-team-2", "cache_salt": "the team's"},
]
NUM_URGENT = 8


@pytest.fixture(scope="module")
def keyed(llm_server: LlmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    file.write_text(json.dumps({"keys": KEYS}))
    with GatewayProcess(llm_server.grpc_url, ["--api-key-file", str(file)]) as running:
        yield running


@cache
def client_of(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120)


def complete(gateway: GatewayProcess, key: str, model: str, prompt: str, max_tokens: int) -> openai.types.Completion:
    client = client_of(gateway.url, key)
    return client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, extra_body={"ignore_eos": True})


class Urgent:
    """Clients of priority 0 that ask again as soon as they are answered, more than the model can run at once."""

    def __init__(self, gateway: GatewayProcess, model: str) -> None:
        self._gateway, self._model = gateway, model
        self._stop = threading.Event()
        self.num_answers = 0

    @contextmanager
    def running(self) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(NUM_URGENT + 1) as pool:
            clients = [pool.submit(self._ask, number) for number in range(NUM_URGENT)]
            try:
                wait_until(lambda: self.num_answers > NUM_URGENT, "a queue")
                yield pool
            finally:
                self._stop.set()
            for client in clients:
                client.result()

    def _ask(self, number: int) -> None:
        while not self._stop.is_set():
            complete(self._gateway, "sk-urgent", self._model, f"def f{number}(x):", 12)
            self.num_answers += 1


@pytest.mark.parametrize("aging_s", [0.25, 0])
def test_a_key_of_low_priority_is_served_beside_endless_urgent_ones(
    keyed: GatewayProcess, llm_server: LlmServer, aging_s: float
) -> None:
    """Four levels below them, it lets a second of them pass; strictly by priority it waits until they stop."""
    name = "aged" if aging_s else "strict"
    with llm_server.variant(name, {"max_num_seqs": 1, "num_blocks": 64, "priority_aging_s": aging_s}):
        urgent = Urgent(keyed, name)
        with urgent.running() as pool:
            num_before = urgent.num_answers
            batch = pool.submit(complete, keyed, "sk-batch", name, "import ", 4)
            if aging_s:
                wait_until(batch.done, "the batch request, while urgent ones come")
            else:
                wait_until(lambda: urgent.num_answers >= num_before + 2 * NUM_URGENT, "many urgent answers")
                assert not batch.done()
        assert batch.result().usage.completion_tokens == 4


def test_a_prompt_is_seen_where_keys_share_a_salt_and_nowhere_else(keyed: GatewayProcess) -> None:
    secret = "The key of the safe is under the third stone, and nobody else knows it. " * 20

    def cached(key: str) -> int:
        return complete(keyed, key, "llm", secret, 1).usage.prompt_tokens_details.cached_tokens

    assert cached("sk-team-1") == 0 < cached("sk-team-2"), "one team"
    assert cached("sk-urgent") == 0 == cached("sk-batch"), "a right guess looks like a wrong one"
