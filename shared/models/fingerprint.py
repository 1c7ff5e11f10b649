"""Model fingerprint: the fields in which two nodes must agree to hand over KV. No torch."""

from __future__ import annotations

import json
from hashlib import blake2b

from ..text.tokenizer_files import TokenizerFiles
from .spec import DecoderSpec, fingerprint_fields


def model_fingerprint(spec: DecoderSpec, tokenizer: TokenizerFiles | None) -> dict[str, str]:
    """Fields for shapes, rope, vocabulary and template. Two trainings of one architecture have
    equal fingerprints.

    A checkpoint in another format, or one that was saved again, is the same model. Without
    ``tokenizer``, vocabulary and template are not compared.
    """
    return fingerprint_fields(spec) | ({} if tokenizer is None else text_fields(tokenizer))


def text_fields(tokenizer: TokenizerFiles) -> dict[str, str]:
    """The fields for vocabulary and template."""
    vocabulary = sorted((number, text) for text, number in tokenizer.vocabulary().items())
    both = (tokenizer.template, tokenizer.tool_template or tokenizer.template)
    templates = ["" if one is None else one.source.strip() for one in both]
    return {
        "vocabulary": _digest(json.dumps(vocabulary)),
        "chat_template": _digest(json.dumps(templates)),
    }


def _digest(text: str) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def fingerprint_text(fields: dict[str, str]) -> str:
    """Format as ``field=value`` lines, so that a router can name the field that differs."""
    return "\n".join(f"{key}={value}" for key, value in sorted(fields.items()))
