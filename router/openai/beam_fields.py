"""``use_beam_search`` and the fields that belong to it."""

from __future__ import annotations

from ...proto.packed_logprobs import MAX_LOGPROBS
from ..errors import invalid
from ..generation import BeamOptions
from ..requests.body_errors import check_integer
from ..served_model import ServedModel
from .generation_body import GenerationBody

# A step lists at least two continuations for each beam.
MAX_BEAMS = MAX_LOGPROBS // 2
# Fields that change the probabilities of tokens, or need logprobs of the prompt.
INCOMPATIBLE = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "prompt_logprobs",
)
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def read_beams(
    body: GenerationBody, model: ServedModel, *, constrained: bool
) -> BeamOptions | None:
    """The options of a beam search, if the body has ``use_beam_search``. Temperature, seed and
    sampling filters have no effect on it, because nothing is sampled. Raises ``RequestError``."""
    if not body.use_beam_search:
        for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
            if getattr(body, name) != default:
                raise invalid(f"'{name}' is only allowed with 'use_beam_search'.", name)
        return None
    for name in INCOMPATIBLE:
        default = type(body).model_fields[name].get_default(call_default_factory=True)
        if getattr(body, name) != default:
            raise _unavailable(name)
    for name, neutral in NEUTRAL.items():
        if getattr(body, name) not in (None, neutral):
            raise _unavailable(name)
    if constrained:
        raise _unavailable("structured_outputs")
    width, name = (body.n, "n") if body.best_of is None else (body.best_of, "best_of")
    check_integer(name, width, body.n, MAX_BEAMS)
    return BeamOptions(
        width=width,
        length_penalty=body.length_penalty,
        early_stopping=body.early_stopping,
        ends=frozenset(body.stop_token_ids) | (set() if body.ignore_eos else model.eos_token_ids),
    )


def _unavailable(name: str) -> Exception:
    return invalid(f"'{name}' is not available with 'use_beam_search'.", name, "unsupported_value")
