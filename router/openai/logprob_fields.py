"""How many alternatives of each token a request asks logprobs of."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..options import RouterOptions
from ..requests.body_errors import check_integer
from ..requests.body_model import WHOLE

# The upper limit is the server's.
Alternatives = Annotated[int, Field(ge=0), WHOLE]


def check_alternatives(name: str, asked: int | None, options: RouterOptions) -> None:
    """Raise ``RequestError`` if the field ``name`` asks for more than --max-logprobs."""
    if asked is not None:
        check_integer(name, asked, 0, options.max_logprobs)
