"""What the head tells its ranks survives the way there."""

from __future__ import annotations

from tandem.shared.engine.channel import PREFIX_BYTES, pack, unpack
from tandem.shared.engine.plan import (
    SamplerSpec,
    SamplingParams,
    SequenceStep,
    StepPlan,
    plan_from_wire,
    plan_to_wire,
)


def test_a_plan_arrives_as_it_was_sent() -> None:
    params = SamplingParams(logit_bias={3: -1.5, 4: 2.0}, stop=("a", "b"), stop_token_ids=(7,))
    plan = StepPlan(
        9,
        [
            SequenceStep(1, [5], 31, [4, 2], True),
            SequenceStep(2, [6, 7, 8], 0, [1], False, 2, [7, 8]),
        ],
        [SamplerSpec(1, params, 1 << 63, (1, 2), (3,), (0,), 4)],
        [11, 12],
    )
    kind, payload = unpack(pack("step", plan_to_wire(plan))[PREFIX_BYTES:])
    assert kind == "step"
    assert plan_from_wire(payload) == plan
