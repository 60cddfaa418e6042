"""The chat page in a real headless Chromium: talking, stopping, settings, keyboard, both schemes, contrast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from gateway import GatewayProcess
from llm_server import LlmServer
from patience import PATIENCE_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture
def page(browser: Browser, gateway: GatewayProcess) -> Iterator[Page]:
    opened = browser.new_page(viewport={"width": 1100, "height": 700})
    opened.set_default_timeout(1000 * PATIENCE_S)
    faults: list[str] = []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    opened.goto(gateway.url)
    opened.wait_for_selector("#model option[value=llm]", state="attached")
    opened.select_option("#model", "llm")
    yield opened
    opened.close()
    assert not [fault for fault in faults if "status of 400" not in fault]  # what test_an_error_is_shown provokes


def say(page: Page, text: str, max_tokens: int = 12) -> None:
    page.fill("#max_tokens", str(max_tokens))
    page.fill("#temperature", "0")
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def wait_for_answer(page: Page) -> str:
    page.wait_for_selector("article.assistant:last-of-type:not(.busy)", timeout=1000 * PATIENCE_S)
    return page.inner_text("article.assistant:last-of-type .text")


def test_a_talk(page: Page) -> None:
    say(page, "add two numbers")
    first = wait_for_answer(page)
    assert first.strip() and page.text_content("article.user .text") == "add two numbers"
    assert " ms" in page.text_content("#ttft") and "12 out" in page.text_content("#tokens")
    assert float(page.text_content("#rate")) > 0
    assert page.text_content("#said").startswith("Answer: "), "screen readers hear the whole answer, once"
    page.wait_for_selector("#kv-row:not([hidden])")
    assert "% of" in page.text_content("#kv-text")
    assert page.evaluate("document.activeElement.id") == "prompt"
    assert not page.is_visible("#speculation"), "this model has none"
    say(page, "and again")
    assert wait_for_answer(page) and page.locator("article").count() == 4
    page.click("#clear")
    assert page.locator("article").count() == 0 and page.is_visible("#hint")


def test_speculation_is_chosen_and_shown(page: Page, drafting: str) -> None:
    page.reload()
    page.wait_for_selector(f"#model option[value={drafting}]", state="attached")
    page.select_option("#model", drafting)
    assert page.is_visible("#speculation") and page.locator("#method option").all_text_contents()[-1] == "off"
    sent: list[dict] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.method == "POST" else None)
    page.fill("#drafts", "3")
    say(page, "a = 1\nb = 2\n" * 6, 24)
    wait_for_answer(page)
    assert sent[-1]["speculation"] == {"num_draft_tokens": 3}
    assert page.text_content("#acceptance").rstrip().endswith(tuple("0123456789")), "a share, of a number of drafts"
    page.select_option("#method", "none")
    say(page, "again", 8)
    wait_for_answer(page)
    assert sent[-1]["speculation"] == {"speculative_method": "none"} and page.text_content("#acceptance") == "none made"


def test_stop_frees_the_cache(page: Page, llm_server: LlmServer) -> None:
    before = llm_server.settled("slipstream_cancellations_total")
    for stop in (lambda: page.click("#stop"), lambda: page.keyboard.press("Escape")):
        say(page, "write a long program", 1500)
        page.wait_for_selector("article.assistant.busy .text:not(:empty)")
        assert page.is_disabled("#send")
        stop()
        page.wait_for_selector("article.assistant:last-of-type:not(.busy) >> text=(stopped)")
        assert page.is_enabled("#send")
    llm_server.wait_counted(before + 2, "slipstream_cancellations_total")


def test_an_error_is_shown(page: Page) -> None:
    say(page, "word " * 3000)
    page.wait_for_selector("#problem:not([hidden])")
    assert "accepted: at most 2047" in page.text_content("#problem")
    assert page.get_attribute("#problem", "role") == "alert"


def test_every_field_has_a_name_and_is_reached_by_keyboard(page: Page) -> None:
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('input, select, textarea, button')].filter(
            (field) => !(field.labels && field.labels.length) && !field.textContent.trim()).map((field) => field.id)"""
    )
    assert unnamed == []
    reached = set()
    for _ in range(25):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"model", "theme", "log", "prompt", "send", "temperature", "max_tokens", "system", "key"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(page: Page, scheme: str) -> None:
    """WCAG AA: 4.5:1 for text."""
    if page.evaluate("document.documentElement.dataset.theme") != scheme:
        page.click("#theme")
    colors = page.evaluate(
        """() => { const style = getComputedStyle(document.documentElement);
          return Object.fromEntries(['ground','raised','mine','text','quiet','bad','accent','on-accent'].map(
            (name) => [name, style.getPropertyValue('--' + name).trim()])); }"""
    )
    pairs = [(text, ground) for text in ("text", "quiet") for ground in ("ground", "raised", "mine")]
    pairs += [("bad", "ground"), ("on-accent", "accent")]
    for text, ground in pairs:
        assert contrast(colors[text], colors[ground]) >= 4.5, (text, ground)


def contrast(one: str, other: str) -> float:
    """Source: WCAG 2.2, relative luminance."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_a_key_and_a_verdict(browser: Browser, fake_gateway: GatewayProcess) -> None:
    """Before the scripted stand-in, which wants a key and has a guarded model."""
    page = browser.new_page()
    page.set_default_timeout(1000 * PATIENCE_S)
    page.goto(fake_gateway.url)
    page.wait_for_selector("#problem:not([hidden])")
    assert "API key" in page.text_content("#problem")
    page.fill("#key", "sk-right")
    page.press("#key", "Tab")
    page.wait_for_selector("#model option[value=guarded]", state="attached")
    assert page.is_hidden("#problem")
    page.select_option("#model", "guarded")
    say(page, '{"pieces": ["a", "b"], "reason": "content_filter"}')
    assert wait_for_answer(page) == "ab"
    assert page.text_content("#safety") == "flagged: violence"
    assert "ended by the safety model" in page.inner_text("article.assistant")
    page.select_option("#model", "plain")
    say(page, '{"pieces": [], "hang": true}')  # a piece would set the time to the first token
    page.wait_for_selector("article.assistant.busy")
    assert page.is_hidden("#safety-row") and page.text_content("#ttft") == "–", "what was said of another answer"
    page.keyboard.press("Escape")
    page.close()
