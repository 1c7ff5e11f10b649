"""Text read in pieces by a parser that is written as if it had all of it.

A parser is a generator over a ``Reader``: it asks for text by the methods that are generators too,
which suspend it until there is enough, and reports what it finds: content, calls, arguments.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator

from ..markers import first_of, held_back
from ..output import CallDelta, TextDelta

Steps = Generator[None, None, None]
Sink = Callable[[str], None]

# Text that is buffered before it is known to be what it seems.
MAX_BUFFERED = 64 * 1024
# White space, and repeated markers, that are looked past to see what follows.
MAX_SPACE = 1024
MAX_REPEATED = 8
# Calls of one choice; what looks like further ones is content.
MAX_CALLS = 512


class NotACallError(Exception):
    """The text is not the call that its beginning promised."""


class Reader:
    """The text of one choice, and what has been found in it. ``held`` is the text that was not read
    yet, ``ended`` is true when no more will come.

    ``marked`` is true where markers are no content any more, nor their beginnings at the end of the
    text: from the first call on. ``stray`` is a marker that belongs to nothing then; its first
    occurrence in the content is dropped."""

    def __init__(self, *, parallel: bool = True, stray: str = "") -> None:
        self.held = ""
        self.ended = False
        self.calls = 0
        self.marked = False
        self.verbatim = False  # reading text that only the end of the output ends
        self.thinking = False  # reading text of the reasoning
        self.new_id = new_call_id
        self.call_ids: set[str] = set()  # that the model has given
        self._parallel = parallel
        self._stray = stray
        self._found: list[TextDelta] = []
        self._arguments: list[str] = []  # of the last call, since what was found before
        self._space: list[str] = []  # at the end of the content: dropped before a call
        self._read: list[str] | None = None  # since ``attempt``

    @property
    def in_call(self) -> bool:
        """True from what may be the beginning of a call."""
        return self.calls > 0 or self._read is not None

    def take_found(self) -> list[TextDelta]:
        """Everything found since the last call of this method."""
        self._join_arguments()
        found, self._found = self._found, []
        return found

    # -- what a parser finds ----------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Report content. White space at its end waits for what follows."""
        shown = text.rstrip()
        if shown:
            self._find(TextDelta("".join((*self._space, shown))))
            self._space.clear()
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def reasoning(self, text: str) -> None:
        self.recognised()
        if text:
            self._find(TextDelta(reasoning=text))

    def recognised(self) -> None:
        """Note that what was read of an attempt is what it seemed to be, and will not be
        content."""
        if self._read is not None:
            self._read = []

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Report a call; what was read of it will not be content."""
        if self.calls >= MAX_CALLS:
            raise NotACallError
        self._join_arguments()
        self.calls += 1
        self.marked = True
        self._space.clear()
        self.recognised()
        if call_id in self.call_ids:
            call_id = ""
        self.call_ids.add(call_id)
        if self._reports_call:
            call = CallDelta(self.calls - 1, call_id or self.new_id(), name)
            self._find(TextDelta(calls=(call,)))

    def arguments(self, text: str) -> None:
        """Report a fragment of the last call's arguments."""
        self.recognised()
        if self._reports_call and text:
            self._arguments.append(text)

    def end(self) -> None:
        """Report the white space at the end of the content, since no call follows it."""
        if self._space and not self.calls:
            self._find(TextDelta("".join(self._space)))
        self._space.clear()

    @property
    def _reports_call(self) -> bool:
        return self._parallel or self.calls == 1

    def _find(self, delta: TextDelta) -> None:
        self._join_arguments()
        self._found.append(delta)

    def _join_arguments(self) -> None:
        if self._arguments:
            call = CallDelta(self.calls - 1, arguments="".join(self._arguments))
            self._arguments.clear()
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
        """Wait for the next character. Returns true if there is none."""
        yield from self.need(1)
        return not self.held

    def accept(self, marker: str) -> Generator[None, None, bool]:
        """Read ``marker`` if it comes next. Returns whether it did."""
        while len(self.held) < len(marker) and marker.startswith(self.held) and not self.ended:
            yield
        if not self.held.startswith(marker):
            self._drop_beginning(marker)
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

    def next_is(self, *markers: str) -> Generator[None, None, str]:
        """Wait until it is known which of ``markers`` comes next, and stays. Returns the longest,
        or an empty text if none does."""
        while not self.ended and any(
            len(self.held) < len(marker) and marker.startswith(self.held) for marker in markers
        ):
            yield
        return max(filter(self.held.startswith, markers), key=len, default="")

    def skip(self, *markers: str) -> Generator[None, None, list[str]]:
        """Read white space, and ``markers`` in it, any number of them. Returns those."""
        found: list[str] = []
        while True:
            yield from self.skip_space()
            marker = yield from self.next_is(*markers)
            if not marker:
                self._drop_beginning(*markers)
                return found
            self.take(len(marker))
            found.append(marker)

    def followed_by(self, at: int, *markers: str, repeated: str = "") -> bool | None:
        """True if one of ``markers`` follows position ``at`` of the held text, after white space
        and some ``repeated`` markers. ``None`` if too little follows to know."""
        for _ in range(MAX_REPEATED):
            rest = self.held[at : at + MAX_SPACE].lstrip()
            if not repeated or not rest.startswith(repeated):
                break
            at = self.held.index(repeated, at) + len(repeated)
        if len(self.held) - at >= MAX_SPACE and not rest:
            return True
        if rest.startswith(markers):
            return True
        return None if any(marker.startswith(rest) for marker in (*markers, repeated)) else False

    def comes_next(self, *markers: str) -> Generator[None, None, bool | None]:
        """Wait until it is known whether one of ``markers`` comes next, after white space. ``None``
        if the text ends there."""
        while (follows := self.followed_by(0, *markers)) is None and not self.ended:
            yield
        if follows is None and self.marked:
            self.take(len(self.held))
        return follows

    def until(self, *markers: str, to: Sink) -> Generator[None, None, str]:
        """Read up to the first of ``markers``, and that; the text before it goes ``to`` a sink.
        Returns the marker, which is empty if the text ended without one. Where text is ``marked``,
        a beginning of a marker at its end is dropped."""
        while True:
            found = first_of(self.held, markers)
            if found is not None:
                to(self.take(found[0]))
                return self.take(len(found[1]))
            to(self.take(len(self.held) - held_back(self.held, markers)))
            if self.ended:
                rest = self.take(len(self.held))
                if not self.marked:
                    to(rest)
                return ""
            yield

    def content_until(
        self, *markers: str, ends: tuple[str, ...] = ()
    ) -> Generator[None, None, str]:
        """Read content up to one of ``markers``, and that, which is returned as by ``until``. The
        ``ends`` of calls are dropped where text is ``marked``."""
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

    def capture(self, *markers: str, most: int = MAX_BUFFERED) -> Generator[None, None, str]:
        """Read up to one of ``markers``, and that. Returns the text before it. Raises
        ``NotACallError`` if there is none, or more text than ``most``."""
        text, _ = yield from self.capture_to(*markers, most=most)
        return text

    def capture_to(
        self, *markers: str, most: int = MAX_BUFFERED
    ) -> Generator[None, None, tuple[str, str]]:
        """As ``capture``; the text, and the marker after it."""
        parts: list[str] = []
        left = most

        def keep(text: str) -> None:
            nonlocal left
            left -= len(text)
            if left < 0:
                self.give_back(text[left:])
                raise NotACallError
            parts.append(text)

        marker = yield from self.until(*markers, to=keep)
        if not marker:
            raise NotACallError
        return "".join(parts), marker

    def attempt(self, steps: Steps, *, after: str = "") -> Generator[None, None, bool]:
        """Read a call, of which ``after`` has been read. If it is none, its text is content, unless
        the text ended in it where it is ``marked``. Returns whether it was one."""
        self._read = [after]
        try:
            yield from steps
            return True
        except NotACallError:
            if self.ended and self.marked:
                self.held = ""
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
        """Read content, and calls that begin with ``starts``, of which models may repeat some: each
        ``call`` is given those that it begins with."""

        def repeated(marker: str) -> Steps:
            markers = yield from self.skip(*starts)
            yield from call([marker, *markers])

        while marker := (yield from self.content_until(*starts, ends=ends)):
            yield from self.attempt(repeated(marker), after=marker)

    def _drop_beginning(self, *markers: str) -> None:
        """Drop what is held if the text ends in one of ``markers``, where it is ``marked``."""
        if self.ended and self.marked and any(one.startswith(self.held) for one in markers):
            self.take(len(self.held))


def dropped(text: str) -> None:
    """The sink of text that belongs to nothing."""


def new_call_id() -> str:
    """A random id of a tool call, in the shape of OpenAI's."""
    return f"call_{secrets.token_hex(12)}"
