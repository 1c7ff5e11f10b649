"""Output in a real browser: Markdown, hostile and difficult texts, reasoning, and tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.tests.router.support import Cluster
from tandem.tests.router.web.browser import Tab, axe_source, says, streams, tab, violations

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


async def test_markdown_is_shown(t: Tab, c: Cluster) -> None:
    says(c, RICH)
    await t.send_and_read("show me")
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
        await t.send_and_read("show me")
        heights = "[...document.querySelectorAll('td, th')].map(e => e.offsetHeight)"
        assert max(await t.page.evaluate(heights)) < 50, "a number or a word is broken"
        assert await t.page.evaluate(OUTSIDE) == []
        widths = "[innerWidth, document.documentElement.scrollWidth]"
        assert await t.page.evaluate(widths) == [390, 390], "tables scroll by themselves"
        await t.page.focus(".markdown .table")


async def test_hostile_output_stays_text(t: Tab, c: Cluster) -> None:
    says(c, HOSTILE)
    text = await t.send_and_read("attack")
    assert "<img src=x" in text and "<iframe" in text
    count = "document.querySelectorAll('.log :is(img, script, iframe, style, object, form)').length"
    assert await t.page.evaluate(count) == 0
    assert await t.page.evaluate("window.pwned") is None
    links = "[...document.querySelectorAll('.log a')].map(a => [a.protocol, a.rel, a.target])"
    for protocol, rel, target in await t.page.evaluate(links):
        assert protocol == "http:" and "noopener" in rel and target == "_blank"
    # Even a mistake in our own scripts could not execute it.
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
    result = {"server_label": "clock", "name": "now", "arguments": "{}", "output": "noon"}
    deltas.append({"mcp_calls": [{"type": "mcp_call", "id": "m1", "error": None} | result]})
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
    requests = await streams(
        t, "chat/completions", [{"tool_calls": [call]}], [{"content": "Sunny."}]
    )
    await t.send("weather?")
    await t.page.fill("[aria-label='Result of weather']", '{"sun": 1}')
    await t.click("button:has-text('Send the result')")
    await t.has("article.assistant:last-child .markdown:has-text('Sunny.')")
    call_message, result = requests[1]["messages"][1:]
    assert call_message["tool_calls"][0]["id"] == result["tool_call_id"] == "c1"
    assert result["role"] == "tool" and result["content"] == '{"sun": 1}'
    await t.has("article.tool summary:has-text('Result of weather')")
    assert await t.page.locator("[placeholder='Result of weather']").count() == 0


async def test_calls_of_mcp_servers_wait_for_an_approval(t: Tab) -> None:
    names = {"server_label": "files", "arguments": "{}"}
    calls = [
        {"type": "mcp_approval_request", "id": f"a-{name}", "name": name} | names
        for name in ("list", "delete")
    ]
    result = {"type": "mcp_call", "id": "m1", "name": "list", "output": "a.txt", "error": None}
    result |= names | {"approval_request_id": "a-list"}
    done = [{"type": "response.output_item.done", "item": item} for item in (*calls, result)]
    usage = {"input_tokens": 3, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 1}}
    last = {"type": "response.completed", "response": {"status": "completed", "usage": usage}}
    text = {"type": "response.output_text.delta", "delta": "One file."}
    requests = await streams(t, "responses", [*done[:2], last], [done[2], text, last], [text, last])
    await t.page.keyboard.press("Control+,")
    await t.page.fill("#setting-mcp", "files")
    await t.page.check("#setting-ask")
    await t.page.keyboard.press("Escape")
    await t.send("which?")
    await t.click("[aria-label='Allow files: list']")
    assert len(requests) == 1, "each call needs a decision"
    await t.click("[aria-label='Deny files: delete']")
    assert await t.reply() == "One file."
    await t.has(".note:has-text('Allowed files: list; Denied files: delete')")
    await t.has(".call summary:has-text('Ran files: list')")
    assert requests[0]["tools"][0]["require_approval"] == "always" and requests[0]["store"] is False
    decisions = {item["approval_request_id"]: item["approve"] for item in requests[1]["input"][3:]}
    assert decisions == {"a-list": True, "a-delete": False}
    await t.send_and_read("thanks")
    kinds = [item["type"].removeprefix("mcp_") for item in requests[2]["input"]]
    assert kinds == ["message", *["approval_request"] * 2, *["approval_response"] * 2, "call",
                     "message", "message"]  # fmt: skip


async def test_axe_finds_nothing(chromium: Any, c: Cluster) -> None:
    axe = axe_source()
    says(c, RICH)
    for scheme in ("light", "dark"):
        async with tab(chromium, c, color_scheme=scheme) as t:
            await t.load()
            await t.send_and_read("show me")
            for path in ("", "Control+,", "?"):
                await t.page.keyboard.press("Escape")
                if path:
                    await t.page.evaluate("document.activeElement.blur()")
                    await t.page.keyboard.press(path)
                    await t.has("dialog[open]")
                assert await violations(t, axe) == {}, (scheme, path)
