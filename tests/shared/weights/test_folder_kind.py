"""Folders and repositories that are no checkpoint are refused as what they are."""

from __future__ import annotations

import re

import pytest

from tandem.shared.weights.folder_kind import without_config, without_weights

ADAPTER = "is a LoRA adapter, which is not supported by itself: merge it into its base model"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "give the folder of a Hugging Face model"),
        (["README.md"], "give the folder of a Hugging Face model"),
        (["adapter_config.json", "adapter_model.safetensors"], ADAPTER),
        (["model_index.json"], "is a diffusion pipeline"),
        (["blobs", "refs", "snapshots"], "in the hub's cache; give its name, or the folder in"),
        (["params.json", "consolidated.safetensors", "tekken.json"], "in Mistral's own format"),
        (["params.json", "consolidated.00.pth"], "in Meta's own format"),
        (["m.Q4_0_4_4.gguf", "m.Q8_0.gguf", "m.F16.gguf"], "given by itself: place/m.Q8_0.gguf"),
        (["mmproj-F16.gguf", "m-q4_0.gguf"], "given by itself: place/m-q4_0.gguf"),
        (
            ["m.Q4_0_4_4.gguf", "m.Q4_0_8_8.gguf"],
            "none of which is of a supported type by its name",
        ),
        (["m-Q8_0-00001-of-00002.gguf"], "it lacks m-Q8_0-00002-of-00002.gguf, a part of the"),
        (["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf is not a whole model, by its name"),
        (["Mistral-7B-lora-F16.gguf"], "is not a whole model"),
        (["imatrix.gguf", "m.F16.gguf"], "given by itself: place/m.F16.gguf"),
        (["a-F16.gguf", "b-F16.gguf"], "several GGUF files in F16: a-F16.gguf, b-F16.gguf"),
        (["m-q6_k_l.gguf"], "given by itself: place/m-q6_k_l.gguf"),
        (["ggml-model-q4_0.bin"], "ggml-model-q4_0.bin is in GGML"),
        (["adapter_model.safetensors"], ADAPTER),
        (["adapters.npz"], ADAPTER),
        (["pytorch_lora_weights.safetensors"], ADAPTER),
        (["checkpoint-500", "checkpoint-1000"], "give one of them: place/checkpoint-1000"),
        (["__0_0.distcp"], "in the format of a training framework"),
        (["global_step10", "zero_to_fp32.py"], "in the format of a training framework"),
        (["model.safetensors", "tokenizer.json"], "download it too"),
        (["model.onnx"], "weights are in ONNX"),
        (["openvino_model.xml"], "weights are in OpenVINO"),
        (["weights.npz"], "weights are in MLX's older format"),
    ],
)
def test_files_without_a_config(files: list[str], words: str) -> None:
    assert_matches(without_config(files, "place"), words)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "download the weights"),
        (["adapter_config.json", "adapter_model.safetensors"], ADAPTER),
        (["consolidated.safetensors", "tokenizer.json"], "in Mistral's own format"),
        (["params.json", "consolidated.00.pth"], "in Meta's own format"),
        (["ggml-model-f16.bin"], "is in GGML"),
        (["model-00001-of-00002.safetensors"], "which model.safetensors.index.json lists: downl"),
        (["pytorch_model.bin"], "pytorch_model.bin cannot be loaded: convert to safetensors"),
        (["model.pth"], "model.pth cannot be loaded: convert to safetensors"),
        (["m.BF16.gguf"], "given by itself: place/m.BF16.gguf"),
        (["tf_model.h5"], "weights are in TensorFlow"),
        (["flax_model.msgpack"], "weights are in Flax"),
        (["weights.safetensors"], "weights.safetensors is not under the name of a whole model's"),
    ],
)
def test_files_without_weights(files: list[str], words: str) -> None:
    assert_matches(without_weights([*files, "config.json"], "place"), words)


def assert_matches(message: str, words: str) -> None:
    assert re.search(words, message), message
    assert "\n" not in message
