"""Identification of folders and repositories without a loadable checkpoint, for error messages."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from ..errors import ModelError
from .gguf.choice import choose

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_ADAPTER = re.compile(r"^(adapters?(_model|_config)?|(.*_)?lora_weights)\.\w+$")
_TRAINING = re.compile(r"\.distcp$|^zero_to_fp32\.py$|optim_states\.pt$|^pytorch_model_fsdp")
_CHECKPOINT = re.compile(r"^checkpoint-\d+$")
# Formats that may run code when they are loaded.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OTHER_FORMATS = {
    ".onnx": "ONNX",
    ".xml": "OpenVINO",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
    ".npz": "MLX's older format",
    ".nemo": "NeMo",
    ".tflite": "TensorFlow Lite",
    ".engine": "TensorRT",
    ".mlpackage": "Core ML",
}


def without_config(files: Collection[str], place: str) -> str:
    """Describe ``files`` without a config.json, and what to do. ``place`` is their folder or the
    name of their repository."""
    if "model_index.json" in files:
        return "it is a diffusion pipeline; only text models are supported"
    if {"blobs", "snapshots"} <= set(files):
        return "it is a model in the hub's cache; give its name, or the folder in snapshots/"
    if kind := _of_weights(files, place):
        return kind
    if other := _other_format(files):
        return other
    if steps := [file for file in files if _CHECKPOINT.search(file)]:
        last = max(steps, key=lambda name: int(name.rpartition("-")[2]))
        return f"it has the checkpoints of a training; give one of them: {Path(place) / last}"
    if {SINGLE, INDEX, "tokenizer.json"} & set(files):
        return "download it too; it is beside the weights"
    return "give the folder of a Hugging Face model"


def without_weights(files: Collection[str], place: str) -> str:
    """Describe ``files`` without loadable weights, and what to do."""
    if kind := _of_weights(files, place):
        return kind
    if shards := sorted(file for file in files if _SHARD.search(file)):
        return f"{shards[0]} is one of several files, which {INDEX} lists: download that too"
    if pickles := _ending(files, _PICKLES):
        return (
            f"{', '.join(pickles[:3])} cannot be loaded: convert to safetensors, which is "
            f"AutoModelForCausalLM.from_pretrained({place!r}).save_pretrained(FOLDER) in "
            f"transformers"
        )
    if other := _other_format(files):
        return other
    if others := _ending(files, (".safetensors",)):
        return f"{', '.join(others[:3])} is not under the name of a whole model's weights"
    return "download the weights"


def _of_weights(files: Collection[str], place: str) -> str:
    """Describe checkpoints that are recognised with or without a config.json."""
    if any(_ADAPTER.search(file) for file in files):
        return (
            "it is a LoRA adapter, which is not supported by itself: merge it into its base model "
            "(merge_and_unload and save_pretrained in peft)"
        )
    if any(file.startswith("consolidated") and file.endswith(".safetensors") for file in files):
        return (
            "its weights are in Mistral's own format (consolidated.safetensors); use a version "
            f"for transformers, with config.json and {SINGLE} or {INDEX}"
        )
    if "params.json" in files and _ending(files, _PICKLES):
        return "it is in Meta's own format; use the version for transformers"
    if any(_TRAINING.search(file) for file in files):
        return (
            "its weights are in the format of a training framework, spread over ranks; export the "
            "model with save_pretrained, or the framework's own converter"
        )
    if old := [file for file in files if re.search(r"^ggml.*\.bin$|\.ggml$", file)]:
        return f"{min(old)} is in GGML, which came before GGUF; use a GGUF file"
    if _ending(files, (".gguf",)):
        return _of_ggufs(files, place)
    return ""


def _of_ggufs(files: Collection[str], place: str) -> str:
    try:
        file = choose(files, "it", None)[0]
    except ModelError as error:
        return str(error)
    return f"it has GGUF files, of which one is given by itself: {Path(place) / file}"


def _other_format(files: Collection[str]) -> str:
    for ending, name in _OTHER_FORMATS.items():
        if matches := _ending(files, (ending,)):
            return f"its weights are in {name} ({matches[0]}); use a version in safetensors"
    return ""


def _ending(files: Collection[str], endings: tuple[str, ...]) -> list[str]:
    return sorted(file for file in files if file.lower().endswith(endings))
