"""Conversations on the chat page, in a headless Chromium before scripted models: kept, edited, formatted, failing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pytest
from gateway import GatewayProcess
from patience import PATIENCE_S

if TYPE_CHECKING:
    from fake_triton import FakeTriton
    from playwright.sync_api import Browser, BrowserContext, Page, Route

PHONE = {"width": 360, "height": 740}
CODE = "Look:\n\n```python\ndef f():\n    return 1\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n- **x**\n- `y`\n"
HOSTILE = [
    "<img src=x onerror=\"document.title='broken'\">",
    "<script>document.title='broken'</script>",
    "[link](javascript:document.title='broken')",
    "![picture](http://127.0.0.1:1/leak?q=secret)",
    '<svg onload="document.title=1"><style>*{display:none}</style>',
    "```html\n<b onclick=x>bold</b>\n```",
    "<form action=/><input name=q></form><iframe src=/></iframe>",
]
TOOLS = '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """A browser of its own for each test, which nothing is kept in."""
    made = browser.new_context(viewport={"width": 1300, "height": 760})
    made.set_default_timeout(1000 * PATIENCE_S)
    yield made
    made.close()


def open_page(context: BrowserContext, gateway: GatewayProcess, model: str = "plain") -> Page:
    page = context.new_page()
    page.goto(gateway.url)
    page.wait_for_selector(f"#model option[value={model}]", state="attached")
    page.select_option("#model", model)
    return page


@pytest.fixture
def page(context: BrowserContext, open_gateway: GatewayProcess) -> Page:
    return open_page(context, open_gateway)


def say(page: Page, *pieces: str, **script: object) -> str:
    """Ask for these pieces. Returns the message."""
    text = json.dumps({"pieces": pieces, **script})
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    return text


def wait_for_end(page: Page) -> None:
    page.wait_for_selector("#log[aria-busy=false]")


def answers(page: Page) -> list[str]:
    return page.locator("article.assistant .text").all_inner_texts()


def titles(page: Page) -> list[str]:
    return page.locator(".open-talk").all_inner_texts()


def test_conversations_are_kept_opened_and_deleted(page: Page) -> None:
    first = say(page, "one")
    wait_for_end(page)
    page.click("#clear")
    say(page, "two")
    wait_for_end(page)
    page.wait_for_selector(".open-talk >> nth=1")
    page.reload()
    page.wait_for_selector(".open-talk >> nth=1")
    assert page.locator("article").count() == 0, "a new conversation"
    page.click(".open-talk >> nth=1")
    page.wait_for_selector("article.assistant")
    assert answers(page) == ["one"] and page.text_content("article.user .text") == first
    assert page.locator(".open-talk[aria-current]").count() == 1
    page.click(".delete-talk >> nth=1")
    page.wait_for_selector("#undo:not([hidden])")
    assert len(titles(page)) == 1 and page.locator("article").count() == 0
    page.click("#undo")
    page.wait_for_selector(".open-talk >> nth=1")
    page.on("dialog", lambda dialog: dialog.accept())
    page.click("#delete-all")
    page.wait_for_selector("#delete-all", state="hidden")
    assert titles(page) == [] and "stay in this browser" in page.text_content("#history-note")


def test_nothing_is_kept_when_that_is_switched_off(page: Page) -> None:
    page.uncheck("#keep")
    say(page, "one")
    wait_for_end(page)
    page.reload()
    page.wait_for_selector("#model option[value=plain]", state="attached")
    assert titles(page) == [] and not page.is_checked("#keep")


def test_two_tabs_do_not_overwrite_each_other(
    page: Page, context: BrowserContext, open_gateway: GatewayProcess
) -> None:
    say(page, "one")
    wait_for_end(page)
    page.wait_for_selector(".open-talk")
    other = open_page(context, open_gateway)
    other.click(".open-talk")
    other.wait_for_selector("article.assistant")
    say(other, "of the other tab")
    wait_for_end(other)
    say(page, "of this tab")
    wait_for_end(page)
    page.wait_for_selector(".open-talk >> nth=1")
    other.wait_for_selector(".open-talk >> nth=1")
    other.reload()
    seen = set()
    for index in range(2):
        other.click(f".open-talk >> nth={index}")
        other.wait_for_selector(f"li:nth-child({index + 1}) .open-talk[aria-current]")
        seen.add(answers(other)[-1])
    assert seen == {"of the other tab", "of this tab"}


def test_the_oldest_conversations_give_way(page: Page) -> None:
    kept = page.evaluate(
        """async () => {
          const { LIMITS, openHistory } = await import('./page/history.js');
          const history = await openHistory(() => {});
          LIMITS.talks = 3;
          for (let n = 0; n < 5; n += 1) {
            const messages = [{ role: 'user', content: `question ${n}` }];
            await history.write({ id: `t${n}`, messages, system: '', tools: '', updated: 0 });
            await new Promise((resolve) => setTimeout(resolve, 2));
          }
          return (await history.list()).map((head) => head.title);
        }"""
    )
    assert kept == ["question 4", "question 3", "question 2"]


def test_an_answer_is_made_again_and_a_message_is_edited(page: Page, fake_triton: FakeTriton) -> None:
    say(page, "one")
    wait_for_end(page)
    say(page, "two")
    wait_for_end(page)
    before = len(fake_triton.requests)
    page.click("article.assistant:last-of-type >> text=Regenerate")
    wait_for_end(page)
    assert len(fake_triton.requests) == before + 1 and answers(page) == ["one", "two"]
    page.click("article.user >> nth=0 >> text=Edit")
    field = page.locator(".edit textarea")
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"
    page.keyboard.press("Escape")
    assert field.count() == 0 and page.is_visible("article.user >> nth=0 >> text=Edit")
    page.click("article.user >> nth=0 >> text=Edit")
    field.fill('{"pieces": ["edited"]}')
    page.keyboard.press("Enter")
    wait_for_end(page)
    assert answers(page) == ["edited"], "what followed the edited message is gone"


def test_markdown_while_it_streams(page: Page) -> None:
    if page.get_attribute("html", "data-libraries") == "no":
        pytest.skip("the build had no npm: the page shows plain text")
    say(page, *CODE, hang=True)
    page.wait_for_selector("article.busy code >> text=return")
    page.wait_for_selector("article.busy table")
    assert page.locator("article.busy strong").inner_text() == "x"
    page.click("#stop")
    page.wait_for_selector("article.assistant .hljs-keyword >> nth=0")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("text=Copy code")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def f():\n    return 1\n"
    assert page.locator(".code-head span").inner_text() == "python"


def test_text_of_a_model_never_runs(page: Page) -> None:
    """HTML is shown as text, pictures of other hosts are not loaded, links lead only to the web."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    say(page, "\n\n".join(HOSTILE), hang=True)
    page.wait_for_selector("article.busy >> text=iframe")
    page.click("#stop")
    wait_for_end(page)
    assert page.title() == "Slipstream chat"
    inside = "article.assistant .text :is(img, script, svg, style, iframe, form, input, b)"
    assert page.locator(inside).count() == 0 and not [url for url in asked if "leak" in url]
    assert page.locator('a[href^="javascript"]').count() == 0
    for part in ("onerror", "<script>", "leak?q=secret", "<iframe"):
        assert part in page.inner_text("article.assistant .text")
    refused = page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>'; return ''; } catch (error) { return error.name; } }"
    )
    assert refused == "TypeError", "the policy leaves no way from text to HTML"


