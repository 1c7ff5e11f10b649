"""Outputs that follow a grammar, on a whole engine: always valid, and nobody else's changed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from tandem import (
    Completion,
    Engine,
    EngineConfig,
    SamplingParams,
    StructuredOutputs,
    ThinkingBudget,
)
from tandem.router.openai.tools.forced_calls import required_calls
from tandem.router.openai.tools.grammars import ToolGrammar, calls_and_text, with_grammars
from tandem.router.openai.tools.guided_calls import GuidedTools
from tandem.shared.engine.structured import step_masks
from tandem.shared.engine.structured.constraint import Constraint
from tandem.shared.engine.structured.grammar import GrammarError
from tandem.shared.engine.structured.llguidance_backend import LLGrammar
from tandem.shared.engine.structured.step_masks import _Row
from tandem.shared.errors import RequestError, UnavailableError
from tandem.shared.text.output import Deltas
from tandem.shared.text.tool_parsers.tool_text import ToolText
from tandem.shared.text.tool_parsers.tool_use import ToolUse
from tandem.tests.shared.engine.structured.schemas import schemas
from tandem.tests.support.extent import FULL

pytestmark = pytest.mark.usefixtures("forked_ranks")

CONFIG = EngineConfig(dtype="float32", threads=1, num_blocks=512, max_model_len=512)
RANDOM = SamplingParams(temperature=1.5, max_tokens=300)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = "Once upon a time"
# Fewer would leave a kind of schema out.
COUNT = 120 if FULL else 60


@pytest.fixture(scope="module", params=["off", "on"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One that plans steps in turn, and one that plans them ahead."""
    with Engine(replace(CONFIG, async_scheduling=request.param)) as engine:
        yield engine


def reasoning_tokens(engine: Engine, completion: Completion) -> int:
    """The tokens before the closing marker."""
    assert engine._thread is not None
    decode = engine._thread.runner.tokenizer.decode
    texts = (decode(completion.tokens[:count]) for count in range(len(completion.tokens) + 1))
    whole = next(count for count, text in enumerate(texts) if "</think>" in text)
    return whole - len(engine._thread.runner.tokenizer.encode("</think>"))


def follow(engine: Engine, constraint: StructuredOutputs | None, **params: Any) -> list[Completion]:
    sampling_params = replace(RANDOM, structured_outputs=constraint, **params)
    return engine.generate_sync([PROMPT], sampling_params)[0]


def test_random_schemas_give_valid_json_beside_rows_without_one(engine: Engine) -> None:
    alone = engine.generate_sync([PROMPT], GREEDY)[0][0]
    samples = schemas(COUNT)
    params = [
        replace(
            RANDOM, seed=seed, structured_outputs=StructuredOutputs(json=schema, whitespace=False)
        )
        for seed, schema in enumerate(samples)
    ]
    completions = engine.generate_sync([PROMPT] * (COUNT + 2), [GREEDY, *params, GREEDY])
    for schema, [completion] in zip(samples, completions[1:-1], strict=True):
        assert completion.finish_reason == "stop", completion.text
        jsonschema.validate(json.loads(completion.text), schema)
    assert completions[0][0].tokens == completions[-1][0].tokens == alone.tokens


def test_a_schema_may_have_a_thousand_optional_properties(engine: Engine) -> None:
    properties = {f"p{number}": {"type": "integer"} for number in range(1000)}
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    assert follows(engine, StructuredOutputs(json=schema), '{"p7": 1, "p999": 2}')


def test_any_model_makes_required_calls(engine: Engine) -> None:
    nothing = {"type": "object", "additionalProperties": False}
    city = nothing | {"properties": {"city": {"type": "string", "maxLength": 9}}}
    tools: dict[str, dict[str, Any]] = {"weather": city | {"required": ["city"]}, "now": nothing}
    forced = required_calls(tools, parallel=False)
    for completion in follow(engine, StructuredOutputs(json=forced.json, whitespace=False), n=4):
        assert completion.finish_reason == "stop", completion.text
        [call] = json.loads(completion.text)
        jsonschema.validate(call["parameters"], tools[call["name"]])


