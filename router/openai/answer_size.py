"""How large an answer may become, known and bounded before anything is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import invalid
from ..options import RouterOptions

# Bytes of JSON, about: a choice, a token's text, its id, one token with its logprob.
CHOICE_BYTES = 256
TEXT_BYTES = 6
ID_BYTES = 7
ENTRY_BYTES = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSize:
    """What one request asks for. ``prompts`` are lengths in tokens; ``logprobs`` and
    ``scored_prompt`` are the alternatives wanted for each token generated and of the prompt, and
    ``echoed`` the characters of all prompts that come back as text.

    What is streamed is not kept, apart from the logprobs of prompts, which come all at once.
    """

    prompts: Sequence[int]
    n: int
    logprobs: int | None
    scored_prompt: int | None
    echoed: int
    token_ids: bool
    stream: bool

    def fit(self, granted: Sequence[int], options: RouterOptions) -> list[int]:
        """``granted`` tokens of each prompt, cut to what fits: for a limit that no client has
        chosen."""
        if self.stream:
            return list(granted)
        rooms = []
        for limit, size in (
            (options.max_answer_logprobs, self._entries),
            (options.max_answer_bytes, self._bytes),
        ):
            fixed = size(0)
            if a_token := size(1) - fixed:
                rooms.append((limit - fixed) // a_token)
        most = max(1, min(rooms) // len(granted))
        return [min(tokens, most) for tokens in granted]

    def check(self, granted: Sequence[int], options: RouterOptions) -> None:
        """Raises ``RequestError`` for an answer out of all proportion."""
        for limit, size, unit in (
            (options.max_answer_logprobs, self._entries(sum(granted)), "logprobs"),
            (options.max_answer_bytes, self._bytes(sum(granted)), "bytes"),
        ):
            if size > limit:
                raise invalid(
                    f"The answer could have {size} {unit}; the limit is {limit}. Lower "
                    f"{self._causes()}.",
                    "n" if self.n > 1 else None,
                    "answer_too_large",
                )

    def _entries(self, generated: int) -> int:
        """Tokens with a logprob, when so many tokens are ``generated`` for each of the n choices
        of all prompts together."""
        entries = 0
        if self.scored_prompt is not None:
            entries += sum(self.prompts) * (1 + self.scored_prompt)
        if self.logprobs is not None and not self.stream:
            entries += generated * (1 + self.logprobs)
        return entries * self.n

    def _bytes(self, generated: int) -> int:
        if self.stream:
            return 0
        ids = generated + sum(self.prompts) if self.token_ids else 0
        a_choice = (
            CHOICE_BYTES * len(self.prompts) + TEXT_BYTES * generated + ID_BYTES * ids + self.echoed
        )
        return a_choice * self.n + ENTRY_BYTES * self._entries(generated)

    def _causes(self) -> str:
        known = {
            "'n'": self.n > 1,
            "the number of prompts": len(self.prompts) > 1,
            "'max_tokens'": not self.stream,
            "'logprobs' or 'top_logprobs'": self.logprobs is not None,
            "'prompt_logprobs'": self.scored_prompt is not None and self.logprobs is None,
            "the length of what 'echo' repeats": bool(self.echoed),
        }
        causes = [cause for cause, counts in known.items() if counts]
        if self.token_ids:
            causes.append("leave out 'return_token_ids'")
        if not self.stream:
            causes.append("set 'stream'")
        return ", ".join(causes[:-1]) + f" or {causes[-1]}" if len(causes) > 1 else causes[0]
