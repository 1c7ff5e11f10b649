"""Scores of pairs and labels of texts by the Python API, against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from tandem import Engine, EngineConfig
from tandem.shared.errors import ModelError, RequestError
from tandem.shared.models.config_files import read_config
from tandem.shared.models.registry import spec_of
from tandem.shared.models.spec import TokenScoreSpec
from tandem.shared.text.tokenizer import Tokenizer
from tandem.shared.text.tokenizer_files import read_tokenizer_files
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.rerankers import (
    LABELS,
    PAIR_TEMPLATE,
    PREFIX,
    add_labels,
    on_the_card,
    on_the_vl_card,
    write_logit_score,
)

pytestmark = pytest.mark.usefixtures("forked_ranks")

QUERY = "What is the capital of China?"
DOCUMENTS = ["The capital of China is Beijing.", "Gravity attracts bodies.", "<|im_end|>", ""]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Qwen3-Reranker was first published: nothing but its name tells it."""
    folder = tmp_path_factory.mktemp("models") / "Qwen3-Reranker-0.6B"
    tiny_models.build("qwen3", folder)
    add_labels(folder)
    return folder


def engine_of(folder: Path, **options: Any) -> Engine:
    sizes: dict[str, Any] = {"threads": 1, "block_size": 8, "num_blocks": 160, "max_model_len": 640}
    return Engine(EngineConfig(model=str(folder), dtype="float32", **sizes | options))


@pytest.fixture(scope="module", params=[1, 2])
def engine(request: pytest.FixtureRequest, reranker: Path) -> Iterator[Engine]:
    """On one rank, and on two, of which each has half of the labels' logits."""
    with engine_of(reranker, tensor_parallel_size=request.param) as engine:
        yield engine


def card(folder: Path, document: str, *instruction: str) -> list[int]:
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return on_the_card(raw, QUERY, document, *instruction)


