"""What two nodes must agree on before KV may pass between them. No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .spec import DecoderSpec, fingerprint_fields


def model_fingerprint(spec: DecoderSpec, folder: Path) -> dict[str, str]:
    """Shapes, rope, tokenizer and template, field by field; two trainings of one shape look the
    same here."""
    fields = fingerprint_fields(spec)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        file = folder / name
        if file.is_file():
            fields[name] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    return fields


def fingerprint_text(fields: dict[str, str]) -> str:
    """``field=value`` lines, so that a router can name the field in which two nodes differ."""
    return "\n".join(f"{key}={value}" for key, value in sorted(fields.items()))
