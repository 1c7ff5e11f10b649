"""Maps of characters that a model of SentencePiece may have: followed only if they are whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from tandem.proto import sentencepiece_pb2 as pb
from tandem.shared.text.vocabulary.charsmap import check_charsmap
from tandem.tests.shared.text.vocabulary.support import AWKWARD, MODELS

MODEL = pb.ModelProto.FromString((MODELS / "unigram.model").read_bytes())
CHARSMAP = MODEL.normalizer_spec.precompiled_charsmap
FOLLOWED = [text for text in AWKWARD if text] + ["\uff21", "\u3000", "e\u0301", "\x1f"]


def test_a_whole_map_is_accepted() -> None:
    assert CHARSMAP and check_charsmap(CHARSMAP) is None


def test_a_truncated_map_is_not() -> None:
    for length in (0, 3, 4, 100, 1027):
        assert check_charsmap(CHARSMAP[:length]) == "is truncated"
    assert check_charsmap(CHARSMAP + b"\xff") == "is not UTF-8"
    assert str(check_charsmap(CHARSMAP + bytes(5 << 20))).startswith("has 52")


def test_the_root_is_followed_whatever_it_is() -> None:
    values = bytearray(CHARSMAP)
    values[4:8] = (0x8000_0000 | 0xFFFFFF << 10 & 0x7FFF_FFFF).to_bytes(4, "little")
    assert check_charsmap(bytes(values)) == "unit 0 points outside the map"


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(CHARSMAP) - 1), st.integers(0, 255)), max_size=6))
def test_no_map_that_is_taken_leads_out_of_itself(changes: list[tuple[int, int]]) -> None:
    values = bytearray(CHARSMAP)
    for at, byte in changes:
        values[at] = byte
    if check_charsmap(bytes(values)) is None:
        normalizer = normalizers.Precompiled(bytes(values))
        for text in FOLLOWED:
            assert isinstance(normalizer.normalize_str(text), str)
