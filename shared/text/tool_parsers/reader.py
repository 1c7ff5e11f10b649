"""Text read in pieces by a parser that is written as if it had all of it.

A parser is a generator over a ``Reader``: it asks for text by the methods that are generators too,
which suspend it until there is enough, and reports what it finds: content, calls, arguments.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator

from ..output import CallDelta, TextDelta

Steps = Generator[None, None, None]
Sink = Callable[[str], None]

# Text that is buffered before it is known to be what it seems.
MAX_BUFFERED = 64 * 1024
# Calls of one choice; what looks like further ones is content.
MAX_CALLS = 512


class NotACallError(Exception):
    """The text is not the call that its beginning promised."""


class Reader:
    """The text of one choice, and what has been found in it. ``held`` is the text that was not read
    yet, ``ended`` is true when no more will come."""

    def __init__(self, *, parallel: bool = True) -> None:
        self.held = ""
        self.ended = False
        self.calls = 0
        self.thinking = False  # reading text of the reasoning
        self.new_id = new_call_id
        self._parallel = parallel
        self._found: list[TextDelta] = []
        self._space: list[str] = []  # at the end of the content: dropped before a call
        self._read: list[str] | None = None  # since ``attempt``

    def take_found(self) -> list[TextDelta]:
        """Everything found since the last call of this method."""
        found, self._found = self._found, []
        return found

    # -- what a parser finds ----------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Report content. White space at its end waits for what follows."""
        shown = text.rstrip()
        if shown:
            self._found.append(TextDelta("".join((*self._space, shown))))
            self._space.clear()
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def reasoning(self, text: str) -> None:
        self.recognised()
        if text:
            self._found.append(TextDelta(reasoning=text))

    def recognised(self) -> None:
        """Note that what was read of an attempt is what it seemed to be, and will not be
        content."""
        if self._read is not None:
            self._read = []

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Report a call; what was read of it will not be content."""
        if self.calls >= MAX_CALLS:
            raise NotACallError
        self.calls += 1
        self._space.clear()
        self.recognised()
        self._add_call(call_id or self.new_id(), name, "")

    def arguments(self, text: str) -> None:
        """Report a fragment of the last call's arguments."""
        self.recognised()
        if text:
            self._add_call("", "", text)

    def end(self) -> None:
        """Report the white space at the end of the content, since no call follows it."""
        if self._space and not self.calls:
            self._found.append(TextDelta("".join(self._space)))
        self._space.clear()

    def _add_call(self, call_id: str, name: str, arguments: str) -> None:
        index = self.calls - 1
        if self._parallel or index == 0:
            call = CallDelta(index, call_id, name, arguments)
            self._found.append(TextDelta(calls=(call,)))

    # -- reading ----------------------------------------------------------------------------------

    def take(self, length: int) -> str:
        """Read this many characters of the held text."""
        text, self.held = self.held[:length], self.held[length:]
        if self._read is not None:
            self._read.append(text)
        return text

    def give_back(self, text: str) -> None:
        """Unread the ``text`` that was read last."""
        self.held = text + self.held
        if self._read:
            self._read[-1] = self._read[-1].removesuffix(text)

    def need(self, length: int) -> Steps:
        """Wait until this many characters are held, or no more will come."""
        while len(self.held) < length and not self.ended:
            yield

    def at_end(self) -> Generator[None, None, bool]:
        """Wait for the next character. Returns false if there is none."""
        yield from self.need(1)
        return not self.held

    def accept(self, marker: str) -> Generator[None, None, bool]:
        """Read ``marker`` if it comes next. Returns whether it did."""
        while len(self.held) < len(marker) and marker.startswith(self.held) and not self.ended:
            yield
        if not self.held.startswith(marker):
            return False
        self.take(len(marker))
        return True

    def expect(self, marker: str) -> Steps:
        """Read ``marker``. Raises ``NotACallError`` if something else comes next."""
        if not (yield from self.accept(marker)):
            raise NotACallError

    def skip_space(self) -> Steps:
        """Read white space, all of it. Raises ``NotACallError`` for more than any call has."""
        left = MAX_BUFFERED
        while True:
            left -= len(self.take(len(self.held) - len(self.held.lstrip())))
            if left < 0:
                raise NotACallError
            if self.held or self.ended:
                return
            yield

    def skip_space_of_content(self) -> Steps:
        """Read white space before what may be content or a call."""
        while True:
            self.content(self.take(len(self.held) - len(self.held.lstrip())))
            if self.held or self.ended:
                return
            yield

    def until(self, *markers: str, to: Sink) -> Generator[None, None, str]:
        """Read up to the first of ``markers``, and that; the text before it goes ``to`` a sink.
        Returns the marker, which is empty if the text ended without one."""
        while True:
            found = _first(self.held, markers)
            if found is not None:
                to(self.take(found[0]))
                return self.take(len(found[1]))
            if self.ended:
                to(self.take(len(self.held)))
                return ""
            to(self.take(len(self.held) - _held_back(self.held, markers)))
            yield

    def capture(self, *markers: str, most: int = MAX_BUFFERED) -> Generator[None, None, str]:
        """Read up to one of ``markers``, and that. Returns the text before it. Raises
        ``NotACallError`` if there is none, or more text than ``most``."""
        parts: list[str] = []
        left = most

        def keep(text: str) -> None:
            nonlocal left
            left -= len(text)
            if left < 0:
                raise NotACallError
            parts.append(text)

        if not (yield from self.until(*markers, to=keep)):
            raise NotACallError
        return "".join(parts)

    def attempt(self, steps: Steps, *, after: str = "") -> Generator[None, None, bool]:
        """Read a call, of which ``after`` has been read. If it is none, its text is content, or
        what is left of it after arguments that were reported. Returns whether it was one."""
        self._read = [after]
        try:
            yield from steps
            return True
        except NotACallError:
            self.content("".join(self._read))
            return False
        finally:
            self._read = None


def new_call_id() -> str:
    """A random id of a tool call, in the shape of OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


def _first(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """The position of the first marker, and the marker."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found) if found else None


def _held_back(text: str, markers: tuple[str, ...]) -> int:
    """The length of the longest end of ``text`` with which a marker begins."""
    longest = min(max(map(len, markers)) - 1, len(text))
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        if any(marker.startswith(end) for marker in markers):
            return length
    return 0
