"""The model of ``tandem router --model``, known before any node joins.

Without the option the first node to join decides, which may be a stray one after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...proto import tandem_pb2 as pb
from ...shared.config.sampling import MODELS_OWN
from ...shared.config.sampling_defaults import warn_of_ignored
from ...shared.errors import ModelError
from ...shared.models.fingerprint import fingerprint_text, model_fingerprint
from ...shared.process.threads import in_thread
from ...shared.text.tokenizer_files import TemplateText, TokenizerFiles
from ...shared.weights.locate import display_name, find_model, is_gguf
from ...shared.weights.source import open_source, read_spec
from ..options import RouterOptions

if TYPE_CHECKING:
    from ...shared.text.tokenizer import Tokenizer

# Characters of a model's path in an error message.
MAX_PATH = 256


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """The model card that nodes must match, and the router's own tokenizer."""

    card: pb.ModelCard
    tokenizer: Tokenizer


async def read_pinned(options: RouterOptions) -> PinnedModel | None:
    """Read the model of ``--model``; ``None`` without the option. Raises ``ModelError``.

    This may take a long download, or hang on a dead volume; the event loop continues meanwhile, and
    cancelling abandons it.
    """
    name = options.model
    if name is None:
        return None
    fingerprint, vocab_size, files = await in_thread(
        lambda: _describe(name, options.ignored_config_keys, options.config_overrides)
    )
    own_name = next(iter(options.served_names), display_name(name))
    card = pb.ModelCard(name=own_name, fingerprint=fingerprint, vocab_size=vocab_size)
    return PinnedModel(card, await load_tokenizer(files, vocab_size, options))


def _describe(
    name: str, ignored_keys: frozenset[str], overrides: Mapping[str, Any]
) -> tuple[str, int, TokenizerFiles]:
    """The fingerprint of a model, the size of its vocabulary, and its tokenizer."""
    with find_model(name) as model:
        spec = read_spec(model.path, ignored_keys, overrides=overrides)
        files = read_tokenizer(model.path)
        return fingerprint_text(model_fingerprint(spec, files)), spec.vocab_size, files


def read_tokenizer(path: Path) -> TokenizerFiles:
    """The tokenizer of a model on this machine. Raises ``ModelError``."""
    try:
        return open_source(path).tokenizer_files()
    except OSError as error:
        name = str(path)[:MAX_PATH]
        raise ModelError(f"{name!r} cannot be read: {error.strerror}") from None


async def load_tokenizer(
    files: TokenizerFiles, vocab_size: int, options: RouterOptions
) -> Tokenizer:
    """Load a model's tokenizer, with the operator's chat template if there is one. Raises
    ``ModelError`` if it belongs to another model."""
    from ...shared.text.tokenizer import Tokenizer

    if (template := _operators_template(files, options)) is not None:
        files = replace(files, template=template, tool_template=None)
    if options.generation_config == MODELS_OWN:
        origin = Path(files.origin)
        own = origin if is_gguf(origin) else origin.with_name("generation_config.json")
        warn_of_ignored(files.generation_config, str(own))
    tokenizer = await in_thread(lambda: Tokenizer.load(files, vocab_size))
    await in_thread(tokenizer.prepare)
    return tokenizer


def _operators_template(files: TokenizerFiles, options: RouterOptions) -> TemplateText | None:
    """The template of ``--chat-template``. Raises ``ModelError`` for a name that the model
    lacks."""
    if (name := options.template_name) is None:
        source, option = options.template_source, options.chat_template
        origin = "--chat-template" if option == source else f"--chat-template {option}"
        return None if source is None else TemplateText(source, origin)
    templates = files.templates()
    if name not in templates:
        names = ", ".join(sorted(templates)) or "none"
        raise ModelError(
            f"--chat-template {name!r} is neither a file nor the name of a chat template of the "
            f"model ({files.origin}), which has: {names}"
        )
    return templates[name]
