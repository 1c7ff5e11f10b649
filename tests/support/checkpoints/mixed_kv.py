"""Models whose layers keep KV of different shapes, made of transformers' layers, and a family that
reads them.

Processes that a test starts know the family if ``knowing`` has changed their environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.shared.models import registry
from tandem.shared.models.config import Config
from tandem.shared.models.families import deepseek, llama
from tandem.shared.models.registry import Family
from tandem.shared.models.spec import DecoderSpec

ARCHITECTURE = "MixedKVForCausalLM"
# A process that runs this knows the family.
PRELUDE = "from tandem.tests.support.checkpoints.mixed_kv import register; register()"
GROUPED, LATENT = "llama_linear", "deepseek_v3_dense"


def _grouped(kv_heads: int, head_dim: int) -> tuple[str, dict[str, int]]:
    return GROUPED, {"num_key_value_heads": kv_heads, "head_dim": head_dim}


def _latent(rank: int) -> tuple[str, dict[str, int]]:
    return LATENT, {"kv_lora_rank": rank, "first_k_dense_replace": 4}


# For each layer, a model of tiny_models and changes of its config.
MODELS = {
    "shapes": (_grouped(2, 16), _grouped(1, 32), _grouped(4, 8), _grouped(2, 16)),
    "latent_and_grouped": (_latent(48), _grouped(4, 16), _latent(24), _grouped(1, 32)),
}


def read(config: Config) -> DecoderSpec:
    """Read each layer from a config of its own."""
    specs = [
        registry.FAMILIES[values["architectures"][0]].read(Config(values))
        for values in config.values["layers"]
    ]
    layers = tuple(spec.layers[index] for index, spec in enumerate(specs))
    return replace(specs[0], layers=layers, tie_embeddings=False)


FAMILY = Family(ARCHITECTURE, "mixed_kv", read, deepseek.WEIGHTS | llama.WEIGHTS)


def register() -> None:
    """Make the family known to this process."""
    registry.FAMILIES[ARCHITECTURE] = FAMILY


@contextmanager
def knowing(folder: Path) -> Iterator[None]:
    """Make the family known to this process and to those that are started meanwhile."""
    (folder / "sitecustomize.py").write_text(PRELUDE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.FAMILIES, ARCHITECTURE, FAMILY)
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        yield


class Reference:
    """The model as transformers computes it: its own layers, each with its own rotation."""

    def __init__(self, name: str, seed: int = 0) -> None:
        import torch

        from tandem.tests.support.checkpoints import tiny_models

        layers = {"num_hidden_layers": len(MODELS[name])}
        parts = [tiny_models.new_model(kind, **layers, **changes) for kind, changes in MODELS[name]]
        self.configs = [
            part.config.to_dict() | {"architectures": [type(part).__name__]} for part in parts
        ]
        self.model = parts[0]
        self.model.model.layers = torch.nn.ModuleList(
            _turned(part.model, index) for index, part in enumerate(parts)
        )
        tiny_models.randomise(self.model, seed)
        self.model.eval()

    def save(self, folder: Path) -> None:
        """Write config, weights and tokenizer."""
        from safetensors.torch import save_file

        from tandem.tests.support.checkpoints import tiny_models

        tiny_models.write_tokenizer(folder)
        weights = self.model.state_dict()
        save_file(weights, folder / "model.safetensors")
        config = {"architectures": [ARCHITECTURE], "layers": self.configs}
        (folder / "config.json").write_text(json.dumps(config))

    def greedy(self, tokens: list[int], steps: int) -> list[int]:
        """The tokens that follow a prompt."""
        import torch

        output = list(tokens)
        with torch.inference_mode():
            for _ in range(steps):
                logits = self.model(torch.tensor([output]), use_cache=False).logits
                output.append(int(logits[0, -1].argmax()))
        return output[len(tokens) :]


def _turned(model: Any, index: int) -> Any:
    """A layer of a model that is given the rotation of that model."""
    layer, rotary = model.layers[index], model.rotary_emb

    def turn(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs["position_embeddings"] = rotary(args[0], position_ids=kwargs["position_ids"])
        return args, kwargs

    layer.register_forward_pre_hook(turn, with_kwargs=True)
    return layer
