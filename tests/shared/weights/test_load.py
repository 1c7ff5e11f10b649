"""Whole checkpoints load; for any other, the error names the file and the remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.shared.errors import ModelError
from tandem.shared.models.layers.part import Part
from tandem.shared.models.parallel import TensorParallel, WeightSlot
from tandem.shared.models.registry import FAMILIES
from tandem.shared.models.weight_names import target_of, with_short_names
from tandem.shared.weights.checkpoint import CheckpointWeights
from tandem.shared.weights.load import load_model, resolve_dtype
from tandem.shared.weights.random import RandomWeights
from tandem.shared.weights.source import read_spec
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.runners import embeddings


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture
def folder(root: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint in one file, to be spoilt."""
    return Path(shutil.copytree(tiny_models.cached("qwen3", root), tmp_path / "model"))


@pytest.fixture
def sharded(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models.cached("qwen2", root), tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_weights(
    folder: Path, added: dict[str, torch.Tensor] | None = None, *, drop: str = ""
) -> None:
    file = folder / "model.safetensors"
    weights = {name: value for name, value in load_file(file).items() if name != drop}
    save_file(weights | (added or {}), file)


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(folder, **options)
    return str(caught.value)


def test_a_config_key_that_is_ignored_does_not_keep_weights_from_loading(folder: Path) -> None:
    change_config(folder, query_scale=2.0)
    assert "--ignore-config-keys query_scale" in refusal(folder)
    assert load_model(folder, ignored_keys=frozenset({"query_scale"}))


def test_no_folder(tmp_path: Path) -> None:
    assert "config.json is missing: give the folder" in refusal(tmp_path / "nowhere")


def test_config_that_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    assert "is not valid JSON" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "not an object" in refusal(folder)
    (folder / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid x\n")
    assert "config.json is a Git LFS pointer and not the file itself" in refusal(folder)


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin cannot be loaded: convert to safetensors" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = refusal(folder)
    assert str(file) in message
    assert "delete it and download it again" in message


def test_a_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert f"{shard} is missing" in refusal(sharded)


def test_an_index_that_does_not_fit_its_shards(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    shards = sorted(set(values["weight_map"].values()))
    name = next(n for n, file in values["weight_map"].items() if file == shards[0])
    values["weight_map"][name] = shards[1]
    index.write_text(json.dumps(values))
    assert f"lacks {name}" in refusal(sharded)
    values["weight_map"][name] = "../../etc/passwd"
    index.write_text(json.dumps(values))
    assert "is not the name of a file in the folder" in refusal(sharded)
    values["weight_map"][name] = "pytorch_model.bin"
    index.write_text(json.dumps(values))
    assert "'pytorch_model.bin' is not a safetensors file, as its name says" in refusal(sharded)


def test_a_missing_weight(folder: Path) -> None:
    change_weights(folder, drop="model.layers.1.mlp.up_proj.weight")
    assert "lacks model.layers.1.mlp.up_proj.weight: configuration and" in refusal(folder)


def test_an_unknown_weight(folder: Path) -> None:
    change_weights(folder, {"model.layers.0.mlp.router.weight": torch.zeros(2)})
    assert "model.layers.0.mlp.router.weight is unknown" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("model.layers.0.mlp.down_proj.weight_scale_inv", "the weights look quantized"),
        ("model.layers.0.mlp.down_proj.qweight", "the weights look quantized"),
        ("model.layers.0.mlp.down_proj.scales", "the weights look quantized"),
        ("model.layers.0.mlp.down_proj.biases", "the weights look quantized"),
        ("model.layers.0.mlp.down_proj.weight.absmax", "the weights look quantized"),
        ("model.layers.0.mlp.down_proj.weight_packed", "the weights look quantized"),
        ("vision_tower.blocks.0.weight", "a model of images or audio around a text model"),
        ("visual.patch_embed.proj.weight", "a model of images or audio around a text model"),
        ("language_model.model.norm.weight", "a model of images or audio around a text model"),
        ("model.multi_modal_projector.weight", "a model of images or audio around a text model"),
        ("base_model.model.model.norm.weight", "it belongs to an adapter: merge that"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "it belongs to an adapter: merge that"),
        ("model.layers.0.mlp.up_proj.base_layer.weight", "it belongs to an adapter: merge that"),
        ("_orig_mod.model.norm.weight", "a training framework has left a prefix"),
        ("module.model.norm.weight", "a training framework has left a prefix"),
        ("mtp.layers.0.input_layernorm.weight", "it predicts further tokens"),
        ("midlayer.self_attn.q_proj.weight", "it drafts tokens for another model"),
        ("fc.weight", "it drafts tokens for another model"),
        ("score.weight", "a head that classifies or scores"),
        ("model.layers.0.mlp.experts.0.up_proj.weight", "a mixture of experts"),
        ("model.layers.0.block_sparse_moe.experts.3.w1.weight", "a mixture of experts"),
        ("transformer.wte.weight", "names are those of another format"),
        ("layers.0.attention.wq.weight", "names are those of another format"),
        ("model.layers.0.mlp.twist.weight", "another version of this one, or a variant"),
    ],
)
def test_an_unknown_weight_has_a_likely_cause(name: str, cause: str) -> None:
    names = with_short_names(FAMILIES["Qwen3ForCausalLM"].weights)
    with pytest.raises(ModelError, match=rf"model: tensor {name} is unknown .* matter: .*{cause}"):
        target_of(name, names, "model")


def test_tables_of_rope_that_were_saved_are_ignored(folder: Path) -> None:
    tables = (
        *("rotary_emb.inv_freq", "layers.1.self_attn.rotary_emb.inv_freq"),
        *("rotary_emb.cos_cached", "rotary_emb_local.original_inv_freq"),
    )
    change_weights(folder, {f"model.{name}": torch.zeros(4) for name in tables})
    change_weights(folder, {"model.layers.0.self_attn.rotary_emb.cos_cached": torch.zeros(4, 4)})
    assert load_model(folder)


def test_names_of_a_base_model(folder: Path) -> None:
    whole = load_model(folder)
    file = folder / "model.safetensors"
    weights = {name.removeprefix("model."): value for name, value in load_file(file).items()}
    save_file(weights, file)
    change_config(folder, architectures=["Qwen3Model"])
    short = load_model(folder)
    assert torch.equal(embeddings(short), embeddings(whole)) and short.head is not None
    change_weights(folder, drop="lm_head.weight")
    assert load_model(folder).head is None
    change_weights(folder, {"model.norm.weight": torch.ones(64)})
    assert "has no place in this model" in refusal(folder)  # there twice


def test_a_head_that_is_missing_among_whole_names_is_a_damage(folder: Path) -> None:
    change_weights(folder, drop="lm_head.weight")
    assert "lacks lm_head.weight, and tie_word_embeddings is false, or left out" in refusal(folder)


def test_weights_of_a_larger_model(folder: Path) -> None:
    change_config(folder, num_hidden_layers=2, layer_types=None)
    assert "has no place in this model" in refusal(folder)


def test_a_wrong_shape(folder: Path) -> None:
    change_config(folder, intermediate_size=95)
    assert "gate_proj.weight has shape [96, 64], but the configuration implies [95, 64]" in refusal(
        folder
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_that_the_config_does_not_mention(
    folder: Path, dtype: torch.dtype
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_weights(folder, {name: torch.ones(96, 64).to(dtype)})
    assert f"{name} is saved in" in refusal(folder)


@pytest.fixture
def tied(root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models.cached("llama", root), tmp_path / "tied"))


EMBEDDING = "model.embed_tokens.weight"


def test_a_tied_head_may_be_saved_too_or_alone(tied: Path) -> None:
    """Alone is how safetensors' ``save_model`` writes two names of one tensor."""
    table = load_file(tied / "model.safetensors")[EMBEDDING]
    change_weights(tied, {"lm_head.weight": table.clone()})
    model = load_model(tied)
    assert model.head is model.embed
    change_weights(tied, drop=EMBEDDING)
    assert torch.equal(embeddings(load_model(tied)), embeddings(model))


@pytest.mark.parametrize("tp", [TensorParallel(), TensorParallel(1, 2)])
def test_a_head_of_its_own_beside_a_tied_embedding_is_refused(
    tied: Path, tp: TensorParallel
) -> None:
    """transformers 5 takes the head, its older versions the embedding."""
    table = load_file(tied / "model.safetensors")[EMBEDDING]
    table[-1] += 1  # in the part of the last rank
    change_weights(tied, {"lm_head.weight": table})
    message = refusal(tied, tp=tp)
    assert "lm_head.weight is not the embedding, but tie_word_embeddings is true" in message
    change_config(tied, tie_word_embeddings=False)
    assert load_model(tied, tp=tp)


def second_of_two(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, WeightSlot], dict[str, torch.Tensor]]:
    """The filled slots of the second of two ranks, and the file's tensors."""
    slots: dict[str, WeightSlot] = {}
    fill = CheckpointWeights.fill

    def fill_and_note(weights: CheckpointWeights, part: Part) -> None:
        slots.update(part.weight_slots())
        fill(weights, part)

    monkeypatch.setattr(CheckpointWeights, "fill", fill_and_note)
    load_model(folder, dtype="float32", tp=TensorParallel(1, 2))
    return slots, load_file(folder / "model.safetensors")


def test_ranks_hold_slices(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, file = second_of_two(tiny_models.cached("qwen3", root), monkeypatch)
    up = file["model.layers.0.mlp.up_proj.weight"]
    down = file["model.layers.0.mlp.down_proj.weight"]
    key = file["model.layers.0.self_attn.k_proj.weight"]
    assert torch.equal(slots["layers.0.mlp.up.weight"].target, up[48:])
    assert torch.equal(slots["layers.0.mlp.down.weight"].target, down[:, 48:])
    assert torch.equal(slots["layers.0.attention.k.weight"].target, key[16:])
    assert torch.equal(slots["embed.weight"].target, file["model.embed_tokens.weight"][256:])


def test_ranks_hold_slices_of_every_expert_and_the_whole_router(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, file = second_of_two(tiny_models.cached("deepseek_v3", root), monkeypatch)
    for number in (0, 7, 11):
        theirs, ours = f"model.layers.1.mlp.experts.{number}", f"layers.1.mlp.experts.{number}"
        up, down = (file[f"{theirs}.{part}_proj.weight"] for part in ("up", "down"))
        assert torch.equal(slots[f"{ours}.up.weight"].target, up[12:])
        assert torch.equal(slots[f"{ours}.down.weight"].target, down[:, 12:])
    for theirs, ours in (("gate.weight", "weight"), ("gate.e_score_correction_bias", "bias")):
        whole = file[f"model.layers.2.mlp.{theirs}"]
        assert whole.any() and torch.equal(slots[f"layers.2.mlp.router.{ours}"].target, whole)
    kv_b = file["model.layers.0.self_attn.kv_b_proj.weight"]
    assert torch.equal(slots["layers.0.attention.kv_b.weight"].target, kv_b[4 * 28 :])


def test_an_expert_that_is_missing_is_named(root: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_models.cached("deepseek_v3", root), tmp_path / "model"))
    change_weights(folder, drop="model.layers.2.mlp.experts.10.up_proj.weight")
    assert "lacks model.layers.2.mlp.experts.10.up_proj.weight: " in refusal(folder)


def test_layers_after_the_last_are_skipped_in_the_family_that_has_them(
    root: Path, tmp_path: Path
) -> None:
    """Three layers, and one that would predict a second token."""
    more = {
        "model.layers.3.eh_proj.weight": torch.ones(64, 128),
        "model.layers.3.mlp.experts.3.up_proj.weight": torch.ones(24, 64),
    }
    for name in ("deepseek_v3", "deepseek_v2"):
        folder = Path(shutil.copytree(tiny_models.cached(name, root), tmp_path / name))
        change_weights(folder, more)
    load_model(tmp_path / "deepseek_v3")
    assert "layers.3" in refusal(tmp_path / "deepseek_v2")


def test_dummy_experts_need_the_config_alone(root: Path, tmp_path: Path) -> None:
    config = tiny_models.cached("deepseek_v3", root) / "config.json"
    shutil.copy(config, tmp_path / "config.json")
    load_model(tmp_path, load_format="dummy", tp=TensorParallel(1, 2))


def test_dtypes(root: Path) -> None:
    spec = read_spec(tiny_models.cached("qwen3", root))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    half = type(spec)(**{**vars(spec), "dtype": "float16"})
    assert resolve_dtype("auto", spec, cpu) == torch.float32
    assert resolve_dtype("auto", half, cpu) == torch.bfloat16
    assert resolve_dtype("float32", half, cpu) == torch.float32
    assert resolve_dtype("auto", half, gpu) == torch.float16
    assert resolve_dtype("float16", spec, cpu) == torch.float16
    with pytest.raises(ModelError, match="'int8' is not supported; use auto or"):
        resolve_dtype("int8", spec, cpu)


def test_dummy_weights_need_the_config_alone_and_are_seeded(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    def table(seed: int, **options: Any) -> torch.Tensor:
        model = load_model(folder, dtype="float32", load_format="dummy", seed=seed, **options)
        return embeddings(model)

    one = table(1)
    assert torch.equal(one, table(1))
    assert not torch.equal(one, table(2))
    assert torch.equal(one[256:], table(1, tp=TensorParallel(1, 2)))
    assert 0.9 < float(one.std()) < 1.1
    assert "load format 'onnx'; supported: auto, safetensors, gguf, dummy" in refusal(
        folder, load_format="onnx"
    )


def test_dummy_weights_are_made_in_pieces_on_the_device_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(rank: int, size: int) -> list[torch.Tensor]:
        targets: list[torch.Tensor] = []
        fill = RandomWeights.fill

        def fill_and_note(weights: RandomWeights, part: Part) -> None:
            fill(weights, part)
            targets.extend(slot.target for slot in part.weight_slots().values())

        with monkeypatch.context() as patch:
            patch.setattr(RandomWeights, "fill", fill_and_note)
            load_model(folder, load_format="dummy", tp=TensorParallel(rank, size))
        return targets

    for rank, size in ((0, 1), (1, 2)):
        at_once = weights(rank, size)
        with monkeypatch.context() as patch:
            patch.setattr("tandem.shared.weights.random._PIECE", 500)
            assert all(map(torch.equal, weights(rank, size), at_once))
    model = load_model(folder, load_format="dummy", device="meta")
    assert embeddings(model).device.type == "meta"


def test_safetensors_may_be_requested_by_name(folder: Path) -> None:
    explicit, result = (load_model(folder, load_format=name) for name in ("safetensors", "auto"))
    assert torch.equal(embeddings(explicit), embeddings(result))


def test_end_tokens_come_from_both_configs(folder: Path) -> None:
    assert read_spec(folder).eos_token_ids == (256,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 256]}))
    assert read_spec(folder).eos_token_ids == (256, 258)