def test_without_the_libraries_answers_are_plain_text(context: BrowserContext, open_gateway: GatewayProcess) -> None:
    context.route("**/page/vendor/*", lambda route: route.abort())
    page = open_page(context, open_gateway)
    say(page, CODE)
    wait_for_end(page)
    assert answers(page)[0].strip() == CODE.strip()


def test_deeply_nested_text_is_shown(page: Page) -> None:
    say(page, ">" * 20000 + " deep")
    wait_for_end(page)
    assert "deep" in answers(page)[0]
    say(page, "next")
    wait_for_end(page)
    assert answers(page)[1] == "next"


def test_calls_are_folded_and_answered(context: BrowserContext, open_gateway: GatewayProcess) -> None:
    page = open_page(context, open_gateway, "hermes")
    page.fill("#tools", TOOLS)
    say(page, 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    wait_for_end(page)
    assert page.inner_text("summary") == "Calls f" and not page.is_visible(".folded")
    page.click("summary")
    assert page.inner_text(".folded") == '{\n  "a": 1\n}'
    page.fill(".results textarea", '{"pieces": ["done"]}')
    page.click("text=Send the results")
    wait_for_end(page)
    assert answers(page)[-1] == "done" and page.locator(".results").count() == 0
    page.fill("#tools", "{")
    asked = say(page, "x")
    page.wait_for_selector("#problem:not([hidden])")
    assert "not JSON" in page.text_content("#problem") and page.input_value("#prompt") == asked


def stream_of(*deltas: dict[str, object], end: bool = True) -> str:
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ("data: [DONE]\n\n" if end else "")


def test_reasoning_is_folded(page: Page) -> None:
    body = stream_of({"reasoning_content": "first "}, {"reasoning": "then"}, {"content": "so"})  # either name
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    say(page, "x")
    wait_for_end(page)
    assert answers(page) == ["so"] and page.inner_text(".reasoning summary") == "Reasoning"
    assert not page.is_visible(".folded")
    page.click(".reasoning summary")
    assert page.inner_text(".folded") == "first then"


def fulfill(reply: dict[str, object], route: Route) -> None:
    route.fulfill(**reply)


def test_what_was_typed_survives_every_failure(page: Page) -> None:
    say(page, "one")
    wait_for_end(page)
    replies: list[dict[str, object]] = [
        {"status": 429, "headers": {"Retry-After": "7"}, "body": '{"error": {"message": "4 requests wait"}}'},
        {"status": 502, "body": "<html>Bad gateway</html>"},
        {"body": 'data: {"error": {"message": "the engine died"}}\n\n'},
        {"body": ""},
    ]
    told = ["4 requests wait. Try again in 7 s.", "status 502.", "the engine died.", "broke off"]
    for reply, words in zip(replies, told, strict=True):
        page.route("**/v1/chat/completions", partial(fulfill, reply))
        asked = say(page, "two")
        page.wait_for_selector(f"#problem >> text={words}")
        assert page.text_content("#problem").endswith("Your message is kept.")
        assert page.input_value("#prompt") == asked and answers(page) == ["one"]
        page.click("text=Regenerate")
        page.wait_for_selector(f"#problem >> text={words}")
        wait_for_end(page)
        assert answers(page) == ["one"], "the answer that was to be made again is kept"
        page.unroute("**/v1/chat/completions")
    page.reload()
    page.wait_for_selector("#model option[value=plain]", state="attached")
    assert page.input_value("#prompt") == asked, "a reload keeps it too"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=stream_of({"content": "ha"}, end=False)))
    say(page, "three")
    page.wait_for_selector("article.assistant >> text=(incomplete)")
    assert "What came of the answer is kept" in page.text_content("#problem") and page.input_value("#prompt") == ""


