"""The page in a real browser: chats, their versions, hostile output, errors, keys and files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tandem.tests.router.support import Cluster, cluster, until
from tandem.tests.router.web.browser import (
    Tab,
    axe_source,
    playwright,
    tab,
    violations,
)
from tandem.tests.router.web.scripts import goes_on

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = """<img src=x onerror="window.pwned=1"><script>window.pwned=2</script>
[click](javascript:window.pwned=3) ![pixel](http://evil.example/pixel.png) <http://evil.example>
<style>body{display:none}</style><iframe src="http://evil.example"></iframe>
$\\href{javascript:window.pwned=4}{x}$ [a](data:text/html,<script>window.pwned=5</script>)
```html
</code></pre><script>window.pwned=6</script>
```
| a<script>window.pwned=7</script> | b |
|---|---|
| <svg onload="window.pwned=8"> | [x](vbscript:1) |"""
SINK = "() => { try { document.body.innerHTML = '<p>' } catch (error) { return error.name } }"
RICH = """# Title

Some **bold** and *slanted* text with `code` and $x^2$.

```python
def answer(): return 42
```

| a | b |
|---|--:|
| 1 | 2 |

- one
  - two
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def c(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    playwright()
    async with cluster(tmp_path_factory.mktemp("page"), served_model_name="tiny,other") as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def t(chromium: Any, c: Cluster) -> AsyncIterator[Tab]:
    c.node.script, c.node.reply = None, c.encode("hello world")
    async with tab(chromium, c) as made:
        await made.load()
        yield made


def says(c: Cluster, text: str) -> None:
    c.node.reply = c.encode(text)


async def test_a_chat_is_edited_answered_again_and_still_there_after_a_reload(
    t: Tab, c: Cluster
) -> None:
    assert await t.ask("first question") == "hello world"
    figures = await t.page.inner_text(".figures")
    assert "first token" in figures and "tokens" in figures
    says(c, "another answer")
    await t.click("[aria-label='Answer again']")
    await t.has(".versions:has-text('2/2')")
    assert await t.answer() == "another answer"
    await t.click("[aria-label='Version before']")
    assert await t.answer() == "hello world"
    await t.page.press("#message", "ArrowUp")
    assert await t.page.input_value("#message") == "first question"
    await t.ask("second question")
    await t.page.reload()
    assert await t.answer() == "another answer"
    assert await t.page.inner_text(".bubble") == "second question"
    await t.click("article.user [aria-label='Version before']")
    assert await t.page.inner_text(".bubble") == "first question"
    assert await t.answer() == "hello world"
    prompts = [len(request.prompt) for request in c.node.requests]
    assert prompts[0] == prompts[1], "an answer is no part of the prompt of its sibling"


async def test_an_answer_is_stopped_and_what_has_come_stays(t: Tab, c: Cluster) -> None:
    goes_on(c, asyncio.Event())
    await t.send("go on")
    await t.has("article.running .markdown:has-text('goes on')")
    await t.page.keyboard.press("Escape")
    await t.has("article:not(.running) .note:has-text('Stopped')")
    assert "it goes on" in await t.answer()
    await until(lambda: c.node.active == 0)


async def test_an_answer_goes_on_while_another_chat_is_shown(t: Tab, c: Cluster) -> None:
    end = asyncio.Event()
    goes_on(c, end)
    await t.send("one")
    await t.has("article.running .markdown:has-text('goes on')")
    await t.page.keyboard.press("Control+Shift+O")
    await t.has(".chats li:has-text('one') .mark.running")
    assert await t.page.locator("article").count() == 0
    await t.send("two")
    await t.has("article.running .markdown:has-text('goes on')")
    await t.page.fill("#message", "a draft")
    await t.click(".chats .title:has-text('one')")
    await t.has("article.running .markdown:has-text('goes on')")
    assert await t.page.input_value("#message") == ""
    await t.click("[aria-label='Stop this answer']")
    await t.has("article:not(.running) .note:has-text('Stopped')")
    await until(lambda: c.node.active == 1)
    end.set()
    await t.has(".chats li:has-text('two') .mark:not(.running)")
    await t.click(".chats .title:has-text('two')")
    assert await t.answer() == "it goes on to the end"
    assert await t.page.input_value("#message") == "a draft"
    assert await t.page.locator(".mark").count() == 0
    await t.page.reload()
    assert await t.answer() == "it goes on to the end", "it is kept"


async def test_answers_at_once_are_bounded(t: Tab, c: Cluster) -> None:
    goes_on(c, asyncio.Event())
    for text in ("one", "two", "three"):
        await t.page.keyboard.press("Control+Shift+O")
        await t.send(text)
        await t.has(f"article.user:has-text('{text}') + article.running")
    await t.page.keyboard.press("Control+Shift+O")
    await t.send("four")
    await t.has(".notice:has-text('3 answers are being streamed')")
    assert await t.page.input_value("#message") == "four" and c.node.active == 3
    await t.page.hover(".chats li:has-text('one')")
    await t.click(".chats li:has-text('one') [aria-haspopup]")
    await t.page.keyboard.press("Escape")
    assert c.node.active == 3, "the menu is closed, and no answer is stopped"
    await t.click(".chats li:has-text('one') [aria-haspopup]")
    await t.click("[role=menuitem]:has-text('Stop the answer')")
    await until(lambda: c.node.active == 2)
    await t.page.wait_for_selector(".notice", state="hidden")
    await t.page.press("#message", "Enter")
    await t.has("article.user:has-text('four') + article.running")


async def test_a_chat_that_is_deleted_while_it_is_answered_does_not_come_back(
    t: Tab, c: Cluster
) -> None:
    goes_on(c, asyncio.Event())
    await t.send("gone")
    await t.has("article.running .markdown:has-text('goes on')")
    await t.page.hover(".chats li")
    await t.click(".chats [aria-haspopup]")
    await t.click("[role=menuitem]:has-text('Delete')")
    await t.click("dialog button.danger")
    await until(lambda: c.node.active == 0)
    await t.has(".welcome")
    await t.page.reload()
    await t.has(".welcome")
    assert await t.page.locator(".chats .title").count() == 0


async def test_an_answer_that_a_closed_page_has_cut_off_says_so(t: Tab, c: Cluster) -> None:
    goes_on(c, asyncio.Event())
    await t.send("go on")
    await t.has("article.running .markdown:has-text('goes on')")
    await t.page.reload()
    await t.has("article:not(.running) .note:has-text('Incomplete')")
    c.node.script = None
    await t.click("[aria-label='Answer again']")
    await t.has(".versions:has-text('2/2')")
    assert await t.answer() == "hello world"


async def test_markdown_is_shown(t: Tab, c: Cluster) -> None:
    says(c, RICH)
    await t.ask("show me")
    for selector in ("h2", "strong", "em", "math msup", "figure .hl-keyword", "td.to-right",
                     "li li", "figcaption button"):  # fmt: skip
        await t.has(f".markdown {selector}")


WIDE = "| " + " | ".join(f"column{i}" for i in range(9)) + " |\n" + "|--:" * 9 + "|\n"
WIDE += "| " + "1,234,567 | " * 9
OUTSIDE = """() => [...document.querySelectorAll("button > .icon")].filter(icon => {
  const [a, b] = [icon, icon.parentElement].map(node => node.getBoundingClientRect());
  return a.left < b.left || a.right > b.right || a.top < b.top || a.bottom > b.bottom;
}).map(icon => icon.parentElement.ariaLabel)"""


async def test_on_a_phone_numbers_are_whole_and_icons_in_their_buttons(
    chromium: Any, c: Cluster
) -> None:
    c.node.script = None
    says(c, WIDE)
    async with tab(chromium, c, viewport={"width": 390, "height": 844}) as t:
        await t.load()
        await t.ask("show me")
        heights = "[...document.querySelectorAll('td, th')].map(e => e.offsetHeight)"
        assert max(await t.page.evaluate(heights)) < 50, "a number or a word is broken"
        assert await t.page.evaluate(OUTSIDE) == []
        widths = "[innerWidth, document.documentElement.scrollWidth]"
        assert await t.page.evaluate(widths) == [390, 390], "tables scroll by themselves"
        await t.page.focus(".markdown .table")


async def test_hostile_output_stays_text(t: Tab, c: Cluster) -> None:
    says(c, HOSTILE)
    shown = await t.ask("attack")
    assert "<img src=x" in shown and "<iframe" in shown
    count = "document.querySelectorAll('.log :is(img, script, iframe, style, object, form)').length"
    assert await t.page.evaluate(count) == 0
    assert await t.page.evaluate("window.pwned") is None
    links = "[...document.querySelectorAll('.log a')].map(a => [a.protocol, a.rel, a.target])"
    for protocol, rel, target in await t.page.evaluate(links):
        assert protocol == "http:" and "noopener" in rel and target == "_blank"
    # Nor could a mistake in our own scripts bring it to life.
    assert await t.page.evaluate(SINK) == "TypeError"
    t.problems = [problem for problem in t.problems if "TrustedHTML" not in problem]


HARD = r"""async () => {
  const { MarkdownView } = await import("/web/markdown/render.js");
  const texts = ["*a ", "**a _b ", "_a", "[", "[a](", "`a ``b ", "$a ", "$$a ", "\\(", "> ", "- ",
                 "|a", "a|b\n-|-\n", "```js\n/* ", "```yaml\n-", "http://a)", "~~a", "![", "$$x^{",
                 "\n", "\\[a\n", "1. ", "#", "<http://"];
  for (const text of texts) new MarkdownView().show(text.repeat(40_000 / text.length));
  return texts.length;
}"""


async def test_hard_texts_take_no_time_that_grows_with_their_square(t: Tab) -> None:
    assert await t.page.evaluate(HARD) == 24


async def test_reasoning_is_folded_and_calls_are_shown(t: Tab) -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "reasoning": "I should", "reasoning_content": "I should"},
        {"reasoning": " call.", "reasoning_content": " call."},
        {"tool_calls": [{"index": 0, "id": "c1", "type": "function",
                         "function": {"name": "weather", "arguments": '{"city": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"Paris"}'}}]},
    ]  # fmt: skip
    ran = {"server_label": "clock", "name": "now", "arguments": "{}", "output": "noon"}
    deltas.append({"mcp_calls": [{"type": "mcp_call", "id": "m1", "error": None} | ran]})
    events = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    await t.page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )
    await t.send("weather?")
    await t.has(".call:has-text('weather') :text('\"Paris\"')")
    await t.click(".call summary:has-text('Ran clock: now')")
    await t.has(".call pre:has-text('noon')")
    assert not await t.page.is_visible(".reasoning .markdown")
    await t.click(".reasoning summary")
    await t.has(".reasoning .markdown p:text-is('I should call.')")


