"""The Python API on the built-in model: whole, streamed, stopped, cancelled, closed."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem import Engine, EngineConfig, Message, SamplingParams
from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.engine.api.prompts import plain
from tandem.shared.engine.other_hosts import RemoteProcess
from tandem.shared.errors import ModelError, RequestError, UnavailableError, UsageError

pytestmark = pytest.mark.usefixtures("forked_ranks")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPT = "Once upon a time there was"


def config(**changes: object) -> EngineConfig:
    # float32, because in bf16 a draw may land on either side of a border by rounding alone.
    options = {"threads": 1, "num_blocks": 256, "max_model_len": 512, "dtype": "float32"}
    return EngineConfig(**(options | changes))  # type: ignore[arg-type]


def rank_of(engine: Engine) -> psutil.Process:
    """The process of an engine's only rank."""
    assert engine._thread is not None
    (rank,) = engine._thread.runner.engine.ranks._ranks
    assert not isinstance(rank.process, RemoteProcess)
    return psutil.Process(rank.process.pid)


def owned_blocks(engine: Engine) -> int:
    """Blocks that sequences hold, once the step in flight is over."""
    assert engine._thread is not None
    scheduler = engine._thread.runner.engine.core._scheduler
    for _ in range(500):
        if scheduler.idle and not scheduler.pool.counts().owned:
            break
        time.sleep(0.01)
    return scheduler.pool.counts().owned


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(config()) as engine:
        rank = rank_of(engine)
        yield engine
    assert not rank.is_running()


def test_messages_may_have_calls_and_content_as_in_requests(engine: Engine) -> None:
    calls = [
        {"id": "1", "function": {"name": "f", "arguments": arguments}}
        for arguments in ('{"x": 1}', {"x": 1}, '{"x": 1', None)
    ]
    messages = plain(
        [
            Message("user", "hi"),
            {"role": "assistant", "content": None, "tool_calls": calls},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
        ]
    )
    assert [message["content"] for message in messages] == ["hi", "", "a\nb"]
    arguments = [call["function"]["arguments"] for call in messages[1]["tool_calls"]]
    assert arguments == [{"x": 1}, {"x": 1}, {}, {}]
    assert engine.apply_chat_template(messages)
    for wrong in (
        {"content": "x"},
        {"role": "user", "content": 5},
        {"role": "a", "tool_calls": [1]},
    ):
        with pytest.raises(RequestError, match=r"messages\[0\]"):
            engine.apply_chat_template([wrong])


def test_greedy_output_is_the_same_alone_and_in_a_batch(engine: Engine) -> None:
    alone = engine.generate_sync([PROMPT], GREEDY)[0][0]
    batch = engine.generate_sync([PROMPT, "Hello!", engine.tokenizer.encode(PROMPT)], GREEDY)
    assert [choices[0].text for choices in (batch[0], batch[2])] == [alone.text] * 2
    assert batch[0][0].tokens == batch[2][0].tokens == alone.tokens
    assert alone.text and alone.finish_reason in ("stop", "length")
    assert alone.prompt_tokens == len(engine.tokenizer.encode(PROMPT))


