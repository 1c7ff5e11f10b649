"""Converts checkpoints to GGUF files with llama.cpp's converter, a program of its own: it brings
its own version of the ``gguf`` library.

    python convert.py SOURCE_OF_LLAMA_CPP FOLDER...

Each folder becomes a file beside it. Vocabularies of tiny models are none that the converter knows,
and their configurations, which transformers has written, lack keys that published ones have.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main(source: Path, folders: list[Path]) -> None:
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    import conversion  # type: ignore[import-not-found]
    import gguf
    import torch
    from conversion import base

    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    for folder in folders:
        config: dict[str, Any] = base.ModelBase.load_hparams(folder, False)
        name = base.get_model_architecture(config, base.ModelType.TEXT)
        model = conversion.get_model_class(name)
        model.set_vocab = lambda self: self._set_vocab_gpt2()
        rope = config.get("rope_parameters") or {}
        rope = rope.get("full_attention", rope)
        part = rope.get("partial_rotary_factor", 1.0)
        for key, value in {
            "rotary_pct": part,
            "rotary_emb_base": rope.get("rope_theta", 10000),
            "rotary_dim": int(part * (config.get("head_dim") or 16)),
            "n_ctx": config.get("n_positions"),
            "partial_rotary_factor": part if name == "StableLmForCausalLM" else None,
        }.items():
            if value is not None:
                config.setdefault(key, value)
        file = folder.with_suffix(".gguf")
        with torch.inference_mode():
            model(folder, gguf.LlamaFileType.ALL_F32, file, hparams=config).write()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
