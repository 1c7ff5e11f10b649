"""Sampling defaults of the operator: on every surface, behind a request's own values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.router.cluster.pinned_model import load_tokenizer
from tandem.router.options import RouterOptions
from tandem.shared.config import RouterConfig
from tandem.shared.config.sampling_defaults import read_defaults
from tandem.shared.errors import ModelError, UsageError
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.router.in_process import InProcess, tiny
from tandem.tests.router.in_process_responses import InProcessResponses
from tandem.tests.router.support import cluster, make_model

MESSAGES = [{"role": "user", "content": "hi"}]
# A request of each API, and the same with temperature 0.75.
SURFACES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}, {"temperature": 0.75}),
    ("/v1/completions", {"prompt": "hi"}, {"temperature": 0.75}),
    ("/v1/responses", {"input": "hi"}, {"temperature": 0.75}),
    ("/v1/messages", {"model": "", "messages": MESSAGES, "max_tokens": 9}, {"temperature": 0.75}),
    (
        "/api/chat",
        {"model": "tiny", "messages": MESSAGES, "stream": False},
        {"options": {"temperature": 0.75}},
    ),
    (
        "/api/generate",
        {"model": "tiny", "prompt": "hi", "stream": False},
        {"options": {"temperature": 0.75}},
    ),
]


def sampling(c: InProcess, path: str, body: dict[str, Any]) -> Any:
    response = c.post(path, **body)
    assert response.status_code == 200, response.text
    return c.node.requests[-1].sampling


def test_defaults_act_on_every_surface_and_requests_win() -> None:
    tokenizer = tiny(temperature=0.1, top_k=3, max_new_tokens=6)
    options: dict[str, Any] = {
        "temperature": 0.5,
        "override_generation_config": '{"top_p": 0.25, "temperature": 0.3}',
        "presence_penalty": 1.5,
    }
    with InProcessResponses(tokenizer, **options) as c:
        for path, body, own in SURFACES:
            params = sampling(c, path, body)
            assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 3), path
            assert (params.presence_penalty, params.max_tokens) == (1.5, 6), path
            assert sampling(c, path, body | own).temperature == 0.75, path
        card_defaults = c.model.card().default_sampling_params
        assert (card_defaults["temperature"], card_defaults["top_p"], card_defaults["top_k"]) == (
            0.5,
            0.25,
            3,
        )
        assert (
            card_defaults["presence_penalty"],
            card_defaults["min_p"],
            card_defaults["max_tokens"],
        ) == (1.5, 0, 6)


def test_max_tokens_is_a_default_and_max_new_tokens_a_limit() -> None:
    c = InProcess(max_tokens=20, override_generation_config='{"max_new_tokens": 30}')
    for path, body, _ in SURFACES[:2]:
        for limit, limit_of_node in ((None, 20), (25, 25), (40, 30)):
            assert sampling(c, path, body | {"max_tokens": limit}).max_tokens == limit_of_node


def test_template_variables_have_defaults() -> None:
    tokenizer = tiny("{{ word }} {{ messages[0].content }}")
    c = InProcess(tokenizer, default_chat_template_kwargs='{"word": "stop"}')
    c.chat()
    c.chat(chat_template_kwargs={"word": "fox"})
    count = c.post("/tokenize", messages=MESSAGES).json()
    first, second = (list(request.prompt) for request in c.node.requests)
    assert first == c.encode("stop hi") == count["tokens"]
    assert second == c.encode("fox hi")


async def test_operators_settings_reach_the_model_that_joins(tmp_path: Path) -> None:
    """A template in place of the model's own, in a file or inline, and a default."""
    (tmp_path / "own.jinja").write_text("stop {{ messages[0].content }}")
    for template in (str(tmp_path / "own.jinja"), "stop {{ messages[0].content }}"):
        async with cluster(tmp_path, chat_template=template, temperature=0.5) as c:
            await c.chat()
            assert list(c.node.requests[0].prompt) == c.encode("stop hi")
            assert c.node.requests[0].sampling.temperature == 0.5
            [card] = (await c.client.get("/v1/models")).json()["data"]
            assert card["default_sampling_params"]["temperature"] == 0.5