async def test_results_of_calls_are_entered_and_sent(t: Tab) -> None:
    call = {"index": 0, "id": "c1", "type": "function",
            "function": {"name": "weather", "arguments": "{}"}}  # fmt: skip
    sent = await streams(t, "chat/completions", [{"tool_calls": [call]}], [{"content": "Sunny."}])
    await t.send("weather?")
    await t.page.fill("[aria-label='Result of weather']", '{"sun": 1}')
    await t.click("button:has-text('Send the result')")
    await t.has("article.assistant:last-child .markdown:has-text('Sunny.')")
    asked, result = sent[1]["messages"][1:]
    assert asked["tool_calls"][0]["id"] == result["tool_call_id"] == "c1"
    assert result["role"] == "tool" and result["content"] == '{"sun": 1}'
    await t.has("article.tool summary:has-text('Result of weather')")
    assert await t.page.locator("[placeholder='Result of weather']").count() == 0


async def test_calls_of_mcp_servers_wait_for_an_approval(t: Tab) -> None:
    names = {"server_label": "files", "arguments": "{}"}
    asked = [
        {"type": "mcp_approval_request", "id": f"a-{name}", "name": name} | names
        for name in ("list", "delete")
    ]
    ran = {"type": "mcp_call", "id": "m1", "name": "list", "output": "a.txt", "error": None}
    ran |= names | {"approval_request_id": "a-list"}
    done = [{"type": "response.output_item.done", "item": item} for item in (*asked, ran)]
    usage = {"input_tokens": 3, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 1}}
    last = {"type": "response.completed", "response": {"status": "completed", "usage": usage}}
    text = {"type": "response.output_text.delta", "delta": "One file."}
    sent = await streams(t, "responses", [*done[:2], last], [done[2], text, last], [text, last])
    await t.page.keyboard.press("Control+,")
    await t.page.fill("#setting-mcp", "files")
    await t.page.check("#setting-ask")
    await t.page.keyboard.press("Escape")
    await t.send("which?")
    await t.click("[aria-label='Allow files: list']")
    assert len(sent) == 1, "each call needs a decision"
    await t.click("[aria-label='Deny files: delete']")
    assert await t.answer() == "One file."
    await t.has(".note:has-text('Allowed files: list; Denied files: delete')")
    await t.has(".call summary:has-text('Ran files: list')")
    assert sent[0]["tools"][0]["require_approval"] == "always" and sent[0]["store"] is False
    decisions = {item["approval_request_id"]: item["approve"] for item in sent[1]["input"][3:]}
    assert decisions == {"a-list": True, "a-delete": False}
    await t.ask("thanks")
    kinds = [item["type"].removeprefix("mcp_") for item in sent[2]["input"]]
    assert kinds == ["message", *["approval_request"] * 2, *["approval_response"] * 2, "call",
                     "message", "message"]  # fmt: skip


