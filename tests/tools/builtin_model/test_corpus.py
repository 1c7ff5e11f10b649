"""The conversations that the built-in model is trained on."""

from collections.abc import Callable
from itertools import islice
from random import Random

import pytest
from tokenizers import Tokenizer

from tandem.shared.builtin_model import builtin_model_path
from tandem.tools.builtin_model.chat import MAKERS
from tandem.tools.builtin_model.corpus import conversation, conversations
from tandem.tools.builtin_model.recall import filler_sentence, make_fact, passage


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(builtin_model_path() / "tokenizer.json"))


def test_the_corpus_is_the_same_for_the_same_seed() -> None:
    first = list(islice(conversations(3, 256), 20))
    assert first == list(islice(conversations(3, 256), 20))
    assert first != list(islice(conversations(4, 256), 20))


@pytest.mark.parametrize("length", [128, 256, 1024, 4096])
def test_a_conversation_fills_its_length_and_alternates(length: int, tokenizer: Tokenizer) -> None:
    for seed in range(5):
        turns = conversation(Random(seed), length)
        roles = [turn.role for turn in turns if turn.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        size = sum(len(tokenizer.encode(turn.content).ids) + 5 for turn in turns)
        assert 0.9 * length < size < 1.6 * length + 300


def test_facts_have_different_keys_and_stand_in_their_passage() -> None:
    rng = Random(1)
    names: set[tuple[str, str]] = set()
    facts = [make_fact(rng, names) for _ in range(200)]
    assert len({(fact.attribute, fact.key) for fact in facts}) == 200
    text = passage(rng, facts, 50)
    assert all(fact.sentence in text for fact in facts)
    assert filler_sentence(rng).endswith(".")


@pytest.mark.parametrize("maker", [maker for maker, *_ in MAKERS])
def test_every_exchange_has_two_sides(maker: Callable[[Random], tuple[str, str]]) -> None:
    rng = Random(2)
    for _ in range(200):
        question, answer = maker(rng)
        assert question.strip() and answer.strip()
