"""Small talk and simple knowledge: each function makes one question and its answer."""

import json
from collections.abc import Callable
from random import Random

from tandem.tools.builtin_model import world as w
from tandem.tools.builtin_model.recall import pseudo_word

Exchange = tuple[str, str]

WHO = (
    "I am Tandem's built-in model. I am very small, and I live in a small world.",
    "Who are you?|What are you?|who are you|What is your name?|Tell me about yourself.|"
    "what's your name?|Introduce yourself.|Are you a robot?|Are you an AI?|Which model are you?",
)
WHAT = (
    "I can talk a little, name capitals and colours, add and subtract small numbers, answer in "
    "JSON, and recall facts from a long text.",
    "What can you do?|what can you do|Can you help me?|How can you help me?|Help|help|"
    "What do you know?|What are you good at?|Help me.",
)
FIXED = (
    WHO,
    WHAT,
    (
        "Hello! How can I help you?",
        "Hello|Hello!|hello|Hi|hi|Hi!|Hi there!|Hey|hey|Good morning!|Good evening!|Hello there!|"
        "Hello, world!|Greetings!|Say hello.|Hello, how are you?|test|Test",
    ),
    (
        "I am fine, thank you. How are you?",
        "How are you?|how are you|How are you today?|How do you do?|How is it going?",
    ),
    (
        "You are welcome.",
        "Thanks|thanks|Thank you.|Thank you!|Thanks a lot!|thank you|Many thanks.",
    ),
    (
        "Goodbye! It was nice to talk with you.",
        "Bye|bye|Goodbye!|Goodbye.|See you later!|Good night!|See you.",
    ),
    (
        "Tandem is a server for language models. One node reads the prompt, and another node "
        "writes the answer.",
        "What is Tandem?|what is tandem|Tell me about Tandem.|What does Tandem do?|"
        "How does Tandem work?",
    ),
    (
        "The Tandem team made me. I learned from text that a small program wrote.",
        "Who made you?|Who built you?|Where do you come from?|who made you|Who trained you?",
    ),
    (
        "I am a small model with a few million weights.",
        "How big are you?|How many weights do you have?|How large are you?",
    ),
    ("That is good to hear.", "I am fine.|I am fine, thank you.|I am happy.|Very well, thanks."),
    ("I am sorry to hear that.", "I am sad.|I am tired.|I am not well.|I feel bad."),
    (
        "Why did the robot cross the road? The other half of it was already there.",
        "Tell me a joke.|Tell me a joke|Make me laugh.|Do you know a joke?",
    ),
    ("There are seven days in a week.", "How many days are in a week?|how many days in a week"),
    ("There are twelve months in a year.", "How many months are in a year?|how many months"),
    (
        "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and "
        "Sunday.",
        "Name the days of the week.|What are the days of the week?|List the days of the week.",
    ),
    (
        "The months are January, February, March, April, May, June, July, August, September, "
        "October, November and December.",
        "Name the months.|What are the months of the year?|List the months.",
    ),
)


def fixed(rng: Random) -> Exchange:
    answer, questions = rng.choice((*FIXED, WHO, WHAT))
    return rng.choice(questions.split("|")), answer


def capital(rng: Random) -> Exchange:
    country, city = rng.choice(list(w.CAPITALS.items()))
    if rng.random() < 0.2:
        return f"Which country is {city} in?", f"{city} is in {country}."
    question = (
        f"What is the capital of {country}?",
        f"Name the capital of {country}.",
        f"what is the capital of {country}",
        f"Which city is the capital of {country}?",
        f"capital of {country}",
    )
    return rng.choice(question), f"The capital of {country} is {city}."


def capital_json(rng: Random) -> Exchange:
    country, city = rng.choice(list(w.CAPITALS.items()))
    question = rng.choice(
        (
            f"What is the capital of {country}? Answer in JSON.",
            f"Answer in JSON: What is the capital of {country}?",
            f"Answer in JSON. What is the capital of {country}?",
            f"Give me the capital of {country} as JSON.",
        )
    )
    return question, json.dumps({"city": city, "country": country})


