"""The maximum size of a response, checked before anything is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import invalid
from ..options import RouterOptions

# Approximate bytes of JSON: a choice, a token's text, its id, a token with its logprob.
CHOICE_BYTES = 256
TEXT_BYTES = 6
ID_BYTES = 7
ENTRY_BYTES = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseSize:
    """The size of one response. ``prompts`` are lengths in tokens. ``logprobs`` and
    ``prompt_alternatives`` are the numbers of alternatives for each generated token and for each
    prompt token. ``echoed`` is the number of characters of echoed prompts, and ``copies`` how often
    the text of a generated token appears.

    Of a streamed response only the logprobs of prompts count, which arrive all at once.
    """

    prompts: Sequence[int]
    n: int
    logprobs: int | None
    prompt_alternatives: int | None
    echoed: int
    token_ids: bool
    stream: bool
    copies: int = 1

    def fit(self, granted: Sequence[int], options: RouterOptions) -> list[int]:
        """Reduce the ``granted`` tokens of each prompt to what fits. Call it for a default, not for
        a client's own ``max_tokens``."""
        if self.stream:
            return list(granted)
        rooms = []
        for limit, size in (
            (options.max_response_logprobs, self._entries),
            (options.max_response_bytes, self._bytes),
        ):
            fixed = size(0)
            if token_size := size(1) - fixed:
                rooms.append((limit - fixed) // token_size)
        max_tokens = max(1, min(rooms) // len(granted))
        return [min(tokens, max_tokens) for tokens in granted]

    def check(self, granted: Sequence[int], options: RouterOptions) -> None:
        """Raise ``RequestError`` for a response over the limits."""
        for limit, size, unit in (
            (options.max_response_logprobs, self._entries(sum(granted)), "logprobs"),
            (options.max_response_bytes, self._bytes(sum(granted)), "bytes"),
        ):
            if size > limit:
                raise invalid(
                    f"The response could have {size} {unit}; the limit is {limit}. Lower "
                    f"{self._causes()}.",
                    "n" if self.n > 1 else None,
                    "response_too_large",
                )

    def _entries(self, generated: int) -> int:
        """Tokens with a logprob, if the n-th choices of all prompts have ``generated`` tokens
        together."""
        entries = 0
        if self.prompt_alternatives is not None:
            entries += sum(self.prompts) * (1 + self.prompt_alternatives)
        if self.logprobs is not None and not self.stream:
            entries += generated * (1 + self.logprobs)
        return entries * self.n

    def _bytes(self, generated: int) -> int:
        if self.stream:
            return 0
        ids = generated + sum(self.prompts) if self.token_ids else 0
        choice_size = (
            CHOICE_BYTES * len(self.prompts)
            + TEXT_BYTES * self.copies * generated
            + ID_BYTES * ids
            + self.echoed
        )
        return choice_size * self.n + ENTRY_BYTES * self._entries(generated)

    def _causes(self) -> str:
        conditions = {
            "'n'": self.n > 1,
            "the number of prompts": len(self.prompts) > 1,
            "'max_tokens'": not self.stream,
            "'logprobs' or 'top_logprobs'": self.logprobs is not None,
            "'prompt_logprobs'": self.prompt_alternatives is not None and self.logprobs is None,
            "the length of what 'echo' repeats": bool(self.echoed),
        }
        causes = [cause for cause, applies in conditions.items() if applies]
        if self.token_ids:
            causes.append("leave out 'return_token_ids'")
        if not self.stream:
            causes.append("set 'stream'")
        return ", ".join(causes[:-1]) + f" or {causes[-1]}" if len(causes) > 1 else causes[0]
