"""Two texts that a model reads together, and texts that are cut, as transformers does it."""

from __future__ import annotations

from itertools import product

import pytest
import transformers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers, processors

from tandem.shared.errors import RequestError
from tandem.shared.text.tokenizer import Tokenizer

WORDS = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", *"abcdefgh"]
TEXTS = ["", "a", "a b c", "a b c d e f g h", "a b [SEP] c"]


def raw() -> RawTokenizer:
    """A tokenizer with BERT's special tokens."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    made = RawTokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(WORDS[:4])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return made


@pytest.fixture(scope="module")
def theirs() -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw())


@pytest.mark.parametrize("limit", [None, 3, 4, 5, 6, 7, 8, 11, 30])
@pytest.mark.parametrize(("first", "second"), list(product(TEXTS, TEXTS)))
def test_pairs_are_those_of_transformers(
    first: str, second: str, limit: int | None, theirs: transformers.PreTrainedTokenizerFast
) -> None:
    tokens, second_text = Tokenizer(raw()).encode_pair(first, second, limit=limit, most=100)
    cut = {} if limit is None else {"truncation": "longest_first", "max_length": limit}
    wanted = theirs([[first, second]], return_token_type_ids=True, **cut)
    assert [tokens] == wanted["input_ids"]
    segments = [int(place >= second_text) for place in range(len(tokens))]
    assert [segments] == wanted["token_type_ids"]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("limit", [2, 3, 5, 30])
@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_cut_within_its_special_tokens(text: str, limit: int, left: bool) -> None:
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw(), truncation_side="left" if left else "right"
    )
    found = Tokenizer(raw()).encode_within(text, limit, most=100, left=left)
    assert found == theirs(text, truncation=True, max_length=limit)["input_ids"]


def test_a_pair_that_is_too_long_is_refused() -> None:
    with pytest.raises(RequestError, match="at most 8"):
        Tokenizer(raw()).encode_pair("a b c", "d e f", most=8)
