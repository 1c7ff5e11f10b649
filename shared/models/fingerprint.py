"""Model fingerprint: the fields in which two nodes must agree to hand over KV. No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from .spec import DecoderSpec, fingerprint_fields


def model_fingerprint(spec: DecoderSpec, folder: Path) -> dict[str, str]:
    """Fields for shapes, rope, tokenizer and template. Two trainings of one architecture have equal
    fingerprints."""
    fields = fingerprint_fields(spec)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        file = folder / name
        if file.is_file():
            fields[name] = hashlib.blake2b(file.read_bytes(), digest_size=8).hexdigest()
    return fields


def fingerprint_text(fields: dict[str, str]) -> str:
    """Format as ``field=value`` lines, from which a router names the field that differs."""
    return "\n".join(f"{key}={value}" for key, value in sorted(fields.items()))
