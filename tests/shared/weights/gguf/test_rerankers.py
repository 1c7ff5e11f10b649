"""GGUF files of rerankers, against transformers with the checkpoints that they were made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from tandem import Engine, EngineConfig
from tandem.shared.errors import ModelError, RequestError
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.weights.source import open_source, read_spec
from tandem.tests.support.checkpoints import gguf_files, tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf
from tandem.tests.support.checkpoints.rerankers import (
    LABELS,
    PREFIX,
    SUFFIX,
    add_labels,
    on_the_card,
    on_the_vl_card,
)

pytestmark = pytest.mark.usefixtures("forked_ranks")

QUERY = "What is the capital of China?"
DOCUMENTS = ["The capital of China is Beijing.", "Gravity attracts bodies."]
# As llama.cpp's converter writes it.
PLACES = (
    f"{PREFIX}<Instruct>: Given a web search query, retrieve relevant passages that answer the "
    f"query\n<Query>: {{query}}\n<Document>: {{document}}{SUFFIX}"
)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "plain"
    tiny_models.build("qwen3_tied", folder)
    add_labels(folder)
    return folder


def engine_of(file: Path, **options: Any) -> Engine:
    sizes: dict[str, Any] = {"threads": 1, "block_size": 8, "num_blocks": 160, "max_model_len": 640}
    return Engine(EngineConfig(model=str(file), dtype="float32", **sizes | options))


def expected(
    folder: Path, document: str, *instruction: str, card: Callable[..., list[int]] = on_the_card
) -> float:
    """The probability of yes against no, as the card computes it."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = card(raw, QUERY, document, *instruction)
    with torch.inference_mode():
        logits = model.eval()(torch.tensor([tokens])).logits[0, -1]
    no, yes = (logits[raw.token_to_id(label)] for label in LABELS)
    return float((yes - no).sigmoid())


def ranking(folder: Path, file: Path, kind: str = "F32", template: str = PLACES) -> Path:
    """A file of Qwen3-Reranker as llama.cpp's converter writes it."""
    (weights,) = folder.glob("*.safetensors")
    table = load_file(weights)["model.embed_tokens.weight"].float()
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    no, yes = (table[raw.token_to_id(label)] for label in LABELS)
    type_of = gguf.GGMLQuantizationType[kind]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(gguf.PoolingType(4))
        writer.add_classifier_output_labels(["yes", "no"])
        writer.add_chat_template([{"name": "rerank", "template": template}])
        head = gguf.quants.quantize(torch.stack([yes, no]).numpy(), type_of)
        writer.add_tensor("cls.output.weight", head, raw_dtype=type_of)

    return write_gguf(folder, file, kind, change=add)


@pytest.mark.parametrize(("kind", "tolerance"), [("F32", 1e-5), ("F16", 1e-3), ("Q8_0", 1e-2)])
def test_a_file_for_ranking_scores_by_the_card(
    reranker: Path, tmp_path: Path, kind: str, tolerance: float
) -> None:
    """By what it holds, whatever its name is."""
    with engine_of(ranking(reranker, tmp_path / "model.gguf", kind)) as engine:
        result = engine.score(QUERY, DOCUMENTS)
        [message] = engine.score([QUERY], DOCUMENTS[:1], instruction="Find it")
        [labelled] = engine.classify([PREFIX])
        with pytest.raises(RequestError, match="has a classifier, which only scores or labels"):
            engine.generate_sync(["hi"])
    reference = [expected(reranker, text) for text in DOCUMENTS]
    assert [one.value for one in result] == pytest.approx(reference, abs=tolerance)
    other = expected(reranker, DOCUMENTS[0], "Find it")
    assert message.value == pytest.approx(other, abs=tolerance)
    assert (labelled.label, len(labelled.probs)) == ("LABEL_0", 1)


def test_ranks_have_the_whole_head(reranker: Path, tmp_path: Path) -> None:
    file = ranking(reranker, tmp_path / "model.gguf")
    with engine_of(file, tensor_parallel_size=2) as engine:
        [result] = engine.score(QUERY, DOCUMENTS[0])
    assert result.value == pytest.approx(expected(reranker, DOCUMENTS[0]), abs=1e-5)


