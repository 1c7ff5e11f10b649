"""Text that arrives in pieces, for parsers written as if they had all of it.

A parser is a generator over a ``Reader``. It reads by methods that are generators too and suspend
it until there is enough text, and reports what it finds: content, calls, arguments.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator

from ..markers import first_of, partial_marker
from ..output import CallDelta, TextDelta

Steps = Generator[None, None, None]
Sink = Callable[[str], None]

# Text that is buffered until it is known to be a call.
MAX_BUFFERED = 64 * 1024
# White space and repeated markers that lookahead skips.
MAX_SPACE = 1024
MAX_REPEATED = 8
# Calls of one choice; further ones are content.
MAX_CALLS = 512


class NotACallError(Exception):
    """The text began like a call but is not one."""


class Reader:
    """The text of one choice, and what has been found in it. ``buffer`` is the text that was not
    read yet; ``ended`` is true when no more will come.

    ``marked`` is true from the first call on, where markers are no longer content, nor is an
    incomplete marker at the end of the text. ``stray`` is a marker without a meaning there; its
    first occurrence in the content is dropped."""

    def __init__(self, *, parallel: bool = True, stray: str = "") -> None:
        self.buffer = ""
        self.ended = False
        self.calls = 0
        self.marked = False
        self.verbatim = False  # reading text that only the end of the output ends
        self.thinking = False  # reading text of the reasoning
        self.new_id = new_call_id
        self.call_ids: set[str] = set()  # chosen by the model
        self._parallel = parallel
        self._stray = stray
        self._deltas: list[TextDelta] = []
        self._arguments: list[str] = []  # of the last call, not yet in ``_deltas``
        self._space: list[str] = []  # at the end of the content: dropped before a call
        self._read: list[str] | None = None  # since ``attempt``

    @property
    def in_call(self) -> bool:
        """True from the first call on, and while text may be a call."""
        return self.calls > 0 or self._read is not None

    def take_deltas(self) -> list[TextDelta]:
        """Return everything found since the last time."""
        self._join_arguments()
        deltas, self._deltas = self._deltas, []
        return deltas

    # -- reporting --------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Report content. White space at its end is held until more follows."""
        body = text.rstrip()
        if body:
            self._report(TextDelta("".join((*self._space, body))))
            self._space.clear()
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def reasoning(self, text: str) -> None:
        self.recognise()
        if text:
            self._report(TextDelta(reasoning=text))

    def recognise(self) -> None:
        """Note that the text read since ``attempt`` is not content."""
        if self._read is not None:
            self._read = []

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Report a call; the text read of it is not content."""
        if self.calls >= MAX_CALLS:
            raise NotACallError
        self._join_arguments()
        self.calls += 1
        self.marked = True
        self._space.clear()
        self.recognise()
        if call_id in self.call_ids:
            call_id = ""
        self.call_ids.add(call_id)
        if self._reports_call:
            call = CallDelta(self.calls - 1, call_id or self.new_id(), name)
            self._report(TextDelta(calls=(call,)))

    def arguments(self, text: str) -> None:
        """Report a fragment of the last call's arguments."""
        self.recognise()
        if self._reports_call and text:
            self._arguments.append(text)

    def end(self) -> None:
        """Report white space at the end of the content, since no call follows."""
        if self._space and not self.calls:
            self._report(TextDelta("".join(self._space)))
        self._space.clear()

    @property
    def _reports_call(self) -> bool:
        return self._parallel or self.calls == 1

    def _report(self, delta: TextDelta) -> None:
        self._join_arguments()
        self._deltas.append(delta)

    def _join_arguments(self) -> None:
        if self._arguments:
            call = CallDelta(self.calls - 1, arguments="".join(self._arguments))
            self._arguments.clear()
            self._deltas.append(TextDelta(calls=(call,)))

    # -- reading ----------------------------------------------------------------------------------

    def take(self, length: int) -> str:
        """Read this many characters of the buffer."""
        text, self.buffer = self.buffer[:length], self.buffer[length:]
        if self._read is not None:
            self._read.append(text)
        return text

    def give_back(self, text: str) -> None:
        """Unread ``text``, which was read last."""
        self.buffer = text + self.buffer
        if self._read:
            self._read[-1] = self._read[-1].removesuffix(text)

    def need(self, length: int) -> Steps:
        """Wait until the buffer has this many characters, or no more will come."""
        while len(self.buffer) < length and not self.ended:
            yield

    def at_end(self) -> Generator[None, None, bool]:
        """Wait for the next character. Returns true if there is none."""
        yield from self.need(1)
        return not self.buffer

    def accept(self, marker: str) -> Generator[None, None, bool]:
        """Read ``marker`` if it comes next. Returns whether it did."""
        while len(self.buffer) < len(marker) and marker.startswith(self.buffer) and not self.ended:
            yield
        if not self.buffer.startswith(marker):
            self._drop_beginning(marker)
            return False
        self.take(len(marker))
        return True

    def expect(self, marker: str) -> Steps:
        """Read ``marker``. Raises ``NotACallError`` if something else comes next."""
        if not (yield from self.accept(marker)):
            raise NotACallError

    def skip_space(self) -> Steps:
        """Read all white space. Raises ``NotACallError`` for more than any call has."""
        remaining = MAX_BUFFERED
        while True:
            remaining -= len(self.take(len(self.buffer) - len(self.buffer.lstrip())))
            if remaining < 0:
                raise NotACallError
            if self.buffer or self.ended:
                return
            yield

    def skip_space_of_content(self) -> Steps:
        """Read white space before content or a call, as content."""
        while True:
            self.content(self.take(len(self.buffer) - len(self.buffer.lstrip())))
            if self.buffer or self.ended:
                return
            yield

    def next_is(self, *markers: str) -> Generator[None, None, str]:
        """Wait until it is known which of ``markers`` comes next. Returns the longest without
        reading it, or an empty text if none does."""
        while not self.ended and any(
            len(self.buffer) < len(marker) and marker.startswith(self.buffer) for marker in markers
        ):
            yield
        return max(filter(self.buffer.startswith, markers), key=len, default="")

    def skip(self, *markers: str) -> Generator[None, None, list[str]]:
        """Read white space and any number of ``markers``. Returns the markers."""
        result: list[str] = []
        while True:
            yield from self.skip_space()
            marker = yield from self.next_is(*markers)
            if not marker:
                self._drop_beginning(*markers)
                return result
            self.take(len(marker))
            result.append(marker)

    def followed_by(self, at: int, *markers: str, repeated: str = "") -> bool | None:
        """True if one of ``markers`` follows position ``at`` of the buffer, after white space and
        copies of the marker ``repeated``. ``None`` if too little follows to tell."""
        for _ in range(MAX_REPEATED):
            rest = self.buffer[at : at + MAX_SPACE].lstrip()
            if not repeated or not rest.startswith(repeated):
                break
            at = self.buffer.index(repeated, at) + len(repeated)
        if len(self.buffer) - at >= MAX_SPACE and not rest:
            return True
        if rest.startswith(markers):
            return True
        return None if any(marker.startswith(rest) for marker in (*markers, repeated)) else False

    def comes_next(self, *markers: str) -> Generator[None, None, bool | None]:
        """Wait until it is known whether one of ``markers`` comes next, after white space. Returns
        ``None`` if the text ends there."""
        while (follows := self.followed_by(0, *markers)) is None and not self.ended:
            yield
        if follows is None and self.marked:
            self.take(len(self.buffer))
        return follows

    def until(self, *markers: str, to: Sink) -> Generator[None, None, str]:
        """Read up to and including the first of ``markers``; the text before it goes ``to`` a sink.
        Returns the marker, or an empty text if there is none. Where text is ``marked``, an
        incomplete marker at its end is dropped."""
        while True:
            match = first_of(self.buffer, markers)
            if match is not None:
                to(self.take(match[0]))
                return self.take(len(match[1]))
            to(self.take(len(self.buffer) - partial_marker(self.buffer, markers)))
            if self.ended:
                rest = self.take(len(self.buffer))
                if not self.marked:
                    to(rest)
                return ""
            yield

    def content_until(
        self, *markers: str, ends: tuple[str, ...] = ()
    ) -> Generator[None, None, str]:
        """Read content up to and including one of ``markers``, which is returned as by ``until``.
        Where text is ``marked``, the ``ends`` of calls are dropped."""
        while True:
            others: tuple[str, ...] = ()
            if self.marked:
                others = (*ends, self._stray) if self._stray else ends
            marker = yield from self.until(*markers, *others, to=self.content)
            if marker not in others:
                return marker
            if marker == self._stray:
                self._stray = ""
                self._space.clear()

    def capture(self, *markers: str, max_length: int = MAX_BUFFERED) -> Generator[None, None, str]:
        """Read up to and including one of ``markers``. Returns the text before it. Raises
        ``NotACallError`` if there is none within ``max_length`` characters."""
        text, _ = yield from self.capture_to(*markers, max_length=max_length)
        return text

    def capture_to(
        self, *markers: str, max_length: int = MAX_BUFFERED
    ) -> Generator[None, None, tuple[str, str]]:
        """Like ``capture``, but return the text and the marker."""
        parts: list[str] = []
        remaining = max_length

        def keep(text: str) -> None:
            nonlocal remaining
            remaining -= len(text)
            if remaining < 0:
                self.give_back(text[remaining:])
                raise NotACallError
            parts.append(text)

        marker = yield from self.until(*markers, to=keep)
        if not marker:
            raise NotACallError
        return "".join(parts), marker

    def attempt(self, steps: Steps, *, after: str = "") -> Generator[None, None, bool]:
        """Try to read a call whose beginning ``after`` has been read. If it is not a call, its text
        is content, unless the text ended in it and is ``marked``. Returns whether it was a call."""
        self._read = [after]
        try:
            yield from steps
            return True
        except NotACallError:
            if self.ended and self.marked:
                self.buffer = ""
            else:
                self.content("".join(self._read))
            return False
        finally:
            self._read = None

    def marked_calls(
        self,
        call: Callable[[list[str]], Steps],
        starts: tuple[str, ...],
        ends: tuple[str, ...] = (),
    ) -> Steps:
        """Read content, and calls that begin with one or more of ``starts``, which are passed to
        ``call``."""

        def call_after(marker: str) -> Steps:
            markers = yield from self.skip(*starts)
            yield from call([marker, *markers])

        while marker := (yield from self.content_until(*starts, ends=ends)):
            yield from self.attempt(call_after(marker), after=marker)

    def _drop_beginning(self, *markers: str) -> None:
        """Drop an incomplete marker at the end of the text, where it is ``marked``."""
        if self.ended and self.marked and any(one.startswith(self.buffer) for one in markers):
            self.take(len(self.buffer))


def discard(text: str) -> None:
    """A sink for text that is dropped."""


def new_call_id() -> str:
    """A random id of a tool call, in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"
