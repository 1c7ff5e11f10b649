"""A type of fields that travel as packed bytes, apart from the codec: plans of steps need no
msgpack."""

from __future__ import annotations

from typing import Annotated

PACKED = "packed"
# Block and token ids: unsigned, at most 32 bits. On the wire in the byte order of the machine,
# since both ends are processes of one host.
Uint32s = Annotated[list[int], PACKED]