def test_a_file_of_a_reranker_of_images_reads_texts_by_its_card(
    reranker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's converter gives it the template of a reranker of texts."""
    monkeypatch.setitem(gguf_files._ARCHITECTURES, "qwen3", gguf.MODEL_ARCH.QWEN3VL)
    with engine_of(ranking(reranker, tmp_path / "model.gguf")) as engine:
        [result] = engine.score(QUERY, DOCUMENTS[0])
        [message] = engine.score([QUERY], DOCUMENTS[:1], instruction="Find it")
    reference = expected(reranker, DOCUMENTS[0], card=on_the_vl_card)
    assert result.value == pytest.approx(reference, abs=1e-5)
    other = expected(reranker, DOCUMENTS[0], "Find it", card=on_the_vl_card)
    assert message.value == pytest.approx(other, abs=1e-5)
    whole = write_gguf(reranker, tmp_path / "Qwen3-VL-Reranker-2B-Q8_0.gguf")
    found_by_name, found_by_kind = (
        Tokenizer.load(open_source(file).tokenizer_files()).encode_pair("a", "b", max_tokens=500)
        for file in (whole, tmp_path / "model.gguf")
    )
    assert found_by_name == found_by_kind


@pytest.mark.parametrize("by_name", ["file", "metadata"])
def test_a_whole_file_is_recognised_by_its_name(
    reranker: Path, tmp_path: Path, by_name: str
) -> None:
    """One from before there were files for ranking, which has the head that generates."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_pooling_type(gguf.PoolingType(4))
        if by_name == "metadata":
            writer.add_name("Qwen3 Reranker 0.6B")

    name = "Qwen3-Reranker-0.6B.Q8_0.gguf" if by_name == "file" else "model.gguf"
    with engine_of(write_gguf(reranker, tmp_path / name, change=add)) as engine:
        [result] = engine.score(QUERY, DOCUMENTS[0])
        assert engine.generate_sync(["yes or no?"])[0][0].tokens
    assert result.value == pytest.approx(expected(reranker, DOCUMENTS[0]), abs=1e-5)


def test_a_file_has_its_own_template(reranker: Path, tmp_path: Path) -> None:
    """Of which nothing is a language but both places."""
    text = '{{ 7 }}{% "a\\ {query}{document} {{query}}\n'
    file = ranking(reranker, tmp_path / "model.gguf", template=text)
    with engine_of(file) as engine:
        tokens, _ = engine.tokenizer.encode_pair("one", "two", max_tokens=100)
        assert engine.tokenizer.decode(tokens) == '{{ 7 }}{% "a\\ onetwo {{query}}\n'
    other = ranking(reranker, tmp_path / "other.gguf", template="{query} alone")
    with pytest.raises(ModelError, match=r"has no placeholders \{query\} and \{document\}"):
        open_source(other).tokenizer_files()


def test_a_head_of_another_size_than_its_labels_is_refused(reranker: Path, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_classifier_output_labels(["a", "b", "c"])
        writer.add_tensor("cls.output.weight", torch.zeros(2, 64).numpy())

    file = write_gguf(reranker, tmp_path / "model.gguf", change=add)
    with pytest.raises(ModelError, match=r"3 labels, and cls\.output\.weight 2 rows"):
        read_spec(file)


def test_overrides_name_the_labels_of_a_file(reranker: Path, tmp_path: Path) -> None:
    keys = {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
    file = write_gguf(reranker, tmp_path / "model.gguf")
    assert read_spec(file).classifier is None
    reference = write_gguf(reranker, tmp_path / "Qwen3-Reranker.gguf")
    assert read_spec(file, overrides=keys).classifier == read_spec(reference).classifier


def encoder(
    folder: Path, file: Path, *, labels: list[str] | None = None, kind: str = "F32"
) -> Path:
    """A file of BERT or XLM-R as llama.cpp's converter writes it, whose tokenizer is RoBERTa's."""
    config = json.loads((folder / "config.json").read_text())
    (weights,) = folder.glob("*.safetensors")
    writer = gguf_files.encoder_writer(file, "bert", config)
    writer.add_rope_freq_base(10000.0)  # without effect
    writer.add_pooling_type(gguf.PoolingType(2 if labels is None else 4))
    if labels is not None:
        writer.add_classifier_output_labels(labels)
    gguf_files.add_tokenizer(writer, folder, config | {"eos_token_id": 258})
    writer.add_bos_token_id(257)
    writer.add_token_type_count(config["type_vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config["num_hidden_layers"])
    for name, value in load_file(weights).items():
        name = name.removeprefix("bert.").removeprefix("roberta.")
        if name.startswith("pooler."):
            continue
        if name == "embeddings.position_embeddings.weight" and config["model_type"] != "bert":
            value = value[2:]
        if config["model_type"] == "bert":
            name = name.replace("classifier.", "classifier.out_proj.")
        theirs = names.get_name(name, (".weight", ".bias"))
        assert theirs is not None, name
        gguf_files.add_tensor(writer, theirs, value.float().numpy(), kind)
    gguf_files.finish(writer)
    return file


@pytest.mark.parametrize(("kind", "tolerance"), [("F32", 1e-5), ("F16", 1e-3), ("Q8_0", 1e-2)])
@pytest.mark.parametrize("labels", [["LABEL_0"], ["no", "maybe", "yes"]])
def test_a_cross_encoder_scores_as_its_folder(
    tmp_path: Path, labels: list[str], kind: str, tolerance: float
) -> None:
    folder = tmp_path / "model"
    tiny_models.build("xlm_roberta_scorer", folder, num_labels=len(labels))
    file = encoder(folder, tmp_path / "model.gguf", labels=labels, kind=kind)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with engine_of(file, max_model_len=64) as engine:
        if len(labels) == 1:
            [score] = engine.score("one", "two")
            result = [score.value]
            tokens = engine.tokenizer.encode_pair("one", "two", max_tokens=100)[0]
        else:
            [labelled] = engine.classify(["one"])
            result, tokens = labelled.probs, engine.tokenizer.encode("one")
            assert labelled.label == labels[result.index(max(result))]
        with pytest.raises(RequestError, match="only scores or labels texts; use /"):
            engine.embed(["one"])
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    reference = logits.sigmoid() if len(labels) == 1 else logits.softmax(0)
    assert result == pytest.approx(reference.tolist(), abs=tolerance)


@pytest.mark.parametrize("name", ["bert", "xlm_roberta"])
def test_an_encoder_embeds_as_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    tiny_models.build(name, folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with engine_of(encoder(folder, tmp_path / "model.gguf"), max_model_len=64) as engine:
        [ids] = engine.encode(["one two"])
        tokens = engine.tokenizer.encode("one two")
    with torch.inference_mode():
        reference = model(torch.tensor([tokens])).last_hidden_state[0, 0]
    assert ids.values == pytest.approx(reference.tolist(), abs=1e-4)


def test_a_classifier_of_bert_lacks_a_layer_and_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_models.build("bert_scorer", folder)
    file = encoder(folder, tmp_path / "model.gguf", labels=["LABEL_0"])
    with pytest.raises(ModelError, match=r"lacks cls\.weight"):
        read_spec(file)


def vocabulary_only(file: Path, model: str, tokens: list[str], **ids: int) -> Any:
    """The tokenizer of an encoder's file with these tokens."""
    writer = gguf.GGUFWriter(file, "bert")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token[0] in "<[" else 1 for token in tokens])
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    for name, number in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    if model == "t5":
        writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return Tokenizer.load(open_source(file).tokenizer_files())


def test_pairs_are_put_together_as_in_training(tmp_path: Path) -> None:
    """One token is between the texts of BERT, which are two segments, and two between XLM-R's."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581one", "\u2581two"]
    ids = {"unknown": 1, "cls": 2, "seperator": 3}
    bert = vocabulary_only(tmp_path / "bert.gguf", "bert", pieces, **ids)
    assert bert.encode_pair("one", "two", max_tokens=9) == ([2, 4, 3, 5, 3], 3)
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "\u2581one", "\u2581two"]
    ids = {"bos": 0, "padding": 1, "eos": 2, "unknown": 3}
    xlm = vocabulary_only(tmp_path / "xlm.gguf", "t5", pieces, **ids)
    assert xlm.encode_pair("one", "two", max_tokens=9) == ([0, 4, 2, 2, 5, 2], 0)
    assert xlm.encode("one") == [0, 4, 2]
