"""Facts, the filler text around them, and the questions that ask for them.

A fact's key is two words, many facts share one of them, and the answer repeats the whole key: so
the model must match the pair, and what it says can be checked with one string comparison.
"""

from dataclasses import dataclass
from random import Random

from tandem.tools.builtin_model import world as w

ATTRIBUTES = ("code", "code", "code", "code", "number", "password", "keeper")


@dataclass(frozen=True)
class Fact:
    """`The {attribute} of the {key} is {value}.`"""

    attribute: str
    key: str
    value: str

    @property
    def sentence(self) -> str:
        return f"The {self.attribute} of the {self.key} is {self.value}."

    def question(self, rng: Random) -> str:
        subject = f"the {self.attribute} of the {self.key}"
        return rng.choice(
            (
                f"What is {subject}?",
                f"What is {subject}?",
                f"What is {subject}?",
                f"Tell me {subject}.",
                f"Do you know {subject}?",
                f"what is {subject}",
            )
        )


def pseudo_word(rng: Random) -> str:
    """Make up a word of two or three syllables, so several tokens."""
    return "".join(rng.choice(w.SYLLABLES) for _ in range(rng.choice((2, 2, 3))))


def make_fact(rng: Random, used: set[tuple[str, str]], three_digits: float = 1.0) -> Fact:
    """Make a fact whose attribute and key are not in `taken`, and add them.

    `three_digits` is the share of numbers with that many; the others have two, four or five.
    """
    while True:
        attribute = rng.choice(ATTRIBUTES)
        noun = rng.choice(rng.choice((w.PLACES, w.PLACES, w.THINGS, w.ANIMALS)))
        if rng.random() < 0.06:
            noun = pseudo_word(rng)
        key = f"{rng.choice(w.ADJECTIVES)} {noun}"
        if (attribute, key) not in used:
            break
    used.add((attribute, key))
    if attribute == "keeper":
        return Fact(attribute, key, rng.choice(w.NAMES))
    digits = 3 if rng.random() < three_digits else rng.choice((2, 4, 5))
    return Fact(attribute, key, "".join(rng.choice("0123456789") for _ in range(digits)))


def filler_sentence(rng: Random) -> str:
    """Make a sentence without facts."""
    pick = rng.choice
    thing, place, animal = pick(w.THINGS), pick(w.PLACES), pick(w.ANIMALS)
    adjective, name, other = pick(w.ADJECTIVES), pick(w.NAMES), pick(w.ADJECTIVES)
    return pick(
        (
            f"The {animal} sleeps near the {adjective} {place}.",
            f"{name} {pick(w.VERBS)} the {adjective} {thing}.",
            f"The {adjective} {place} is {other} today.",
            f"On {pick(w.DAYS)} there was {pick(w.WEATHER)} over the {place}.",
            f"{name} and {pick(w.NAMES)} eat {pick(w.FOODS)} in the {adjective} {place}.",
            f"In {pick(w.MONTHS)} the {place} is full of {pick(w.FOODS)}.",
            f"A {animal} {pick(w.VERBS)} the {thing} and {pick(w.VERBS)} the {adjective} {place}.",
            f"There are {pick(w.NUMBERS)} {pick(w.FOODS)} on the {thing}.",
            f"{name} was {rng.randint(2, 99)} years old when the {place} was {other}.",
            f"Nobody {pick(w.VERBS)} the {thing} of the {adjective} {place}.",
        )
    )


def noise_sentence(rng: Random) -> str:
    """Random words, some of them made up: an imitation of text from outside the small world."""
    tables = (w.ADJECTIVES, w.PLACES, w.THINGS, w.VERBS, w.FOODS, w.NAMES, w.NUMBERS)
    words = [
        pseudo_word(rng) if rng.random() < 0.3 else rng.choice(rng.choice(tables))
        for _ in range(rng.randint(4, 14))
    ]
    return " ".join(words).capitalize() + rng.choice((".", ".", "!", ","))


def passage(rng: Random, facts: list[Fact], sentences: int) -> str:
    """Place the facts, in order, at random among `sentences` sentences of filler."""
    make = noise_sentence if rng.random() < 0.15 else filler_sentence
    total = sentences + len(facts)
    places = set(rng.sample(range(total), len(facts)))
    waiting = iter(facts)
    return " ".join(
        next(waiting).sentence if index in places else make(rng) for index in range(total)
    )
