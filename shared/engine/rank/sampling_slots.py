"""The columns of a sequence's slot in the table of ``kernels/gpu/sampling_table.py``."""

from __future__ import annotations

import math

import numpy as np

from ....kernels.gpu import sampling_table
from ..plan import RankSampling, SamplerSpec
from .sampler import GREEDY_BELOW, stream_of
from .table_upload import Value

_BITS = 32


def filters(params: RankSampling, vocab_size: int) -> bool:
    """True if draws leave out some tokens for their probability."""
    limited = 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0
    return params.temperature >= GREEDY_BELOW and limited


def _edits(spec: SamplerSpec) -> bool:
    """True if logits of some draws are edited."""
    params = spec.params
    lists = params.logit_bias, params.allowed_token_ids, params.bad_words, spec.blocked_tokens
    return params.penalizes or any(lists)


def columns_of(spec: SamplerSpec, vocab_size: int) -> list[Value]:
    """The columns of a sequence that starts, or that resumes after its outputs."""
    params = spec.params
    columns: list[Value] = [0] * sampling_table.COLUMNS.value
    stream = stream_of(spec.seed)
    columns[sampling_table.STREAM.value] = stream - (stream >> 63 << 64)  # as a signed number
    columns[sampling_table.INDEX.value] = len(spec.outputs)
    greedy = params.temperature < GREEDY_BELOW
    columns[sampling_table.SCALE.value] = 0.0 if greedy else math.log2(math.e) / params.temperature
    columns[sampling_table.TOP_K.value] = params.top_k if params.top_k < vocab_size else 0
    columns[sampling_table.TOP_P.value] = float(params.top_p)
    span = params.temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf
    columns[sampling_table.SPAN.value] = span
    columns[sampling_table.REPETITION.value] = float(params.repetition_penalty)
    columns[sampling_table.PRESENCE.value] = float(params.presence_penalty)
    columns[sampling_table.FREQUENCY.value] = float(params.frequency_penalty)
    if params.penalizes:
        counts = 2 * np.bincount(_ints(spec.outputs), minlength=vocab_size)
        counts[spec.prompt] |= 1
        columns[sampling_table.COUNTS.value] = _ints(counts)
    if params.logit_bias:
        values = np.array(list(params.logit_bias.values()), np.float32)
        biases = np.concatenate([_ints(list(params.logit_bias)), values.view(np.int32)])
        columns[sampling_table.BIASES.value] = biases
        columns[sampling_table.BIAS_COUNT.value] = len(values)
    if spec.blocked_tokens:
        columns[sampling_table.BLOCKED.value] = _ints(spec.blocked_tokens)
        columns[sampling_table.BLOCKED_COUNT.value] = len(spec.blocked_tokens)
        columns[sampling_table.BLOCKED_UNTIL.value] = spec.blocked_until
    if params.bad_words:
        _set_bad_words(columns, spec)
    if params.allowed_token_ids:
        columns[sampling_table.ALLOWED.value] = _bits(params.allowed_token_ids, vocab_size)
    columns[sampling_table.EDITED.value] = int(_edits(spec))
    return columns


def _set_bad_words(columns: list[Value], spec: SamplerSpec) -> None:
    words, allowed = spec.params.bad_words, spec.params.allowed_token_ids
    prefix = max(map(len, words)) - 1
    table = np.full((len(words), 1 + prefix), -1, np.int32)
    for row, word in zip(table, words, strict=True):
        row[: len(word)] = word[::-1]
    recent = np.full(prefix, -1, np.int32)
    for index in range(max(0, len(spec.outputs) - prefix), len(spec.outputs)):
        recent[index % prefix] = spec.outputs[index]
    columns[sampling_table.WORDS.value] = table.ravel()
    columns[sampling_table.WORD_COUNT.value] = len(words)
    columns[sampling_table.PREFIX.value] = prefix
    columns[sampling_table.RECENT.value] = recent
    if allowed:
        columns[sampling_table.ALLOWED_IDS.value] = _ints(allowed)
        columns[sampling_table.ALLOWED_COUNT.value] = len(allowed)


def mask_words(mask: bytes, vocab_size: int) -> np.ndarray:
    """A mask of tokens as int32, with a bit for every token of the vocabulary."""
    size = -(-vocab_size // _BITS) * _BITS // 8
    return np.frombuffer(mask[:size].ljust(size, b"\0"), np.int32)


def _bits(tokens: tuple[int, ...], vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // _BITS) * _BITS, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _ints(values: object) -> np.ndarray:
    return np.asarray(values, np.int32)
