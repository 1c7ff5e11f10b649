"""The committed model is whole, small and consistent with the script that makes it."""

import json
from random import Random

import pytest
from jinja2 import Environment
from safetensors import safe_open
from tokenizers import Tokenizer

from tandem import Engine, EngineConfig, Message, SamplingParams
from tandem.shared.builtin_model import builtin_model_path
from tandem.tools.builtin_model.chat import reckoning
from tandem.tools.builtin_model.corpus import Turn
from tandem.tools.builtin_model.train_tokenizer import CHAT_TEMPLATE

pytestmark = pytest.mark.usefixtures("forked_ranks")

WEIGHTS = builtin_model_path()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))


def test_sums_and_differences_are_right_in_any_wording() -> None:
    """Fresh questions, decoded greedily by the engine that serves the model."""
    rng = Random(31)
    cases = [("What is 7 plus 5?", "7 + 5 = 12.")] + [reckoning(rng) for _ in range(100)]
    questions = [[Message("user", question)] for question, _ in cases]
    with Engine(EngineConfig(model="builtin", threads=1)) as engine:
        outputs = engine.generate_sync(questions, SamplingParams(max_tokens=16, temperature=0))
    right = [
        choices[0].text == expected for choices, (_, expected) in zip(outputs, cases, strict=True)
    ]
    assert right[0] and sum(right) >= 95


def test_the_weights_load_and_the_folder_is_small() -> None:
    config = json.loads((WEIGHTS / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] == 8192
    with safe_open(WEIGHTS / "model.safetensors", framework="pt") as tensors:
        names = set(tensors.keys())
        embedding = tensors.get_tensor("model.embed_tokens.weight")
    assert "lm_head.weight" not in names
    assert embedding.shape == (config["vocab_size"], config["hidden_size"])
    assert str(embedding.dtype) == "torch.bfloat16"
    assert len(names) == 2 + 11 * config["num_hidden_layers"]
    assert sum(file.stat().st_size for file in WEIGHTS.iterdir()) < 10_000_000


@pytest.mark.parametrize(
    "text",
    [
        "",
        " two  spaces ",
        "\r\n\n\ttabs",
        "naïve Ünïcode",
        "日本語 🦊👩‍🚀",
        "a\u0301 e\u0301",
        "\x00\x7f",
    ],
)
def test_the_tokenizer_gives_any_text_back(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_random_text_comes_back(tokenizer: Tokenizer) -> None:
    rng = Random(5)
    for _ in range(200):
        points = (rng.choice((rng.randrange(1, 0xD800), rng.randrange(32, 127))) for _ in range(40))
        text = "".join(map(chr, points))
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("481").tokens == ["4", "8", "1"]
    assert tokenizer.encode("is 481").tokens[-3:] == ["4", "8", "1"]


def test_the_special_tokens_are_single_and_match_the_config(tokenizer: Tokenizer) -> None:
    config = json.loads((WEIGHTS / "config.json").read_text())
    generation = json.loads((WEIGHTS / "generation_config.json").read_text())
    end = tokenizer.token_to_id("<|im_end|>")
    assert config["eos_token_id"] == generation["eos_token_id"] == end
    assert tokenizer.encode("<|im_end|>").ids == [end]


def test_the_chat_template_renders_what_training_saw() -> None:
    config = json.loads((WEIGHTS / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE
    turns = [Turn("system", "Be brief."), Turn("user", "Hello")]
    messages = [{"role": turn.role, "content": turn.content} for turn in turns]
    template = Environment(autoescape=False).from_string(CHAT_TEMPLATE)
    assert template.render(messages=messages, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.render(messages=messages).endswith("Hello<|im_end|>\n")
