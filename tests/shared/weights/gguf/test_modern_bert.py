"""GGUF files of ModernBERT, against transformers with the checkpoints that they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from tandem import Engine, EngineConfig
from tandem.shared.errors import ModelError
from tandem.shared.models.spec import AttentionSpec, ClassifierSpec, DecoderSpec
from tandem.shared.weights.source import read_spec
from tandem.tests.support.checkpoints import gguf_files, tiny_models
from tandem.tests.support.checkpoints.rerankers import add_labels

pytestmark = pytest.mark.usefixtures("forked_ranks")

# More tokens than a window has, one of several letters, and a letter of two characters.
TEXT = "Most layers see no more than tokens near by, and every third one sees e\u0301verything."
CLS, SEP, PAD = 257, 258, 256


def checkpoint(folder: Path, name: str = "modernbert", **changes: Any) -> Path:
    """A folder with the keys of a published config, and a tokenizer with a token before and one
    after each text."""
    changes |= {"pad_token_id": PAD, "bos_token_id": CLS, "cls_token_id": CLS}
    changes |= {"eos_token_id": SEP, "sep_token_id": SEP}
    tiny_models.build(name, folder, **changes)
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    tables = config.pop("rope_parameters")
    config |= {
        "global_attn_every_n_layers": 3,
        "global_rope_theta": tables["full_attention"]["rope_theta"],
        "local_rope_theta": tables["sliding_attention"]["rope_theta"],
        "layer_norm_eps": config["norm_eps"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    add_labels(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", CLS), ("<|im_end|>", SEP)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def converted(
    folder: Path,
    file: Path,
    *,
    kind: str = "F32",
    pooling: int | None = None,
    more: dict[str, torch.Tensor] | None = None,
    **changes: Any,
) -> Path:
    """A file as llama.cpp's converter writes it, with ``more`` tensors and some of its metadata
    replaced."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf_files.encoder_writer(file, "modern-bert", config)
    writer.add_rope_freq_base(config["global_rope_theta"])
    writer.add_rope_freq_base_swa(config["local_rope_theta"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_uint32(
        "modern-bert.classifier.pooling_type", {"mean": 1, "cls": 2}[config["classifier_pooling"]]
    )
    if "id2label" in config:
        writer.add_classifier_output_labels([*config["id2label"].values()])
    if (window := changes.get("window", config["local_attention"])) is not None:
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern(changes.get("pattern", 3))
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_string("modern-bert.hidden_activation", config["hidden_activation"])
    gguf_files.add_vocabulary(writer, folder, config["vocab_size"], "modern-bert")
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_bos_token_id(CLS)
    writer.add_eos_token_id(SEP)
    writer.add_sep_token_id(SEP)
    writer.add_pad_token_id(PAD)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MODERN_BERT, config["num_hidden_layers"])
    for name, value in (load_file(folder / "model.safetensors") | (more or {})).items():
        name = name.removeprefix("model.").replace("classifier.", "classifier.out_proj.")
        theirs = names.get_name(name, (".weight", ".bias"))
        if theirs is None:  # in older versions of the library
            assert name == "head.norm.weight"
            theirs = "cls.norm.weight"
        gguf_files.add_tensor(writer, theirs, value.float().numpy(), kind)
    gguf_files.finish(writer)
    return file


def engine_of(file: Path) -> Engine:
    return Engine(
        EngineConfig(
            model=str(file),
            dtype="float32",
            threads=1,
            block_size=8,
            num_blocks=64,
            max_model_len=128,
        )
    )


def hidden_of(folder: Path, kind: str = "F32") -> torch.Tensor:
    """The states of the text's tokens, with transformers' tokenizer, and its model with weights as
    a file of this kind has them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    type_of = gguf.GGMLQuantizationType[kind]
    with torch.inference_mode():
        for weight in (each for each in model.parameters() if each.ndim > 1):
            blocks = gguf.quants.quantize(weight.numpy(), type_of)
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(blocks, type_of)))
        hidden: torch.Tensor = model(tokenizer(TEXT, return_tensors="pt").input_ids)[0][0]
    return hidden


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("models") / "model")


@pytest.mark.parametrize(("kind", "pooling"), [("F32", None), ("F16", 2), ("Q8_0", 1)])
def test_a_file_embeds_as_its_folder(
    embedder: Path, tmp_path: Path, kind: str, pooling: int | None
) -> None:
    file = converted(embedder, tmp_path / "model.gguf", kind=kind, pooling=pooling)
    with engine_of(file) as engine:
        [tokens] = engine.encode([TEXT])
    hidden = hidden_of(embedder, kind)
    expected = hidden.mean(0) if pooling == 1 else hidden[0]
    assert tokens.values == pytest.approx(expected.tolist(), abs=1e-4)


def windows(spec: DecoderSpec) -> list[int | None]:
    attentions = [layer.attention for layer in spec.layers]
    return [each.sliding_window for each in attentions if isinstance(each, AttentionSpec)]


def test_a_file_has_the_spec_of_its_folder(tmp_path: Path) -> None:
    """Of every activation, and of models whose layers all see the whole text."""
    silu = checkpoint(tmp_path / "silu", hidden_activation="silu", local_attention=20)
    assert read_spec(converted(silu, tmp_path / "silu.gguf")) == read_spec(silu)
    entries = [True, False, True, True, False]
    spec = read_spec(converted(silu, tmp_path / "listed.gguf", pattern=entries))
    assert windows(spec) == [11 if windowed else None for windowed in entries]
    spec = read_spec(converted(silu, tmp_path / "full.gguf", window=None))
    assert windows(spec) == [None] * 5
    assert len({layer.rope for layer in spec.layers}) == 1


@pytest.mark.parametrize(("labels", "pooling"), [(1, "mean"), (3, "cls")])
def test_a_classifier_scores_and_labels_as_its_folder(
    tmp_path: Path, labels: int, pooling: str
) -> None:
    changes = {"num_labels": labels, "classifier_pooling": pooling}
    folder = checkpoint(tmp_path / "model", "modernbert_scorer", **changes)
    file = converted(folder, tmp_path / "model.gguf", pooling=4)
    assert read_spec(file) == read_spec(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with engine_of(file) as engine:
        if labels == 1:
            [score] = engine.score(TEXT, "a document")
            result, values = [score.value], [TEXT, "a document"]
        else:
            [labelled] = engine.classify([TEXT])
            result, values = labelled.probs, [TEXT]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        logits = model(tokenizer(*values, return_tensors="pt").input_ids).logits[0]
    expected = logits.sigmoid() if labels == 1 else logits.softmax(0)
    assert result == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_file_without_a_pooling_of_its_classifier_takes_the_mean(tmp_path: Path) -> None:
    """As llama.cpp does."""
    folder = checkpoint(tmp_path / "model", "modernbert_scorer")
    data = converted(folder, tmp_path / "model.gguf").read_bytes()
    key = b"modern-bert.classifier.pooling_type"
    older = tmp_path / "older.gguf"
    older.write_bytes(data.replace(key, b"general.not_of_the_classifier_type!"[: len(key)]))
    classifier = read_spec(older).classifier
    assert isinstance(classifier, ClassifierSpec) and classifier.pooling == "mean"
    other = tmp_path / "other.gguf"
    other.write_bytes(data.replace(key + b"\4\0\0\0\2", key + b"\4\0\0\0\3"))
    with pytest.raises(ModelError, match="classifier_pooling is 3; supported"):
        read_spec(other)


def test_a_head_that_fills_gaps_is_left_out(embedder: Path, tmp_path: Path) -> None:
    """Files of such a model have its layer under the names of a classifier's."""
    head = {"head.dense.weight": torch.eye(64), "head.norm.weight": torch.ones(64)}
    with engine_of(converted(embedder, tmp_path / "model.gguf", more=head)) as engine:
        [tokens] = engine.encode([TEXT])
    assert tokens.values == pytest.approx(hidden_of(embedder)[0].tolist(), abs=1e-4)