def test_any_model_writes_the_texts_of_tools_with_grammars(engine: Engine) -> None:
    lark = ToolGrammar(
        syntax="lark", definition='start: "a" ("\\n" /[b-d"]{2}/)~1..3', argument="input", place=""
    )
    day = replace(lark, syntax="regex", definition=r'\d{2}\.|tod"ay\n')
    schemas = {"patch": lark.schema(), "day": day.schema()}
    use = ToolUse(parser="hermes", schemas=schemas, required=True, verbatim={"patch": "input"})
    for parallel in (True, False):
        tag = calls_and_text(schemas, {"patch": lark}, parallel=parallel, param="")
        forced = StructuredOutputs(structural_tag=tag.structural_tag)
        called: set[str] = set()
        for completion in follow(engine, forced, n=6, seed=5):
            text = ToolText(use)
            calls = whole_calls([*text.push(completion.text), *text.flush()])
            assert calls, completion.text
            for name, arguments in calls if completion.finish_reason == "stop" else calls[:-1]:
                pattern = 'a(\n[b-d"]{2}){1,3}' if name == "patch" else day.definition
                assert re.fullmatch(pattern, json.loads(arguments)["input"]), completion.text
                called.add(name)
        assert called == {"patch", "day"}


def test_calls_in_free_text_follow_their_grammars(engine: Engine) -> None:
    lark = ToolGrammar(syntax="lark", definition='start: "a" /b+/', argument="input", place="")
    grammars = {"patch": lark, "day": replace(lark, syntax="regex", definition="[0-9]+")}
    schemas = with_grammars({"patch": {}, "day": {}, "now": {}}, grammars)
    tools = GuidedTools(parser="hermes", schemas=schemas, grammars=grammars, strict={})
    tool_constraint = tools.constraint()
    assert tool_constraint is not None
    constraint = StructuredOutputs(tool_calls=tool_constraint.tool_calls)

    def call(name: str, arguments: str) -> str:
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}'

    end = "}\n</tool_call>"
    now, patch = call("now", '{"a": [1]}') + end, call("patch", '{"input": """\nabb')
    for text in ("", "one < two <tool", f"one {now} two{now}", patch, now + patch, "one" + patch):
        assert follows(engine, constraint, text), text
    for text in (
        *("<tool_call>?", call("then", "{}") + end, call("patch", '{"input": "abb"}') + end),
        *(patch + end, patch + now, call("day", '{"input": "1x"}') + end),
    ):
        assert not follows(engine, constraint, text), text
    thought = replace(constraint, reasoning_start="<think>", reasoning_end="</think>")
    for text in (f"<think>one <tool_call> two</think>\n{now}", patch):
        assert follows(engine, thought, text), text
    assert not follows(engine, thought, "<think>one</think>\n<tool_call>?")


def test_calls_in_xml_follow_their_grammars(engine: Engine) -> None:
    day = ToolGrammar(syntax="regex", definition="[0-9]+", argument="input", place="")
    schemas = {"day": day.schema(), "now": {}}
    tool_constraint = GuidedTools(
        parser="qwen3_xml", schemas=schemas, grammars={"day": day}, strict={}
    ).constraint()
    assert tool_constraint is not None
    constraint = StructuredOutputs(tool_calls=tool_constraint.tool_calls)
    now = "<tool_call>\n<function=now>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    day_call = "<tool_call>\n<function=day>\n<parameter=input>\n05"
    for text in ("one <fun", now, now + now, day_call, now + day_call):
        assert follows(engine, constraint, text), text
    for text in ("<function=then>", day_call + "x", day_call + "\n</parameter>", "<function=now>"):
        assert not follows(engine, constraint, text), text


def test_free_text_ends_at_the_first_of_several_constants(engine: Engine) -> None:
    constants = [{"type": "const_string", "value": text} for text in ("<a>", "b")]
    tag = {"type": "sequence", "elements": [{"type": "any_text"}, *constants]}
    constraint = StructuredOutputs(structural_tag=tag)
    assert follows(engine, constraint, "x<a>b") and not follows(engine, constraint, "x<a>")


def follows(engine: Engine, constraint: StructuredOutputs, text: str) -> bool:
    """True if the text is an output that a constraint allows."""
    assert engine._thread is not None
    backend = engine._thread.runner.engine.grammars._get_backend()
    matcher = backend.compile(constraint.key()).matcher()
    try:
        matcher.advance(backend.encode(text))
    except GrammarError:
        return False
    return matcher.accepting


