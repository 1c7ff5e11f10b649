"""The page in a real browser: chats, their versions, errors, settings, keys and files."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.tests.router.support import Cluster, cluster, until
from tandem.tests.router.web.browser import Tab, says, streams, tab
from tandem.tests.router.web.scripts import goes_on

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_chat_is_edited_regenerated_and_restored_after_a_reload(t: Tab, c: Cluster) -> None:
    assert await t.send_and_read("first question") == "hello world"
    figures = await t.page.inner_text(".figures")
    assert "first token" in figures and "tokens" in figures
    says(c, "another answer")
    await t.click("[aria-label='Answer again']")
    await t.has(".versions:has-text('2/2')")
    assert await t.reply() == "another answer"
    await t.click("[aria-label='Version before']")
    assert await t.reply() == "hello world"
    await t.page.press("#message", "ArrowUp")
    assert await t.page.input_value("#message") == "first question"
    await t.send_and_read("second question")
    await t.page.reload()
    assert await t.reply() == "another answer"
    assert await t.page.inner_text(".bubble") == "second question"
    await t.click("article.user [aria-label='Version before']")
    assert await t.page.inner_text(".bubble") == "first question"
    assert await t.reply() == "hello world"
    prompts = [len(request.prompt) for request in c.node.requests]
    assert prompts[0] == prompts[1], "an answer is no part of the prompt of its sibling"


async def test_a_stopped_reply_keeps_its_partial_text(t: Tab, c: Cluster) -> None:
    goes_on(c, asyncio.Event())
    await t.send("go on")
    await t.has("article.running .markdown:has-text('goes on')")
    await t.page.keyboard.press("Escape")
    await t.has("article:not(.running) .note:has-text('Stopped')")
    assert "it goes on" in await t.reply()
    await until(lambda: c.node.active == 0)


async def test_a_reply_continues_while_another_chat_is_open(t: Tab, c: Cluster) -> None:
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
    await t.has("article.user:has-text('two')")  # and no longer the chat that was stopped
    assert await t.reply() == "it goes on to the end"
    assert await t.page.input_value("#message") == "a draft"
    await t.page.wait_for_selector(".mark", state="detached")
    await t.page.reload()
    assert await t.reply() == "it goes on to the end", "it is kept"


async def test_concurrent_replies_are_bounded(t: Tab, c: Cluster) -> None:
    goes_on(c, asyncio.Event())
    for text in ("one", "two", "three"):
        await t.page.keyboard.press("Control+Shift+O")
        await t.send(text)
        await t.has(f"article.user:has-text('{text}') + article.running")
    await t.page.keyboard.press("Control+Shift+O")
    await t.send("four")
    await t.has(".notice:has-text('3 answers are being streamed')")
    assert await t.page.input_value("#message") == "four"
    await until(lambda: c.node.active == 3)
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


async def test_a_chat_deleted_during_its_reply_does_not_come_back(t: Tab, c: Cluster) -> None:
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


async def test_a_reply_cut_off_by_a_closed_page_is_marked(t: Tab, c: Cluster) -> None:
    goes_on(c, asyncio.Event())
    await t.send("go on")
    await t.has("article.running .markdown:has-text('goes on')")
    await t.page.reload()
    await t.has("article:not(.running) .note:has-text('Incomplete')")
    c.node.script = None
    await t.click("[aria-label='Answer again']")
    await t.has(".versions:has-text('2/2')")
    assert await t.reply() == "hello world"


@pytest.mark.parametrize(
    ("status", "expected"),
    [(429, "Too many requests."), (503, "is unavailable"), (0, "Connection lost")],
)
async def test_errors_can_be_tried_again(t: Tab, c: Cluster, status: int, expected: str) -> None:
    async def fail_once(route: Any) -> None:
        if failed.is_set():
            await route.continue_()
        elif status:
            error = {"error": {"message": "Come back later."}}
            await route.fulfill(status=status, json=error, headers={"retry-after": "1"})
        else:
            await route.abort()
        failed.set()

    # Never removed: a request during the removal of a route may hang.
    failed = asyncio.Event()
    await t.page.route("**/v1/chat/completions", fail_once)
    await t.send("hi")
    await t.has(f".error:has-text('{expected}')")
    await t.click(".error button:enabled")
    assert await t.reply() == "hello world"
    assert await t.page.locator("article.assistant").count() == 1
    goes_on(c, asyncio.Event())
    failed.clear()
    await t.send("hi again")
    await t.click(".error button:enabled")
    await t.has("article.assistant.running .markdown:has-text('goes on')")


async def test_a_reply_that_ended_early_is_continued(t: Tab, c: Cluster) -> None:
    goes_on(c, asyncio.Event())
    await t.send("go on")
    await t.has("article.running .markdown:has-text('goes on')")
    await t.page.keyboard.press("Escape")
    await t.has(".note:has-text('Stopped')")
    before = await t.reply()
    c.node.script = None
    says(c, " and on")
    await t.click("button:has-text('Continue')")
    await t.has(f"article:not(.running) .markdown:has-text('{before} and on')")
    assert c.node.requests[-1].prompt[-len(c.encode(before)) :] == c.encode(before)
    await t.page.wait_for_selector("button:has-text('Continue')", state="detached")


@pytest.mark.parametrize("reason", ["length", ""])
async def test_a_reply_that_was_cut_off_is_continued(t: Tab, reason: str) -> None:
    bodies: list[Any] = []

    async def cut(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        choice = {"index": 0, "delta": {"content": "so far"}, "finish_reason": reason or None}
        end = "data: [DONE]\n\n" if reason else ""
        event = f"data: {json.dumps({'choices': [choice]})}\n\n"
        await route.fulfill(content_type="text/event-stream", body=event + end)

    await t.page.route("**/v1/chat/completions", cut)
    await t.send("hi")
    note = ".note:has-text('token limit')" if reason else ".error:has-text('Connection lost')"
    await t.has(f"{note} button:has-text('Continue')")
    await streams(t, "chat/completions", [{"content": " and on"}])
    await t.click("button:has-text('Continue')")
    await t.has("article:not(.running) .markdown:has-text('so far and on')")
    assert await t.page.locator(".error").count() == 0 and len(bodies) == 1


async def test_a_chat_longer_than_the_context_goes_on_without_its_oldest_messages(
    chromium: Any, tmp_path: Path
) -> None:
    async with cluster(tmp_path, context=256) as c, tab(chromium, c) as t:
        await t.load()
        for number in range(4):
            await t.send(f"message {number} " + "word " * 12)
            await t.has(
                f"article:nth-of-type({2 * number + 2}):not(.running) :is(.figures, .error)"
            )
        assert await t.page.locator(".shortened").count() == 0
        await t.click("button:has-text('Answer without the oldest messages')")
        await t.has(".shortened")
        assert await t.reply() == "hello world"
        assert await t.page.locator("article").count() == 8, "nothing is gone from the chat"
        await t.has("article:has-text('hello') ~ .shortened ~ article.user:has-text('message 3')")
        assert len(c.node.requests) == 4 and len(c.node.requests[-1].prompt) < 256
        await t.page.reload()
        await t.has(".shortened")
        await t.page.keyboard.press("Control+Shift+O")
        await t.send("word " * 300)
        await t.has(".error:has-text('maximum context length') button:has-text('Try again')")


async def test_text_files_are_attached_and_no_others(t: Tab, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("one\n```two```\n")
    field = t.page.locator(".composer input[type=file]")
    await field.set_input_files(notes)
    await t.has(".attached li:has-text('notes.txt')")
    for name, data, why in (
        ("photo.png", b"\x89PNG", "photo.png is an image"),
        ("paper.pdf", b"%PDF", "paper.pdf is a PDF"),
        ("data.bin", b"\xff\x00", "data.bin is not a text file"),
        ("long.txt", b"x" * 2_000_001, "long.txt is too large"),
    ):
        (tmp_path / name).write_bytes(data)
        await field.set_input_files(tmp_path / name)
        await t.has(f".notice:has-text('{why}')")
    drop = """selector => {
        const data = new DataTransfer();
        data.items.add(new File(["dropped"], "dropped.txt", { type: "text/plain" }));
        const about = { dataTransfer: data, bubbles: true, cancelable: true };
        const event = new DragEvent("drop", about);
        document.querySelector(selector).dispatchEvent(event);
        return event.defaultPrevented;
    }"""
    assert await t.page.evaluate(drop, "header")
    await t.has(".attached li:has-text('dropped.txt')")
    bodies = await streams(t, "chat/completions", [{"content": "read"}])
    assert await t.send_and_read("what is this?") == "read"
    [message] = bodies[0]["messages"]
    assert message["content"] == (
        "what is this?\n\nnotes.txt:\n````\none\n```two```\n\n````\n\n"
        "dropped.txt:\n```\ndropped\n```"
    )
    assert await t.page.locator("article.user .call").count() == 2
    await t.page.wait_for_selector(".attached", state="hidden")
    await t.click("article.user [aria-label='Edit']")
    await t.has(".attached li:has-text('notes.txt')")
    await t.page.keyboard.press("Escape")
    await t.click("[data-view=cluster]")
    assert await t.page.evaluate(drop, "main"), "the page is not left"
    await t.click("[data-view=chat] >> nth=0")
    await t.page.wait_for_selector(".attached", state="hidden")


async def test_the_rate_is_that_of_the_tokens_after_the_first(t: Tab) -> None:
    stats = await t.page.evaluate(r"""async () => {
        const { stream } = await import("./web/chat/answer.js");
        let now = 1000, controller;
        const token = { choices: [{ index: 0, delta: { content: "a" } }] };
        const usage = { prompt_tokens: 7, completion_tokens: 5 };
        const events = [token, token, token, token, token, { choices: [], usage }].map(event =>
            `data: ${JSON.stringify(event)}\n\n`);
        // Each event comes when the page has taken the one before.
        const next = () => {
            now += 250;
            controller.enqueue(new TextEncoder().encode(events.shift() ?? "data: [DONE]\n\n"));
        };
        performance.now = () => now;
        const body = new ReadableStream({ start(it) { controller = it; } });
        window.fetch = async () => new Response(body);
        const message = { text: "" };
        const streamed = stream(message, { messages: [] }, null, next);
        next();
        await streamed;
        return message.stats;
    }""")
    assert (stats["first"], stats["rate"]) == (0.25, 4)
    assert (stats["tokens"], stats["prompt"]) == (5, 7)


async def test_settings_are_sent(t: Tab, c: Cluster) -> None:
    await t.page.keyboard.press("Control+,")
    assert await t.page.get_attribute("#setting-temperature", "placeholder") == "1"
    await t.page.fill("#setting-temperature", "9")
    await t.has("#setting-temperature-problem:has-text('Temperature is 2 or less.')")
    assert await t.page.get_attribute("#setting-temperature", "aria-invalid") == "true"
    await t.page.fill("#setting-more", "{")
    await t.has("#setting-more-problem:has-text('not a JSON object')")
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
    tops_found = await t.page.evaluate(tops)
    assert tops_found == sorted(tops_found), "the fields stand below each other"
    await t.page.fill("#setting-more", '{"min_tokens": 1}')
    await t.page.keyboard.press("Escape")
    await t.page.select_option("#model", "other")
    before = len(c.encode("be brief"))
    await t.send_and_read("hi")
    assert (await t.page.get_attribute(".figures", "title") or "").startswith("other: ")
    sampling = c.node.requests[-1].sampling
    assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (7, 5, 3)
    assert (round(sampling.temperature, 3), round(sampling.top_p, 3)) == (0.5, 0.9)
    assert sampling.min_tokens == 1 and len(c.node.requests[-1].prompt) > before


async def test_settings_for_new_chats_and_the_theme_are_kept(t: Tab) -> None:
    await t.page.keyboard.press("Control+,")
    await t.page.fill("#setting-temperature", "0.5")
    await t.page.fill("#setting-stop", "one\ntwo")
    await t.click("button:has-text('Use for new chats')")
    await t.page.keyboard.press("Escape")
    other = await t.beside()
    await other.click("[aria-label^='Theme:']")
    for each in (t, other):
        await each.has("html[data-theme=light] [aria-label='Theme: light']")
    await t.click("[aria-label='Theme: light']")
    await other.has("html[data-theme=dark] [aria-label='Theme: dark']")
    await t.page.reload()
    await t.has("html[data-theme=dark] [aria-label='Theme: dark']")
    await t.page.keyboard.press("Control+,")
    for field, value in (("temperature", "0.5"), ("stop", "one\ntwo"), ("top_p", "")):
        assert await t.page.input_value(f"#setting-{field}") == value


FILES = """async files => {
    const { fromJson } = await import("./web/chat/files.js");
    return files.map(file => {
        try {
            const [chat] = fromJson(JSON.stringify(file));
            const places = Object.keys(chat.messages);
            return [chat.title, places.map(id => {
                const { id: own, parent, at, ...fields } = chat.messages[id];
                return { at: places.indexOf(own), below: places.indexOf(parent), ...fields };
            })];
        } catch (error) {
            return error.message;
        }
    });
}"""


async def test_an_imported_chat_has_all_that_it_had_and_nothing_else(t: Tab) -> None:
    call = {"id": "c", "name": "f", "text": "{}"}
    mcp_call = call | {"server": "s", "output": "o", "failed": False, "approval": "a"}
    user = {"role": "user", "text": "hi", "files": [{"name": "n", "text": "t"}]}
    amounts = ("first", "total", "rate", "tokens", "prompt", "cached", "remote")
    stats = dict.fromkeys(amounts, 2) | {"prefill": "p", "decode": "d"}
    reply = {"role": "assistant", "text": "", "reasoning": "r", "calls": [call], "ran": [mcp_call],
              "approvals": [call | {"server": "s"}], "stats": stats}  # fmt: skip
    result = {"role": "tool", "text": "x", "name": "f", "callId": "c"}
    decision = {
        "role": "approval",
        "text": "",
        "decisions": [call | {"server": "s", "approve": True}],
    }
    places = [("1", ""), ("2", "1"), ("3", "2"), ("4", "2")]
    all_messages: list[dict[str, Any]] = [user, reply, result, decision]
    messages = {
        f"m{id}": {"id": f"m{id}", "parent": f"m{parent}" if parent else "", "other": 1} | message
        for (id, parent), message in zip(places, all_messages, strict=True)
    }
    ours = {"format": "tandem-chats", "chats": [{"title": "T", "messages": messages}]}
    tool_calls = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]
    theirs = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]},
                           {"role": "assistant", "content": None, "tool_calls": tool_calls},
                           {"role": "tool", "content": "x", "tool_call_id": "c"}]}  # fmt: skip
    unknown = {"messages": [{"role": "nobody", "content": "hi"}]}
    imported = await t.page.evaluate(FILES, [ours, theirs, unknown, {}])
    expected = [{"at": at, "below": below} for at, below in enumerate((-1, 0, 1, 1))]
    assert imported[0] == [
        "T",
        [place | message for place, message in zip(expected, all_messages, strict=True)],
    ]
    assert imported[1] == ["", [
        {"at": 0, "below": -1, "role": "user", "text": "hi"},
        {"at": 1, "below": 0, "role": "assistant", "text": "", "calls": [call]},
        {"at": 2, "below": 1, "role": "tool", "text": "x", "callId": "c"},
    ]]  # fmt: skip
    assert imported[2:] == [
        "A message in the file has the role 'nobody'.",
        "The file has neither chats of Tandem nor a list of messages.",
    ]


async def test_chats_are_found_renamed_exported_deleted_and_imported(
    t: Tab, tmp_path: Path
) -> None:
    await t.send_and_read("about apples")
    await t.page.keyboard.press("Control+Shift+O")
    await t.send_and_read("about pears")
    await t.has(".chats li:has-text('pears') + li:has-text('apples')")
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
    assert await t.send_and_read("one more") == "the answer"
    assert await t.page.locator("article").count() == 52
    before = t.page.locator("article:has-text('message 80')")
    place = (await before.bounding_box())["y"]
    await t.page.evaluate("document.querySelector('.earlier').click()")
    await t.has("article:has-text('message 30')")
    assert abs((await before.bounding_box())["y"] - place) < 2, "the log stays in its place"
    await t.page.evaluate("document.querySelector('.scroller').scrollTop = 0")
    await t.has("article:has-text('message 0')")
    await t.page.wait_for_selector(".earlier", state="hidden")


async def test_the_page_requests_an_api_key(chromium: Any, tmp_path: Path) -> None:
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
        assert await t.send_and_read("hi") == "hello world"
