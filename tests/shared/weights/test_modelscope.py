"""Models of ModelScope, by its own client against a stand-in of its API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.inventory.cached_models import cached_models
from tandem.shared.config import EngineConfig
from tandem.shared.config.model_name import HubName
from tandem.shared.errors import ModelError
from tandem.shared.weights import locate
from tandem.shared.weights.modelscope_hub import _reason
from tandem.shared.weights.obtain import ObtainedModel, obtain_model
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf
from tandem.tests.support.fake_modelscope import FakeModelScope, serving

NAME = "owner/model"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeModelScope]:
    pytest.importorskip("modelscope_hub")
    from modelscope_hub import set_default_config

    with serving() as served:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", served.url)
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        set_default_config(None)
        yield served
        set_default_config(None)


def obtain(name: str = NAME) -> ObtainedModel:
    return obtain_model(EngineConfig(model=f"modelscope:{name}"))


def refusal(name: str = NAME) -> str:
    with pytest.raises(ModelError) as caught:
        obtain(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def files_of(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in tiny_models.cached("qwen3", root).iterdir()}


def test_weights_come_after_the_rest_and_only_they(hub: FakeModelScope, root: Path) -> None:
    files = files_of(root)
    hub.repositories[NAME] = {**files, "pytorch_model.bin": b"x", "onnx/model.onnx": b"x"}
    model = obtain()
    assert model.generates and {path.name for path in model.path.iterdir()} >= set(files)
    assert sorted(hub.given) == sorted(files) and hub.given[-1] == "model.safetensors"
    obtain()
    assert hub.given.count("model.safetensors") == 1
    (entries,) = [each for each in cached_models() if each.name == f"modelscope:{NAME}"]
    assert (entries.refs, entries.format, entries.whole) == (("master",), "safetensors", True)
    hub.refusals[NAME] = 403
    assert obtain().generates, "what is in the cache will do"


def test_a_model_that_cannot_be_served_is_refused_before(hub: FakeModelScope, root: Path) -> None:
    config = b'{"architectures": ["ElectraModel"], "model_type": "electra"}'
    hub.repositories[NAME] = {**files_of(root), "config.json": config}
    assert "ElectraModel" in refusal()
    assert "model.safetensors" not in hub.given


def test_a_gguf_file(hub: FakeModelScope, root: Path) -> None:
    folder = tiny_models.cached("qwen3", root)
    file = write_gguf(folder, root / "model.gguf", "Q8_0")
    content = file.read_bytes() + bytes(16 << 20)  # more than is read for the header
    hub.repositories[NAME] = {"m-Q8_0.gguf": content, "m-F16.gguf": b"x"}
    model = obtain(f"{NAME}:Q8_0")
    assert model.path.read_bytes() == content
    assert set(hub.given + hub.ranges) == {"m-Q8_0.gguf"}


def test_what_goes_wrong_is_told(hub: FakeModelScope, root: Path) -> None:
    assert "has no such model, or it is private: check the spelling" in refusal()
    hub.repositories[NAME] = files_of(root)
    assert "owner/model has no revision 'v1'; it has v1.0" in refusal(f"{NAME}@v1")
    hub.refusals[NAME] = 403
    assert "then set MODELSCOPE_API_TOKEN, or run modelscope login" in refusal()
    assert hub.given == []


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (
            "NetworkError",
            'E("Failed to resolve ([Errno -3] No name)")',
            "([Errno -3] No name): with",
        ),
        ("RequestTimeoutError", "列表单页请求超过 15s", "(it took too long): without a network"),
        ("NetworkError", "网络", "(NetworkError): without a network"),
    ],
)
def test_errors_of_the_client_are_translated(kind: str, text: str, words: str) -> None:
    client = pytest.importorskip("modelscope_hub")
    assert words in _reason(HubName(NAME), getattr(client, kind)(text))


def test_a_cache_that_cannot_be_used(hub: FakeModelScope, root: Path, tmp_path: Path) -> None:
    hub.repositories[NAME] = files_of(root)
    (tmp_path / "cache").touch()
    message = refusal()
    assert f"the cache {tmp_path / 'cache'} cannot be used (" in message
    assert "Not a directory): MODELSCOPE_CACHE moves it" in message


def test_without_its_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "find_spec", lambda name: None)
    assert "downloading needs modelscope_hub: pip install '.[modelscope]'" in refusal()
