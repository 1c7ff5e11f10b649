"""Models of the hub are judged before their weights are downloaded, and those on disk before any
rank is started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load, load_file, save, save_file

from tandem.shared.config import EngineConfig
from tandem.shared.errors import ModelError, StartupError
from tandem.shared.models.spec import TokenScoreSpec
from tandem.shared.weights.hub import HuggingFaceHub
from tandem.shared.weights.locate import find_model
from tandem.shared.weights.obtain import ObtainedModel, obtain_model
from tandem.shared.weights.remote_files import Listing
from tandem.tests.support import fake_hub
from tandem.tests.support.checkpoints import rerankers, tiny_models
from tandem.tests.support.fake_hub import FakeHub, used_here

NAME = "owner/model"
INDEX = "model.safetensors.index.json"
MODULES = {
    "Transformer": "",
    "Pooling": "1_Pooling",
    "Dense": "2_Dense",
    "Normalize": "3_Normalize",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with used_here(monkeypatch, tmp_path / "cache") as serving:
        yield serving


def files_of(root: Path, model: str = "qwen2") -> dict[str, bytes]:
    """Those of a checkpoint; qwen2 is in several files."""
    return {path.name: path.read_bytes() for path in tiny_models.cached(model, root).iterdir()}


def with_changes(
    files: dict[str, bytes], file: str = "config.json", **values: Any
) -> dict[str, bytes]:
    content = json.loads(files.get(file, b"{}"))
    return files | {file: json.dumps({**content, **values}).encode()}


def obtain(name: str = NAME, **options: Any) -> ObtainedModel:
    return obtain_model(EngineConfig(model=name, **options))


def refusal(name: str = NAME, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        obtain(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_weights_are_downloaded_after_the_rest_and_once(
    hub: FakeHub, root: Path, model: str
) -> None:
    unwanted = {
        "consolidated.safetensors": b"1",
        "model-fp8.safetensors": b"2",
        "onnx/model.safetensors": b"3",
        "pytorch_model.bin": b"4",
        "original/params.json": b"{}",
    }
    files = files_of(root, model)
    hub.put(NAME, files | unwanted)
    result = obtain()
    assert sorted(hub.given) == sorted(files)
    weights = [file for file in files if file.endswith(".safetensors")]
    assert sorted(hub.given[-len(weights) :]) == sorted(weights)
    assert result.generates and result.source.tensor_names()
    assert {path.name for path in result.path.iterdir()} == set(files)
    obtain()
    assert len(hub.given) == len(files)


def test_layers_over_vectors_are_downloaded_with_the_weights(hub: FakeHub, root: Path) -> None:
    files = files_of(root)
    hidden = json.loads(files["config.json"])["hidden_size"]
    modules = [{"type": f"models.{kind}", "path": path} for kind, path in MODULES.items()]
    dense: dict[str, Any] = {"in_features": hidden, "out_features": 8, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    weights = {"linear.weight": torch.zeros(8, hidden)}
    of_vectors = {
        "modules.json": json.dumps(modules).encode(),
        "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
        "2_Dense/config.json": json.dumps(dense).encode(),
        "2_Dense/model.safetensors": save(weights),
    }
    hub.put(NAME, files | of_vectors | {"2_Dense/pytorch_model.bin": b"1"})
    result = obtain()
    assert sorted(hub.given) == sorted(files | of_vectors)
    assert hub.given.index("2_Dense/config.json") < hub.given.index(hub.weight_requests[0])
    assert "2_Dense/model.safetensors" in hub.weight_requests
    assert result.spec.vector_size == 8 and result.spec.pooling == "mean"


def test_a_reranker_of_the_hub_says_how_it_scores(hub: FakeHub, root: Path, tmp_path: Path) -> None:
    """By its module, or by its repository's name alone."""
    folder = tmp_path / "model"
    tiny_models.build("qwen3", folder)
    rerankers.add_labels(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    name = "Qwen/Qwen3-Reranker-0.6B"
    hub.put(name, files)
    by_name = obtain(name).spec.classifier
    module = [{"type": "modules.logit_score.LogitScore", "path": "1_LogitScore"}]
    tokens = {"true_token_id": 5, "false_token_id": None}
    config = {"1_LogitScore/config.json": json.dumps(tokens).encode()}
    hub.put(NAME, files | config | {"modules.json": json.dumps(module).encode()})
    by_module = obtain().spec.classifier
    assert isinstance(by_name, TokenScoreSpec) and isinstance(by_module, TokenScoreSpec)
    assert (by_module.true, by_module.false) == (5, None)
    vocabulary = json.loads(files["tokenizer.json"])["model"]["vocab"]
    assert (by_name.true, by_name.false) == (vocabulary["yes"], vocabulary["no"])


def test_layers_over_vectors_that_are_missing_are_named(root: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_models.cached("qwen2", root), tmp_path / "model"))
    (folder / "modules.json").write_text('[{"type": "models.Dense", "path": "2_Dense"}]')
    (folder / "2_Dense").mkdir()
    dense: dict[str, Any] = {"in_features": 128, "out_features": 8, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    words = "2_Dense/model.safetensors is missing, and modules.json lists it"
    assert words in refusal(str(folder))


def test_templates_in_their_folder_are_downloaded(hub: FakeHub, root: Path) -> None:
    template = "additional_chat_templates/tool_use.jinja"
    hub.put(NAME, files_of(root) | {template: b"for tools", "other/chat.jinja": b"x"})
    result = obtain()
    assert template in hub.given and "other/chat.jinja" not in hub.given
    used = result.source.tokenizer_files().tool_template
    assert used is not None and used.source == "for tools"


@pytest.mark.parametrize(
    ("pooling", "words"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, ""),
        ({"pooling_mode_mean_tokens": True}, ""),
        ({"pooling_mode": "cls"}, ""),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, "'max_tokens+cls_tok"),
        ({"word_embedding_dimension": 64, "include_prompt": True}, ""),
    ],
)
def test_the_pooling_of_sentence_transformers_is_judged(
    hub: FakeHub, root: Path, pooling: dict[str, object], words: str
) -> None:
    hub.put(NAME, {**files_of(root), "1_Pooling/config.json": json.dumps(pooling).encode()})
    if not words:
        assert obtain()
        return
    assert words in refusal()
    assert not hub.weight_requests
    assert obtain(ignore_config_keys="pooling_type")


