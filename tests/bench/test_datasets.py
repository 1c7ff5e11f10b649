"""Datasets: lengths, shared prefixes and times, and errors of one line."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from tandem.bench.datasets.planned_request import PlannedRequest
from tandem.bench.datasets.prompt_files import Selection, read_custom, read_sharegpt
from tandem.bench.datasets.random_prompts import IdPrompts, WordPrompts, find_prompt_maker
from tandem.bench.datasets.random_requests import RandomLengths, random_requests
from tandem.bench.datasets.request_traces import (
    MOONCAKE,
    TraceFormat,
    planned,
    read_azure_trace,
    read_jsonl_trace,
)
from tandem.shared.errors import UsageError
from tandem.tests.bench.fake_api import fake_api

IDS = IdPrompts(range(100, 1000))


class WordTokenizer:
    """Each word is a token."""

    async def encode(self, text: str) -> list[int]:
        return [0] * len(text.split())

    async def render(self, prompt: str) -> list[int]:
        return [1, *[0] * len(prompt.split())]


# ---- random ------------------------------------------------------------------------------------


def test_random_requests_have_the_lengths_and_the_prefix_asked_for() -> None:
    lengths = RandomLengths(input_len=100, output_len=10, range_ratio=0.5, prefix_len=7)
    requests = list(random_requests(IDS, lengths, 50, seed=3))
    assert all(len(one.prompt) == one.prompt_tokens for one in requests)
    assert all(57 <= one.prompt_tokens <= 157 and 5 <= one.output_tokens <= 15 for one in requests)
    assert len({tuple(one.prompt[:7]) for one in requests}) == 1
    assert len({tuple(one.prompt[7:]) for one in requests}) == 50
    assert requests == list(random_requests(IDS, lengths, 50, seed=3))


async def test_prompts_are_ids_if_the_server_tokenizes() -> None:
    async with fake_api() as api:
        server = api.server(model="fake")
        maker = await find_prompt_maker(server, None)
        server.client.close()
    assert isinstance(maker, IdPrompts) and len(maker.make(Random(1), 30)) == 30


@pytest.mark.parametrize("settings", [{"backend": "openai-chat"}, {}])
async def test_prompts_are_words_for_chats_and_servers_without_tokenizer(settings: dict) -> None:
    async with fake_api(tokenizes=False) as api:
        server = api.server(model="fake", **settings)
        maker = await find_prompt_maker(server, None)
        server.client.close()
    assert isinstance(maker, WordPrompts)
    assert len(maker.make(Random(1), 30).split()) == (27 if settings else 30)


# ---- files -------------------------------------------------------------------------------------


def conversation(prompt: int, reply: int) -> dict:
    texts = [" ".join(["w"] * count) for count in (prompt, reply)]
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


def data_file(folder: Path, content: str, name: str = "data") -> Path:
    path = folder / name
    path.write_text(content)
    return path


async def test_sharegpt_leaves_out_what_vllm_leaves_out(tmp_path: Path) -> None:
    sizes = [(4, 4), (3, 9), (9, 3), (1025, 9), (1000, 1100), (10, 20)]
    items = [{"id": "x"}, *[conversation(*size) for size in sizes]]
    path = data_file(tmp_path, json.dumps(items))
    selection = Selection(path=path, count=9, shuffle=False, oversample=False)
    requests = await read_sharegpt(selection, WordTokenizer(), None)
    assert [(one.prompt_tokens, one.output_tokens) for one in requests] == [(4, 4), (10, 20)]
    requests = await read_sharegpt(selection, WordTokenizer(), 2)
    assert [one.prompt_tokens for one in requests] == [4, 9, 1000, 10]


async def test_custom_lines_are_texts_ids_or_messages(tmp_path: Path) -> None:
    prompts = ["a b", [1, 2, 3], [{"role": "user", "content": "x"}]]
    lines = "\n".join(json.dumps({"prompt": p, "output_tokens": 5}) for p in prompts)
    selection = Selection(path=data_file(tmp_path, lines), count=0, shuffle=False)
    requests = await read_custom(selection, -1, None)
    assert [(one.prompt, one.output_tokens) for one in requests] == [(p, 5) for p in prompts]
    planned = await read_custom(selection, 3, WordTokenizer())
    assert planned[0] == PlannedRequest([1, 0, 0], 3, 3)


async def test_too_few_prompts_are_used_again(tmp_path: Path) -> None:
    path = data_file(tmp_path, '{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert len(await read_custom(Selection(path=path, count=5), 1, None)) == 5
    few = Selection(path=path, count=5, oversample=False)
    assert len(await read_custom(few, 1, None)) == 2


# ---- traces ------------------------------------------------------------------------------------


def line(at: float, size: int, out: int, hashes: list[int] | None) -> str:
    record = {"timestamp": at, "input_length": size, "output_length": out}
    return json.dumps(record | ({} if hashes is None else {"hash_ids": hashes}))


def replayed(path: Path, form: TraceFormat = MOONCAKE, **settings: object) -> list[PlannedRequest]:
    options = {"count": 0, "speed": 1.0, "seed": 0, "block_tokens": form.block_tokens} | settings
    return list(planned(read_jsonl_trace(path, form), IDS, path=path, **options))  # type: ignore[arg-type]


def test_prompts_of_a_trace_share_what_their_hashes_share(tmp_path: Path) -> None:
    lines = [line(1000, 1100, 5, [1, 2, 3]), line(500, 1300, 6, [1, 2, 9]), line(3000, 40, 1, None)]
    first, second, third = replayed(data_file(tmp_path, "\n".join(lines)), speed=2.0)
    assert [one.at for one in (first, second, third)] == [0, 0.25, 1.25]
    assert [len(one.prompt) for one in (first, second, third)] == [1300, 1100, 40]
    assert first.prompt[:1024] == second.prompt[:1024]
    assert first.prompt[1024:1100] != second.prompt[1024:]
    assert (first.prompt_tokens, first.output_tokens) == (1300, 6)


def test_tokens_behind_the_hashes_are_a_requests_own(tmp_path: Path) -> None:
    lines = [line(0, 600, 5, [1]), line(0, 600, 5, [1])]
    first, second = replayed(data_file(tmp_path, "\n".join(lines)))
    assert first.prompt[:512] == second.prompt[:512] and first.prompt[512:] != second.prompt[512:]


def test_words_of_a_trace_share_prefixes_too(tmp_path: Path) -> None:
    lines = [line(0, 600, 5, [1, 2]), line(0, 700, 5, [1, 3])]
    trace = read_jsonl_trace(data_file(tmp_path, "\n".join(lines)), MOONCAKE)
    requests = planned(
        trace,
        WordPrompts(1.0),
        count=0,
        speed=1.0,
        seed=0,
        block_tokens=512,
        path=tmp_path,
    )
    first, second = [one.prompt.split() for one in requests]  # type: ignore[union-attr]
    assert (len(first), len(second)) == (600, 700) and first[:512] == second[:512]


def test_azures_times_have_seven_digits_or_a_zone(tmp_path: Path) -> None:
    rows = [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,374,44",
        "2023-11-16 18:15:48.1805900,396,0",
    ]
    first, second = read_azure_trace(data_file(tmp_path, "\n".join(rows)))
    assert second.at - first.at == pytest.approx(1.5)
    assert (first.prompt_tokens, first.output_tokens, second.output_tokens) == (374, 44, 1)
    rows[1:] = ["2024-05-10 00:00:00.009930+00:00,1,2"]
    (only,) = read_azure_trace(data_file(tmp_path, "\n".join(rows)))
    assert only.at == pytest.approx(1715299200.00993)


GOOD = '{"timestamp": 1, "input_length": 2, "output_length": 3}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "has no request"),
        (GOOD + "{", "line 2: not JSON"),
        (GOOD + "[1]", "line 2: a JSON object is expected"),
        (GOOD + "\n" + GOOD.replace("2,", "0,"), "line 3: input_length is 0"),
        (GOOD.replace("3}", "3.5}"), "line 1: output_length is 3.5; a whole number from 1"),
        (GOOD.replace("3}", "NaN}"), "output_length is nan"),
        (GOOD.replace("timestamp", "time"), "line 1: timestamp is missing; there are time, input"),
        (GOOD.replace("1,", "true,"), "timestamp is True; a number"),
        (GOOD.replace("1,", '"later",'), "timestamp is 'later'; a number"),
        (GOOD.replace("3}", '3, "hash_ids": 4}'), "hash_ids must be a list"),
        (GOOD + GOOD.replace("1,", "1e15,"), "raise --speed"),
        ("\udcff", "not text in UTF-8"),
    ],
)
def test_a_broken_trace_is_one_line_with_the_place(
    tmp_path: Path, content: str, words: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UsageError) as raised:
        replayed(path)
    assert words in str(raised.value) and str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "line 1: TIMESTAMP is not a column"),
        ("TIMESTAMP,ContextTokens\n", "line 1: GeneratedTokens is not a column"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n", "line 2: TIMESTAMP is '1'; a time"),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,3\n",
            "line 2: ContextTokens is 'x'",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,2\n",
            "line 2: GeneratedTokens is missing",
        ),
    ],
)
def test_a_broken_csv_file_is_one_line_with_the_place(
    tmp_path: Path, content: str, words: str
) -> None:
    with pytest.raises(UsageError, match="data") as raised:
        read_azure_trace(data_file(tmp_path, content))
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": ""}', "line 1: prompt is ''; a text"),
        ('{"prompt": [1, "a"]}', "line 1: prompt must be a text, a list"),
        ('{"text": "a"}', "line 1: prompt is missing; there are text"),
        ('{"prompt": "a"}', "line 1: output_tokens is missing"),
        ("\n", "no usable prompt"),
    ],
)
async def test_a_broken_file_of_prompts_is_one_line(
    tmp_path: Path, content: str, words: str
) -> None:
    selection = Selection(path=data_file(tmp_path, content), count=0)
    with pytest.raises(UsageError) as raised:
        await read_custom(selection, -1, None)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ("{}", "must have a JSON list"),
        ("[1]", "item 1: a JSON object"),
        ('[{"conversations": 3}]', "item 1: conversations must be a list"),
        ('[{"conversations": [{"value": "a"}, {}]}]', "item 1: conversations[1].value must be"),
    ],
)
async def test_a_broken_sharegpt_file_is_one_line(tmp_path: Path, content: str, words: str) -> None:
    selection = Selection(path=data_file(tmp_path, content), count=0)
    with pytest.raises(UsageError) as raised:
        await read_sharegpt(selection, WordTokenizer(), None)
    assert words in str(raised.value)


async def test_a_file_that_is_not_there_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UsageError, match=str(path)):
            replayed(path)


def test_times_of_a_trace_grow(tmp_path: Path) -> None:
    lines = [line(at, 5, 1, [1]) for at in (9, 3, 7, 3)]
    times = [one.at for one in replayed(data_file(tmp_path, "\n".join(lines)), count=3)]
    assert times == sorted(times) and len(times) == 3  # type: ignore[type-var]
    assert all(b - a in (0.0, 0.004) for a, b in pairwise(times))  # type: ignore[operator]
