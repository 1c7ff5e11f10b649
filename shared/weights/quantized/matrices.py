"""Quantised matrices among the tensors of a checkpoint: by their names, shapes and dtypes.

Loads torch only when a matrix is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING, Any, Literal

from ....kernels.block_formats import MXFP4, Q4_0, Q8_0, BlockFormat, Offset, Scale, group_format
from ...errors import ModelError
from ...models.quantization import Quantization
from ..safetensors_folder import SafetensorsFolder
from .quant_state import MAX_TEXT_BYTES, QuantState, read_quant_state

if TYPE_CHECKING:
    import torch

_FP8, _REMEDY = "F8_E4M3", "download the model again, or use another version of it"
_SCALES = ("F16", "BF16", "F32")
# Scales of longer groups are repeated after this many values, so that ranks can split them.
_MAX_RUN = 128
# Far above any model; each expert takes memory before its weights are read.
_MAX_EXPERTS = 1 << 14
# MLX's name for a tensor with all experts of a layer.
_MLX_EXPERTS = re.compile(r"\.switch_mlp\.")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A quantised weight [outputs, inputs]. ``blocks`` reads the blocks of a range of outputs. If
    inputs are reordered in the blocks, ``order`` returns the input at each place."""

    shape: tuple[int, int]
    format: BlockFormat
    tensors: tuple[str, ...]
    blocks: Callable[[int, int], torch.Tensor]
    order: Callable[[], torch.Tensor | None] = lambda: None


def find_matrices(folder: SafetensorsFolder, how: Quantization) -> dict[str, Matrix]:
    """The quantised matrices in an open folder, by the names that unquantised weights have."""
    matrices: dict[str, Matrix] = {}
    finder = _Finder(folder, how)
    for name in folder.names():
        for each, matrix in finder.at(name):
            matrices[each] = matrix
    return matrices