def test_a_router_downloads_no_weights(hub: FakeHub, root: Path) -> None:
    hub.put(NAME, files_of(root))
    with find_model(NAME) as model:
        assert (model.path / "tokenizer.json").is_file()
    assert hub.given and not hub.weight_requests


def test_random_weights_need_no_download(hub: FakeHub, root: Path) -> None:
    hub.put(NAME, files_of(root))
    obtain(load_format="dummy")
    assert hub.given and not hub.weight_requests


VISION = {
    "architectures": ["PaliGemmaForConditionalGeneration"],
    "text_config": {"model_type": "gemma2"},
    "vision_config": {"hidden_size": 8},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": ["JambaForCausalLM"]}, "supported: BertModel, "),
        (VISION, "its text part is a supported gemma2 model"),
        ({"architectures": ["ElectraModel"]}, "it is an encoder"),
        ({"architectures": ["T5ForConditionalGeneration"]}, "it is an encoder-decoder"),
        ({"quantization_config": {"quant_method": "quip", "bits": 4}}, "method quip: bits 4"),
        ({"quantization": {"bits": 7, "group_size": 64}}, "quantization: bits is 7"),
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rope_type is 'ntk'"),
        ({"is_decoder_only": False}, "is_decoder_only is False; supported: True"),
        ({"strange": 1}, "--ignore-config-keys strange"),
        ({"num_attention_heads": 6}, "divisor of 6"),
    ],
)
def test_no_weights_are_downloaded_for_a_config_that_is_refused(
    hub: FakeHub, root: Path, change: dict[str, Any], words: str
) -> None:
    hub.put(NAME, with_changes(files_of(root), **change))
    assert words in refusal()
    assert hub.given and not hub.weight_requests


def without(files: dict[str, Any], *names: str) -> dict[str, Any]:
    return {file: content for file, content in files.items() if file not in names}


