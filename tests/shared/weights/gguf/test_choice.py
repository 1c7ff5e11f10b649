"""Which of the GGUF files of a repository is meant."""

from __future__ import annotations

import pytest

from tandem.shared.errors import ModelError
from tandem.shared.weights.gguf import choice
from tandem.shared.weights.gguf.choice import alternative, choose, loadable, type_of

SPLIT = [f"Q8_0/m-Q8_0-0000{part}-of-00003.gguf" for part in (1, 2, 3)]


@pytest.fixture(autouse=True)
def every_type_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "loadable", lambda kind: bool(kind))


@pytest.mark.parametrize(
    ("files", "tag", "expected"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-F16.gguf"], None, ["m-Q4_K_M.gguf"]),
        (["m-Q8_0.gguf", "m-Q2_K.gguf"], None, ["m-Q8_0.gguf"]),
        (["m-UD-Q4_K_XL.gguf"], None, ["m-UD-Q4_K_XL.gguf"]),
        (["mmproj-m-F16.gguf", "m-F16.gguf", "imatrix.gguf"], None, ["m-F16.gguf"]),
        (["model.gguf", "README.md"], None, ["model.gguf"]),
        (["a/m-F16.gguf", *reversed(SPLIT)], None, SPLIT),
        (["a/m-F16.gguf", *SPLIT], "q8_0", SPLIT),
        (["a/m-F16.gguf", *SPLIT], SPLIT[1], SPLIT),
        (["m-q4_k_m.gguf", "m-q4_k_s.gguf"], "Q4_K_S", ["m-q4_k_s.gguf"]),
        (["m.Q4_K_M.gguf", "m.UD-Q4_K_XL.gguf"], "Q4_K_XL", ["m.UD-Q4_K_XL.gguf"]),
        (["m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf"], "Q4_K_M", ["m-Q4_K_M.gguf"]),
        (["m-fp16.gguf", "m-q8_0.gguf"], "F16", ["m-fp16.gguf"]),
        (["sub/m-F16.gguf", "m-F32.gguf"], "m-F16.gguf", ["sub/m-F16.gguf"]),
        (["mmproj-F16.gguf", "m-F32.gguf"], "mmproj-F16.gguf", ["mmproj-F16.gguf"]),
    ],
)
def test_the_file(files: list[str], tag: str | None, expected: list[str]) -> None:
    assert choose(files, "place", tag) == expected


@pytest.mark.parametrize(
    ("files", "tag", "words"),
    [
        (["m-Q8_0.gguf", "m-F16.gguf"], "Q4_K_M", "no GGUF file in Q4_K_M; it has F16, Q8_0"),
        (["m-Q4_K_M.gguf", "m-F16.gguf"], "Q4_KM", "did you mean Q4_K_M?"),
        (["mmproj-F16.gguf"], "F16", "no GGUF file of a model: mmproj-F16.gguf is not a whole"),
        (["model.bin"], "Q8_0", "place has no GGUF file of a model"),
        (["model.safetensors"], "F16", "of a model; its weights are safetensors: leave out 'F16'"),
        (["model.safetensors"], "Q8_0", "leave out 'Q8_0', and serve it with --isq q8_0"),
        (["model.safetensors"], "q4_K_M", "leave out 'q4_K_M', and serve it with --isq q4k"),
        (["model.safetensors"], "m.gguf", "no GGUF file at all; its weights are safetensors"),
        (["m-Q8_0.gguf"], "n-Q8_0.gguf", "has no file 'n-Q8_0.gguf'; it has m-Q8_0.gguf"),
        (["model.bin"], "m.gguf", "has no file 'm.gguf', and no GGUF file at all"),
        (["a/m.gguf", "b/m.gguf"], "m.gguf", "has several 'm.gguf'; it has a/m.gguf, b/m.gguf"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], None, "several GGUF files in Q8_0: a-Q8_0.gguf, b-Q8_0"),
        (SPLIT[:2], None, "place lacks Q8_0/m-Q8_0-00003-of-00003.gguf, a part of the model"),
    ],
)
def test_what_is_told_if_there_is_none(files: list[str], tag: str | None, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        choose(files, "place", tag)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("a/Model.UD-IQ2_XXS-00001-of-00002.gguf", "UD-IQ2_XXS"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("Meta-Llama-3-8B-Instruct-fp16.gguf", "F16"),
        ("ggml-model-f32.gguf", "F32"),
        ("Q4-model.gguf", "Q4"),
        ("model.gguf", ""),
    ],
)
def test_the_quantisation_in_a_name(file: str, kind: str) -> None:
    assert type_of(file) == kind


def test_what_can_be_loaded() -> None:
    assert all(map(loadable, ("Q8_0", "Q6_K", "Q6_K_L", "F16", "BF16", "UD-Q6_K_XL")))
    assert not any(map(loadable, ("Q4_0_8_8", "Q4_0_4_4", "")))


@pytest.mark.parametrize(
    ("files", "refused", "expected"),
    [
        (("m-Q4_0.gguf", "m-Q8_0.gguf", "m-F16.gguf"), "m-Q4_0.gguf", "m-Q8_0.gguf"),
        (("m-Q4_0.gguf", "other-Q4_K_M.gguf", "m-F16.gguf"), "m-Q4_0.gguf", "m-F16.gguf"),
        (("m-Q4_0.gguf", "a/other-Q4_K_M.gguf"), "m-Q4_0.gguf", "a/other-Q4_K_M.gguf"),
        (("m-Q4_0.gguf", "mmproj-F16.gguf", "m.gguf"), "m-Q4_0.gguf", None),
        (("model.safetensors", "m-IQ4_XS.gguf", "m-Q5_K_M.gguf"), "", "m-Q5_K_M.gguf"),
        (
            ("m-Q8_0-00002-of-00002.gguf", "m-Q8_0-00001-of-00002.gguf"),
            "m-Q4_0.gguf",
            "m-Q8_0-00001-of-00002.gguf",
        ),
        ((), "", None),
    ],
)
def test_what_may_be_used_instead(files: tuple[str, ...], refused: str, expected: str) -> None:
    """By its name, in another type, and of the same model if there is one."""
    assert alternative(files, refused) == expected
