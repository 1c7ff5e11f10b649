"""How many alternatives of each token a request asks logprobs of."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..errors import invalid
from ..options import RouterOptions
from ..requests.body_errors import check_integer
from ..requests.body_model import WHOLE
from ..served_model import ServedModel

# Stands for the whole vocabulary, as in vLLM.
ALL = -1

# The upper limit is the server's.
Alternatives = Annotated[int, Field(ge=ALL), WHOLE]


def read_alternatives(
    name: str, asked: int | None, model: ServedModel, options: RouterOptions
) -> int | None:
    """The number that the field ``name`` asks for. Raises ``RequestError`` if it is above
    --max-logprobs."""
    if asked is None:
        return None
    limit = model.vocab_size if options.max_logprobs == ALL else options.max_logprobs
    if asked != ALL:
        check_integer(name, asked, 0, limit)
    elif limit < model.vocab_size:
        message = (
            f"Invalid value for '{name}': -1 stands for all {model.vocab_size} tokens of the "
            f"vocabulary; this server lists at most {limit}."
        )
        raise invalid(message, name, "integer_above_max_value")
    return model.vocab_size if asked == ALL else asked