def whole_calls(deltas: Deltas) -> list[tuple[str, str]]:
    """The names and arguments of calls."""
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        assert not delta.content.strip(), delta
        for call in delta.calls:
            name, before = calls.pop() if not call.name else (call.name, "")
            calls.append((name, before + call.arguments))
    return calls


def test_each_kind_of_constraint(engine: Engine) -> None:
    for constraint, pattern in (
        (StructuredOutputs(regex="[a-f]{3}-[0-9]{2}"), "[a-f]{3}-[0-9]{2}"),
        (StructuredOutputs(choice=("yes", "no", "per haps")), "yes|no|per haps"),
        (StructuredOutputs(grammar='root ::= "a" | "b" root'), "b*a"),
        (StructuredOutputs(grammar='start: "x" y\ny: /[0-3]{2}/'), "x[0-3]{2}"),
        (
            StructuredOutputs(choice=("yes",), reasoning_end="e"),
            r"(?s:[^e]*)e[ \n\t\r]*yes",
        ),
    ):
        for completion in follow(engine, constraint, n=3, seed=3):
            if completion.finish_reason == "stop":
                assert re.fullmatch(pattern, completion.text), completion.text


def test_other_restrictions_give_way_to_the_grammar(engine: Engine) -> None:
    constraint = StructuredOutputs(regex="[0-9]{4}")
    for restriction in (
        {"ignore_eos": True},
        {"min_tokens": 20},
        {"allowed_token_ids": (5, 6)},
        {"repetition_penalty": 2.0, "top_k": 1, "logprobs": 3},
    ):
        [completion] = follow(engine, constraint, **restriction)
        assert re.fullmatch("[0-9]{4}", completion.text)
        assert completion.finish_reason == "stop"


def test_preempted_outputs_go_on_where_they_were() -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 20}
    config = replace(CONFIG, num_blocks=14, block_size=8, max_model_len=96)
    base = replace(RANDOM, structured_outputs=StructuredOutputs(json=schema), max_tokens=80)
    with Engine(config) as engine:
        params = [replace(base, seed=seed) for seed in range(4)]
        completions = engine.generate_sync([PROMPT] * 4, params)
        assert engine._thread is not None
        core = engine._thread.runner.engine.core
        before = core.load().preemptions
        budget = ThinkingBudget(tokens=40, start="")
        thinking = replace(GREEDY, thinking=budget, max_tokens=60, logprobs=2)
        alone = engine.generate_sync([PROMPT], thinking)[0][0]
        thought = engine.generate_sync([PROMPT] * 4, thinking)
        assert core.load().preemptions > before > 0
    assert alone.text.count("</think>") == 1
    assert [one.tokens for [one] in thought] == [alone.tokens] * 4
    for [one] in thought:
        assert [scored.token for scored in one.logprobs] == one.tokens
        logprobs = [scored.logprob for scored in one.logprobs]
        assert logprobs == pytest.approx([scored.logprob for scored in alone.logprobs], abs=1e-4)
    for [completion] in completions:
        if completion.finish_reason == "stop":
            assert len(json.loads(completion.text)) == 20
        else:
            assert re.match(r"\s*\[[-0-9eE+.,\s]*", completion.text)


def test_reasoning_ends_with_its_budget(engine: Engine) -> None:
    """In every choice, after the prompt or behind a marker, and before what a grammar asks for."""
    unlimited = ThinkingBudget(tokens=6, start="")
    rest = StructuredOutputs(regex="[0-9]{3}", reasoning_end="</think>")
    for tokens in (0, 6):
        budget = replace(unlimited, tokens=tokens)
        for completion in follow(engine, None, thinking=budget, n=3, max_tokens=24, seed=5):
            assert completion.text.count("</think>") == 1, completion.text
            assert reasoning_tokens(engine, completion) == tokens
        for completion in follow(engine, rest, thinking=budget, n=3, seed=5):
            _, output = completion.text.split("</think>")
            assert re.fullmatch(r"\s*[0-9]{3}", output), completion.text
    own = StructuredOutputs(grammar='start: "<think>" /(.|\\n)*/')
    # The grammar may end before a longer budget does.
    marked = replace(unlimited, start="<think>", tokens=0)
    for completion in follow(engine, own, thinking=marked, max_tokens=40):
        assert completion.text.startswith("<think>") and completion.text.count("</think>") == 1


