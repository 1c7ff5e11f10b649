"""Forms with a file (multipart/form-data), parsed as they arrive."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..errors import ApiError, invalid

MAX_HEADER_BYTES = 8 * 1024
# Of all fields that are not files.
MAX_FIELD_BYTES = 64 * 1024
MAX_PARTS = 32
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(r'[;\s]name="((?:[^"\\\r\n]|\\.)*)"')
_FILENAME = re.compile(r'[;\s]filename="((?:[^"\\\r\n]|\\.)*)"')


def boundary_of(content_type: str) -> bytes:
    """The boundary of a form. Raises ``ApiError`` 415 for another type."""
    kind, _, parameters = content_type.partition(";")
    found = _BOUNDARY.search(parameters)
    if kind.strip().lower() != "multipart/form-data" or found is None:
        raise ApiError(415, "The content type must be 'multipart/form-data' with a boundary.")
    return (found[1] or found[2]).encode("latin-1")


@dataclass(slots=True)
class MultipartForm:
    """Takes the bytes of a form in any pieces. ``fields`` are those that are not files; there may
    be one file, whose content ``feed`` returns."""

    boundary: bytes
    fields: dict[str, str] = field(default_factory=dict)
    file_field: str | None = None
    filename: str = ""
    finished: bool = False
    _buffer: bytearray = field(default_factory=lambda: bytearray(b"\r\n"))
    _name: str | None = None  # of the part that is being read; None between parts
    _value: bytearray = field(default_factory=bytearray)
    _parts: int = 0
    _field_bytes: int = 0

    def feed(self, data: bytes) -> bytes:
        """Content of the file that is complete. Raises ``RequestError`` for what is no form."""
        self._buffer += data
        return b"".join(self._content())

    def check_finished(self) -> None:
        """Raise ``RequestError`` if the form has not ended."""
        if not self.finished:
            raise invalid("The form is incomplete: its last boundary is missing.")

    def _content(self) -> Iterator[bytes]:
        delimiter = b"\r\n--" + self.boundary
        while not self.finished:
            at = self._buffer.find(delimiter)
            # What may be the begin of a boundary waits for the next bytes.
            ready = at if at >= 0 else max(0, len(self._buffer) - len(delimiter) + 1)
            if at >= 0 and len(self._buffer) < at + len(delimiter) + 2:
                return
            if self._name is not None:
                yield from self._take(bytes(self._buffer[:ready]))
                del self._buffer[:ready]
                at = 0 if at >= 0 else at
            if at < 0:
                if self._name is None:
                    self._check_header(0)
                return
            if not self._next_part(at + len(delimiter)):
                self._check_header(at)
                return

    def _take(self, data: bytes) -> Iterator[bytes]:
        """Add content to the part that is being read."""
        if self._name == self.file_field:
            yield data
            return
        self._field_bytes += len(data)
        if self._field_bytes > MAX_FIELD_BYTES:
            raise invalid(f"The form's fields are over the limit of {MAX_FIELD_BYTES} bytes.")
        self._value += data

    def _next_part(self, start: int) -> bool:
        """Read the header of the part after a boundary; False if it has not arrived."""
        if self._buffer[start : start + 2] == b"--":
            self._end_part()
            self.finished = True
            return True
        end = self._buffer.find(b"\r\n\r\n", start)
        if end < 0:
            return False
        self._end_part()
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise invalid(f"The form has more than {MAX_PARTS} parts, which is the limit.")
        self._begin_part(bytes(self._buffer[start:end]).decode("utf-8", "replace"))
        del self._buffer[: end + 4]
        return True

    def _begin_part(self, header: str) -> None:
        name, filename = _NAME.search(header), _FILENAME.search(header)
        if name is None:
            raise invalid("A part of the form has no name.")
        self._name = _unescaped(name[1])
        if filename is not None:
            if self.file_field is not None:
                raise invalid("The form has more than one file.", "file")
            self.file_field, self.filename = self._name, _unescaped(filename[1])

    def _end_part(self) -> None:
        if self._name is not None and self._name != self.file_field:
            if self._name in self.fields:
                raise invalid(f"The form has the field '{self._name[:64]}' twice.")
            self.fields[self._name] = self._value.decode("utf-8", "replace")
        self._name, self._value = None, bytearray()

    def _check_header(self, start: int) -> None:
        if len(self._buffer) - start > MAX_HEADER_BYTES:
            raise invalid("The body is not a form: a part's header is missing or too long.")


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text).replace("%22", '"')