def test_no_weights_are_downloaded_if_other_files_speak_against_it(
    hub: FakeHub, root: Path
) -> None:
    files = files_of(root)
    single = {**without(files, INDEX), "model.safetensors": b"x"}
    weights = json.loads(files[INDEX])["weight_map"]
    shard = weights["model.norm.weight"]
    prefixed = {**weights, "language_model.model.norm.weight": shard}
    headless = without(weights, "lm_head.weight")
    cases: list[tuple[dict[str, bytes], str]] = [
        (without(files, "tokenizer.json"), "tokenizer.json does not exist"),
        (without(files, INDEX), "which model.safetensors.index.json lists: download"),
        (without(files, shard), f"{NAME}/{shard} is missing, and model.safetensors.index.json"),
        (with_changes(files, INDEX, weight_map={}), "weight_map is missing or empty"),
        (with_changes(files, INDEX, weight_map=headless), "lacks lm_head.weight, and tie_word_emb"),
        (
            with_changes(files, INDEX, weight_map=prefixed),
            "a text model: use a text-only checkpoint",
        ),
        (
            with_changes(single, "hf_quant_config.json", quantization={"quant_algo": "INT9"}),
            "quant_algo is 'INT9'",
        ),
        (with_changes(single, "quantize_config.json", bits=5), "bits is 5"),
        (with_changes(single, "quant_config.json", w_bit=5), "w_bit is 5"),
        (
            {"config.json": files["config.json"], "pytorch_model.bin": b"x"},
            "pytorch_model.bin cannot be loaded: convert to safetensors",
        ),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"}, "a LoRA adapter"),
        ({"params.json": b"{}", "consolidated.safetensors": b"x"}, "Mistral's own format"),
        ({"model_index.json": b"{}"}, "a diffusion pipeline"),
    ]
    for number, (content, words) in enumerate(cases):
        name = f"owner/case-{number}"
        hub.put(name, content)
        assert words.replace(NAME, name) in refusal(name)
    assert not hub.weight_requests


def test_nor_if_headers_do(hub: FakeHub, root: Path) -> None:
    """Those of a single file, which no index describes, and of all files of several."""
    single, several = files_of(root, "qwen3"), files_of(root)
    weights = load(single["model.safetensors"])
    up = "model.layers.0.mlp.up_proj.weight"
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    words = up.replace("weight", "qweight")

    def with_weights(**tensors: torch.Tensor) -> dict[str, bytes]:
        return single | {"model.safetensors": save(tensors)}

    shard = json.loads(several[INDEX])["weight_map"][up]
    result = {name: value for name, value in load(several[shard]).items() if name != up}
    index = json.loads(several[INDEX])["weight_map"]
    unlisted = without(index, up)
    cases = {
        "missing": (with_weights(**without(weights, up)), f"model.safetensors lacks {up}: "),
        "shard": (
            with_changes(several, INDEX, weight_map=unlisted) | {shard: save(result)},
            f" lacks {up}: configuration and weights do not belong together",
        ),
        "more": (with_weights(**weights, strange=torch.zeros(2)), "tensor strange is unknown"),
        "shapes": (
            with_changes(
                with_weights(**without(weights, up), **{words: torch.zeros(2, 2).int()}),
                quantization_config=gptq,
            ),
            f"lacks {words.replace('qweight', 'scales')}, by owner/shapes/config.json",
        ),
        "other": (single | {"model.safetensors": b"<html>"}, "is truncated or not a safetensors"),
        "words": (
            with_changes(single, "tokenizer.json", model=1),
            "tokenizer.json: not a tokenizer",
        ),
    }
    for number, (content, message) in cases.items():
        name = f"owner/{number}"
        hub.put(name, content)
        assert message.replace("model.safetensors lacks", f"{name} lacks") in (
            error_text := refusal(name)
        )
        assert "tandem-headers" not in error_text
    assert not hub.weight_requests


def test_an_index_may_leave_out_what_its_files_have(hub: FakeHub, root: Path) -> None:
    files = files_of(root)
    weights = without(json.loads(files[INDEX])["weight_map"], "model.norm.weight")
    hub.put(NAME, with_changes(files, INDEX, weight_map=weights))
    assert obtain().generates


