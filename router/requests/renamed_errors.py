"""Errors of a request that is converted to another API's: they name the fields that it has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...shared.errors import RequestError

# A pattern at the beginning of a field's name, and its replacement.
Names = Sequence[tuple[re.Pattern[str], str]]
_QUOTED = re.compile(r"'([a-z_]+(?:\[\d+\])?(?:\.[a-z_]+(?:\[\d+\])?)*)'")


@contextmanager
def fields_renamed(names: Names) -> Iterator[None]:
    """Rename the fields in the error of the block, in its message too."""
    try:
        yield
    except RequestError as error:
        error.args = (_QUOTED.sub(lambda quoted: f"'{_renamed(quoted[1], names)}'", str(error)),)
        error.param = None if error.param is None else _renamed(error.param, names)
        raise


def _renamed(field: str, names: Names) -> str:
    for pattern, replacement in names:
        made, count = pattern.subn(replacement, field, count=1)
        if count:
            return made
    return field