def expected_score(folder: Path, tokens: list[int]) -> float:
    """The probability of yes against no, as the card computes it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1]
    both = torch.stack([logits[raw.token_to_id(label)] for label in LABELS])
    return float(both.log_softmax(0)[1].exp())


def test_a_reranker_scores_by_its_card(engine: Engine, reranker: Path) -> None:
    """All pairs in one call, twice: then their beginning is cached."""
    expected = [expected_score(reranker, card(reranker, text)) for text in DOCUMENTS[:2]]
    for _ in range(2):
        scores = engine.score(QUERY, DOCUMENTS)
        assert [one.value for one in scores[:2]] == pytest.approx(expected, abs=1e-5)
        assert scores[0].prompt_tokens == len(card(reranker, DOCUMENTS[0]))
    assert scores[0].cached_tokens > 0
    [result] = engine.score([QUERY], DOCUMENTS[:1], instruction="Find it")
    other = expected_score(reranker, card(reranker, DOCUMENTS[0], "Find it"))
    assert result.value == pytest.approx(other, abs=1e-5)
    [logit] = engine.score(QUERY, DOCUMENTS[0], use_activation=False)
    assert torch.sigmoid(torch.tensor(logit.value)).item() == pytest.approx(expected[0], abs=1e-5)


def test_control_tokens_in_a_document_are_text(engine: Engine, reranker: Path) -> None:
    tokens = engine.tokenizer.encode_pair(QUERY, DOCUMENTS[2], max_tokens=1000)[0]
    assert tokens.count(tiny_models.IM_END) == 2
    assert engine.tokenizer.decode(tokens).endswith(
        f"<Document>: {DOCUMENTS[2]}\nassistant\n<think>\n\n</think>\n\n"
    )
    [score] = engine.score(QUERY, [DOCUMENTS[2]])
    assert score.value == pytest.approx(expected_score(reranker, tokens), abs=1e-5)


def test_texts_are_cut_and_the_template_stays(engine: Engine, reranker: Path) -> None:
    long = "word " * 300
    whole = len(card(reranker, ""))
    with pytest.raises(RequestError, match="tokens"):
        engine.score(QUERY, long)
    [score] = engine.score(QUERY, long, truncate_prompt_tokens=whole + 40)
    assert score.prompt_tokens == whole + 40
    expected = expected_score(reranker, card(reranker, long[:40]))
    assert score.value == pytest.approx(expected, abs=1e-5)
    with pytest.raises(RequestError, match="the model's template alone has"):
        engine.score(QUERY, long, truncate_prompt_tokens=10)


def test_a_reranker_generates_as_well_and_its_tokens_classify(engine: Engine) -> None:
    assert engine.generate_sync(["yes or no?"])[0][0].tokens
    [classification] = engine.classify([PREFIX])
    assert (classification.label, len(classification.probs)) == ("LABEL_0", 1)


def test_a_folder_of_sentence_transformers_says_how_it_scores(
    reranker: Path, tmp_path: Path
) -> None:
    """By any name: ``modules.json`` has a ``LogitScore``, and the chat template both roles."""
    folder = Path(shutil.copytree(reranker, tmp_path / "model"))
    write_logit_score(folder, false=False, activation="torch.nn.modules.linear.Identity")
    with engine_of(folder) as engine:
        scores = engine.score(QUERY, DOCUMENTS[:2])
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for text, one in zip(DOCUMENTS, scores, strict=False):
        tokens = raw.encode(f"find it|{QUERY}|{text}=").ids
        with torch.inference_mode():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        assert one.value == pytest.approx(float(logits[raw.token_to_id("yes")]), abs=1e-4)


@pytest.mark.parametrize("false", [True, False])
def test_scores_are_those_of_the_library(false: bool, reranker: Path, tmp_path: Path) -> None:
    library: Any = pytest.importorskip("sentence_transformers")
    folder = Path(shutil.copytree(reranker, tmp_path / "model"))
    write_logit_score(folder, false=false, activation=None)
    model = library.CrossEncoder(str(folder), device="cpu")
    expected = model.predict([(QUERY, text) for text in DOCUMENTS[:2]], batch_size=1)
    with engine_of(folder) as engine:
        scores = engine.score(QUERY, DOCUMENTS[:2])
    assert [one.value for one in scores] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.fixture(scope="module")
def vl_reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "Qwen3-VL-Reranker-2B"
    tiny_models.build("qwen3_vl", folder)
    add_labels(folder)
    return folder


def vl_score(folder: Path, document: str, *instruction: str) -> float:
    """The probability of yes against no, as Qwen3-VL-Reranker's own script computes it."""
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model: Any = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder)
    no, yes = (model.lm_head.weight[raw.token_to_id(label)] for label in LABELS)
    tokens = on_the_vl_card(raw, QUERY, document, *instruction)
    with torch.inference_mode():
        last = model.eval().model(torch.tensor([tokens])).last_hidden_state[0, -1]
        return float((last @ (yes - no)).sigmoid())


def test_a_reranker_of_images_scores_texts_by_its_card(vl_reranker: Path) -> None:
    with engine_of(vl_reranker) as engine:
        scores = engine.score(QUERY, DOCUMENTS[:2])
        [result] = engine.score([QUERY], DOCUMENTS[:1], instruction="Find it")
        assert engine.generate_sync(["yes or no?"])[0][0].tokens
    expected = [vl_score(vl_reranker, text) for text in DOCUMENTS[:2]]
    assert [one.value for one in scores] == pytest.approx(expected, abs=1e-5)
    assert result.value == pytest.approx(vl_score(vl_reranker, DOCUMENTS[0], "Find it"), abs=1e-5)


def test_every_file_of_a_reranker_of_images_says_the_same(
    vl_reranker: Path, tmp_path: Path
) -> None:
    """Those of sentence-transformers, also with the wrong folder of the published one with 8
    billion parameters, and vLLM's keys, with which it is a classifier by its architecture."""
    spec = spec_of(read_config(vl_reranker))
    assert isinstance(spec.classifier, TokenScoreSpec)
    unnamed = Path(shutil.copytree(vl_reranker, tmp_path / "model"))
    assert spec_of(read_config(unnamed)).classifier is None
    keys = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    for name in ("Qwen3VLForConditionalGeneration", "Qwen3VLForSequenceClassification"):
        overrides = keys | {"architectures": [name]}
        assert spec_of(read_config(unnamed, overrides)) == spec
    with pytest.raises(ModelError, match="no tokens are named whose logits are the"):
        spec_of(read_config(unnamed, {"architectures": ["Qwen3VLForSequenceClassification"]}))
    write_logit_score(unnamed, false=True, activation=None)
    assert spec_of(read_config(unnamed)) == spec
    (unnamed / "1_LogitScore").rename(unnamed / "1_CausalScoreHead")
    with pytest.raises(ModelError, match=r"1_LogitScore/config\.json is missing"):
        read_config(unnamed)
    assert spec_of(read_config(unnamed.rename(tmp_path / "Qwen3-VL-Reranker-8B"))) == spec


