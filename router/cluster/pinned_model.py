"""The model of ``tandem router --model``, known before any node has joined.

Without the option the first node to join decides, which may be a stray one after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...proto import tandem_pb2 as pb
from ...shared.errors import ModelError
from ...shared.models.fingerprint import fingerprint_text, model_fingerprint
from ...shared.process.threads import in_thread
from ...shared.text.tokenizer_files import TemplateText
from ...shared.weights.locate import display_name, locate_model
from ...shared.weights.source import open_source, read_spec
from ..options import RouterOptions

if TYPE_CHECKING:
    from ...shared.text.tokenizer import Tokenizer

# Characters of a model's path in an error message.
MAX_PATH = 256


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """The model card that nodes are compared with, and the router's own copy of the tokenizer."""

    card: pb.ModelCard
    tokenizer: Tokenizer


async def read_pinned(options: RouterOptions) -> PinnedModel | None:
    """Read the model of ``--model``; ``None`` without the option. Raises ``ModelError``.

    It may be a long download, or a volume that does not answer: the event loop goes on meanwhile,
    and a cancellation abandons it."""
    name = options.model
    if name is None:
        return None
    path = await in_thread(lambda: locate_model(name))
    spec = await in_thread(lambda: read_spec(path, options.ignored_config_keys))
    tokenizer = await load_tokenizer(path, spec.vocab_size, options.template_source)
    card = pb.ModelCard(
        name=next(iter(options.served_names), display_name(name)),
        path=str(path),
        fingerprint=fingerprint_text(
            await in_thread(lambda: model_fingerprint(spec, open_source(path).tokenizer_files()))
        ),
        vocab_size=spec.vocab_size,
    )
    return PinnedModel(card, tokenizer)


async def load_tokenizer(path: Path, vocab_size: int, chat_template: str | None) -> Tokenizer:
    """Load a model's tokenizer, with the operator's ``chat_template`` if there is one. Raises
    ``ModelError`` if it cannot be read, or belongs to another model."""
    from ...shared.text.tokenizer import Tokenizer

    try:
        files = await in_thread(lambda: open_source(path).tokenizer_files())
        if chat_template is not None:
            template = TemplateText(chat_template, "--chat-template")
            files = replace(files, template=template, tool_template=None)
        tokenizer = await in_thread(lambda: Tokenizer.load(files))
        await in_thread(tokenizer.prepare)
    except OSError as error:
        shown = str(path)[:MAX_PATH]
        raise ModelError(f"{shown!r} cannot be read: {error.strerror}") from None
    # A few published models have special tokens beyond the embedding, which cannot be sampled.
    if vocab_size and tokenizer.base_vocab_size > vocab_size:
        raise ModelError(
            f"{files.origin} has {tokenizer.base_vocab_size} tokens, the model's "
            f"vocab_size is {vocab_size}; it belongs to another model"
        )
    return tokenizer
