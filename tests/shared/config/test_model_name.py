"""Names of models on a hub."""

from __future__ import annotations

import pytest

from tandem.shared.config.model_name import HubName, full_name, hub_name
from tandem.shared.errors import UsageError

NAME = "owner/na.me-1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (NAME, HubName(NAME)),
        (f"{NAME}@v1.0", HubName(NAME, "v1.0")),
        (f"{NAME}@refs/pr/7", HubName(NAME, "refs/pr/7")),
        (f"{NAME}:Q4_K_M", HubName(NAME, None, "Q4_K_M")),
        (f"{NAME}:Q4_K_M@main", HubName(NAME, "main", "Q4_K_M")),
        (f"{NAME}@main:Q4_K_M", HubName(NAME, "main", "Q4_K_M")),
        (f"{NAME}:BF16/m-00001-of-00002.gguf", HubName(NAME, None, "BF16/m-00001-of-00002.gguf")),
        (f"{NAME}/m.gguf", HubName(NAME, None, "m.gguf")),
        (f"{NAME}/sub/m.GGUF@abc", HubName(NAME, "abc", "sub/m.GGUF")),
        (f"hf.co/{NAME}:Q8_0", HubName(NAME, None, "Q8_0")),
        (f"https://huggingface.co/{NAME}/", HubName(NAME)),
        (f"https://huggingface.co/{NAME}/tree/main", HubName(NAME, "main")),
        (f"https://huggingface.co/{NAME}/blob/v2/a/m.gguf", HubName(NAME, "v2", "a/m.gguf")),
        (
            f"https://huggingface.co/{NAME}/resolve/v2/m.gguf?download=true",
            HubName(NAME, "v2", "m.gguf"),
        ),
        (f"modelscope:{NAME}@master", HubName(NAME, "master", None, "modelscope")),
        (f"https://modelscope.cn/models/{NAME}", HubName(NAME, None, None, "modelscope")),
        ("builtin", None),
        ("gpt2", None),
        ("./owner/name", None),
        ("../name", None),
        ("~/name", None),
        ("/owner/name", None),
        ("folder/file.gguf", None),
        ("a/b/c", None),
        (f"{NAME}@", None),
        (f"{NAME}:", None),
        (f"{NAME}:a:b", None),
        ("", None),
    ],
)
def test_what_is_a_name(text: str, expected: HubName | None) -> None:
    name = hub_name(text)
    assert name == expected
    if name is not None:
        assert hub_name(str(name)) == name


def test_options_are_parts_of_the_name() -> None:
    assert full_name(NAME, file="m.gguf", revision="v1") == f"{NAME}:m.gguf@v1"
    assert full_name(f"{NAME}@v1", file="m.gguf", revision="v1") == f"{NAME}:m.gguf@v1"
    assert full_name(f"{NAME}:Q8_0", modelscope=True) == f"modelscope:{NAME}:Q8_0"
    assert full_name("builtin", modelscope=True) == "builtin"
    assert full_name(f"modelscope:{NAME}", modelscope=True) == f"modelscope:{NAME}"
    assert full_name("./folder") == "./folder"


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (
            "builtin",
            {"revision": "v1"},
            "--revision 'v1' is for a model on a hub, but 'builtin' is",
        ),
        ("./folder", {"file": "m.gguf"}, "--f 'm.gguf' is for a model on a hub"),
        (f"{NAME}@v1", {"revision": "v2"}, "--revision 'v2' contradicts 'v1' in the model's name"),
        (f"{NAME}:Q8_0", {"file": "m.gguf"}, "--f 'm.gguf' contradicts 'Q8_0'"),
        (NAME, {"file": "model.bin"}, "--f 'model.bin' is not a .gguf file"),
        (NAME, {"file": "m.safetensors"}, "leave it out for a model in safetensors"),
        (NAME, {"revision": "a:b"}, "must not contain ':' or '@'"),
    ],
)
def test_options_that_contradict_the_name(model: str, options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        full_name(model, **options)  # type: ignore[arg-type]
    assert words in str(caught.value)