def test_the_deltas_of_a_stream_add_up_to_the_completion(engine: Engine) -> None:
    chat = [Message("user", "Hello! Who are you?")]
    whole = engine.generate_sync([chat], GREEDY)[0][0]
    deltas = list(engine.generate_stream(chat, GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.tokens] == whole.tokens
    assert deltas[-1].finish_reason == whole.finish_reason
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    same = engine.generate_stream(engine.apply_chat_template(chat), GREEDY)
    assert "".join(delta.text for delta in same) == whole.text


def test_only_allowed_tokens_are_drawn_even_if_they_end_the_text(engine: Engine) -> None:
    params = SamplingParams(allowed_token_ids=(20, 21), max_tokens=8, seed=1)
    assert set(engine.generate_sync([PROMPT], params)[0][0].tokens) <= {20, 21}
    end = engine.tokenizer.generation_config["eos_token_id"]
    end_params = SamplingParams(allowed_token_ids=(end,), min_tokens=2, max_tokens=3)
    [choice] = engine.generate_sync([PROMPT], end_params)[0]
    assert choice.text == "" and choice.finish_reason in ("stop", "length")


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text(engine: Engine, include: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    text = engine.generate_sync([PROMPT], params)[0][0].text
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=24,
        ignore_eos=True,
        stop=(stop,),
        include_stop_str_in_output=include,
    )
    stopped = engine.generate_sync([PROMPT], params)[0][0]
    expected = text[: text.index(stop)] + (stop if include else "")
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (expected, "stop", stop)
    streamed = "".join(delta.text for delta in engine.generate_stream(PROMPT, params))
    assert streamed == expected
    assert owned_blocks(engine) == 0


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_text_where_stop_strings_are(engine: Engine, include: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    tokens = engine.generate_sync([PROMPT], params)[0][0].tokens
    stop = tokens[8]
    before = tokens[: tokens.index(stop)]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=24,
        ignore_eos=True,
        stop_token_ids=(stop,),
        logprobs=0,
        include_stop_str_in_output=include,
    )
    stopped = engine.generate_sync([PROMPT], params)[0][0]
    assert stopped.text == engine.tokenizer.decode([*before, stop] if include else before)
    assert [scored.token for scored in stopped.logprobs] == stopped.tokens == [*before, stop]
    assert (stopped.tokens, stopped.stop_reason) == ([*before, stop], stop)


def test_n_choices_differ_and_a_seed_repeats_them(engine: Engine) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
    first, second = engine.generate_sync([PROMPT, PROMPT], params)
    assert [choice.index for choice in first] == [0, 1, 2]
    assert len({choice.text for choice in first}) > 1
    assert [choice.tokens for choice in first] == [choice.tokens for choice in second]
    assert all(len(choice.logprobs) == len(choice.tokens) == 12 for choice in first)
    streamed = dict.fromkeys(range(3), "")
    for delta in engine.generate_stream(PROMPT, params):
        streamed[delta.index] += delta.text
    assert streamed == {choice.index: choice.text for choice in first}


def test_a_stream_that_is_closed_early_frees_its_blocks(engine: Engine) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True, n=2)
    stream = engine.generate_stream(PROMPT, params)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert owned_blocks(engine) == 0


@pytest.mark.parametrize(
    ("prompts", "params", "word"),
    [
        ("Hello", GREEDY, "list of prompts"),
        ([""], GREEDY, "empty"),
        ([[10**9]], GREEDY, "vocabulary"),
        ([PROMPT], [GREEDY, GREEDY], "1 prompts and 2"),
        ([PROMPT], SamplingParams(temperature=-1.0), "temperature"),
        ([PROMPT], SamplingParams(temperature=float("nan")), "temperature is nan"),
        ([PROMPT], SamplingParams(temperature=None), "temperature is None"),  # type: ignore[arg-type]
        ([PROMPT], SamplingParams(max_tokens=None), "an integer between 1"),  # type: ignore[arg-type]
        ([PROMPT], SamplingParams(max_tokens=1.5), "max_tokens is 1.5"),  # type: ignore[arg-type]
        ([PROMPT], SamplingParams(seed=10**400), "seed is 1000"),
        ([PROMPT], SamplingParams(n=True), "n is True"),
        ([PROMPT], SamplingParams(logit_bias={5: 1e39}), "logit_bias of token 5 is 1e.39"),
        ([PROMPT], SamplingParams(logit_bias={"5": 1}), "logit_bias"),  # type: ignore[dict-item]
        ([PROMPT], SamplingParams(stop="x"), "stop"),  # type: ignore[arg-type]
        ([PROMPT], SamplingParams(stop=("x", "")), "stop"),
        ([PROMPT], SamplingParams(stop=(5,)), "stop"),  # type: ignore[arg-type]
        ([PROMPT], SamplingParams(stop_token_ids=(10**6,), min_tokens=1), "stop_token_ids"),
        ([PROMPT], SamplingParams(allowed_token_ids=(10**6,)), "allowed_token_ids"),
        ([PROMPT], SamplingParams(allowed_token_ids=("a",)), "allowed_token_ids"),  # type: ignore[arg-type]
        ([PROMPT], SamplingParams(stop_token_ids=("a",)), "stop_token_ids"),  # type: ignore[arg-type]
        ([PROMPT], SamplingParams(logit_bias={"5": 1.0}), "logit_bias"),  # type: ignore[dict-item]
        ([PROMPT], SamplingParams(logit_bias={5: float("nan")}), "logit_bias"),
        ([PROMPT], SamplingParams(top_k=2.5), "top_k is 2.5"),  # type: ignore[arg-type]
        ([PROMPT], SamplingParams(logprobs=1.5), "logprobs"),  # type: ignore[arg-type]
        ([PROMPT], SamplingParams(temperature=None), "temperature is None"),  # type: ignore[arg-type]
        ([PROMPT], SamplingParams(max_tokens=None), "max_tokens is None"),  # type: ignore[arg-type]
        (["\ud800"], GREEDY, "unpaired surrogate"),
        ([PROMPT, PROMPT], SamplingParams(max_tokens=5000), "context length"),
        ([["a", 1]], GREEDY, "list of token ids"),
    ],
)
def test_wrong_requests_are_refused(engine: Engine, prompts: Any, params: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word):
        engine.generate_sync(prompts, params)
    assert owned_blocks(engine) == 0


