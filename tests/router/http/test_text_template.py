"""JSON from templates equals the encoder's."""

from __future__ import annotations

import pytest

from tandem.router.http.encoding import dump
from tandem.router.http.text_template import StampedTemplates, TextTemplates

TEXTS = ["", " word", '"\\/\n\t\x00\x7f', "é\u2028\U0001f600", "text ", "stamp "]


@pytest.mark.parametrize("text", TEXTS)
def test_only_text_and_stamp_differ_from_the_first_time(text: str) -> None:
    plain = TextTemplates[int](lambda key, text: dump({"key": key, "text": text}))
    stamped = StampedTemplates[int](
        lambda key, number, text: dump({"key": key, "n": number, "text": text, "end": []})
    )
    for number in range(3):
        assert plain.fill(1, text) == dump({"key": 1, "text": text})
        for key in range(2):
            expected = dump({"key": key, "n": number, "text": text, "end": []})
            assert stamped.fill(key, b"%d" % number, text) == expected
