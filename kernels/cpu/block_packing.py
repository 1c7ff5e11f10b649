"""Compiled packing of blocks into panels (``block_layouts.py``).

Nearly all bits of a panel are bits of the file in other places, so one kernel packs all formats by
tables. The tables come from ``Panels.fill``, the reference: it packs blocks with a single bit set,
which shows where the kernel must move that bit. Sections that are computed, such as NVFP4's scales
in fp16, are left to the reference.

A unit is the shortest run of inputs that has whole blocks of the file and whole entries of each
section of a panel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import lcm

import numpy as np
import torch
from numba import prange

from ..block_formats import BF16, TQ1_0, TQ2_0, BlockFormat
from ..quantized import QuantizedWeight
from .block_layouts import BLOCK, LANES, LINE, SUPER, Layout, Panels
from .jit import array, kernel
from .vector import put_moved_bits, put_pairs, take_words

_ONE = 0x3C  # the upper byte of 1 in fp16
_SAMPLES = 64
# Tables grow with the square of the unit. Units of more inputs are left to the reference.
_MAX_UNIT = 256
# The number of the section of factors.
_SUPERS = 2


@dataclass(frozen=True, slots=True)
class Moves:
    """The entries of a section that a unit has, as bits of the unit.

    Entry e is ``constants[e]`` xor all ``(word >> right << left) & mask`` of ``fields`` from
    ``firsts[e]`` to ``firsts[e + 1]``.
    """

    firsts: np.ndarray
    # Number of the word, right, left and mask.
    fields: np.ndarray
    constants: np.ndarray


@dataclass(frozen=True, slots=True)
class Tables:
    """How a format is packed: the bytes of a unit, the offsets of the words of four bytes in it
    that moves use, and the moves of each section (``None`` for a computed section)."""

    nbytes: int
    words: np.ndarray
    sections: tuple[Moves | None, ...]


_NOTHING = Moves(np.zeros(1, np.int64), np.zeros((0, 4), np.uint32), np.zeros(0, np.uint32))


def pack(panels: Panels, weight: QuantizedWeight) -> None:
    """Pack a weight into panels of its format and shape, on all threads. Computed sections are left
    to ``Panels.fill``.

    ``weight.blocks`` are uint8 [outputs, bytes of a row]; its inputs must be in order, and a
    multiple of ``BLOCK`` and of the layout's ``group``.
    """
    assert weight.order is None
    if _unit(weight.format, panels.layout) > _MAX_UNIT:
        panels.fill(weight)
        return
    if weight.format == TQ1_0:  # its digits are computed; the layout has two bits
        weight = _in_two_bits(weight)
    blocks = array(weight.blocks)
    whole = len(blocks) // LANES * LANES
    last = np.zeros((0 if whole == len(blocks) else LANES, blocks.shape[1]), np.uint8)
    last[: len(blocks) - whole] = blocks[whole:]
    if weight.format == BF16:
        pairs = panels.sections()[0].numpy()
        _move_pairs(blocks[:whole], 0, pairs)
        _move_pairs(last, whole // LANES, pairs)
        return
    tables = tables_of(weight.format, panels.layout)
    codes, scales, *_ = tables.sections
    arguments: list[np.ndarray] = []
    for moves, section in zip(tables.sections, panels.sections(), strict=True):
        moves = moves or _NOTHING
        arguments += [moves.firsts, moves.fields, moves.constants, section.numpy()]
    _move(blocks[:whole], tables.nbytes, tables.words, 0, *arguments)
    _move(last, tables.nbytes, tables.words, whole // LANES, *arguments)
    panels.fill(weight, codes=codes is None, scales=scales is None)


@cache
def tables_of(format: BlockFormat, layout: Layout) -> Tables:
    """Build tables by packing units that differ in one bit; random units verify them."""
    unit = _unit(format, layout)
    nbytes = format.bytes_of(unit)
    blocks = torch.zeros(unit // format.values, format.nbytes, dtype=torch.uint8)
    factors = torch.zeros_like(blocks, dtype=torch.bool)
    # Scales of books are not computed from their factors.
    for at in () if layout.book else layout.supers:
        blocks[:, at + 1] = _ONE  # the reference divides by it
        factors[:, at : at + 2] = True
    base, factors = blocks.flatten(), factors.flatten()
    bits = torch.eye(8 * nbytes, dtype=torch.uint8).unflatten(1, (nbytes, 8))
    bits = (bits << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 256, (_SAMPLES, nbytes), generator=generator).byte()
    samples = torch.cat([base[None], base ^ bits, torch.where(factors, base, random)])
    size = layout.sections(-(-len(samples) // LANES), unit // BLOCK)[-1]
    panels = Panels(layout, torch.empty(size, dtype=torch.uint8), len(samples), unit)
    panels.fill(QuantizedWeight(format, samples))
    flips = np.unpackbits((samples ^ base).numpy(), axis=1, bitorder="little").astype(bool)
    of_base = np.unpackbits(base.numpy(), bitorder="little").astype(bool)
    words: dict[int, int] = {}
    moves: list[Moves | None] = []
    for number, section in enumerate(panels.sections()):
        by_unit = section.movedim(-1, 1).flatten(0, 1)
        entries = by_unit[: len(samples)].numpy()
        one, random_ones = np.split(entries[1:], [8 * nbytes])
        changed = one ^ entries[0]
        if number < _SUPERS:
            changed[factors.repeat_interleave(8).numpy()] = 0
        expected = [
            entries[0] ^ np.bitwise_xor.reduce(changed[each]) for each in flips[1 + 8 * nbytes :]
        ]
        constants = entries[0] ^ np.bitwise_xor.reduce(changed[of_base])
        alike = np.array_equal(expected, random_ones)
        moves.append(_moves(changed, constants, nbytes, words) if alike else None)
    return Tables(nbytes, np.array(list(words), np.int64), tuple(moves))


def _unit(format: BlockFormat, layout: Layout) -> int:
    return lcm(format.values, BLOCK * layout.sharing, BLOCK * SUPER if layout.supers else BLOCK)


def _moves(changed: np.ndarray, constants: np.ndarray, nbytes: int, words: dict[int, int]) -> Moves:
    """The moves for ``changed`` [bits, entries], the changes of entries by each bit of the unit.
    Adds the offsets of the words that they use to ``words``."""
    firsts, fields = [0], []
    for entry in changed.T:
        masks: dict[tuple[int, int], int] = {}
        for source in np.flatnonzero(entry):
            for target in np.flatnonzero(entry[source] >> np.arange(8 * entry.itemsize) & 1):
                key = int(source // 8 - target // 8), int(source % 8 - target % 8)
                masks[key] = masks.get(key, 0) | 1 << int(target)
        for (byte, shift), mask in masks.items():
            at = int(min(max(byte, 0), nbytes - 4))
            right = shift + 8 * (byte - at)
            word = words.setdefault(at, len(words))
            fields.append((word, max(right, 0), max(-right, 0), mask))
        firsts.append(len(fields))
    table = np.array(fields, np.uint32).reshape(-1, 4)
    return Moves(np.array(firsts, np.int64), table, constants.astype(np.uint32))


def _in_two_bits(weight: QuantizedWeight) -> QuantizedWeight:
    """A weight in TQ1_0 as TQ2_0."""
    blocks = torch.empty(weight.outputs, TQ2_0.bytes_of(weight.inputs), dtype=torch.uint8)
    _spread_digits(array(weight.blocks), array(blocks))
    return QuantizedWeight(TQ2_0, blocks)


@kernel(parallel=True)
def _spread_digits(digits: np.ndarray, pairs: np.ndarray) -> None:
    """Convert the bytes of TQ1_0, which are fractions in base 3, to TQ2_0."""
    for row in prange(len(digits)):
        for block in range(digits.shape[1] // 54):
            source, target = digits[row, block * 54 :], pairs[row, block * 66 :]
            target[:64] = 0
            value = 0
            for first, count, places in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
                power = 1
                for _ in range(places):
                    for at in range(first, first + count):
                        digit = (source[at] * power & 255) * 3 >> 8
                        target[value // 128 * 32 + value % 32] |= digit << value // 32 % 4 * 2
                        value += 1
                    power *= 3
            target[64], target[65] = source[52], source[53]


@kernel(parallel=True)
def _move_pairs(numbers: np.ndarray, first: int, pairs: np.ndarray) -> None:
    """Pack bf16 [O, bytes of a row] to panels from the ``first`` on."""
    width = numbers.shape[1]
    flat = numbers.reshape(-1)
    blocks = width // LINE
    for panel in prange(len(numbers) // LANES):
        for block in range(blocks):
            at = panel * LANES * width + block * LINE
            put_pairs(flat, at, width, pairs, (first + panel) * blocks + block)


@kernel(parallel=True)
def _move(
    blocks: np.ndarray,
    nbytes: int,
    words: np.ndarray,
    first: int,
    code_firsts: np.ndarray,
    code_fields: np.ndarray,
    code_constants: np.ndarray,
    codes: np.ndarray,
    scale_firsts: np.ndarray,
    scale_fields: np.ndarray,
    scale_constants: np.ndarray,
    scales: np.ndarray,
    super_firsts: np.ndarray,
    super_fields: np.ndarray,
    super_constants: np.ndarray,
    supers: np.ndarray,
    extra_firsts: np.ndarray,
    extra_fields: np.ndarray,
    extra_constants: np.ndarray,
    extras: np.ndarray,
) -> None:
    width = blocks.shape[1]
    for panel in prange(len(blocks) // LANES):
        unit_words = np.empty((len(words), LANES), np.uint32)
        for unit in range(width // nbytes):
            begin = panel * LANES * width + unit * nbytes
            for word in range(len(words)):
                take_words(blocks, begin + words[word], width, unit_words, word)
            to = (first + panel) * (width // nbytes) + unit
            _put(unit_words, code_firsts, code_fields, code_constants, codes, to)
            _put(unit_words, scale_firsts, scale_fields, scale_constants, scales, to)
            _put(unit_words, super_firsts, super_fields, super_constants, supers, to)
            _put(unit_words, extra_firsts, extra_fields, extra_constants, extras, to)


@kernel()
def _put(
    unit_words: np.ndarray,
    firsts: np.ndarray,
    fields: np.ndarray,
    constants: np.ndarray,
    into: np.ndarray,
    unit: int,
) -> None:
    count = len(constants)
    for number in range(count):
        first, end, at = firsts[number], firsts[number + 1], (unit * count + number) * LANES
        put_moved_bits(unit_words, fields, first, end, constants[number], into, at)
