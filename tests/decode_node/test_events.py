"""The events of a request, as messages to its router."""

from __future__ import annotations

import pytest

from tandem.decode_node.events import usage_event
from tandem.decode_node.transfers import PrefillSource
from tandem.shared.engine.sampling_params import SamplingParams
from tandem.shared.engine.sequence import Sequence
from tandem.shared.engine.work import Generate


@pytest.mark.parametrize(
    ("received", "source", "expected"),
    [
        (2, PrefillSource("p"), ("p", "")),
        (0, PrefillSource(reason="below threshold"), ("", "below threshold")),
        # Its blocks went to a request that goes first.
        (0, PrefillSource("p"), ("", "preempted")),
    ],
)
def test_a_prompt_is_said_to_be_prefilled_where_its_kv_comes_from(
    received: int, source: PrefillSource, expected: tuple[str, str]
) -> None:
    sequence = Sequence(1, [1, 2, 3], Generate(SamplingParams()), received=received)
    usage = usage_event(sequence, source).usage
    assert (usage.prefill_node, usage.local_reason) == expected
