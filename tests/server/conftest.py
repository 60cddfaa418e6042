"""One gateway for all tests of it, in front of the server that the whole session shares."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from patience import PATIENCE_S

pytest.importorskip("fastapi", reason="the gateway's packages are not installed: pip install 'slipstream[gateway]'")
pytest.importorskip("uvicorn")

if TYPE_CHECKING:
    import openai
    from fake_triton import FakeTriton
    from gateway import GatewayProcess
    from llm_server import LlmServer
    from playwright.sync_api import Browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAX_BODY_BYTES = 1 << 20


@pytest.fixture(scope="session")
def gateway(llm_server: LlmServer) -> Iterator[GatewayProcess]:
    """Before the real server; an event a token, however many tokens another test had in a second."""
    from gateway import GatewayProcess

    arguments = ["--metrics-url", llm_server.metrics_url, "--alias", "gpt-4o=llm", "--max-events-per-s", "0"]
    arguments += ["--max-body-bytes", str(MAX_BODY_BYTES), "--log-level", "warning"]
    with GatewayProcess(llm_server.grpc_url, arguments) as running:
        yield running


@pytest.fixture(scope="session")
def drafting(llm_server: LlmServer) -> Iterator[str]:
    """A model that drafts by prompt lookup."""
    with llm_server.variant("drafting", {"speculative_method": "ngram"}) as name:
        yield name


@pytest.fixture(scope="session")
def client(gateway: GatewayProcess) -> openai.OpenAI:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="not-needed", max_retries=0, timeout=120)


def write_checkpoint(folder: Path, template: str) -> Path:
    """What the gateway reads of a checkpoint."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "bos_token": "<s>"}))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    return folder


@pytest.fixture(scope="session")
def fake_triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeTriton]:
    """Models whose prompt is the last message and `extra`; the comment in the template says the tool format."""
    import toy_tokenizers
    from fake_triton import FakeTriton

    folder = tmp_path_factory.mktemp("checkpoints")
    signs = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>", "plain": "", "guarded": ""}
    signs["blocking"] = ""  # as the repository's `guarded`, where "guarded" is any model with an output `safety`
    models = {}
    for name, sign in signs.items():
        template = "{# " + sign + " #}{{ messages[-1]['content'] }}{{ extra }}"
        models[name] = {"model": str(write_checkpoint(folder / name, template))}
    for name, ending in (("thinking", "<think>\n"), ("pondering", "")):  # the second writes <think> itself
        closed = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
        template = (
            "{# <tool_call> </think> #}{{ messages[-1]['content'] }}" + closed + "{% else %}" + ending + "{% endif %}"
        )
        models[name] = {"model": str(write_checkpoint(folder / name, template))}
    toy_tokenizers.byte_level().save(str(folder / "thinking/tokenizer.json"))
    template = "{# <|channel|> #}{{ messages[-1]['content'] }}"
    models["harmony"] = {"model": str(write_checkpoint(folder / "harmony", template))}
    models["bare"] = {"model": "../elsewhere"}
    models["broken"] = {"model": str(write_checkpoint(folder / "broken", "{% for %}"))}
    states = {"loading": ("LOADING", ""), "gone": ("UNAVAILABLE", "unloaded"), "dead": ("UNAVAILABLE", "no weights")}
    with FakeTriton(models, states) as running:
        yield running


@pytest.fixture(scope="session")
def fake_gateway(fake_triton: FakeTriton) -> Iterator[GatewayProcess]:
    """Before the scripted stand-in, with API keys."""
    from gateway import GatewayProcess

    arguments = ["--api-key", "sk-right", "--api-key", "sk-also", "--embedding-model", "encoder"]
    arguments += ["--embedding-model", "batched_encoder"]
    with GatewayProcess(fake_triton.url, [*arguments, "--workers", "2", "--send-timeout-s", "1"]) as running:
        yield running


@pytest.fixture(scope="session")
def fake_client(fake_gateway: GatewayProcess) -> openai.OpenAI:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{fake_gateway.url}/v1", api_key="sk-right", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """No longer than a module: while it is there its event loop runs in this thread, where no other may be started."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed (Debian: apt install chromium)")
    with api.sync_playwright() as playwright:
        options = {"executable_path": found, "timeout": 1000 * PATIENCE_S}
        running = playwright.chromium.launch(args=["--no-sandbox", "--disable-gpu"], **options)
        yield running
        running.close()


@pytest.fixture(scope="session")
def open_gateway(fake_triton: FakeTriton) -> Iterator[GatewayProcess]:
    """Before the scripted stand-in, for everybody."""
    from gateway import GatewayProcess

    with GatewayProcess(fake_triton.url, ["--log-level", "warning"]) as running:
        yield running