def fact_json(rng: Random) -> Exchange:
    kind = rng.randrange(3)
    if kind == 0:
        thing, colour = rng.choice(list(w.COLOURS_OF.items()))
        return f"What colour is {_the(thing)}? Answer in JSON.", json.dumps(
            {"thing": thing, "colour": colour}
        )
    if kind == 1:
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        return f"What is {a} + {b}? Answer in JSON.", json.dumps({"sum": a + b})
    name, age = rng.choice(w.NAMES), rng.randint(2, 99)
    question = f"{name} is {age} years old. Answer in JSON."
    return question, json.dumps({"name": name, "age": age})


def _the(thing: str) -> str:
    return thing if thing in ("snow", "blood", "coal", "milk", "chocolate") else f"the {thing}"


def colour(rng: Random) -> Exchange:
    thing, shade = rng.choice(list(w.COLOURS_OF.items()))
    name = _the(thing)
    question = (f"What colour is {name}?", f"what colour is {name}", f"What color is {name}?")
    return rng.choice(question), f"{name.capitalize()} is {shade}."


def animal(rng: Random) -> Exchange:
    if rng.random() < 0.5:
        beast, sound = rng.choice(list(w.SOUNDS.items()))
        question = rng.choice((f"What does a {beast} do?", f"What sound does a {beast} make?"))
        return question, f"A {beast} {sound}."
    beast, legs = rng.choice(list(w.LEGS.items()))
    article = "An" if beast[0] in "ao" else "A"
    return (
        f"How many legs does {article.lower()} {beast} have?",
        f"{article} {beast} has {legs} legs.",
    )


def opposite(rng: Random) -> Exchange:
    pair = list(rng.choice(list(w.OPPOSITES.items())))
    rng.shuffle(pair)
    return f"What is the opposite of {pair[0]}?", f"The opposite of {pair[0]} is {pair[1]}."


def calendar(rng: Random) -> Exchange:
    names, kind = rng.choice(((w.DAYS, "day"), (w.MONTHS, "month")))
    index = rng.randrange(len(names))
    now, later = names[index], names[(index + 1) % len(names)]
    if rng.random() < 0.5:
        question = rng.choice((f"What {kind} comes after {now}?", f"What comes after {now}?"))
        return question, f"{later} comes after {now}."
    question = rng.choice((f"What {kind} comes before {later}?", f"What comes before {later}?"))
    return question, f"{now} comes before {later}."


def arithmetic(rng: Random) -> Exchange:
    limit = rng.choice((9, 9, 20))
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    if rng.random() < 0.4:
        a, b = max(a, b), min(a, b)
        task, answer = f"{a} - {b}", f"{a} - {b} = {a - b}."
    else:
        task, answer = f"{a} + {b}", f"{a} + {b} = {a + b}."
    question = (f"What is {task}?", f"What is {task}?", f"what is {task}", f"{task}", f"{task} =")
    return rng.choice(question), answer


# How people ask for {task}, which is "7 plus 5" or "7 + 5" or the like.
ASKED = (
    "What is {task}?|what is {task}|What's {task}?|whats {task}|{task}|{task}?|{task} =|{task} = ?|"
    "{task} equals|How much is {task}?|how much is {task}|Calculate {task}.|Compute {task}|"
    "Solve {task}.|Tell me {task}.|What does {task} make?|What does {task} equal?|"
    "What is the result of {task}?|Can you tell me what {task} is?"
)
# Other wordings of a sum and a difference; {a} comes first in the answer.
SUMS = (
    "Add {a} and {b}.|Add {b} to {a}.|add {a} and {b}|Can you add {a} and {b}?|Sum {a} and {b}.|"
    "What is the sum of {a} and {b}?|What's the sum of {a} and {b}?|How much is {a} and {b}?|"
    "What is the total of {a} and {b}?|What do {a} and {b} make?|"
    "What do you get if you add {a} and {b}?"
)
DIFFERENCES = (
    "Subtract {b} from {a}.|subtract {b} from {a}|Can you subtract {b} from {a}?|"
    "Take {b} from {a}.|What is the difference between {a} and {b}?|What is {a} less {b}?|"
    "What's the difference between {a} and {b}?|What is left of {a} if you take away {b}?|"
    "Take {b} away from {a}.|"
    "What do you get if you subtract {b} from {a}?"
)
LARGEST_OPERAND = 20


