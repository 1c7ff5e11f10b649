"""The sums that stand for bytes in a GPU's memory, against Python's own integers."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from tandem.kernels.row_sums import COLUMNS, WORD, row_sums, splitmix64

ROW = WORD * COLUMNS
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def expected(data: bytes) -> list[int]:
    """The definition, word by word."""
    data += bytes(-len(data) % ROW)
    words = struct.unpack(f"<{len(data) // WORD}i", data)
    keys = [splitmix64(column + 1) | 1 for column in range(COLUMNS)]
    return [
        sum(word * key for word, key in zip(words[at : at + COLUMNS], keys, strict=True)) % 2**64
        for at in range(0, len(words), COLUMNS)
    ]


def sums_of(data: bytes, device: str = "cpu") -> list[int]:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
    return [int(each) % 2**64 for each in row_sums(tensor.to(device))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [0, 1, 3, 4, 19, 989, ROW - 1, ROW, ROW + 1, 3 * ROW + 4093])
def test_the_sums_are_those_of_the_definition(size: int, device: str) -> None:
    data = random.Random(size).randbytes(size)
    assert sums_of(data, device) == expected(data)


def test_the_keys_are_those_of_splitmix64() -> None:
    # The first three numbers that Vigna's program prints for the seed 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [splitmix64(number) for number in (1, 2, 3)] == expected


def test_sums_wrap_around_and_extreme_words_count() -> None:
    for word in (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80"):
        assert sums_of(word * COLUMNS) == expected(word * COLUMNS)


def test_every_flipped_bit_changes_the_sum_of_its_row_alone() -> None:
    source = random.Random(3)
    data = bytearray(source.randbytes(2 * ROW + 50))
    before = sums_of(bytes(data))
    bits = [*range(64), *source.sample(range(8 * len(data)), 100), 8 * len(data) - 1]
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
        after = sums_of(bytes(data))
        rows = [row for row, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        assert rows == [bit // 8 // ROW]
        data[bit // 8] ^= 1 << bit % 8


def test_two_flipped_signs_do_not_cancel_out() -> None:
    """A sum of 64-bit words times odd keys would lose any two top bits."""
    data = bytearray(random.Random(4).randbytes(ROW))
    before = sums_of(bytes(data))
    for first, second in [(3, 7), (7, 15), (3, ROW - 1), (4095, 4099)]:
        copy = bytearray(data)
        copy[first] ^= 0x80
        copy[second] ^= 0x80
        assert sums_of(bytes(copy)) != before


@pytest.mark.parametrize("width", [1, 2, 4, 256, ROW])
def test_what_has_changed_places_is_found(width: int) -> None:
    source = random.Random(width)
    data = source.randbytes(2 * ROW)
    pieces = [data[at : at + width] for at in range(0, len(data), width)]
    for _ in range(10):
        first, second = source.sample(range(len(pieces)), 2)
        swapped = list(pieces)
        swapped[first], swapped[second] = pieces[second], pieces[first]
        assert pieces[first] == pieces[second] or sums_of(b"".join(swapped)) != sums_of(data)


def test_a_missing_end_is_found_unless_it_is_zeros() -> None:
    data = random.Random(5).randbytes(ROW + 7) + b"\x01"
    assert all(sums_of(data[:-missing]) != sums_of(data) for missing in (1, 2, 3, 4, 8, ROW))
    assert sums_of(data + bytes(3)) == sums_of(data)