async def test_a_template_of_the_models_is_chosen_by_its_name(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "named")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    templates = {"default": "fox", "rag": "stop {{ messages[0].content }}", "tool_use": "tools"}
    config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    files = read_tokenizer_files(folder)
    tokenizer = await load_tokenizer(files, 0, RouterOptions(chat_template="rag"))
    options: list[Any] = [None, [{}]]
    for tools in options:
        assert tokenizer.apply_chat_template(MESSAGES, tools=tools) == "stop hi"
    with pytest.raises(ModelError, match=r"'tag' is neither a file nor .* has: default, rag, tool"):
        await load_tokenizer(files, 0, RouterOptions(chat_template="tag"))
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for %}")
    for value, origin in ((str(broken), f" {broken}"), ("{% for %}", "")):
        with pytest.raises(ModelError, match=rf"^--chat-template{origin}: the chat template does"):
            await load_tokenizer(files, 0, RouterOptions(chat_template=value))


def test_the_source_of_the_defaults(tmp_path: Path) -> None:
    model = {
        "temperature": 0.1,
        "top_k": True,
        "top_p": float("inf"),
        "max_new_tokens": 1e9,
        "eos_token_id": 0,
    }
    (tmp_path / "generation_config.json").write_text('{"min_p": 0.2}')
    for source, expected in (
        ("auto", {"temperature": 0.1}),
        ("vllm", {}),
        (str(tmp_path), {"min_p": 0.2}),
        (str(tmp_path / "generation_config.json"), {"min_p": 0.2}),
    ):
        defaults = read_defaults(RouterOptions(generation_config=source)).for_model(model)
        assert (defaults.parameters, defaults.limit) == (expected, None)


async def test_a_model_default_that_is_not_a_number_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_model(tmp_path / "model", temperature="hot", top_p=None, top_k=5)
    file = folder / "generation_config.json"
    async with cluster(tmp_path) as c:
        await c.chat()
        assert c.node.requests[0].sampling.temperature == 1
    words = "temperature is 'hot', which is not a number, and is ignored: correct it, or set it by"
    warnings = [message for message in caplog.messages if "which is not a number" in message]
    assert [line.startswith(f"{file}: {words} --override") for line in warnings] == [True]
    read_defaults(RouterOptions(generation_config=str(file)))
    assert f"--generation-config {file}: {words} --override" in caplog.messages[-1]
    options = RouterOptions(generation_config="vllm")
    await load_tokenizer(read_tokenizer_files(folder), 0, options)
    assert sum("which is not a number" in message for message in caplog.messages) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"override_generation_config": "{"}, "'{' is not a JSON object"),
        ({"override_generation_config": '{"do_sample": true}'}, "'do_sample' is not a default"),
        ({"override_generation_config": '{"top_p": 0}'}, "top_p 0 must be a number above 0"),
        ({"override_generation_config": '{"top_k": 1.5}'}, "top_k 1.5 must be an integer from"),
        ({"override_generation_config": '{"temperature": NaN}'}, "temperature nan must be"),
        ({"top_p": 0.0}, "--top-p 0 is out of range"),
        ({"temperature": float("nan")}, "--temperature nan is out of range"),
        ({"max_tokens": 0}, "--max-tokens 0 is out of range"),
        ({"default_chat_template_kwargs": '{"tools": []}'}, "must not set 'tools'"),
        ({"chat_template": "/none.jinja"}, "--chat-template /none.jinja: No such file"),
        ({"default_chat_template_kwargs": "[]"}, "is not a JSON object"),
    ],
)
def test_a_default_that_no_request_may_have_is_refused(options: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        RouterConfig(**options)


def test_a_file_of_defaults_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory; use auto, vllm"):
        read_defaults(RouterOptions(generation_config=str(tmp_path)))
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(UsageError, match="not a JSON object"):
        read_defaults(RouterOptions(generation_config=str(tmp_path / "x.json")))