def test_reasoning_within_its_budget_is_left_alone(engine: Engine) -> None:
    [free] = follow(engine, None, max_tokens=12, seed=8)
    for budget in (
        ThinkingBudget(tokens=12, start=""),
        ThinkingBudget(tokens=2),
        ThinkingBudget(tokens=2, start="", end=free.text[:3]),
    ):
        [completion] = follow(engine, None, max_tokens=12, seed=8, thinking=budget)
        assert completion.tokens == free.tokens


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        (ThinkingBudget(tokens=-1), "it is -1 tokens"),
        (ThinkingBudget(tokens=1, end=""), "no closing marker"),
        (ThinkingBudget(tokens=1, end="x" * 300), "at most 256 characters"),
    ],
)
def test_impossible_budgets_are_rejected(
    engine: Engine, budget: ThinkingBudget, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason) as rejected:
        follow(engine, None, thinking=budget)
    assert rejected.value.param == "thinking"


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (StructuredOutputs(), "none is given"),
        (StructuredOutputs(regex="a", json_object=True), "regex and json_object is given"),
        (StructuredOutputs(regex="["), "unclosed character class"),
        (StructuredOutputs(regex=r"[^\s\S]"), "no text can satisfy it"),
        (StructuredOutputs(json={"$ref": "http://localhost/x"}), "does not fetch"),
        (
            StructuredOutputs(json={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            "no text can satisfy it",
        ),
        (StructuredOutputs(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (StructuredOutputs(json="{"), "not valid JSON"),
        (StructuredOutputs(grammar="start: x"), "unknown name"),
        (StructuredOutputs(structural_tag={"type": "riddle"}), "'riddle' is not supported"),
        (
            StructuredOutputs(structural_tag={"type": "grammar", "grammar": "start: x"}),
            "unknown name",
        ),
        (StructuredOutputs(regex="a" * 20_000), "at most 16384"),
    ],
)
def test_constraints_that_cannot_be_followed_are_rejected(
    engine: Engine, constraint: StructuredOutputs, reason: str
) -> None:
    with pytest.raises(RequestError, match=re.escape(reason)) as rejected:
        follow(engine, constraint)
    assert rejected.value.param == "structured_outputs"


def test_a_sequence_whose_grammar_fails_ends_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Constraint, tokens: list[int]) -> bytes | None:
        raise ValueError("a bug")

    monkeypatch.setattr(Constraint, "next_mask", fail)
    with pytest.raises(UnavailableError, match="failed to compute its token mask"):
        follow(engine, StructuredOutputs(regex="a"))
    assert engine.generate_sync([PROMPT], GREEDY)[0][0].finish_reason == "length"


class DeadEnd:
    """A matcher that allows everything for some tokens, and then nothing."""

    def __init__(self, tokens: int) -> None:
        self._remaining = tokens
        self.accepting = False

    def advance(self, tokens: list[int]) -> None:
        self._remaining -= len(tokens)

    def mask(self) -> bytearray:
        return bytearray([255 if self._remaining > 0 else 0] * 256)


def test_a_grammar_without_a_next_token_is_the_requests_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLGrammar, "matcher", lambda self: DeadEnd(3))
    with pytest.raises(RequestError, match="cannot follow its grammar: no token continues it"):
        follow(engine, StructuredOutputs(regex="a"), ignore_eos=True)


def test_a_mask_that_cannot_be_computed_costs_no_other_row() -> None:
    class Broken(Constraint):
        def next_mask(self, tokens: list[int]) -> bytes | None:
            raise ValueError("a bug")

    class Sound(Constraint):
        def next_mask(self, tokens: list[int]) -> bytes | None:
            return b"x"

    broken, sound = Broken(None, ()), Sound(None, ())
    masks = step_masks._masks(1, [_Row(1, broken, []), _Row(2, sound, [])])
    assert masks.masks == {2: b"x"}
    assert broken.failure and not broken.unfollowable and not sound.failure
