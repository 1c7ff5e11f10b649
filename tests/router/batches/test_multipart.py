"""Forms with a file that arrive in pieces of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.router.batches.multipart import MAX_HEADER_BYTES, MultipartForm, boundary_of
from tandem.router.errors import ApiError
from tandem.shared.errors import RequestError

BOUNDARY = b"b0undary"


def form_of(content: bytes, filename: str = "a.jsonl") -> bytes:
    head = b"--" + BOUNDARY + b'\r\nContent-Disposition: form-data; name="'
    return (
        head + b'purpose"\r\n\r\nbatch\r\n'
        + head + b'file"; filename="' + filename.encode() + b'"\r\n'
        + b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n"
        + b"--" + BOUNDARY + b"--\r\n"
    )  # fmt: skip


# Content that looks like the form around it.
CONTENT = (
    st.lists(st.sampled_from([b"\r\n", b"--", BOUNDARY, b"-", b"\r", b"\n", b"\0", b"x" * 40]))
    .map(b"".join)
    .filter(lambda data: b"\r\n--" + BOUNDARY not in b"\r\n" + data)
)


@given(content=CONTENT, size=st.integers(1, 90))
def test_pieces_of_any_size_make_the_same_file(content: bytes, size: int) -> None:
    data, form = form_of(content), MultipartForm(BOUNDARY)
    pieces = [form.feed(data[start : start + size]) for start in range(0, len(data), size)]
    form.check_finished()
    assert b"".join(pieces) == content
    assert (form.fields, form.filename) == ({"purpose": "batch"}, "a.jsonl")


@given(data=st.binary(max_size=300), size=st.integers(1, 90))
def test_other_bytes_are_rejected(data: bytes, size: int) -> None:
    form = MultipartForm(BOUNDARY)
    with pytest.raises(RequestError):
        for start in range(0, len(data), size):
            form.feed(data[start : start + size])
        form.check_finished()


def test_forms_hold_little() -> None:
    for data in (b"x" * (MAX_HEADER_BYTES + 1), form_of(b"").split(b"batch")[0] + b"x" * 70_000):
        with pytest.raises(RequestError, match="form"):
            MultipartForm(BOUNDARY).feed(data)
    unending = form_of(b"")[:-4] + b"\r\n" + b"h" * (MAX_HEADER_BYTES + 1)
    with pytest.raises(RequestError):
        MultipartForm(BOUNDARY).feed(unending)


def test_the_content_type_names_the_boundary() -> None:
    assert boundary_of('multipart/form-data; boundary="a b"') == b"a b"
    assert boundary_of("Multipart/Form-Data;boundary=ab; x=y") == b"ab"
    for wrong in ("", "application/json", "multipart/form-data", "text/x; boundary=a"):
        with pytest.raises(ApiError):
            boundary_of(wrong)
