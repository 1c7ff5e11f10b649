"""Make the built-in model: `python -m tandem.tools.builtin_model.train --out DIR`.

There are three courses. The first teaches the small world and recall, on ever longer rows. Each of
the others begins with the weights that the one before has saved, and a fresh optimizer: the second
is mostly long rows, the third teaches arithmetic in any wording while it rehearses the rest.

Everything follows from the seed and the step counts below, never from the clock, so that the same
script on the same machine makes the same weights.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from tandem.tools.builtin_model.corpus import Turn, conversations
from tandem.tools.builtin_model.train_tokenizer import SPECIAL, save_tokenizer, train_tokenizer

SEED = 20261121
CONTEXT = 8192
WARM_UP = 100
DIGIT_WEIGHT = 3.0


@dataclass(frozen=True)
class Stage:
    """Steps with rows of one length; long rows come last, because they cost most."""

    length: int
    rows: int
    steps: int
    only_chat: bool = False


@dataclass(frozen=True)
class Course:
    """Stages with one learning rate, which rises, then falls as a cosine to a fiftieth."""

    number: int
    stages: tuple[Stage, ...]
    seed: int
    peak_rate: float
    rehearsals: int = 3  # with long rows, one step in this many is small talk

    def steps(self, scale: float) -> int:
        return sum(round(stage.steps * scale) for stage in self.stages)


FIRST_STAGES = (
    Stage(length=128, rows=16, steps=700),
    Stage(length=256, rows=8, steps=1500),
    Stage(length=512, rows=4, steps=500),
    Stage(length=1024, rows=2, steps=450),
    Stage(length=2048, rows=1, steps=600),
    Stage(length=4096, rows=1, steps=600),
)
SECOND_STAGES = (
    Stage(length=1024, rows=2, steps=200),
    Stage(length=2048, rows=1, steps=250),
    Stage(length=4096, rows=1, steps=650),
)
THIRD_STAGES = (
    Stage(length=1024, rows=2, steps=600),
    Stage(length=2048, rows=1, steps=300),
    Stage(length=4096, rows=1, steps=300),
)
FIRST = Course(1, FIRST_STAGES, SEED, peak_rate=1.5e-3)
SECOND = Course(2, SECOND_STAGES, SEED + 100, peak_rate=5e-4)
THIRD = Course(3, THIRD_STAGES, SEED + 200, peak_rate=4e-4, rehearsals=2)
COURSES = (FIRST, SECOND, THIRD)
# Long rows hold little small talk, and what is not rehearsed is forgotten: in stages of long rows
# every third step is one of these instead, and every second one where small talk is to be learned.
# The reverse holds too: a thousand steps of small talk alone, and no fact is recalled any more.
REHEARSAL = Stage(length=256, rows=8, steps=0, only_chat=True)
REHEARSE_FROM = 512


def make_model(vocabulary: int) -> Any:
    """Build a Qwen3 decoder of 2.3 M parameters with transformers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    end, padding = SPECIAL.index("<|im_end|>"), SPECIAL.index("<|endoftext|>")
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=padding,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        # A sharper start: with gains of 1 a score can reach only 5.7, too blunt for one fact
        # among thousands of tokens.
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.constant_(parameter, 1.6)
    return model


def render(turns: list[Turn], tokenizer: Any) -> tuple[list[int], list[float]]:
    """The tokens of a dialogue in the chat template, and their weights in the loss.

    Only what the model says counts, and digits count most: they are the few tokens of an answer
    that cannot be guessed from the question.
    """
    texts, spoken_counts = [], []
    for turn in turns:
        texts += [f"<|im_start|>{turn.role}\n", f"{turn.content}<|im_end|>", "\n"]
        spoken_counts += [False, turn.role == "assistant", False]
    ids: list[int] = []
    weights: list[float] = []
    for encoding, counts in zip(tokenizer.encode_batch(texts), spoken_counts, strict=True):
        ids += encoding.ids
        weights += [
            (DIGIT_WEIGHT if token.isdigit() else 1.0) if counts else 0.0
            for token in encoding.tokens
        ]
    return ids, weights