def test_headers_are_not_read_of_what_is_here_or_has_no_size(
    hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.put(NAME, files_of(root, "qwen3"))
    obtain()
    ranges = len(hub.ranges)
    assert ranges and obtain().generates and len(hub.ranges) == ranges
    listing = Listing(dict.fromkeys(hub.repositories[NAME]), fake_hub.COMMIT)
    monkeypatch.setattr(HuggingFaceHub, "listing", lambda self, name: listing)
    next(obtain().path.glob("*.safetensors")).unlink()
    assert obtain().generates and len(hub.ranges) == ranges


def test_nor_if_options_do(hub: FakeHub, root: Path) -> None:
    hub.put(NAME, files_of(root))
    assert "cannot be split over 3 ranks" in refusal(tensor_parallel_size=3)
    assert "--load-format gguf, but" in refusal(load_format="gguf")
    with pytest.raises(StartupError, match=r"--max-model-len 9999 exceeds the model's context of"):
        obtain(max_model_len=9999)
    assert not hub.weight_requests


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "RepoNotFound", "has no such model, or it is private: check the spelling"),
        (401, "RepoNotFound", "has no such model, or it is private: check the spelling"),
        (403, "GatedRepo", "/owner/model, then run hf auth login, or set HF_TOKEN"),
        (401, "GatedRepo", "it is gated: accept its terms at"),
        (403, "", "rejects the token of HF_TOKEN or hf auth login (status 403)"),
        (500, "", "responds with status 500; try again later"),
    ],
)
def test_a_hub_that_refuses_is_quoted(hub: FakeHub, status: int, code: str, words: str) -> None:
    hub.refusals[NAME] = (status, code)
    message = refusal()
    assert words in message
    assert message.startswith("'owner/model' is not on this machine, and cannot be downloaded from")


def test_a_hub_that_cannot_be_reached(
    hub: FakeHub, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the cache is used all the same, if it is whole."""
    hub.put(NAME, files_of(root, "qwen3"))
    hub.put("owner/described", files_of(root, "qwen3"))
    obtain()
    with find_model("owner/described"):
        pass
    count = len(hub.given)
    fake_hub.use(monkeypatch, "http://127.0.0.1:9")
    assert obtain().generates
    message = refusal("owner/other")
    assert "no connection to http://127.0.0.1:9" in message
    assert "HTTPS_PROXY" in message and "HF_ENDPOINT" in message
    monkeypatch.setenv("http_proxy", "http://user:secret@127.0.0.1:9")
    message = refusal("owner/other")
    assert "through the proxy that HTTPS_PROXY names" in message and "secret" not in message
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert obtain().generates
    for name in ("owner/other", "owner/described"):
        assert "HF_HUB_OFFLINE is set, and the cache" in refusal(name)
    assert len(hub.given) == count


def test_a_name_that_the_hub_cannot_have(hub: FakeHub) -> None:
    assert "a name on the hub is OWNER/NAME" in refusal("-owner/model")


@pytest.fixture
def folder(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models.cached("qwen2", root), tmp_path / "model"))


def test_a_folder_that_was_half_downloaded(folder: Path) -> None:
    shard = sorted(folder.glob("model-*.safetensors"))[3]
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    assert f"{shard} ({len(whole) // 2} bytes) is truncated" in refusal(str(folder))
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert f"{shard} is a Git LFS pointer and not the file itself" in refusal(str(folder))
    shard.unlink()
    assert f"{shard} is missing, and {INDEX} lists it: resume the download" in refusal(str(folder))
    (folder / INDEX).unlink()
    assert f"which {INDEX} lists: download that too" in refusal(str(folder))


def test_a_folder_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    message = refusal(str(tmp_path))
    assert f"{tmp_path / 'config.json'} is missing: it is a LoRA adapter" in message


def test_an_embedding_model_without_a_head_is_known_as_one(root: Path, tmp_path: Path) -> None:
    """Its names lack the first part, as those of Qwen3-Embedding do."""
    folder = Path(shutil.copytree(tiny_models.cached("qwen3", root), tmp_path / "model"))
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["lm_head.weight"]
    save_file(weights, file)
    assert "lacks lm_head.weight, and tie_word_embeddings is false" in refusal(str(folder))
    save_file({name.removeprefix("model."): value for name, value in weights.items()}, file)
    assert not obtain(str(folder)).generates
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    assert obtain(str(folder)).generates