class _Finder:
    """Finds the matrix whose main tensor has a name, if any."""

    def __init__(self, folder: SafetensorsFolder, how: Quantization) -> None:
        self._folder = folder
        self._how = how
        self._names = set(folder.names())

    def at(self, name: str) -> Iterator[tuple[str, Matrix]]:
        """The matrices whose codes are in a tensor."""
        stem, _, kind = name.rpartition(".")
        match self._how.method, kind:
            case ("gptq", "qweight"):
                yield f"{stem}.weight", self._gptq(stem)
            case ("awq", "qweight"):
                yield f"{stem}.weight", self._awq(stem)
            case ("compressed-tensors", "weight_packed"):
                yield f"{stem}.weight", self._packed_matrix(stem)
            case ("fp8" | "modelopt" | "compressed-tensors", "weight"):
                yield from self._scaled_matrix(stem)
            case ("fp8" | "modelopt" | "compressed-tensors", "gate_up_proj" | "down_proj"):
                yield from self._stacked_floats(stem, kind)
            case ("bitsandbytes", "weight"):
                yield from self._bitsandbytes(name)
            case ("mlx", "weight"):
                yield from self._mlx(stem)
            case ("mxfp4", _) if name.endswith("_blocks"):
                yield from self._mxfp4(name.removesuffix("_blocks"))

    # Methods, in the order above.

    def _gptq(self, stem: str) -> Matrix:
        how = self._how
        words, zeros, scales, groups = (
            f"{stem}.{each}" for each in ("qweight", "qzeros", "scales", "g_idx")
        )
        height, outputs = self._matrix(words, "I32")
        has_groups = groups in self._names
        inputs = prod(self._folder.shape(groups)) if has_groups else height * 32 // how.bits
        bits = height * 32 // inputs if inputs else 0
        if bits not in (2, 3, 4, 8) or height * 32 != inputs * bits:
            raise self._wrong(words, f"{inputs} inputs, of {how.key}: bits {how.bits}")
        count = self._matrix(scales, *_SCALES, width=outputs)[0]
        size = self._group_size(inputs)
        if count != -(-inputs // size):
            raise self._wrong(scales, f"{-(-inputs // size)} groups of {size} inputs")
        if outputs * bits % 32:
            raise self._wrong(words, f"outputs in whole words of {bits} bits each")
        self._matrix(zeros, "I32", height=count, width=outputs * bits // 32)
        if has_groups:
            self._expect(groups, "I32", (inputs,))
        format = self._integers(bits, size, inputs, scales, how.symmetric)

        def order() -> torch.Tensor | None:
            return self._order(groups) if has_groups else None

        def blocks(first: int, end: int) -> torch.Tensor:
            from .unpacking import gptq_zeros, in_words, pack

            codes = in_words(self._folder.read(words, 1, first, end).mT, bits)
            if has_groups:
                codes = self._in_order(codes, groups, size)
            words_of_zeros = self._folder.read(zeros, 0, 0, count)
            zero = gptq_zeros(words_of_zeros, bits, less_one=how.zeros_less_one)[
                :, first:end
            ].mT.short()
            if how.symmetric and not (zero == 1 << bits - 1).all():
                raise ModelError(
                    f"{self._folder.path}: {zeros} has zeros other than {1 << bits - 1}, but "
                    f"{how.key} has sym true: correct it to false"
                )
            row_scales = self._folder.read(scales, 1, first, end).mT
            if how.symmetric and bits == 8:
                codes = codes ^ 128
            return pack(format, codes, bits, size, row_scales, None if how.symmetric else zero)

        return Matrix((outputs, inputs), format, (words, zeros, scales, groups), blocks, order)

    def _awq(self, stem: str) -> Matrix:
        words, zeros, scales = (f"{stem}.{each}" for each in ("qweight", "qzeros", "scales"))
        inputs, width = self._matrix(words, "I32")
        outputs = 8 * width
        size = self._group_size(inputs)
        count = -(-inputs // size)
        self._matrix(scales, *_SCALES, height=count, width=outputs)
        self._matrix(zeros, "I32", height=count, width=width)
        format = self._integers(4, size, inputs, scales, symmetric=False)

        def blocks(first: int, end: int) -> torch.Tensor:
            from .unpacking import awq_codes, pack

            begin, stop = first // 8, -(-end // 8)
            codes, zero = (
                awq_codes(self._folder.read(name, 1, begin, stop))[
                    :, first - 8 * begin : end - 8 * begin
                ].mT
                for name in (words, zeros)
            )
            row_scales = self._folder.read(scales, 1, first, end).mT
            return pack(format, codes, 4, size, row_scales, zero.short())

        return Matrix((outputs, inputs), format, (words, zeros, scales), blocks)

    def _packed_matrix(self, stem: str) -> Matrix:
        """Codes in words, or two floats of 4 bits in a byte."""
        words = f"{stem}.weight_packed"
        if self._folder.dtype(words) == "U8":
            return self._nvfp4(words, f"{stem}.weight_scale", f"{stem}.weight_global_scale")
        how, bits = self._how, self._how.bits
        scales, zeros, shape, groups = (
            f"{stem}.weight_{each}" for each in ("scale", "zero_point", "shape", "g_idx")
        )
        outputs, width = self._matrix(words, "I32")
        if bits == 0:
            raise self._wrong(words, f"no integers, by {how.key}")
        count = self._matrix(scales, *_SCALES, height=outputs)[1]
        inputs = self._inputs_of_words(shape, words, width * 32 // bits)
        if -(-inputs * bits // 32) != width:
            raise self._wrong(words, f"{inputs} inputs in {bits} bits")
        size = -(-inputs // count)
        if -(-inputs // size) != count:
            raise self._wrong(scales, f"equal groups of {inputs} inputs")
        has_zeros, has_groups = zeros in self._names, groups in self._names
        if has_groups:
            self._expect(groups, "I32", (inputs,))
        format = self._integers(bits, size, inputs, scales, symmetric=not has_zeros)

        def order() -> torch.Tensor | None:
            return self._order(groups) if has_groups else None

        def blocks(first: int, end: int) -> torch.Tensor:
            from .unpacking import in_words, pack

            codes = in_words(self._folder.read(words, 0, first, end), bits)[:, :inputs]
            if has_groups:
                codes = self._in_order(codes, groups, size)
            row_scales = self._folder.read(scales, 0, first, end)
            if not has_zeros:
                return pack(format, codes ^ 128 if bits == 8 else codes, bits, size, row_scales)
            zero = self._zero_points(zeros, (outputs, count), bits, first, end)
            return pack(format, codes, bits, size, row_scales, zero)

        return Matrix(
            (outputs, inputs), format, (words, scales, zeros, shape, groups), blocks, order
        )

    def _inputs_of_words(self, shape: str, words: str, default: int) -> int:
        """The number of inputs, which the last word of a row may exceed; ``default`` for a header
        without the rest of a file."""
        self._expect(shape, self._dtype(shape, "I64", "I32"), (2,))
        outputs, inputs = (int(each) for each in self._folder.whole(shape))
        if not outputs and not inputs:
            return default
        if outputs != self._folder.shape(words)[0]:
            raise self._wrong(words, f"{outputs} outputs, by {shape}")
        return inputs

    def _zero_points(
        self, name: str, shape: tuple[int, int], bits: int, first: int, end: int
    ) -> torch.Tensor:
        """Zeros of some rows, which are subtracted from codes: packed along the rows, or as
        int8."""
        from .unpacking import in_words

        outputs, count = shape
        if self._folder.dtype(name) == "I8":
            self._expect(name, "I8", shape)
            zeros = self._folder.read(name, 0, first, end).short() + (1 << bits - 1)
            if ((zeros < 0) | (zeros >= 1 << bits)).any():
                raise ModelError(
                    f"{self._folder.path}: {name} has zeros beyond {bits} bits: {_REMEDY}"
                )
            return zeros
        self._matrix(name, "I32", height=-(-outputs * bits // 32), width=count)
        words = self._folder.read(name, 0, 0, -(-outputs * bits // 32))
        return in_words(words.mT, bits)[:, first:end].mT.short()

    def _scaled_matrix(self, stem: str) -> Iterator[tuple[str, Matrix]]:
        """Floats or integers of 8 bits, or floats of 4, with scales in a tensor beside them."""
        weight = f"{stem}.weight"
        names = [f"{stem}.weight_scale_inv", f"{stem}.weight_scale"]
        scales = next((name for name in names if name in self._names), None)
        match self._folder.dtype(weight):
            case "F8_E4M3":
                if scales is None:
                    raise self._lacks(weight, "weight_scale_inv or .weight_scale")
                yield weight, self._floats(weight, scales)
            case "I8":
                if scales is None:
                    raise self._lacks(weight, "weight_scale")
                yield weight, self._bytes(weight, scales, f"{stem}.weight_zero_point")
            case "U8":
                yield weight, self._nvfp4(weight, f"{stem}.weight_scale", f"{stem}.weight_scale_2")
            case _ if scales is not None:
                self._dtype(weight, _FP8, "I8", "U8")

    def _floats(self, weight: str, scales: str) -> Matrix:
        outputs, inputs = self._matrix(weight, _FP8)
        shape = self._folder.shape(scales)
        self._dtype(scales, *_SCALES, "F8_E8M0")
        sides = tuple(each for each in shape if each != 1)
        height, size = outputs, inputs
        if prod(shape) == 1:
            pass
        elif prod(shape) == outputs and shape[0] == outputs:
            height = 1
        elif self._how.block is not None:
            height, size = self._how.block
            expected = (-(-outputs // height), -(-inputs // size))
            if sides != tuple(each for each in expected if each != 1):
                raise self._wrong(scales, f"{list(expected)}, by {self._how.key}")
        elif len(shape) == 2 and shape[0] == outputs and shape[1] and inputs % shape[1] == 0:
            height, size = 1, inputs // shape[1]
        else:
            raise self._wrong(
                scales, f"one for all, or for each of {outputs} outputs, or weight_block_size"
            )
        format = self._e4m3(size, inputs)

        def blocks(first: int, end: int) -> torch.Tensor:
            from .unpacking import of_rows, pack

            codes = self._folder.read(weight, 0, first, end)
            whole = self._folder.whole(scales).float().reshape(-(-outputs // height), -1)
            row_scales = of_rows(whole[first // height :], first, end, height)
            return pack(format, codes, 8, size, row_scales)

        return Matrix((outputs, inputs), format, (weight, scales), blocks)

    def _stacked_floats(self, stem: str, kind: str) -> Iterator[tuple[str, Matrix]]:
        """One side of a layer's experts in a tensor [experts, outputs, inputs], or in published
        text parts of image models [experts, inputs, outputs]."""
        weight = f"{stem}.{kind}"
        if self._folder.dtype(weight) != _FP8:
            return
        names = [f"{weight}_{ending}" for ending in ("scale_inv", "weight_scale", "scale")]
        scales = next((name for name in names if name in self._names), None)
        if scales is None:
            raise ModelError(
                f"{self._folder.path}: {weight} is saved in {_FP8} and has no {names[0]} or "
                f"{names[1]} beside it: {_REMEDY}"
            )
        transposed = self._is_transposed(stem)
        experts, *sides = self._experts(weight)
        outputs, inputs = sides[::-1] if transposed else sides
        height, size, grid = self._stacked_scales(scales, experts, outputs, inputs, transposed)
        format = self._e4m3(size, inputs)
        others = (f"{weight}_input_scale", f"{weight}_activation_scale")
        halves = kind == "gate_up_proj" and f"{weight}_bias" not in self._names
        # With biases, gate and up alternate, and the family splits them.
        parts = {"gate_proj": 0, "up_proj": outputs // 2} if halves else {kind: 0}
        count = outputs // len(parts)
        for index in range(experts):
            for part, start in parts.items():

                def blocks(
                    first: int, end: int, index: int = index, start: int = start
                ) -> torch.Tensor:
                    from .unpacking import of_rows, pack

                    first, end = start + first, start + end
                    codes = self._folder.read(weight, int(transposed), first, end, index)
                    row_scales = of_rows(grid(index)[first // height :], first, end, height)
                    return pack(format, codes.mT if transposed else codes, 8, size, row_scales)

                yield (
                    f"{stem}.{index}.{part}.weight",
                    Matrix((count, inputs), format, (weight, scales, *others), blocks),
                )

    def _is_transposed(self, stem: str) -> bool:
        """Return whether experts are stored as [inputs, outputs], by the shapes of both sides."""
        gate_up, down = f"{stem}.gate_up_proj", f"{stem}.down_proj"
        for name in (gate_up, down):
            self._dtype(name, _FP8)
            if len(self._folder.shape(name)) != 3:
                raise self._wrong(name, "experts, outputs, inputs")
        experts, *first = self._folder.shape(gate_up)
        count, *second = self._folder.shape(down)
        plain = first == [2 * second[1], second[0]]
        if experts != count or not (plain or first == [second[1], 2 * second[0]]):
            raise self._wrong(gate_up, f"twice the inputs of {down}, and as many experts")
        return not plain

    def _stacked_scales(
        self, scales: str, experts: int, outputs: int, inputs: int, transposed: bool
    ) -> tuple[int, int, Callable[[int], torch.Tensor]]:
        """The outputs (``height``) and inputs (``size``) that share a scale, and a function that
        reads an expert's scales in fp32, [outputs / height, inputs / size]."""
        shape = self._folder.shape(scales)
        self._dtype(scales, *_SCALES, "F8_E8M0")
        count = prod(shape)
        if count in (1, experts):

            def single(index: int) -> torch.Tensor:
                whole: torch.Tensor = self._folder.whole(scales)
                return whole.float().reshape(count)[index % count].reshape(1, 1)

            return outputs, inputs, single
        height, size = (1, inputs)
        expected = [outputs, 1]
        sides = list(shape[:0:-1] if transposed else shape[1:])
        if sides != expected and self._how.block is not None:
            height, size = self._how.block
            expected = [-(-outputs // height), -(-inputs // size)]
        if shape[0] != experts or sides != expected:
            expected_shape = expected[::-1] if transposed else expected
            raise self._wrong(scales, f"one for each expert, or {[experts, *expected_shape]}")

        def several(index: int) -> torch.Tensor:
            grid = self._folder.read(scales, 0, 0, shape[1], index).float()
            return grid.mT if transposed else grid

        return height, size, several

    def _e4m3(self, size: int, inputs: int) -> BlockFormat:
        """The format of codes in e4m3 of which ``size`` inputs share a scale."""
        run, rounds = _run(size, inputs), self._how.rounds_inputs
        return group_format("e4m3", 8, run, "F32", rounds_inputs=rounds)

    def _bytes(self, weight: str, scales: str, zeros: str) -> Matrix:
        outputs, inputs = self._matrix(weight, "I8")
        shape = self._folder.shape(scales)
        self._dtype(scales, *_SCALES)
        each = prod(shape) != 1
        count = max(1, prod(shape) // outputs)
        if each and (shape[0] != outputs or prod(shape) != outputs * count or inputs % count):
            raise self._wrong(scales, f"one for all, or for each of {outputs} outputs")
        has_zeros = zeros in self._names
        if has_zeros:
            self._dtype(zeros, "I8")
            if prod(self._folder.shape(zeros)) != prod(shape):
                raise self._wrong(zeros, f"as many as {scales}")
        format = self._integers(8, inputs // count, inputs, scales, symmetric=not has_zeros)

        def of(name: str, first: int, end: int) -> torch.Tensor:
            whole: torch.Tensor = self._folder.whole(name).reshape(-1, count)
            return whole[first:end] if each else whole.expand(end - first, 1)

        def blocks(first: int, end: int) -> torch.Tensor:
            import torch

            from .unpacking import pack

            codes = self._folder.read(weight, 0, first, end).view(torch.uint8)
            row_scales = of(scales, first, end)
            if not has_zeros:
                return pack(format, codes, 8, inputs // count, row_scales)
            zero = of(zeros, first, end).short() + 128
            return pack(format, codes ^ 128, 8, inputs // count, row_scales, zero)

        return Matrix((outputs, inputs), format, (weight, scales, zeros), blocks)

    def _nvfp4(self, weight: str, scales: str, whole: str) -> Matrix:
        outputs, width = self._matrix(weight, "U8")
        inputs = 2 * width
        if inputs % 16:
            raise self._wrong(weight, "groups of 16 inputs in 4 bits")
        self._matrix(scales, _FP8, height=outputs, width=inputs // 16)
        self._dtype(whole, "F32")
        if prod(self._folder.shape(whole)) != 1:
            raise self._wrong(whole, "one number")
        format = group_format("e2m1", 4, 16, "F32")
        divides = whole.endswith("weight_global_scale")

        def blocks(first: int, end: int) -> torch.Tensor:
            from .unpacking import in_words, pack

            codes = in_words(self._folder.read(weight, 0, first, end), 4)
            global_scale = self._folder.whole(whole).float().reshape(())
            row_scales = self._folder.read(scales, 0, first, end).float()
            row_scales = row_scales / global_scale if divides else row_scales * global_scale
            return pack(format, codes, 4, 16, row_scales)

        return Matrix((outputs, inputs), format, (weight, scales, whole), blocks)

    def _bitsandbytes(self, weight: str) -> Iterator[tuple[str, Matrix]]:
        scales = f"{weight.removesuffix('weight')}SCB"
        if scales in self._names:
            yield weight, self._int8(weight, scales)
        elif f"{weight}.absmax" in self._names:
            yield weight, self._four_bits(weight)

    def _int8(self, weight: str, scales: str) -> Matrix:
        outputs, inputs = self._matrix(weight, "I8")
        self._expect(scales, "F32", (outputs,))
        format = group_format("int", 8, _run(inputs, inputs), "F32")

        def blocks(first: int, end: int) -> torch.Tensor:
            from .unpacking import pack

            codes = self._folder.read(weight, 0, first, end)
            row_scales = self._folder.whole(scales)[first:end, None] / 127
            return pack(format, codes, 8, inputs, row_scales)

        kind = f"{weight}_format"
        return Matrix((outputs, inputs), format, (weight, scales, kind), blocks)

    def _four_bits(self, weight: str) -> Matrix:
        absmax, levels = f"{weight}.absmax", f"{weight}.quant_map"
        nested, more = f"{weight}.nested_absmax", f"{weight}.nested_quant_map"
        is_nested = nested in self._names
        self._dtype(weight, "U8")
        self._dtype(absmax, "U8" if is_nested else "F32")
        state, kind = self._state(weight, is_nested)
        (outputs, inputs), size = state.shape, state.blocksize
        shape = self._folder.shape(weight)
        if 2 * prod(shape) != outputs * inputs or prod(shape[1:]) != 1 or inputs % 2:
            raise self._wrong(weight, f"{outputs} x {inputs} values of 4 bits")
        count = -(-outputs * inputs // size)
        self._expect(absmax, "U8" if is_nested else "F32", (count,))
        self._expect(levels, "F32", (16,))
        if is_nested:
            self._expect(more, "F32", (256,))
            self._expect(nested, "F32", (-(-count // state.nested_blocksize),))
        run = _run(size, inputs)
        if run % 2:
            raise self._wrong(absmax, f"scales of whole bytes, not of {size} values of 4 bits")
        format = group_format(kind, 4, run, "F32")

        def blocks(first: int, end: int) -> torch.Tensor:
            import torch

            from ....kernels.block_codes import FP4, NF4
            from .unpacking import in_words, of_flat, pack

            expected = torch.tensor(NF4 if kind == "nf4" else FP4)
            if not torch.equal(self._folder.whole(levels), expected):
                raise ModelError(
                    f"{self._folder.path}: {levels} does not have the values of {kind}"
                )
            data = self._folder.read(weight, 0, first * inputs // 2, end * inputs // 2)
            codes = in_words(data.reshape(end - first, -1), 4)
            # The first of two codes is in the high half.
            codes = codes.unflatten(1, (-1, 2)).flip(-1).flatten(1)
            largest = self._folder.whole(absmax)
            if is_nested:
                outer = self._folder.whole(nested)[torch.arange(count) // state.nested_blocksize]
                inner = self._folder.whole(more)[largest.int()]
                largest = inner * outer + state.nested_offset
            return pack(format, codes, 4, run, of_flat(largest, size, first, end, inputs, run))

        tensors = (weight, absmax, levels, nested, more, f"{weight}.{_STATE}{kind}")
        return Matrix((outputs, inputs), format, tensors, blocks)

    def _state(self, weight: str, is_nested: bool) -> tuple[QuantState, Literal["nf4", "fp4"]]:
        kinds: tuple[Literal["nf4", "fp4"], ...] = ("nf4", "fp4")
        for kind in kinds:
            name = f"{weight}.{_STATE}{kind}"
            if name not in self._names:
                continue
            self._dtype(name, "U8")
            shape = self._folder.shape(name)
            if len(shape) != 1 or shape[0] > MAX_TEXT_BYTES:
                raise self._wrong(name, f"a text of up to {MAX_TEXT_BYTES} bytes")
            content = bytes(self._folder.whole(name).tolist())
            if not any(content) and not self._folder.whole(f"{weight}.absmax").any():
                return self._state_of_header(weight), kind
            return read_quant_state(content, f"{self._folder.path}: {name}", kind, is_nested), kind
        raise self._lacks(weight, f"weight.{_STATE}nf4")

    def _state_of_header(self, weight: str) -> QuantState:
        """The state as far as a header without the rest of a file shows it: the number of
        neighbours that share a scale, a power of two, but not the length of rows of a flattened
        matrix."""
        values = 2 * prod(self._folder.shape(weight))
        count = prod(self._folder.shape(f"{weight}.absmax"))
        nested = f"{weight}.nested_absmax"
        outer = prod(self._folder.shape(nested)) if nested in self._names else 1
        return QuantState(
            (1, values), _power_of_two(values, count), _power_of_two(count, outer), 0.0
        )

    def _mlx(self, stem: str) -> Iterator[tuple[str, Matrix]]:
        weight, scales = f"{stem}.weight", f"{stem}.scales"
        if self._folder.dtype(weight) != "U32":
            return
        if scales not in self._names:
            raise self._lacks(weight, "scales")
        shape = self._folder.shape(weight)
        if len(shape) == 2:
            yield weight, self._mlx_matrix(stem, None)
            return
        if len(shape) != 3 or not _MLX_EXPERTS.search(stem):
            raise self._wrong(weight, "two dimensions")
        for index in range(self._experts(weight)[0]):
            name = _MLX_EXPERTS.sub(f".experts.{index}.", stem)
            yield f"{name}.weight", self._mlx_matrix(stem, index)

    def _mlx_matrix(self, stem: str, index: int | None) -> Matrix:
        weight, scales, biases = (f"{stem}.{each}" for each in ("weight", "scales", "biases"))
        exception = self._how.exceptions.get(stem, {})
        size = exception.get("group_size", self._how.group_size)
        floats = exception.get("mode", self._how.mode) == "mxfp4"
        outputs, width = self._folder.shape(weight)[-2:]
        shape = self._folder.shape(scales)
        if shape[:-1] != self._folder.shape(weight)[:-1] or not shape[-1]:
            raise self._wrong(scales, f"groups of the {outputs} outputs of {weight}")
        inputs = shape[-1] * size
        bits = width * 32 // inputs
        if bits not in (2, 3, 4, 5, 6, 8) or width * 32 != inputs * bits:
            raise self._wrong(weight, f"{inputs} inputs in groups of {size}, by {self._how.key}")
        scale = self._dtype(scales, *(("U8",) if floats else _SCALES))
        if floats:
            if size != MXFP4.values or bits != 4:
                raise self._wrong(weight, "4 bits in groups of 32, by mode mxfp4")
            format: BlockFormat = MXFP4
        else:
            self._expect(biases, scale, shape)
            format = group_format("int", bits, size, scale, "minimum")

        def blocks(first: int, end: int) -> torch.Tensor:
            from .unpacking import in_words, pack

            codes = in_words(self._folder.read(weight, 0, first, end, index), bits)
            factors = self._folder.read(scales, 0, first, end, index)
            minima = None if floats else self._folder.read(biases, 0, first, end, index)
            return pack(format, codes, bits, size, factors, minima)

        return Matrix((outputs, inputs), format, (weight, scales, biases), blocks)

    def _mxfp4(self, stem: str) -> Iterator[tuple[str, Matrix]]:
        """The experts of a layer, in two tensors."""
        codes, scales = f"{stem}_blocks", f"{stem}_scales"
        shape = self._folder.shape(codes)
        if len(shape) != 4 or shape[-1] != 16:
            raise self._wrong(codes, "experts, outputs, groups of 16 bytes")
        experts, outputs, groups, _ = self._experts(codes)
        self._dtype(codes, "U8")
        self._expect(scales, "U8", (experts, outputs, groups))
        before, _, name = stem.rpartition(".")
        for index in range(experts):

            def blocks(first: int, end: int, index: int = index) -> torch.Tensor:
                from .unpacking import in_words, pack

                data = self._folder.read(codes, 0, first, end, index)
                factors = self._folder.read(scales, 0, first, end, index)
                return pack(MXFP4, in_words(data.flatten(1), 4), 4, MXFP4.values, factors)

            yield (
                f"{before}.{index}.{name}.weight",
                Matrix((outputs, 32 * groups), MXFP4, (codes, scales), blocks),
            )

    # Checks of tensors.

    def _group_size(self, inputs: int) -> int:
        """The inputs of a row that share a scale."""
        size = self._how.group_size
        return inputs if size == -1 else min(size, inputs)

    def _integers(
        self, bits: int, size: int, inputs: int, scales: str, symmetric: bool
    ) -> BlockFormat:
        """The format of integer codes. Without zeros, and with scales in fp16, it is GGUF's, which
        all operators support, though it has a scale for each 32 inputs."""
        scale: Scale = self._dtype(scales, *_SCALES)
        run = _run(size, inputs)
        if symmetric and scale == "F16" and run % 32 == 0 and bits in (4, 8):
            return Q4_0 if bits == 4 else Q8_0
        if run * bits % 8:
            raise self._wrong(scales, f"groups of whole bytes, not of {run} codes of {bits} bits")
        offset: Offset = "none" if symmetric else "zero"
        return group_format("int", bits, run, scale, offset)

    def _order(self, groups: str) -> torch.Tensor | None:
        """The inputs sorted by group, or ``None`` if groups are contiguous."""
        import torch

        order = self._folder.whole(groups).argsort(stable=True)
        return None if torch.equal(order, torch.arange(len(order))) else order

    def _in_order(self, codes: torch.Tensor, groups: str, size: int) -> torch.Tensor:
        """Sort codes by the groups of their inputs."""
        import torch

        group, order = self._folder.whole(groups), self._order(groups)
        group = group if order is None else group[order]
        if not torch.equal(group, torch.arange(len(group), dtype=group.dtype) // size):
            raise ModelError(
                f"{self._folder.path}: {groups} does not have groups of {size} inputs: {_REMEDY}"
            )
        return codes if order is None else codes[:, order]

    def _matrix(
        self, name: str, *dtypes: str, height: int | None = None, width: int | None = None
    ) -> tuple[int, int]:
        self._dtype(name, *dtypes)
        shape = self._folder.shape(name)
        if len(shape) != 2 or height not in (None, shape[0]) or width not in (None, shape[1]):
            sizes = ["..." if each is None else str(each) for each in (height, width)]
            raise self._wrong(name, f"[{', '.join(sizes)}]")
        if 0 in shape:
            raise self._wrong(name, "some outputs and inputs")
        return shape[0], shape[1]

    def _experts(self, name: str) -> tuple[int, ...]:
        """The shape of the weights of several experts."""
        shape = self._folder.shape(name)
        if 0 in shape or shape[0] > _MAX_EXPERTS:
            raise self._wrong(name, f"up to {_MAX_EXPERTS} experts that have weights")
        return shape

    def _expect(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        self._dtype(name, dtype)
        if self._folder.shape(name) != shape:
            raise self._wrong(name, str(list(shape)))

    def _dtype(self, name: str, *dtypes: str) -> Any:
        if name not in self._names:
            raise ModelError(f"{self._folder.path} lacks {name}, by {self._how.key}: {_REMEDY}")
        dtype = self._folder.dtype(name)
        if dtype not in dtypes:
            raise ModelError(
                f"{self._folder.path}: {name} is saved in {dtype}, but {self._how.key} implies "
                f"{' or '.join(dtypes)}: {_REMEDY}"
            )
        return dtype

    def _wrong(self, name: str, expected: str) -> ModelError:
        shape = list(self._folder.shape(name))
        return ModelError(
            f"{self._folder.path}: {name} has shape {shape}, but the weights beside it and "
            f"{self._how.key} imply {expected}: {_REMEDY}"
        )

    def _lacks(self, weight: str, companion: str) -> ModelError:
        return ModelError(
            f"{self._folder.path}: {weight} is saved in {self._folder.dtype(weight)} and has no "
            f".{companion} beside it: {_REMEDY}"
        )


_STATE = "quant_state.bitsandbytes__"


def _power_of_two(numbers: int, count: int) -> int:
    """The size of ``count`` groups; the last may be shorter."""
    return 1 << (-(-numbers // max(1, count)) - 1).bit_length()


def _run(size: int, inputs: int) -> int:
    """Inputs of a block: those that share a scale, or a divisor of them and of a row."""
    both = gcd(size, inputs)
    if both <= _MAX_RUN:
        return both
    power = gcd(both, _MAX_RUN)
    return power if power >= 8 else next(n for n in range(_MAX_RUN, 0, -1) if both % n == 0)
