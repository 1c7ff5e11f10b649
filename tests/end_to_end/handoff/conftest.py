"""The campaign's cluster, which all its cases share. It ends with the last of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.tests.end_to_end.handoff.campaign import Campaign, running_campaign


@pytest.fixture(scope="package")
def warm_campaign(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Iterator[Campaign]:
    """Over TCP: in shared memory no frame passes a wire."""
    folder = tmp_path_factory.mktemp("campaign")
    with running_campaign(folder, tiny_model, "--carrier=tcp") as campaign:
        yield campaign


@pytest.fixture
def campaign(warm_campaign: Campaign) -> Iterator[Campaign]:
    """A case that fails must leave no broken wire to the next one."""
    yield warm_campaign
    warm_campaign.heal()