def test_an_edit_survives_a_failure(page: Page) -> None:
    say(page, "one")
    wait_for_end(page)
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.click("text=Edit")
    page.fill(".edit textarea", "my changed words")
    page.keyboard.press("Enter")
    page.wait_for_selector("#problem >> text=The server is gone")
    assert page.input_value(".edit textarea") == "my changed words"
    page.click("text=Cancel")
    assert answers(page) == ["one"]


def test_the_server_goes_and_comes_back(context: BrowserContext, open_gateway: GatewayProcess) -> None:
    away = {"is_away": True}

    def answer(route: Route) -> None:
        route.abort() if away["is_away"] else route.continue_()

    context.route("**/v1/**", answer)
    page = context.new_page()
    page.goto(open_gateway.url)
    page.wait_for_selector("#problem >> text=The server is gone")
    asked = say(page, "one")
    page.wait_for_selector("#problem >> text=No model is ready. Your message is kept.")
    assert page.input_value("#prompt") == asked
    away["is_away"] = False
    page.wait_for_selector("#model option[value=plain]", state="attached")
    assert page.is_hidden("#problem")


def test_a_guarded_model_is_not_chosen_silently(context: BrowserContext, open_gateway: GatewayProcess) -> None:
    page = context.new_page()
    page.goto(open_gateway.url)
    page.wait_for_selector("#model option[value=guarded]", state="attached")
    assert page.input_value("#model") not in ("guarded", "blocking") and page.is_hidden("#model-note")
    page.select_option("#model", "guarded")
    assert "safety model" in page.text_content("#model-note")
    page.reload()
    page.wait_for_selector("#model option[value=guarded]", state="attached")
    assert page.input_value("#model") == "guarded" and page.is_visible("#model-note"), "chosen before, and said"


def test_focus_escape_and_the_theme_button(page: Page) -> None:
    page.reload()
    page.wait_for_selector("#prompt:focus")
    name = page.text_content("#theme")
    theme = page.evaluate("document.documentElement.dataset.theme")
    assert name == f"Use {'dark' if theme == 'light' else 'light'} colours"
    page.click("#theme")
    assert page.text_content("#theme") == f"Use {theme} colours"


def test_panels_on_a_phone(page: Page) -> None:
    for width in (360, 430):
        page.set_viewport_size({**PHONE, "width": width})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"
        for name in ("history", "settings"):
            check_panel(page, name, width)
    page.click("#open-settings")
    page.focus("#temperature")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "open-settings"


def check_panel(page: Page, name: str, width: int) -> None:
    assert page.is_hidden(f"#{name}")
    page.click(f"#open-{name}")
    assert page.is_visible(f"#{name}") and page.get_attribute(f"#open-{name}", "aria-expanded") == "true"
    button, panel = page.locator(f"#open-{name}").bounding_box(), page.locator(f"#{name}").bounding_box()
    assert panel["y"] >= button["y"] + button["height"], "the panel does not cover its button"
    assert panel["x"] >= 0 and panel["x"] + panel["width"] <= width
    page.keyboard.press("Escape")
    assert page.is_hidden(f"#{name}") and page.get_attribute(f"#open-{name}", "aria-expanded") == "false"
    page.click(f"#open-{name}")
    page.click(f"#open-{name}")
    assert page.is_hidden(f"#{name}"), "its button closes it, too"


def test_accessibility(page: Page) -> None:
    """What axe-core finds on the page with every kind of content, in both schemes and at both widths."""
    api = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    body = stream_of({"reasoning": "hm"}, {"content": CODE})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.emulate_media(reduced_motion="reduce")
    say(page, "x")
    wait_for_end(page)
    page.wait_for_selector(".open-talk")
    for width, opened in ((1300, ""), (360, ""), (360, "#open-history"), (360, "#open-settings")):
        page.set_viewport_size({**PHONE, "width": width})
        if opened:
            page.click(opened)
        for _ in ("one scheme", "the other"):
            found = api.Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            page.click("#theme")