def test_a_turn_ends_with_the_tokenizers_end_token_whatever_the_config_says(tmp_path: Path) -> None:
    """A chat model often keeps the config of its base model. One id is outside the vocabulary."""
    folder = Path(shutil.copytree(builtin_model_path(), tmp_path / "model"))
    for name, ends in (("config.json", 0), ("generation_config.json", [0, 10**6])):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": ends}))
    chat = [Message("user", "Hello! Who are you?")]
    with Engine(config(model=str(folder))) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=200, min_tokens=2)
        completion = engine.generate_sync([chat], params)[0][0]
    assert completion.finish_reason == "stop"
    assert "<|im_end|>" not in completion.text and len(completion.tokens) < 200


def test_a_call_ends_at_its_timeout(engine: Engine) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    with pytest.raises(UnavailableError, match="longer than"):
        engine.generate_sync([PROMPT] * 20, params, timeout=0.05)
    assert owned_blocks(engine) == 0


def test_closing_ends_calls_in_progress_and_a_closed_engine_says_so() -> None:
    engine = Engine(config())
    with pytest.raises(UnavailableError, match="not running"):
        engine.generate_sync([PROMPT])
    engine.start()
    stream = engine.generate_stream(PROMPT, SamplingParams(max_tokens=450, ignore_eos=True))
    next(stream)
    rank = rank_of(engine)
    engine.close()
    engine.close()
    assert not rank.is_running()
    with pytest.raises(UnavailableError, match="stopped"):
        list(stream)


def test_a_dead_rank_is_an_error_and_not_a_hang() -> None:
    with Engine(config(max_waiting=2)) as engine:
        # More requests than may wait take turns.
        params = SamplingParams(max_tokens=2, ignore_eos=True, n=3)
        assert [len(c) for c in engine.generate_sync([PROMPT] * 5, params)] == [3] * 5
        stream = engine.generate_stream(PROMPT, SamplingParams(max_tokens=450, ignore_eos=True))
        next(stream)
        rank_of(engine).kill()
        with pytest.raises(UnavailableError, match="rank 0"):
            list(stream)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="rank 0"):
                engine.generate_sync([PROMPT])


def test_an_fp8_cache_over_two_ranks_gives_the_same_again_from_its_prefix_cache() -> None:
    with Engine(config(kv_cache_dtype="fp8", tensor_parallel_size=2)) as engine:
        prompt = (engine.tokenizer.encode(PROMPT) * 40)[:80]
        first, again = (engine.generate_sync([prompt], GREEDY)[0][0] for _ in range(2))
        assert (first.cached_tokens, again.cached_tokens) == (0, 64)
        assert first.tokens == again.tokens and first.tokens


# One rank before two, which would both compile what is not kept yet.
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_kernels_give_the_same_tokens(engine: Engine, ranks: int) -> None:
    prompts = [PROMPT, "Hello!", "The"]
    with Engine(config(cpu_kernels="compiled", tensor_parallel_size=ranks)) as compiled:
        result = compiled.generate_sync(prompts, GREEDY)
    assert result == engine.generate_sync(prompts, GREEDY)


def test_a_cache_format_that_is_not_implemented_starts_nothing() -> None:
    with pytest.raises(UsageError, match="'fp8_e5m2' is not supported"):
        Engine(config(kv_cache_dtype="fp8_e5m2")).start()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scheduling_policy": "lifo"}, "--scheduling-policy 'lifo'.*fcfs or priority"),
        ({"device": "cuda:0"}, "--device 'cuda:0'.*auto or cpu or cuda"),
        ({"block_size": 0}, "--block-size 0 .*from 1 to 1024"),
        ({"max_model_len": 1}, "--max-model-len 1 .*must be at least 2"),
        ({"kv_fraction": 1.5}, "--kv-fraction 1.5 "),
    ],
)
def test_a_configuration_takes_what_the_flags_take(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        config(**changes)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        Engine(config(model=str(tmp_path / "none"))).start()
