"""Conversations to learn from, made by rules, the same for the same seed.

Each is one long dialogue with many facts and many questions mixed, because that is what taught a
small model to recall (one needle per sequence did not).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tandem.shared.builtin_model import chat, world
from tandem.shared.builtin_model.recall import Fact, make_fact, passage

SYSTEMS = (
    "You are a helpful assistant.",
    "You are Tandem's built-in model.",
    "You are helpful and brief.",
    "Answer the questions.",
)
# Which part of a text's sentences are facts. Short texts are dense: recall is learned there.
SHARES = (0.05, 0.15, 0.3, 0.5)
DENSE = (0.3, 0.6, 0.8, 1.0)
# The first course has numbers of other lengths as well, after which a model of this size adds a
# digit now and then; the others have three digits alone.
THREE_DIGITS = {1: 0.85, 2: 1.0, 3: 1.0}
_PIECES = re.compile(r"\d|[^\W\d]+|[^\w\s]")
_TURN_TOKENS = 5
_SENTENCE_TOKENS = 11


@dataclass(frozen=True)
class Turn:
    role: str
    content: str


def rough_tokens(text: str) -> int:
    """About how many tokens the trained tokenizer makes of `text`, without having it."""
    return len(_PIECES.findall(text))


class _Conversation:
    """One dialogue while it grows; knows which facts it may ask for."""

    def __init__(self, rng: Random, length: int, course: int) -> None:
        self.rng = rng
        self.course = course
        self.left = length
        self.turns: list[Turn] = []
        self.unasked: list[Fact] = []
        self.taken: set[tuple[str, str]] = set()
        self.name = ""

    def say(self, question: str, answer: str) -> None:
        self.turns += [Turn("user", question), Turn("assistant", answer)]
        self.left -= 2 * _TURN_TOKENS + rough_tokens(question) + rough_tokens(answer)

    def text(self, length: int) -> str:
        """A passage of about `length` tokens with new facts, few or many of them."""
        sentences = max(1, length // _SENTENCE_TOKENS)
        share = int(sentences * self.rng.choice(SHARES if length > 300 else DENSE))
        number = min(sentences, 60, max(self.rng.randint(1, 6), share))
        three = THREE_DIGITS[self.course]
        facts = [make_fact(self.rng, self.taken, three) for _ in range(number)]
        self.unasked += facts
        return passage(self.rng, facts, max(0, sentences - len(facts)))

    def read(self, length: int) -> None:
        """A turn that brings text, with a question after it or a mere 'remember'."""
        text = self.text(length)
        if self.rng.random() < 0.25:
            self.say(self.rng.choice(("Remember this: {}", "{}")).format(text), "I will remember.")
            return
        fact = self.pick()
        gap = self.rng.choice((" ", " ", "\n", "\n\n"))
        self.say(f"{text}{gap}{fact.question(self.rng)}", fact.sentence)

    def pick(self) -> Fact:
        """A fact not asked for yet: a second answer could be copied from the first."""
        return self.unasked.pop(self.rng.randrange(len(self.unasked)))

    def ask(self) -> None:
        fact = self.pick()
        self.say(fact.question(self.rng), fact.sentence)

    def chat(self) -> None:
        if self.rng.random() < 0.06:
            self.name = self.rng.choice(world.NAMES)
            self.say(f"My name is {self.name}.", f"Nice to meet you, {self.name}.")
        elif self.name and self.rng.random() < 0.3:
            self.say("What is my name?", f"Your name is {self.name}.")
        else:
            self.say(*chat.exchange(self.rng, self.course))


def conversation(rng: Random, length: int, only_chat: bool = False, course: int = 1) -> list[Turn]:
    """A dialogue of about `length` tokens: a long text first, then questions and small talk."""
    talk = _Conversation(rng, length, course)
    if rng.random() < 0.2:
        talk.turns.append(Turn("system", rng.choice(SYSTEMS)))
    if only_chat or (length <= 256 and rng.random() < 0.25):
        while talk.left > 0:
            talk.chat()
        return talk.turns
    if rng.random() < 0.3:
        talk.chat()
    # The long text leaves room for many questions: each is a lesson, the text alone is none.
    room = max(talk.left * 9 // 20, talk.left - max(250, length // 5))
    talk.read(int(rng.uniform(0.4, 1.0) * room))
    while talk.left > 0:
        kind = rng.random()
        if kind < 0.06 or (kind < 0.7 and not talk.unasked):
            talk.read(rng.randint(10, 120))
        elif kind < 0.2 or not talk.unasked:
            talk.chat()
        else:
            talk.ask()
    return talk.turns


def conversations(
    seed: int, length: int, only_chat: bool = False, course: int = 1
) -> Iterator[list[Turn]]:
    """Endless dialogues of about `length` tokens."""
    rng = Random(seed)
    while True:
        yield conversation(rng, length, only_chat, course)
