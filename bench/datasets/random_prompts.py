"""Random prompts of common words, with a given number of tokens.

For text completions a prompt is token ids, so that lengths are exact; the ids are those of the
words, by the server's or a local tokenizer. For chats, and servers without a tokenizer, it is text,
and the tokens per word are estimated from the usage of two short requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from ...shared.errors import BenchmarkError
from ..client.api_server import ApiServer, Prompt
from .text_tokens import LocalTokens

_TEXT = (
    "air apple arm autumn baker ball bank bell bird blue board boat book bottle branch bread "
    "bridge brother bus cake camp candle car castle cat chair child church circle city class "
    "cloud coat coffee color corner country cup dance day desk doctor dog door dream dress ear "
    "earth egg evening eye face farm father field finger fire fish floor flower food forest "
    "friend fruit garden gate girl glass gold grass green group hand hat heart hill home horse "
    "hour house ice island judge key king kitchen lake lamp land letter light line lion map "
    "market milk minute mirror money moon morning mother mountain music name night number ocean "
    "orange page paper park party pen picture plant plate point queen rain river road room rose "
    "salt school sea seat ship shoe silver sister sky snow song spring star stone story street "
    "sugar summer sun table tea teacher tower town train tree valley village voice wall water "
    "week wheel wind window winter woman wood word world year yellow"
)
WORDS = _TEXT.split()
# Words of the two requests that measure the tokens of a word and of the chat template.
FEW, MANY = 40, 240


class PromptMaker(Protocol):
    """Makes random prompts of a length given in tokens."""

    def make(self, random: Random, tokens: int) -> Prompt: ...


@dataclass(frozen=True, slots=True)
class IdPrompts:
    """Prompts of exactly the given number of ids, from ``pool``."""

    pool: Sequence[int]

    def make(self, random: Random, tokens: int) -> list[int]:
        return random.choices(self.pool, k=tokens)


@dataclass(frozen=True, slots=True)
class WordPrompts:
    """Prompts of about the given number of tokens, of which ``overhead`` are the template's."""

    tokens_per_word: float
    overhead: float = 0.0

    def make(self, random: Random, tokens: int) -> str:
        count = max(1, round((tokens - self.overhead) / self.tokens_per_word))
        return " ".join(random.choices(WORDS, k=count))


async def find_prompt_maker(server: ApiServer, local: LocalTokens | None) -> PromptMaker:
    """The most exact prompts that a server supports. Raises ``BenchmarkError``."""
    if server.is_chat:
        return await _word_prompts(server, local)
    text = " ".join(WORDS)
    tokens = await local.encode(text) if local else await server.tokenize(text)
    return IdPrompts(tuple(sorted(set(tokens)))) if tokens else await _word_prompts(server, None)


async def _word_prompts(server: ApiServer, local: LocalTokens | None) -> WordPrompts:
    random = Random("words")
    few, many = (" ".join(random.choices(WORDS, k=count)) for count in (FEW, MANY))
    if local:
        rate = (len(await local.encode(many)) - len(await local.encode(few))) / (MANY - FEW)
        return WordPrompts(max(rate, 0.1), len(await local.render(few)) - rate * FEW)
    short, long = [await _prompt_tokens(server, text) for text in (few, many)]
    rate = (long - short) / (MANY - FEW)
    if rate <= 0:
        raise BenchmarkError(
            f"the server counts {short} tokens in {FEW} words and {long} in {MANY}; "
            "give --tokenizer"
        )
    return WordPrompts(rate, short - rate * FEW)


async def _prompt_tokens(server: ApiServer, text: str) -> int:
    response = await server.ask(server.body(text, 1))
    if response.error and not response.prompt_tokens:
        raise BenchmarkError(f"{server.client.target.authority}: {response.error}")
    if not response.prompt_tokens:
        raise BenchmarkError("the server reports no usage; give --tokenizer")
    return response.prompt_tokens
