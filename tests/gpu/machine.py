"""Prints what a run on a GPU runs on: versions, devices, driver."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "tokenizers",
    "numpy",
    "msgpack",
    "pyzmq",
    "xxhash",
    "grpcio",
    "protobuf",
    "fastapi",
    "pydantic",
    "uvicorn",
    "pytest",
    "pytest-asyncio",
    "hypothesis",
)


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def main() -> None:
    print(f"Python {platform.python_version()} on {platform.platform()}")
    print(", ".join(f"{package} {installed(package)}" for package in PACKAGES))
    if (tool := shutil.which("nvidia-smi")) is not None:
        subprocess.run([tool], check=False, timeout=30)
    if not torch.cuda.is_available():
        print("no CUDA device")
        return
    free, total = torch.cuda.mem_get_info()
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    print(
        f"{name}, sm_{capability[0]}{capability[1]}, {free >> 20} of {total >> 20} MiB free, "
        f"CUDA {torch.version.cuda}"
    )


if __name__ == "__main__":
    main()
