# mypy: ignore-errors
"""lm-eval over HTTP and over transformers with the same weights: the same numbers."""

from __future__ import annotations

import json
import os

import pytest

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

import lm_eval

URL, KEY, MODEL = (os.environ[f"TARGET_{name}"] for name in ("URL", "KEY", "MODEL"))
FOLDER = os.environ["REAL_MODEL"]
os.environ["OPENAI_API_KEY"] = KEY
FACTS = (
    ("The capital of France is", "Paris", "London", "Rome"),
    ("The capital of Japan is", "Tokyo", "Peking", "Seoul"),
    ("Water freezes at a temperature of", "0 degrees Celsius", "50 degrees Celsius", "1 metre"),
    ("A week has", "seven days", "nine days", "thirty days"),
    ("The opposite of hot is", "cold", "warm", "tall"),
    ("A spider has", "eight legs", "two legs", "four legs"),
    ("The sun rises in the", "east", "west", "north"),
    ("Two plus three is", "five", "six", "nine"),
    ("A young dog is called a", "puppy", "kitten", "calf"),
    ("The largest planet of the solar system is", "Jupiter", "Mars", "Venus"),
    ("The author of Hamlet is", "William Shakespeare", "Charles Dickens", "Mark Twain"),
    ("Plants need water and", "sunlight", "plastic", "salt"),
)
PASSAGES = (
    "The river was high after the rain, and the old bridge could not be crossed for two days.",
    "A compiler reads the text of a program and writes instructions that a machine can execute.",
    "Bread is made of flour, water, salt and yeast: the dough rests until it has doubled in size.",
)
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
PERPLEXITY = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}
WRITING = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{' ' + choices[0]}}",
    "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 16, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}
ONLINE = {"model": MODEL, "max_length": 2048, "timeout": 120}
TEXTS = {"base_url": f"{URL}/v1/completions", **ONLINE}
# Kinds of requests: token ids, several at once; text; the server's own tokenizer.
WAYS = {
    "ids": {"tokenizer": FOLDER, "tokenizer_backend": "huggingface", "batch_size": 4},
    "text": {"tokenizer": FOLDER, "tokenizer_backend": "huggingface", "tokenized_requests": False},
    "server's tokenizer": {"tokenizer_backend": "auto", "auth_token": KEY, "num_concurrent": 4},
}


@pytest.fixture(scope="session")
def evaluated(tmp_path_factory):
    """Evaluates a model on a task; each combination runs once."""
    folder, tasks = tmp_path_factory.mktemp("tasks"), {}
    facts = [{"question": question, "choices": choices} for question, *choices in FACTS]
    for name, rows in (("facts", facts), ("passages", [{"text": text} for text in PASSAGES])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def evaluate(model, model_args, task, **options):
        key = json.dumps((model, model_args, task, options))
        if key not in tasks:
            rows = "passages" if task is PERPLEXITY else "facts"
            files = {"data_files": {"test": str(folder / f"{rows}.jsonl")}}
            config = {"task": "small", "dataset_path": "json", "dataset_kwargs": files}
            config |= {"test_split": "test", "target_delimiter": " ", **task}
            tasks[key] = lm_eval.simple_evaluate(
                model=model, model_args=model_args, tasks=[config], bootstrap_iters=0, **options
            )
        return tasks[key]

    return evaluate


@pytest.fixture(scope="session")
def expected(evaluated):
    """Results of transformers with the same weights."""
    args = {"pretrained": FOLDER, "dtype": "float32"}
    return lambda task, **options: evaluated("hf", args, task, device="cpu", **options)


def metrics(results):
    """The figures of the task, without their errors."""
    figures = results["results"]["small"].items()
    return {name: value for name, value in figures if isinstance(value, (int, float))}


def outputs(results):
    """Model outputs of the documents, in order."""
    samples = sorted(results["samples"]["small"], key=lambda sample: sample["doc_id"])
    return [sample["resps"] for sample in samples]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("task", [CHOICES, PERPLEXITY], ids=["choices", "perplexity"])
def test_likelihoods_are_those_of_transformers(evaluated, expected, task, way):
    args = TEXTS | WAYS[way]
    batch = args.pop("batch_size", 1)
    result = evaluated("local-completions", args, task, batch_size=batch)
    reference = expected(task)
    assert metrics(result) == pytest.approx(metrics(reference), rel=1e-4)
    for one, other in zip(flat(outputs(result)), flat(outputs(reference)), strict=True):
        assert float(one) == pytest.approx(float(other), abs=2e-3)


def flat(outputs):
    """The likelihoods in nested outputs; a choice has a second value, whether it is greedy."""
    for answer in outputs:
        if isinstance(answer, (list, tuple)):
            yield from flat(answer)
        elif not isinstance(answer, bool):
            yield float(answer == "True") if answer in ("True", "False") else answer


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_of_transformers(evaluated, expected, way):
    args = TEXTS | WAYS[way]
    batch = args.pop("batch_size", 1)
    result = evaluated("local-completions", args, WRITING, batch_size=batch)
    assert outputs(result) == outputs(expected(WRITING))
    assert metrics(result) == metrics(expected(WRITING))


def test_chats_are_those_of_transformers(evaluated, expected):
    args = {"base_url": f"{URL}/v1/chat/completions", **ONLINE}
    result = evaluated("local-chat-completions", args, WRITING, apply_chat_template=True)
    reference = expected(WRITING, apply_chat_template=True)
    assert outputs(result) == outputs(reference) and metrics(result) == metrics(reference)