async def streams(t: Tab, path: str, *answers: list[dict[str, Any]]) -> list[Any]:
    """Answer requests with these deltas, or events of a response; returns the bodies."""
    bodies: list[Any] = []

    async def fulfil(route: Any) -> None:
        events = [
            event if "type" in event else {"choices": [{"index": 0, "delta": event}]}
            for event in answers[len(bodies)]
        ]
        bodies.append(route.request.post_data_json)
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        end = "data: [DONE]\n\n" if path == "chat/completions" else ""
        await route.fulfill(content_type="text/event-stream", body=body + end)

    await t.page.route(f"**/v1/{path}", fulfil)
    return bodies


@pytest.mark.parametrize(
    ("status", "shown"),
    [(429, "Too many requests."), (503, "cannot serve"), (0, "Connection lost")],
)
async def test_errors_can_be_tried_again(t: Tab, status: int, shown: str) -> None:
    async def fail(route: Any) -> None:
        if not status:
            await route.abort()
            return
        error = {"error": {"message": "Come back later."}}
        await route.fulfill(status=status, json=error, headers={"retry-after": "1"})

    await t.page.route("**/v1/chat/completions", fail)
    await t.send("hi")
    await t.has(f".error:has-text('{shown}')")
    await t.page.unroute("**/v1/chat/completions")
    await t.click(".error button:enabled")
    assert await t.answer() == "hello world"
    assert await t.page.locator("article.assistant").count() == 1


