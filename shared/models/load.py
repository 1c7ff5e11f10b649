"""Loading of a rank's weights: every parameter filled once, every tensor of the checkpoint used or
listed as ignored."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import torch

from ...kernels.operators import Operators
from ...kernels.reference.operators import ReferenceOperators
from ..errors import ModelError
from ..weights.checkpoint import Checkpoint
from .decoder import Decoder
from .parallel import TensorParallel, WeightPlacement, WeightSlot
from .registry import Family, family_of, read_json, read_spec
from .spec import DecoderSpec
from .weight_names import AddOne, Split, Target, WeightNames

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# dtypes of checkpoints, by safetensors' names.
_SAVED_IN = ("BF16", "F16", "F32", "F64")
LOAD_FORMATS = ("auto", "safetensors", "dummy")


def resolve_dtype(name: str, spec: DecoderSpec, device: torch.device) -> torch.dtype:
    """``DecoderSpec.dtype_for`` as torch's dtype. Raises ``ModelError`` for an unknown name."""
    wanted = spec.dtype_for(name, on_cpu=device.type == "cpu")
    if wanted not in DTYPES:
        raise ModelError(f"dtype {wanted!r} is not supported; use auto or {', '.join(DTYPES)}")
    return DTYPES[wanted]


def load_model(
    folder: str | Path,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    tp: TensorParallel | None = None,
    load_format: str = "auto",
    ignored_keys: frozenset[str] = frozenset(),
    max_model_len: int | None = None,
    seed: int = 0,
    operators: Operators | None = None,
) -> Decoder:
    """Load this rank's part of the model in a folder. ``dummy`` needs ``config.json`` only.

    ``ignored_keys``, ``max_model_len``: see ``read_spec``.
    """
    spec = read_spec(folder, ignored_keys, max_model_len)
    device = torch.device(device)
    place = WeightPlacement(
        resolve_dtype(dtype, spec, device),
        device,
        tp or TensorParallel(),
        operators or ReferenceOperators(),
    )
    model = Decoder(spec, place)
    if load_format == "dummy":
        fill_random(model, seed)
    elif load_format in LOAD_FORMATS:
        with Checkpoint(folder) as checkpoint:
            fill(model, checkpoint, family_of(read_json(Path(folder) / "config.json")))
    else:
        raise ModelError(f"load format {load_format!r}; supported: {', '.join(LOAD_FORMATS)}")
    model.finish_loading()
    return model


def fill(model: Decoder, checkpoint: Checkpoint, family: Family) -> None:
    """Copy the checkpoint's tensors to the model; reject missing and unknown ones."""
    slots = model.weight_slots()
    for theirs in checkpoint.names():
        if family.more_layers and _layer_of(theirs) >= len(model.spec.layers):
            continue
        target = _target_of(theirs, family.weights, checkpoint.folder)
        if target == "head.weight" and model.spec.tie_embeddings:
            continue  # a tied head is the embedding, whatever was saved beside it
        names = _names_of(target)
        if not all(name in slots for name in names):
            raise ModelError(f"{checkpoint.folder}: {theirs} has no place in this model: {_REMEDY}")
        _fill_slots([slots.pop(name) for name in names], target, checkpoint, theirs)
    if slots:
        missing = ", ".join(sorted(slots)[:3])
        raise ModelError(f"{checkpoint.folder} lacks {len(slots)} weights ({missing}): {_REMEDY}")


def _fill_slots(
    slots: list[WeightSlot], target: Target, checkpoint: Checkpoint, theirs: str
) -> None:
    """Copy one tensor, which has the rows of all ``slots``, one after the other."""
    if not slots:
        return
    rows = sum(slot.shape[0] for slot in slots)
    _check(checkpoint, theirs, (rows, *slots[0].shape[1:]))
    offset = 0
    for slot in slots:
        first, end = slot.first, slot.end
        if slot.dim == 0:
            first, end = first + offset, end + offset
        if end > first:
            part = checkpoint.read(theirs, slot.dim, first, end)
            slot.target.copy_(part.float() + 1 if isinstance(target, AddOne) else part)
        offset += slot.shape[0]


