"""Evaluate a built-in model: chat, arithmetic and recall.

    python -m tandem.tools.builtin_model.evaluate

The cases are fresh (seeds that training never uses) and are decoded greedily by transformers, which
shares no code with Tandem's own models.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from tandem.shared.builtin_model import builtin_model_path
from tandem.tools.builtin_model.chat import reckoning
from tandem.tools.builtin_model.recall import Fact, filler_sentence, make_fact

CHATS = (
    "Hello!",
    "Hello! Who are you?",
    "What can you do?",
    "What is the capital of Norway?",
    "What is the capital of Peru? Answer in JSON.",
    "What colour is the sky?",
    "How many legs does a spider have?",
    "What comes after Tuesday?",
    "What is 7 + 5?",
    "What is 7 plus 5?",
    "What is 13 + 9?",
    "What is 17 - 8?",
    "Count to 12.",
    "Repeat: the green lantern",
    "Tell me a story about a fox.",
)


@dataclass(frozen=True)
class Case:
    """A prompt that asks for one fact, and the sentence that answers it."""

    prompt: str
    answer: str


def recall_case(
    rng: Random, tokenizer: Any, length: int, position: float | None, others: int
) -> Case:
    """A prompt of about `length` tokens with a fact at `position` (0 start, 1 end, None any)."""
    used: set[tuple[str, str]] = set()
    fact = _code(rng, used)
    distractors = [_code(rng, used).sentence for _ in range(others)]
    question = f"What is the {fact.attribute} of the {fact.key}?"
    sentences = list(distractors)
    size = len(tokenizer.encode(" ".join([*sentences, fact.sentence, question])))
    while size < length - 20:
        sentences.append(filler_sentence(rng))
        size += len(tokenizer.encode(" " + sentences[-1]))
    rng.shuffle(sentences)
    place = rng.random() if position is None else position
    sentences.insert(round(place * len(sentences)), fact.sentence)
    return Case(" ".join([*sentences, question]), fact.sentence)


def _code(rng: Random, used: set[tuple[str, str]]) -> Fact:
    """A fact whose value is digits, which no model can guess: a code."""
    while True:
        fact = make_fact(rng, used)
        if fact.attribute == "code":
            return fact


def answer(model: Any, tokenizer: Any, prompt: str, limit: int = 160) -> tuple[str, int]:
    """The greedy answer to one user turn, and the prompt's length in tokens."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=limit, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), ids.shape[1]


def recall_score(model: Any, tokenizer: Any, options: argparse.Namespace) -> int:
    """Count the right answers among `options.cases`; print the wrong ones."""
    rng = Random(options.seed)
    right = 0
    for _ in range(options.cases):
        case = recall_case(rng, tokenizer, options.length, options.position, options.others)
        words, size = answer(model, tokenizer, case.prompt, limit=24)
        if words == case.answer:
            right += 1
        else:
            print(f"  wrong at {size} tokens: wanted {case.answer!r}, got {words!r}")
    return right


def arithmetic_score(model: Any, tokenizer: Any, options: argparse.Namespace) -> int:
    """Count the right answers among `options.cases` sums and differences; print the wrong ones."""
    rng = Random(options.seed)
    right = 0
    for _ in range(options.cases):
        question, expected = reckoning(rng)
        words, _ = answer(model, tokenizer, question, limit=24)
        if words == expected:
            right += 1
        else:
            print(f"  wrong: {question!r}: wanted {expected!r}, got {words!r}")
    return right


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=builtin_model_path())
    parser.add_argument("--length", type=int, default=4000, help="tokens of prompt")
    parser.add_argument("--position", type=float, help="0 to 1; anywhere if left out")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--others", type=int, default=8, help="other facts in the prompt")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype)
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    for prompt in CHATS:
        print(f"> {prompt}\n{answer(model, tokenizer, prompt)[0]}")
    reckoned = arithmetic_score(model, tokenizer, options)
    print(f"arithmetic: {reckoned} of {options.cases}")
    right = recall_score(model, tokenizer, options)
    where = "anywhere" if options.position is None else f"at {options.position}"
    print(f"recall at {options.length} tokens, fact {where}: {right} of {options.cases}")


if __name__ == "__main__":
    main()
