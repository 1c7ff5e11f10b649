"""Prompts of models for embeddings."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.shared.errors import ModelError, RequestError
from tandem.shared.text.prompts import DOCUMENT, QUERY, read_prompts


def test_a_prompt_is_found_by_its_name() -> None:
    prompts = read_prompts({"prompts": {"query": "q: ", "passage": "p: "}})
    assert (prompts.of(None), prompts.of("query")) == ("", "q: ")
    assert (prompts.first_of(QUERY), prompts.first_of(DOCUMENT)) == ("q: ", "p: ")
    with pytest.raises(RequestError, match="'other'; this model has: 'query', 'passage'"):
        prompts.of("other")


def test_the_default_is_one_of_them() -> None:
    both = {"prompts": {"a": "x"}, "default_prompt_name": "a"}
    assert read_prompts(both).of(None) == read_prompts(both).first_of(QUERY) == "x"
    assert read_prompts({"prompts": None, "default_prompt_name": None}).of(None) == ""


@pytest.mark.parametrize(
    "config",
    [{"prompts": ["a"]}, {"prompts": {"a": 5}}, {"prompts": {}, "default_prompt_name": "a"}],
)
def test_a_broken_file_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="config_sentence_transformers"):
        read_prompts(config)
