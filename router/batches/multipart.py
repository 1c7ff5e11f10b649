"""Streaming parser of forms with a file (multipart/form-data)."""

from __future__ import annotations

import logging

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from ..errors import ApiError, invalid

MAX_HEADER_BYTES = 8 * 1024
# Sum over all fields except the file.
MAX_FIELD_BYTES = 64 * 1024
MAX_PARTS = 32
MAX_BOUNDARY = 70

# The library warns of each malformed form, but that is the client's error.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


def boundary_of(content_type: str) -> bytes:
    """The boundary of a form. Raises ``ApiError`` 415 for another type."""
    kind, parameters = parse_options_header(content_type)
    boundary = parameters.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= MAX_BOUNDARY:
        raise ApiError(415, "The content type must be 'multipart/form-data' with a boundary.")
    return boundary


class MultipartForm:
    """Parses a form that arrives in any pieces, with at most one file. ``fields`` are all other
    fields; ``feed`` returns the file's content."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.file_field: str | None = None
        self.filename = ""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._check_name,
                "on_part_data": self._take,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
            max_header_size=MAX_HEADER_BYTES,
        )
        self._finished = False
        self._parts = 0
        self._field_bytes = 0
        self._content: list[bytes] = []
        # State of the current part: the current header, its name, and the header's or part's value.
        self._header = bytearray()
        self._name: str | None = None
        self._value = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Parse more bytes, and return the file's content in them. Raises ``RequestError``."""
        try:
            self._parser.write(data)
        except MultipartParseError:
            message = (
                "The body is not a form: a boundary or a header is missing, wrong or too long."
            )
            raise invalid(message) from None
        content = b"".join(self._content)
        self._content.clear()
        return content

    def check_finished(self) -> None:
        """Raise ``RequestError`` if the form has not ended."""
        if not self._finished:
            raise invalid("The form is incomplete: its last boundary is missing.")

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise invalid(f"The form has more than {MAX_PARTS} parts, which is the limit.")
        self._name = None

    def _end_header(self) -> None:
        header, value = bytes(self._header).lower(), bytes(self._value)
        self._header.clear()
        self._value.clear()
        if header != b"content-disposition":
            return
        _, parameters = parse_options_header(value)
        if b"name" in parameters:
            self._name = _text(parameters[b"name"])
        if b"filename" in parameters:
            if self.file_field is not None:
                raise invalid("The form has more than one file.", "file")
            self.file_field, self.filename = self._name, _text(parameters[b"filename"])

    def _check_name(self) -> None:
        if self._name is None:
            raise invalid("A part of the form has no name.")

    def _take(self, data: bytes, start: int, end: int) -> None:
        """Add content to the current part."""
        if self._name == self.file_field:
            self._content.append(data[start:end])
            return
        self._field_bytes += end - start
        if self._field_bytes > MAX_FIELD_BYTES:
            raise invalid(f"The form's fields are over the limit of {MAX_FIELD_BYTES} bytes.")
        self._value += data[start:end]

    def _end_part(self) -> None:
        if self._name is not None and self._name != self.file_field:
            if self._name in self.fields:
                raise invalid(f"The form has the field '{self._name[:64]}' twice.")
            self.fields[self._name] = self._value.decode("utf-8", "replace")
        self._value.clear()

    def _end(self) -> None:
        self._finished = True


def _text(parameter: bytes) -> str:
    """A parameter of a header, with the browsers' escapes of quotation marks undone."""
    return parameter.decode("utf-8", "replace").replace("%22", '"')