def test_one_of_several_templates_is_that_of_pairs(vl_reranker: Path, tmp_path: Path) -> None:
    """As the published Qwen3-VL-Reranker has it, whatever its name; a folder's template counts,
    and not that of the card."""
    folder = Path(shutil.copytree(vl_reranker, tmp_path / "Qwen3-VL-Reranker-2B"))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "other.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates" / "reranker.jinja").write_text(PAIR_TEMPLATE)
    tokenizer = Tokenizer.load(read_tokenizer_files(folder))
    tokens, _ = tokenizer.encode_pair("one", "two", max_tokens=100, instruction="Find it")
    assert tokenizer.decode(tokens) == "Find it|one|two="


def config_of(folder: Path, **keys: Any) -> Any:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | keys))
    return read_config(folder)


def test_keys_of_vllm_say_how_a_folder_scores(reranker: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(reranker, tmp_path / "model"))
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    no, yes = (raw.get_vocab()[label] for label in LABELS)
    assert spec_of(config_of(folder)).classifier is None
    keys: dict[str, Any] = {"architectures": ["Qwen3ForSequenceClassification"]}
    keys |= {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    spec = spec_of(config_of(folder, **keys))
    assert spec.classifier == TokenScoreSpec(true=yes, false=no, activation="sigmoid")
    assert spec.has_head
    keys |= {"classifier_from_token": ["yes"], "method": "no_post_processing"}
    spec = spec_of(config_of(folder, **keys | {"is_original_qwen3_reranker": None}))
    assert spec.classifier == TokenScoreSpec(true=yes, false=None, activation="sigmoid")
    with pytest.raises(ModelError, match="supported: 1 with no_post_processing"):
        config_of(folder, classifier_from_token=["no", "yes"])
    with pytest.raises(ModelError, match="method is 'mean'; supported: from_2_way_softmax or"):
        config_of(folder, method="mean")
    with pytest.raises(ModelError, match="the score token 'maybe' is not a token"):
        config_of(folder, classifier_from_token=["maybe"], method="no_post_processing")


def test_overrides_make_a_reranker_of_any_name(reranker: Path, tmp_path: Path) -> None:
    """The command of vLLM's documentation, on two ranks; the template is the user's."""
    folder = Path(shutil.copytree(reranker, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    keys: dict[str, Any] = {"architectures": ["Qwen3ForSequenceClassification"]}
    keys |= {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    with engine_of(folder, hf_overrides=json.dumps(keys), tensor_parallel_size=2) as engine:
        scores = engine.score(QUERY, DOCUMENTS[:2])
        tokens = [engine.tokenizer.encode_pair(QUERY, t, max_tokens=1000)[0] for t in DOCUMENTS[:2]]
    expected = [expected_score(folder, each) for each in tokens]
    assert [one.value for one in scores] == pytest.approx(expected, abs=1e-5)


def test_a_gemma_scores_by_the_logit_of_one_token(tmp_path: Path) -> None:
    """As bge-reranker-v2-gemma, whose pairs are texts A and B before a question: the raw logit
    of its answer, or the sigmoid of that."""
    folder = tmp_path / "model"
    tiny_models.build("gemma", folder)
    add_labels(folder)
    question = "Given a query A and a passage B, determine whether the passage answers it: "
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages if message.role == 'query' %}A: {{ message.content }}\n"
        "{% endfor %}{% for message in messages if message.role == 'document' %}"
        "B: {{ message.content }}\n{% endfor %}" + question
    )
    keys = {"classifier_from_token": ["yes"], "method": "no_post_processing"}
    with engine_of(folder, hf_overrides=json.dumps(keys)) as engine:
        scores = engine.score(QUERY, DOCUMENTS[:2])
        logits = engine.score(QUERY, DOCUMENTS[:2], use_activation=False)
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for text, one, logit in zip(DOCUMENTS[:2], scores, logits, strict=True):
        tokens = raw.encode(f"A: {QUERY}\nB: {text}\n{question}").ids
        with torch.inference_mode():
            expected = model(torch.tensor([tokens])).logits[0, -1, raw.token_to_id("yes")]
        assert logit.value == pytest.approx(float(expected), abs=1e-4)
        assert one.value == pytest.approx(float(expected.sigmoid()), abs=1e-5)


def test_a_converted_reranker_scores_as_the_original(reranker: Path, tmp_path: Path) -> None:
    """Its only weight is the difference of the labels' rows."""
    folder = tmp_path / "Qwen3-Reranker-0.6B-seq-cls"
    whole = transformers.AutoModelForCausalLM.from_pretrained(reranker, dtype=torch.float32)
    raw = tokenizers.Tokenizer.from_file(str(reranker / "tokenizer.json"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        reranker, num_labels=1, dtype=torch.float32
    )
    no, yes = (whole.lm_head.weight[raw.token_to_id(label)] for label in LABELS)
    model.score.weight.data[0] = yes - no
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(reranker / name, folder / name)
    expected = [expected_score(reranker, card(reranker, text)) for text in DOCUMENTS[:2]]
    with engine_of(folder) as engine:
        scores = engine.score(QUERY, DOCUMENTS[:2])
        with pytest.raises(RequestError, match="has a classifier, which only scores or labels"):
            engine.generate_sync(["hi"])
        with pytest.raises(RequestError, match="use /v1/rerank"):
            engine.embed(["hi"])
    assert [one.value for one in scores] == pytest.approx(expected, abs=1e-5)


def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    """BERT's tokenizer numbers the texts."""
    folder = tmp_path / "model"
    tiny_models.build("bert_scorer", folder)
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[("<|im_start|>", 257), ("<|im_end|>", 258)],
    )
    raw.save(str(folder / "tokenizer.json"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with engine_of(folder, max_model_len=128) as engine:
        scores = engine.score("one", ["two", "three"])
        assert len(engine.classify(["one"])[0].probs) == 1
        with pytest.raises(RequestError, match="reads pairs without one"):
            engine.score("one", "two", instruction="Find it")
        with pytest.raises(RequestError, match="2 first texts and 1 second ones"):
            engine.score(["one", "two"], "three")
    for text, one in zip(("two", "three"), scores, strict=True):
        pair = raw.encode("one", text)
        with torch.inference_mode():
            expected = model(
                torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])
            ).logits
        assert one.value == pytest.approx(float(expected.sigmoid()), abs=1e-5)


def test_texts_are_labelled(tmp_path: Path) -> None:
    folder, names = tmp_path / "model", {0: "no", 1: "maybe", 2: "yes"}
    labels: dict[str, Any] = {"id2label": names, "num_labels": 3}
    tiny_models.build("modernbert_scorer", folder, classifier_pooling="mean", **labels)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    texts = ["one", "two words"]
    with engine_of(folder, max_model_len=128) as engine:
        classifications = engine.classify(texts)
        with pytest.raises(RequestError, match="a classifier of 3 labels, which scores no pairs"):
            engine.score("one", "two")
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, one in zip(texts, classifications, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([raw.encode(text).ids])).logits[0]
        assert one.probs == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
        assert one.label == names[int(logits.argmax())]


def test_a_model_of_embeddings_scores_by_its_vectors(tmp_path: Path) -> None:
    with engine_of(tiny_models.cached("bert", tmp_path), max_model_len=128) as engine:
        scores = engine.score("one", ["one", "two words"])
        one, other = engine.embed(["one", "two words"])
        with pytest.raises(RequestError, match="are for models with a classifier"):
            engine.score("one", "two", instruction="Find it")
    assert scores[0].value == pytest.approx(1)
    cosine = sum(a * b for a, b in zip(one.values, other.values, strict=True))
    assert scores[1].value == pytest.approx(cosine)