def batches(
    stage: Stage, seed: int, tokenizer: Any, course: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of exactly `stage.length` + 1 tokens, cut or padded, and their weights."""
    size = stage.length + 1
    dialogues = conversations(seed, stage.length, stage.only_chat, course)
    while True:
        rows, lessons = [], []
        for _ in range(stage.rows):
            ids, weights = render(next(dialogues), tokenizer)
            short = max(0, size - len(ids))
            rows.append(ids[:size] + [0] * short)
            lessons.append(weights[:size] + [0.0] * short)
        yield torch.tensor(rows), torch.tensor(lessons)


def answer_loss(model: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted cross entropy of the assistant's tokens; no logits are computed elsewhere."""
    hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
    expected, weight = rows[:, 1:], weights[:, 1:]
    spoken = weight > 0
    logits = model.lm_head(hidden[spoken]).float()
    losses = functional.cross_entropy(logits, expected[spoken], reduction="none")
    return (losses * weight[spoken]).sum() / weight[spoken].sum()


def rate(step: int, total: int, peak: float) -> float:
    """The learning rate: warm-up, then a cosine down to a fiftieth."""
    if step < WARM_UP:
        return peak * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, total - WARM_UP)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a folder in Hugging Face's layout, the weights in bf16."""
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    copy = make_model(model.config.vocab_size)
    copy.load_state_dict(model.state_dict())
    end = model.config.eos_token_id
    copy.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=end, pad_token_id=model.config.pad_token_id
    )
    copy.to(torch.bfloat16).save_pretrained(folder)
    # Servers, which sample unless told otherwise, take this; transformers refuses to write it.
    file = folder / "generation_config.json"
    greedy = json.loads(file.read_text()) | {"temperature": 0.0}
    file.write_text(json.dumps(greedy, indent=2, sort_keys=True) + "\n")
    save_tokenizer(tokenizer, folder, CONTEXT)


def load(folder: Path) -> Any:
    """Load the model that `save` wrote, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def optimizer_for(model: Any, peak: float) -> torch.optim.AdamW:
    """Build an optimizer with decay for matrices only: norm weights must be free to grow."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.98), fused=True)


def train(out: Path, device: str, scale: float, first: int) -> None:
    """Run all courses from number ``first`` on; those after the first continue with the model in
    ``out``, which is usable after each stage."""
    torch.manual_seed(SEED)
    tokenizer = train_tokenizer(SEED)
    if first == 1:
        save(make_model(tokenizer.get_vocab_size()), tokenizer, out)
    for course in COURSES[first - 1 :]:
        take(course, load(out).to(device), tokenizer, out, device, scale)


def take(course: Course, model: Any, tokenizer: Any, out: Path, device: str, scale: float) -> None:
    """Run all stages of a course in order."""
    model.train()
    optimizer = optimizer_for(model, course.peak_rate)
    total = course.steps(scale)
    step, start, tokens_seen = 0, time.monotonic(), 0
    for index, stage in enumerate(course.stages):
        source = batches(stage, course.seed + index, tokenizer, course.number)
        rehearsal = batches(REHEARSAL, course.seed - 1 - index, tokenizer, course.number)
        for _ in range(round(stage.steps * scale)):
            rehearse = (
                stage.length >= REHEARSE_FROM and step % course.rehearsals == course.rehearsals - 1
            )
            lesson = next(rehearsal if rehearse else source)
            rows, weights = (tensor.to(device) for tensor in lesson)
            for group in optimizer.param_groups:
                group["lr"] = rate(step, total, course.peak_rate)
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                loss = answer_loss(model, rows, weights)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step, tokens_seen = step + 1, tokens_seen + rows.numel()
            if step % 20 == 0:
                elapsed = time.monotonic() - start
                print(
                    f"step {step}/{total} length {stage.length} loss {loss.item():.3f} "
                    f"{elapsed:.0f} s {tokens_seen / elapsed:.0f} tok/s",
                    flush=True,
                )
        save(model, tokenizer, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="1 is the full schedule")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--from-course",
        type=int,
        choices=range(1, len(COURSES) + 1),
        default=1,
        help="2 or 3: go on with the model that is in --out already",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.out, options.device, options.steps_scale, options.from_course)


if __name__ == "__main__":
    main()
