"""Makes ``models/``: small models of SentencePiece with what it makes of awkward texts, chats with
what mistral-common makes of them, and tiktoken's tokens. Run it where all three packages are
installed, or those that it is given:

    python -m tandem.tests.shared.text.vocabulary.make_expected [PACKAGE ...]
"""

from __future__ import annotations

import json
import random
import string
import sys
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

from .support import AWKWARD, FAMILIES, MERGED, MODELS, TEXTS, TOKENS, byte_tokens, tekken

# Trained on little, each has some hundred pieces.
CORPUS = [
    *["the quick brown fox jumps over the lazy dog"] * 4,
    *["def f(x): return x + 1", "Fox and hound, 1 2 3 4 5", "it's don't we'll", "<x> and < >"] * 3,
    *["日本語 한국어 你好", "straße Ελληνικά русский", "  two  spaces   three", "=-=-=-"] * 3,
]
# What becomes of characters, in place of NFKC's map of 240 KB.
RULES = "9\t20\n1\t\n1F\t\n3000\t20\nFF21\t41\nFF22\t42\n65 301\tE9\n61 302\tE2\n2028\t20\n"
SYMBOLS = ["\u2581\u2581", "\u2581\u2581\u2581", "<x>"]
PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "bpe", "byte_fallback": True, "control_symbols": ["[INST]"], **PLAIN},
    "symbols": {
        "model_type": "bpe",
        "byte_fallback": True,
        "user_defined_symbols": SYMBOLS,
        **PLAIN,
    },
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": [*SYMBOLS, "<start_of_turn>", "\n", "\n\n"],
        **PLAIN,
    },
    "unigram": {"model_type": "unigram"},
    "unigram_bytes": {"model_type": "unigram", "byte_fallback": True, **PLAIN},
}
WORDS = (
    *("hello", "The fox", "café", "[INST]", "</s>", "line\nbreak", " end ", " ", '{"a":1}', "5"),
    *('"q"', "[1, 2]", "中文", "👍🏽", "<s>", "x  ", "[TOOL_CALLS]", "null"),
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "Do [INST] é",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "g", "parameters": {}}},
]


def make_models() -> None:
    """Train the models, and encode the texts with them."""
    import sentencepiece

    expected = {}
    with tempfile.TemporaryDirectory() as folder:
        rules = Path(folder) / "rules.tsv"
        rules.write_text(RULES)
        for name, options in KINDS.items():
            own = {} if "normalization_rule_name" in options else {"normalization_rule_tsv": rules}
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(CORPUS),
                model_prefix=str(Path(folder) / name),
                vocab_size=420,
                hard_vocab_limit=False,
                character_coverage=0.98,
                minloglevel=2,
                **own,
                **options,
            )
            content = (Path(folder) / f"{name}.model").read_bytes()
            (MODELS / f"{name}.model").write_bytes(content)
            model = sentencepiece.SentencePieceProcessor(model_proto=content)
            expected[name] = [[ids := model.encode(text), model.decode(ids)] for text in AWKWARD]
    (MODELS / "expected.json").write_text(json.dumps(expected) + "\n")


def make_chats() -> None:
    """Write random conversations with the tokens of their prompts."""
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    results = []
    for version in ("v3", "v7", "v11", "v13"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tekken.json"
            path.write_text(json.dumps(tekken(version)))
            tokenizer = MistralTokenizer.from_file(path)
        draw = random.Random(version)
        for _ in range(8):
            messages, tools = _chat(draw, version), draw.choice([None, TOOLS, TOOLS[1:]])
            request = ChatCompletionRequest(messages=list(map(_theirs, messages)), tools=tools)
            tokens = tokenizer.encode_chat_completion(request).tokens
            results.append([version, messages, tools, tokens])
    text = ",\n".join(json.dumps(chat, ensure_ascii=False) for chat in results)
    (MODELS / "chats.json").write_text(f"[\n{text}\n]\n")


def _theirs(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning as mistral-common takes it."""
    values = {key: value for key, value in message.items() if value is not None}
    if reasoning := values.pop("reasoning_content", None):
        texts = [{"type": "text", "text": values["content"]}] if values.get("content") else []
        values["content"] = [{"type": "thinking", "thinking": reasoning, "closed": True}, *texts]
    return values


def _chat(draw: random.Random, version: str) -> list[dict[str, Any]]:
    def text() -> str:
        return "".join(draw.choices(WORDS, k=draw.randrange(1, 4)))

    messages = [{"role": "system", "content": text()} for _ in range(draw.choice([0, 1, 2]))]
    for _ in range(draw.randrange(1, 4)):
        messages += [{"role": "user", "content": text()} for _ in range(draw.choice([1, 1, 2]))]
        message: dict[str, Any] = {"role": "assistant", "content": text()}
        if version == "v13" and draw.random() < 0.5:
            message["reasoning_content"] = text()
        if draw.random() < 0.6:
            ids = [
                "".join(draw.choices(string.ascii_letters, k=9)) for _ in range(draw.choice([1, 3]))
            ]
            if version == "v3" or draw.random() < 0.5:
                message["content"] = None
            arguments = ('{"x": "é"}', '{"x":1,"y":[2]}', "{}", '{"x": "</s>"}')
            message["tool_calls"] = [
                {
                    "id": id,
                    "type": "function",
                    "function": {"name": "f", "arguments": draw.choice(arguments)},
                }
                for id in ids
            ]
            results = [{"role": "tool", "tool_call_id": id, "content": text()} for id in ids]
            draw.shuffle(results)
            messages += [message, *results]
        else:
            messages.append(message)
    return [*messages, {"role": "user", "content": text()}]


def make_tiktoken() -> None:
    """Encode the texts with tiktoken's library, as each family splits them. Qwen's own code
    normalises them before."""
    import tiktoken

    ranks: dict[str, list[bytes]] = dict.fromkeys(FAMILIES, TOKENS)
    ranks["tekken"] = byte_tokens(*MERGED)
    patterns = FAMILIES | {"tekken": tekken("v7")["config"]["pattern"]}
    expected: dict[str, Any] = {"version": tiktoken.__version__}
    for name, pattern in patterns.items():
        values = {token: rank for rank, token in enumerate(ranks[name])}
        encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=values, special_tokens={}
        )
        texts: tuple[str, ...] = TEXTS
        if name == "qwen.tiktoken":
            texts = tuple(unicodedata.normalize("NFC", text) for text in TEXTS)
        expected[name] = [encoding.encode_ordinary(text) for text in texts]
    (MODELS / "tiktoken.json").write_text(json.dumps(expected) + "\n")


PACKAGES = {"sentencepiece": make_models, "mistral-common": make_chats, "tiktoken": make_tiktoken}


if __name__ == "__main__":
    for package in sys.argv[1:] or PACKAGES:
        PACKAGES[package]()