def _check(checkpoint: Checkpoint, theirs: str, expected: tuple[int, ...]) -> None:
    """Reject a tensor of another shape, or in a dtype that needs scales."""
    shape, dtype = checkpoint.shape(theirs), checkpoint.dtype(theirs)
    if shape != expected:
        raise ModelError(
            f"{checkpoint.folder}: {theirs} has shape {list(shape)}, but config.json implies "
            f"{list(expected)}: {_REMEDY}"
        )
    if dtype not in _SAVED_IN:
        raise ModelError(
            f"{checkpoint.folder}: {theirs} is saved in {dtype}; supported: "
            f"{', '.join(_SAVED_IN)}: convert the weights to bfloat16"
        )


# A component of a tensor's name that is a number.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_REMEDY = "config.json and the weights do not belong together; download both again"


def _target_of(theirs: str, names: WeightNames, folder: Path) -> Target:
    """The parameters of a tensor; numbers in its name are those of the layer and the expert."""
    numbers = _NUMBER.findall(theirs)
    letters = iter("ij")
    pattern = _NUMBER.sub(lambda number: f"{{{next(letters, '')}}}", theirs)
    if pattern not in names:
        raise ModelError(f"{folder}: tensor {theirs} is unknown for this model, and it may matter")
    indices = dict(zip("ij", numbers, strict=False))
    match names[pattern]:
        case None:
            return None
        case Split(names=ours):
            return Split(tuple(name.format(**indices) for name in ours))
        case AddOne(name=our):
            return AddOne(our.format(**indices))
        case our:
            return our.format(**indices)


def _names_of(target: Target) -> tuple[str, ...]:
    """The parameters that a tensor fills."""
    match target:
        case None:
            return ()
        case Split(names=names):
            return names
        case AddOne(name=name):
            return (name,)
        case name:
            return (name,)


def _layer_of(theirs: str) -> int:
    """The layer that a tensor belongs to, -1 if none."""
    number = _NUMBER.search(theirs)
    return -1 if number is None else int(number[0])


# Random weights repeat with this (prime) period, so that rows differ and filling is a copy.
_PERIOD = 1_000_003
# Elements of a weight that are generated at a time.
_PIECE = 1 << 24


def fill_random(model: Decoder, seed: int) -> None:
    """Fill with seeded weights, equal for every tensor-parallel size: norms are one, the rest is
    scaled such that the hidden state keeps its magnitude."""
    generator = torch.Generator().manual_seed(seed)
    # Drawn on the host, so that all devices have the same numbers, and repeated on the device.
    pool = torch.randn(_PERIOD, generator=generator).to(model.place.device)
    for name, slot in model.weight_slots().items():
        if len(slot.shape) == 1:
            slot.target.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            _fill_random_part(name, slot, pool)


def _fill_random_part(name: str, slot: WeightSlot, pool: torch.Tensor) -> None:
    """Fill some rows at a time: in float32 a large weight takes twice its own memory."""
    rows, columns = slot.shape
    scale = 1.0 if name == "embed.weight" else columns**-0.5
    first_row, last_row = (slot.first, slot.end) if slot.dim == 0 else (0, rows)
    phase = zlib.crc32(name.encode())
    rows_at_once = max(1, _PIECE // columns)
    for row in range(first_row, last_row, rows_at_once):
        end = min(row + rows_at_once, last_row)
        begin = (phase + row * columns) % _PERIOD
        count = (end - row) * columns
        repeats = -(-(begin + count) // _PERIOD)
        piece = pool.repeat(repeats)[begin : begin + count].view(-1, columns) * scale
        piece = piece if slot.dim == 0 else piece[:, slot.first : slot.end]
        slot.target[row - first_row : end - first_row].copy_(piece)