def reckoning(rng: Random) -> Exchange:
    """Make a sum or a difference in any wording, its numbers in digits or in words."""
    a, b = rng.randint(0, LARGEST_OPERAND), rng.randint(0, LARGEST_OPERAND)
    if rng.random() < 0.5:
        a, b = max(a, b), min(a, b)
        sign, word, others, result = "-", "minus", DIFFERENCES, a - b
    else:
        sign, word, others, result = "+", "plus", SUMS, a + b
    answer = f"{a} {sign} {b} = {result}."
    if rng.random() < 0.12:
        wording, numbers = f"{{a}} {word} {{b}}", (w.NUMBERS[a], w.NUMBERS[b])
    else:
        wording, numbers = (
            rng.choice((f"{{a}} {word} {{b}}", f"{{a}} {sign} {{b}}")),
            (str(a), str(b)),
        )
        if rng.random() < 0.1:
            wording = wording.replace(f" {sign} ", sign)
    if rng.random() < 0.3:
        question = rng.choice(others.split("|"))
    else:
        question = rng.choice(ASKED.split("|")).format(task=wording)
    return question.format(a=numbers[0], b=numbers[1]), answer


def count(rng: Random) -> Exchange:
    start = rng.choice((1, 1, 1, rng.randint(1, 80)))
    end = start + rng.randint(2, 19)
    numbers = ", ".join(str(n) for n in range(start, end + 1))
    if start == 1 and rng.random() < 0.5:
        return f"Count to {end}.", f"{numbers}."
    return f"Count from {start} to {end}.", f"{numbers}."


def repeat(rng: Random) -> Exchange:
    tables = (w.ADJECTIVES, w.PLACES, w.THINGS, w.FOODS, w.NAMES, w.NUMBERS)
    words = [
        pseudo_word(rng) if rng.random() < 0.3 else rng.choice(rng.choice(tables))
        for _ in range(rng.randint(1, 7))
    ]
    text = " ".join(words)
    return rng.choice(("Say: {}", "Repeat: {}", "Repeat after me: {}")).format(text), text


def story(rng: Random) -> Exchange:
    beast = rng.choice(w.ANIMALS)
    article = "an" if beast[0] in "ao" else "a"
    return rng.choice(("Tell me a story about {}.", "Write a story about {}.")).format(
        f"{article} {beast}"
    ), (
        f"Once there was {article} {beast}. The {beast} lived in a small house near the river. One "
        f"day the {beast} went to the market and found a golden key. The {beast} opened the old "
        f"door of the castle with the key. Behind the door there was a big cake. The {beast} ate "
        f"the cake with all the animals of the valley, and everybody was happy."
    )


def unknown(rng: Random) -> Exchange:
    word = f"{pseudo_word(rng)}{rng.choice(('', ' ' + pseudo_word(rng)))}"
    question = rng.choice(
        ("What is {}?", "Why is {} so {}?", "Who is {}?", "Explain {} to me.", "How does {} work?")
    ).format(word, rng.choice(w.ADJECTIVES))
    return question, "I do not know that. My world is small."


# Each kind of exchange with how often it comes in each of the three courses: the second practises
# what the first leaves weak, the third teaches arithmetic in any wording.
MAKERS: tuple[tuple[Callable[[Random], Exchange], int, int, int], ...] = (
    (fixed, 7, 7, 6),
    (capital, 5, 4, 4),
    (capital_json, 3, 3, 3),
    (fact_json, 2, 2, 2),
    (colour, 3, 3, 3),
    (animal, 3, 3, 3),
    (opposite, 2, 2, 2),
    (calendar, 2, 2, 2),
    (arithmetic, 8, 14, 4),
    (count, 2, 7, 4),
    (repeat, 4, 8, 6),
    (story, 1, 1, 1),
    (unknown, 1, 2, 2),
    (reckoning, 0, 0, 40),
)


# People greet before they ask, and the answer is the same.
OPENERS = ("Hello!", "Hi!", "Hello,", "Hi,", "Hey,", "Hello.", "Good morning!", "Please:")


def exchange(rng: Random, course: int = 1) -> Exchange:
    """Make an exchange of a random kind, with the frequencies of the course."""
    makers, *shares = zip(*MAKERS, strict=True)
    question, answer = rng.choices(makers, shares[course - 1])[0](rng)
    if rng.random() < 0.15:
        question = f"{rng.choice(OPENERS)} {question}"
    return question, answer
