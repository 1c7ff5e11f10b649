"""Decoders whose next token is a label, with files as rerankers are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

LABELS = ("no", "yes")
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
VL_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
PAIR_TEMPLATE = (
    "{{ messages[0].content }}|{% for message in messages[1:] %}"
    "{{ message.content }}{{ '|' if message.role == 'query' else '' }}"
    "{% if message.role == 'document' and add_generation_prompt %}={% endif %}{% endfor %}"
)


def add_labels(folder: Path) -> None:
    """Give the tokenizer of a tiny model a token for each label."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    values = json.loads(tokenizer.to_str())
    vocabulary, merges = values["model"]["vocab"], []
    # In the places of bytes that no text has.
    unused = sorted(vocabulary, key=vocabulary.__getitem__)[-3:]
    for byte, (left, right) in zip(unused, (("n", "o"), ("y", "e"), ("ye", "s")), strict=True):
        merges.append([left, right])
        vocabulary[left + right] = vocabulary.pop(byte)
    values["model"]["merges"] = merges
    (folder / "tokenizer.json").write_text(json.dumps(values))


def on_the_card(
    raw: tokenizers.Tokenizer, query: str, document: str, instruction: str = INSTRUCTION
) -> list[int]:
    """The tokens of a pair as Qwen3-Reranker's model card makes them, where texts quote no control
    tokens."""
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return [token for text in (PREFIX, pair, SUFFIX) for token in raw.encode(text).ids]


def on_the_vl_card(
    raw: tokenizers.Tokenizer, query: str, document: str, instruction: str = VL_INSTRUCTION
) -> list[int]:
    """The tokens of a pair of texts as Qwen3-VL-Reranker's own script makes them."""
    pair = f"<Instruct>: {instruction}<Query>:{query}\n<Document>:{document}"
    tokens: list[int] = raw.encode(f"{PREFIX}{pair}<|im_end|>\n<|im_start|>assistant\n").ids
    return tokens


def write_logit_score(folder: Path, *, false: bool, activation: str | None) -> None:
    """Write what sentence-transformers saves of a reranker that is made of a decoder, without its
    ``false`` label or with it."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    no, yes = map(tokenizer.token_to_id, LABELS)
    places = (
        ("", "base.modules.transformer.Transformer"),
        (
            "1_LogitScore",
            "cross_encoder.modules.logit_score.LogitScore",
        ),
    )
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{kind}"}
        for number, (path, kind) in enumerate(places)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    tokens = {"true_token_id": yes, "false_token_id": no if false else None}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    config = {"model_type": "CrossEncoder", "prompts": {"find": "find it"}}
    config |= {"default_prompt_name": "find"} | (
        {"activation_fn": activation} if activation else {}
    )
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(PAIR_TEMPLATE)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    message = {"method": "forward", "method_output_name": "logits", "format": "flat"}
    transformer: dict[str, Any] = {
        "transformer_task": "text-generation",
        "module_output_name": "causal_logits",
    }
    transformer |= {"modality_config": {"text": message, "message": message}}
    transformer |= {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    (folder / "sentence_bert_config.json").write_text(json.dumps(transformer))
