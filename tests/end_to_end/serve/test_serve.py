"""``tandem serve`` as a user meets it: the built-in model, a real client, and a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tandem.__main__ import cli
from tandem.router.cluster import admin
from tandem.shared.errors import RequestError
from tandem.shared.launch.log_folders import LATEST
from tandem.shared.security.local_token import find_router, find_token
from tandem.tests.end_to_end.support.cluster import get, until
from tandem.tests.support.documents import ShownCommand, shown_commands

LONG = "The harbour is quiet. " * 60 + "Hello! Who are you?"


class ServeProcess:
    """One ``tandem serve``: its process, the processes it started, its address."""

    def __init__(self, folder: Path) -> None:
        self.logs = folder / "logs"
        self.process = subprocess.Popen(
            [
                # As from a script's background, where SIGINT is ignored by default.
                *("sh", "-c", "trap '' INT; exec \"$@\"", "sh"),
                sys.executable,
                "-m",
                "tandem",
                "serve",
                "--port=0",
                "--prefill-nodes=1",
                "--share-devices",
                f"--log-dir={folder / 'logs'}",
                f"--batch-dir={folder / 'batches'}",
                "--drain-timeout=2",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.greeting = [self.process.stdout.readline() for _ in range(7)]
        match = re.search(r"http://\S+", self.greeting[0])
        assert match, self.greeting
        self.url = match[0]
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def wait_gone(self) -> None:
        assert self.process.stdout is not None
        try:
            until(
                lambda: not any(c.is_running() and c.status() != "zombie" for c in self.children),
                "every part to end",
                30,
            )
            self.process.wait(30)
        finally:
            self.process.kill()  # its parts end with it
            self.process.stdout.close()


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    serve = ServeProcess(tmp_path_factory.mktemp("logs"))
    yield serve
    serve.process.send_signal(signal.SIGINT)
    serve.wait_gone()
    assert serve.process.returncode == 0


def command_of(serve: ServeProcess, label: str) -> str:
    """The output of a command that the greeting shows."""
    (line,) = [line for line in serve.greeting if line.startswith(label)]
    command = line.partition(": ")[2] if ": (" in line else line.removeprefix(f"{label}: ")
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_commands_of_the_greeting_work(serve: ServeProcess) -> None:
    chunks = [line.removeprefix("data: ") for line in command_of(serve, "Try").split("\n") if line]
    assert chunks.pop() == "[DONE]"
    spoken = [json.loads(chunk)["choices"][0]["delta"].get("content") for chunk in chunks]
    assert "".join(filter(None, spoken)) == "7 + 5 = 12."
    assert command_of(serve, "Prefill apart") == "The code of the green door is 417.\n"
    log = serve.logs / LATEST / "router.log"
    moved = re.compile(r"POST /v1/chat/completions 200 .*prefilled=remote")
    until(lambda: bool(moved.search(log.read_text())), "a prompt that is prefilled apart")
    assert "Logs:" in serve.greeting[3]
    rows = [row.split() for row in command_of(serve, "Parts").splitlines()[1:]]
    assert sorted(row[1:3] for row in rows) == [["decode", "ready"], ["prefill", "ready"]]
    assert "<html" in get(serve.url).lower()


def asks_the_server(command: ShownCommand) -> bool:
    """True for the examples of clients, which need nothing but a server of the built-in model."""
    client = re.search(r"(^|\| *)(curl|tandem (chat|complete|run-batch|doctor)) ", command.line)
    server = "127.0.0.1:8000" in command.line or re.search(r" builtin\b", command.line)
    return "> in.jsonl" in command.line or (client is not None and bool(server))


def test_documented_examples_print_the_documented_output(
    serve: ServeProcess, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("What is 7 plus 5?")
    (tmp_path / "prompts.jsonl").write_text('"What is 7 plus 5?"\n')
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ids: dict[str, str] = {}
    num_commands = 0
    for command in filter(asks_the_server, shown_commands()):
        line = command.line.replace("http://127.0.0.1:8000", serve.url)
        line = re.sub(r"(?: --model)? builtin\b", f" --url {serve.url}", line)
        line = line.replace("file-...", ids.get("file", "")).replace(
            "batch_...", ids.get("batch", "")
        )

        def ask(line: str = line) -> str:
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", line],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60,
                cwd=tmp_path,
                env=environment,
            )
            assert done.returncode == 0, (line, done.stderr)
            return done.stdout

        output = ask()
        if "/v1/batches/" in line:
            until(lambda: '"status":"completed"' in ask(), "the batch to end", 30)
            output = ask()
        for object_id, kind in re.findall(
            r'"(?:id|output_file_id)": ?"((file|batch)[-_]\w+)"', output
        ):
            ids[kind] = object_id
        assert '"error":{' not in output.replace(" ", ""), (line, output)
        assert [part for part in command.shown if part not in output] == [], (line, output)
        num_commands += 1
    assert num_commands >= 14


@pytest.mark.parametrize("name", ["chat", "complete"])
def test_examples_of_the_help_work(serve: ServeProcess, name: str) -> None:
    text = cli.commands[name].help or ""
    [example] = re.findall(rf"tandem {name} (.*Who are you.*?)(?:  |\n)", text)
    command = f"{sys.executable} -m tandem {name} --url {serve.url} {example}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "I am Tandem" in done.stdout
    assert "7 + 5 = 12." in done.stdout or "7 plus" not in example


def test_another_user_is_refused_at_the_registry(serve: ServeProcess) -> None:
    (registry,) = [line.split()[-1] for line in serve.greeting if line.startswith("Parts: ")]
    token = find_token(registry)
    assert len(token) == 64 and find_router("127.0.0.1:1", serve.url) == registry
    with pytest.raises(RequestError, match="no token"):
        admin.list_nodes(registry)
    processes = [psutil.Process(serve.process.pid), *serve.children]
    texts = [*(" ".join(process.cmdline()) for process in processes), *serve.greeting]
    texts += [log.read_text() for log in (serve.logs / LATEST).iterdir()]
    assert not [text for text in texts if token in text]


def test_the_openai_client_gets_the_same_text_streamed_and_not(serve: ServeProcess) -> None:
    with openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        messages: Any = [{"role": "user", "content": LONG}]
        whole = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=24,
        )
        with client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = list(stream)
    *spoken, last = chunks
    text = "".join(c.choices[0].delta.content or "" for c in spoken)
    assert text == whole.choices[0].message.content and text
    assert spoken[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.role for c in spoken[1:]] == [None] * (len(spoken) - 1)
    reasons = [c.choices[0].finish_reason for c in spoken]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]
    assert last.choices == [] and [c.usage for c in spoken] == [None] * len(spoken)
    assert last.usage is not None and whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_each_choice_of_a_stream_has_one_role_and_one_end(serve: ServeProcess) -> None:
    with openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none") as client:
        with client.chat.completions.create(
            model="tandem-builtin",
            messages=[{"role": "user", "content": "Hello!"}],
            n=3,
            seed=1,
            max_tokens=8,
            stream=True,
        ) as stream:
            chat = [chunk.choices[0] for chunk in stream]
        with client.completions.create(
            model="tandem-builtin", prompt=["a", "b"], n=2, max_tokens=4, stream=True
        ) as completion:
            text = [chunk.choices[0] for chunk in completion]
    for index in range(3):
        chunks = [choice for choice in chat if choice.index == index]
        assert [c.delta.role for c in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
        assert [bool(c.finish_reason) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    ends = sorted(choice.index for choice in text if choice.finish_reason)
    assert ends == [0, 1, 2, 3]


def test_a_wrong_parameter_is_named_by_the_clients_own_error(serve: ServeProcess) -> None:
    with (
        openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.completions.create(model="tandem-builtin", prompt="x", temperature=7, stream=True)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    assert caught.value.code == "integer_above_max_value"


@pytest.mark.parametrize("choice", ["named", "required"])
def test_custom_tools_keep_to_their_grammars(serve: ServeProcess, choice: str) -> None:
    layout = {"type": "grammar", "syntax": "lark"}
    layout |= {"definition": 'start: "a" ("\\n" /[b-d"]{2}/)~1..3'}
    patch: dict[str, Any] = {"type": "custom", "name": "patch"}
    tools: list[Any] = [patch | {"format": layout}]
    if choice == "required":
        tools.append({"type": "function", "name": "now", "strict": False})
        tools[1]["parameters"] = {"type": "object", "additionalProperties": False}
    fields: dict[str, Any] = {"input": "Hello!", "max_output_tokens": 300}
    fields["tool_choice"] = patch if choice == "named" else choice
    with openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none", max_retries=0) as typed:
        client: Any = typed
        response = client.responses.create(tools=tools, **fields)
        assert response.output and response.status == "completed"
        for item in response.output:
            assert item.name == "now" or re.fullmatch('a(\\n[b-d"]{2}){1,3}', item.input)
        assert choice == "required" or len(response.output) == 1
        layout["definition"] = "start: x"
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(tools=tools, **fields)
    place = "tools[0].format.definition" if choice == "named" else "tools"
    assert caught.value.param == place and "unknown name" in caught.value.message


async def test_the_async_client_works_too(serve: ServeProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{serve.url}/v1", api_key="none") as client:
        completion = await client.chat.completions.create(
            model="tandem-builtin",
            messages=[{"role": "user", "content": "Hello!"}],
            temperature=0,
        )
    assert completion.choices[0].message.content


def test_an_unknown_model_is_a_404_in_openais_shape(serve: ServeProcess) -> None:
    with (
        openai.OpenAI(base_url=f"{serve.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.NotFoundError),
    ):
        client.completions.create(model="no-such-model", prompt="x")
