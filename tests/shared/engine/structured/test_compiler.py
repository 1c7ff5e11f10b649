"""Grammars are compiled in bounded time and space, and a request that leaves frees its turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tandem.shared.engine.structured import compiler as module
from tandem.shared.engine.structured.compiler import GrammarCache, GrammarCompiler
from tandem.shared.engine.structured.llguidance_backend import LLGuidanceBackend
from tandem.shared.engine.structured.params import GrammarKey, StructuredOutputs
from tandem.shared.errors import OverloadedError, RequestError
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.router.support import make_model
from tandem.tests.support.waiting import until

LARGE = module.SMALL_CHARACTERS + 1


class SlowBackend:
    """A backend whose compilations of constraints that begin with "slow" wait until ``may_end``."""

    vocab_size = 8

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun: list[str] = []

    def compile(self, key: GrammarKey) -> Any:
        self.begun.append(key.text[:8])
        if key.text.startswith("slow"):
            assert self.may_end.wait(30)
        return object()


@pytest.fixture
def slow() -> Iterator[SlowBackend]:
    backend = SlowBackend()
    yield backend
    backend.may_end.set()


def compiler_of(backend: Any) -> GrammarCompiler:
    return GrammarCompiler(lambda: backend)


def regex(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


async def test_requests_that_leave_free_their_turn(slow: SlowBackend) -> None:
    compiler = compiler_of(slow)
    running = asyncio.create_task(compiler.compile(regex("slow 1")))
    await until(lambda: bool(slow.begun))
    waiting = [asyncio.create_task(compiler.compile(regex(f"slow {i}"))) for i in range(2, 9)]
    await asyncio.sleep(0)
    for task in (running, *waiting):
        task.cancel()
    await asyncio.gather(running, *waiting, return_exceptions=True)
    assert compiler._waiting == 0
    # A large one has a thread of its own, and a small one its turn as soon as the thread is free.
    await compiler.compile(regex("x" * LARGE))
    slow.may_end.set()
    await compiler.compile(regex("next"))
    assert slow.begun == ["slow 1", "x" * 8, "next"]


async def test_a_compilation_has_a_limit_and_so_has_the_wait_for_a_turn(
    slow: SlowBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPILE_SECONDS", 0.05)
    compiler = compiler_of(slow)
    with pytest.raises(RequestError, match=r"not compiled within 0.05 s") as error:
        await compiler.compile(regex("slow"))
    assert error.value.param == "structured_outputs"
    with pytest.raises(OverloadedError, match="other grammars are being compiled"):
        await compiler.compile(regex("next"))
    slow.may_end.set()
    monkeypatch.setattr(module, "COMPILE_SECONDS", 10.0)
    await compiler.compile(regex("next"))
    monkeypatch.setattr(module, "MAX_WAITING", 0)
    with pytest.raises(OverloadedError, match="0 requests wait"):
        await compiler.compile(regex("another"))
    await compiler.compile(regex("next"))  # it is kept


def test_kept_grammars_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = GrammarCache()
    grammar: Any = object()
    keys = [regex(f"{number}").key() for number in range(100)]
    for key in keys:
        cache.add(key, grammar)
    assert len(cache) == module.MAX_CACHED
    assert cache.get(keys[-1]) is grammar and cache.get(keys[0]) is None
    monkeypatch.setattr(module, "MAX_CACHED_CHARACTERS", 1000)
    another: Any = object()
    cache.add(regex("x" * 999).key(), another)
    assert len(cache) == 1


def nested(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(count):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(count: int) -> dict[str, Any]:
    """References by which each definition is used twice by the one before."""
    definitions: dict[str, Any] = {f"a{count}": {"type": "string"}}
    for number in range(count):
        next_one = {"$ref": f"#/$defs/a{number + 1}"}
        definitions[f"a{number}"] = {
            "type": "array",
            "prefixItems": [next_one, next_one],
            "minItems": 2,
        }
    return {"$ref": "#/$defs/a0", "$defs": definitions}


HOSTILE: dict[str, Callable[[], StructuredOutputs]] = {
    "nested quantifiers": lambda: regex("((a{1,999}){1,999}){1,999}b"),
    "nested stars": lambda: regex("(x+x+)+y"),
    "many alternatives": lambda: regex("(a|b|ab|ba|[a-z]{2,50}){100}z"),
    "enum": lambda: StructuredOutputs(json={"enum": list(range(20_000))}),
    "long enum": lambda: StructuredOutputs(json={"enum": list(range(200_000))}),
    "long strings": lambda: StructuredOutputs(
        json={"type": "string", "minLength": 10**6, "maxLength": 10**9}
    ),
    "long arrays": lambda: StructuredOutputs(
        json={"type": "array", "items": {"type": "integer"}, "minItems": 10**6}
    ),
    "large numbers": lambda: StructuredOutputs(json={"type": "integer", "maximum": 10**300}),
    "small steps": lambda: StructuredOutputs(json={"type": "number", "multipleOf": 1e-300}),
    "nested objects": lambda: StructuredOutputs(json=nested(300)),
    "references": lambda: StructuredOutputs(json=doubling(40)),
    "combinations": lambda: StructuredOutputs(
        json={"allOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(2000)]}
    ),
    "left recursion": lambda: StructuredOutputs(grammar='start: a\na: a a | "x"'),
    "choices": lambda: StructuredOutputs(choice=tuple(f"c{i}" for i in range(100_000))),
}


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> LLGuidanceBackend:
    files = read_tokenizer_files(make_model(tmp_path_factory.mktemp("model")))
    assert files is not None
    return LLGuidanceBackend(files, 1 + max(files.vocabulary().values()), [0])


@pytest.mark.parametrize("case", HOSTILE)
async def test_hostile_constraints_are_compiled_in_time_or_the_requests_error(
    backend: LLGuidanceBackend, case: str
) -> None:
    """``RequestError`` also tells that the 5 s are over."""
    compiler = compiler_of(backend)
    try:
        grammar = await compiler.compile(HOSTILE[case]())
    except RequestError as error:
        assert "not compiled within" not in str(error) and len(str(error)) < 500
    else:
        assert any(grammar.matcher().mask())
    assert await compiler.compile(regex("good"))
