"""Two texts that a model reads together, and texts that are cut, as transformers does it."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers, processors

from tandem.shared.errors import RequestError
from tandem.shared.text.chat_template import ChatTemplate
from tandem.shared.text.pair_template import QWEN3_TEMPLATE, is_reranker_by_name, shows_pairs
from tandem.shared.text.tokenizer import Tokenizer

WORDS = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", *"abcdefgh"]
TEXTS = ["", "a", "a b c", "a b c d e f g h", "a b [SEP] c"]


def raw() -> RawTokenizer:
    """A tokenizer with BERT's special tokens."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    result = RawTokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    result.pre_tokenizer = pre_tokenizers.Whitespace()
    result.add_special_tokens(WORDS[:4])
    result.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return result


@pytest.fixture(scope="module")
def theirs() -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw())


@pytest.mark.parametrize("limit", [None, 3, 4, 5, 6, 7, 8, 11, 30])
@pytest.mark.parametrize(("first", "second"), list(product(TEXTS, TEXTS)))
def test_pairs_are_those_of_transformers(
    first: str, second: str, limit: int | None, theirs: transformers.PreTrainedTokenizerFast
) -> None:
    tokens, second_text = Tokenizer(raw()).encode_pair(first, second, limit=limit, max_tokens=100)
    cut = {} if limit is None else {"truncation": "longest_first", "max_length": limit}
    expected = theirs([[first, second]], return_token_type_ids=True, **cut)
    assert [tokens] == expected["input_ids"]
    segments = [int(place >= second_text) for place in range(len(tokens))]
    assert [segments] == expected["token_type_ids"]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("limit", [2, 3, 5, 30])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_cut_within_its_special_tokens(text: str, limit: int, left: bool) -> None:
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw(), truncation_side="left" if left else "right"
    )
    tokens = Tokenizer(raw()).encode_within(text, limit, max_tokens=100, left=left)
    assert tokens == theirs(text, truncation=True, max_length=limit)["input_ids"]


def test_a_pair_that_is_too_long_is_refused() -> None:
    with pytest.raises(RequestError, match="at most 8"):
        Tokenizer(raw()).encode_pair("a b c", "d e f", max_tokens=8)


PAIR = "{% for m in messages %}{{ m.role[0] if m.role in ('query', 'document') }} {{ m.content }} "
PAIR += "{% endfor %}"


def reranker(source: str) -> Tokenizer:
    template = ChatTemplate(source, origin="test", tokens={"bos_token": "[CLS]"})
    return Tokenizer(raw(), template=template)


@pytest.mark.parametrize("text", ["b c", "b [SEP] c"])
def test_a_template_has_the_tokenizers_special_tokens_once(text: str) -> None:
    """It writes them itself, or leaves them to the tokenizer; those in a text are text."""
    tokens, second = reranker(PAIR).encode_pair("a", text, max_tokens=100)
    unknown = [0] * 3 if "[SEP]" in text else []  # [, SEP and ]
    content = [0, 4, 7, 5, *unknown, 6]  # q and d, which this tokenizer lacks, and the letters
    assert (tokens, second) == ([1, *content, 2], 0)
    tokenizer = reranker("{{ bos_token }} " + PAIR)
    assert tokenizer.encode_pair("a", text, max_tokens=100)[0] == [1, *content]


def test_only_a_template_of_both_roles_is_one_of_pairs() -> None:
    assert shows_pairs(PAIR) and shows_pairs(QWEN3_TEMPLATE)
    assert not shows_pairs("{% for m in messages %}{{ m.role }}: a query, a document{% endfor %}")
    assert reranker("{{ messages }}").pair_template is None
    with pytest.raises(RequestError, match="reads pairs without one"):
        reranker("{{ messages }}").encode_pair("a", "b", max_tokens=100, instruction="c")


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("models/Qwen3-Reranker-0.6B", True),
        ("hub/models--Qwen--Qwen3-Reranker-4B/snapshots/5fa94080", True),
        ("qwen3_reranker-8b-fp8", True),
        ("hub/models--Qwen--Qwen3-VL-Reranker-2B/snapshots/5fa94080", True),
        ("qwen3-reranker/Qwen3-Embedding-0.6B", False),
        ("hub/models--Qwen--Qwen3-0.6B/snapshots/5fa94080", False),
    ],
)
def test_qwen3_reranker_is_recognised_by_its_name(folder: str, expected: bool) -> None:
    assert is_reranker_by_name(Path(folder)) == expected