async def test_settings_are_sent(t: Tab, c: Cluster) -> None:
    await t.page.keyboard.press("Control+,")
    await t.page.fill("dialog textarea >> nth=0", "be brief")
    values = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 5,
        "max_tokens": 3,
    }
    for name, value in values.items():
        await t.page.fill(f"#setting-{name}", str(value))
    tops = "[...document.querySelectorAll('dialog label')].map(l => l.getBoundingClientRect().top)"
    found = await t.page.evaluate(tops)
    assert found == sorted(found), "the fields stand below each other"
    await t.page.fill("#setting-more", '{"min_tokens": 1}')
    await t.page.keyboard.press("Escape")
    await t.page.select_option("#model", "other")
    before = len(c.encode("be brief"))
    await t.ask("hi")
    assert (await t.page.get_attribute(".figures", "title") or "").startswith("other: ")
    sampling = c.node.requests[-1].sampling
    assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (7, 5, 3)
    assert (round(sampling.temperature, 3), round(sampling.top_p, 3)) == (0.5, 0.9)
    assert sampling.min_tokens == 1 and len(c.node.requests[-1].prompt) > before


async def test_chats_are_found_renamed_exported_deleted_and_imported(
    t: Tab, tmp_path: Path
) -> None:
    await t.ask("about apples")
    await t.page.keyboard.press("Control+Shift+O")
    await t.ask("about pears")
    assert await t.page.locator(".chats .title").count() == 2
    await t.page.keyboard.press("Control+k")
    await t.page.keyboard.type("apples")
    await t.has(".chats:not(:has-text('pears'))")
    await t.page.hover(".chats li")
    await t.click(".chats [aria-haspopup]")
    await t.click("[role=menuitem]:has-text('Rename')")
    await t.page.fill("dialog input", "Fruit")
    await t.page.keyboard.press("Enter")
    await t.has(".chats .title:has-text('Fruit')")
    async with t.page.expect_download() as downloading:
        await t.click("button:has-text('Export all')")
    file = tmp_path / "chats.json"
    await (await downloading.value).save_as(file)
    assert {chat["title"] for chat in json.loads(file.read_text())["chats"]} == {"Fruit", ""}
    await t.page.hover(".chats li")
    await t.click(".chats [aria-haspopup]")
    await t.click("[role=menuitem]:has-text('Delete')")
    await t.click("dialog button.danger")
    await t.has(".chats:not(:has-text('Fruit'))")
    async with t.page.expect_file_chooser() as choosing:
        await t.click("button:has-text('Import')")
    await (await choosing.value).set_files(file)
    await t.has(".chats .title:has-text('Fruit')")


