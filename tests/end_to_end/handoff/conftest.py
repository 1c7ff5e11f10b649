"""The campaign's cluster, which all its cases share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.tests.end_to_end.handoff.campaign import Campaign, running_campaign
from tandem.tests.end_to_end.handoff.extent import FULL


@pytest.fixture(scope="package", params=["tcp", "shared_memory"] if FULL else ["tcp"])
def warm_campaign(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: str, request: pytest.FixtureRequest
) -> Iterator[Campaign]:
    """In shared memory the bulk wire has the places of frames; the rest is the same."""
    folder = tmp_path_factory.mktemp("campaign")
    with running_campaign(folder, tiny_model, f"--carrier={request.param}") as campaign:
        yield campaign


@pytest.fixture
def campaign(warm_campaign: Campaign) -> Iterator[Campaign]:
    """A case that fails must leave no broken wire to the next one."""
    yield warm_campaign
    warm_campaign.heal()
