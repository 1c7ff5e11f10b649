"""What a rank says to its data plane when it has computed a layer."""

from __future__ import annotations

from tandem.shared.handoff.plane.endpoint import DataPlane
from tandem.shared.handoff.plane.messages import LayerReady


def layer_ready(
    plane: DataPlane,
    transfer_id: int,
    attempt: int,
    layer: int,
    first_token: int,
    end_token: int,
    end_layer: int | None = None,
) -> None:
    """Announce tokens of a layer, or of the layers up to ``end_layer``."""
    plane.submit(
        LayerReady(
            transfer_id=transfer_id,
            attempt=attempt,
            first_layer=layer,
            end_layer=layer + 1 if end_layer is None else end_layer,
            first_token=first_token,
            end_token=end_token,
        )
    )