async def test_a_long_chat_shows_its_end_and_more_on_demand(t: Tab, tmp_path: Path) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": f"message {i}"} for i in range(130)]
    file = tmp_path / "long.json"
    file.write_text(json.dumps({"messages": messages}))
    async with t.page.expect_file_chooser() as choosing:
        await t.click("button:has-text('Import')")
    await (await choosing.value).set_files(file)
    await t.has("article:last-child:has-text('message 129')")
    assert await t.page.locator("article").count() == 50
    await streams(t, "chat/completions", [{"content": "the answer"}])  # too long for the model
    assert await t.ask("one more") == "the answer"
    assert await t.page.locator("article").count() == 52
    before = t.page.locator("article:has-text('message 80')")
    place = (await before.bounding_box())["y"]
    await t.page.evaluate("document.querySelector('.earlier').click()")
    await t.has("article:has-text('message 30')")
    assert abs((await before.bounding_box())["y"] - place) < 2, "the log stays in its place"
    await t.page.evaluate("document.querySelector('.scroller').scrollTop = 0")
    await t.has("article:has-text('message 0')")
    await t.page.wait_for_selector(".earlier", state="hidden")


async def test_a_key_is_asked_for(chromium: Any, tmp_path: Path) -> None:
    async with cluster(tmp_path, api_key="secret") as c, tab(chromium, c) as t:
        await t.page.goto(c.url)
        await t.page.fill("dialog input[type=password]", "wrong")
        await t.page.keyboard.press("Enter")
        await t.has("dialog:has-text('does not accept')")
        await t.page.keyboard.press("Escape")
        await t.has("#model:disabled:has-text('a key is needed')")
        await t.click("[aria-label='API key']")
        await t.page.fill("dialog input[type=password]", "secret")
        await t.page.keyboard.press("Enter")
        await t.has("#model:enabled")
        assert await t.ask("hi") == "hello world"


async def test_axe_finds_nothing(chromium: Any, c: Cluster) -> None:
    axe = axe_source()
    says(c, RICH)
    for scheme in ("light", "dark"):
        async with tab(chromium, c, color_scheme=scheme) as t:
            await t.load()
            await t.ask("show me")
            for path in ("", "Control+,", "?"):
                await t.page.keyboard.press("Escape")
                if path:
                    await t.page.evaluate("document.activeElement.blur()")
                    await t.page.keyboard.press(path)
                    await t.has("dialog[open]")
                assert await violations(t, axe) == {}, (scheme, path)
