"""A tokenizer as bytes: what is packed is unpacked, and anything else is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.shared.builtin_model import builtin_model_path
from tandem.shared.errors import ModelError
from tandem.shared.text.tokenizer_files import TemplateText, TokenizerFiles, read_tokenizer_files
from tandem.shared.text.tokenizer_message import pack_tokenizer, unpack_tokenizer

FILES = TokenizerFiles(
    '{"model": {}}',
    "origin",
    {"eos_token": "</s>", "more": [1, None, {"a": True}]},
    {"temperature": 0.5},
    TemplateText("template \ud800 ü", "file"),
    more_templates={"rag": TemplateText("{{ documents }}", "another")},
    sentence_config={"prompts": {"query": "q: "}},
)


@pytest.mark.parametrize("files", [FILES, read_tokenizer_files(builtin_model_path())])
def test_what_is_packed_is_unpacked(files: TokenizerFiles) -> None:
    assert unpack_tokenizer(pack_tokenizer(files)) == files


@given(
    st.binary()
    | st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["tokenizer", "origin", "config", "template", "source"]), inner
            )
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_other_bytes_are_refused(data: bytes) -> None:
    try:
        files = unpack_tokenizer(data)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(files.tokenizer, str) and isinstance(files.config, dict)
