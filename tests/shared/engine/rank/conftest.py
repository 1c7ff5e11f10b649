"""A fake ``torch.cuda`` for ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tandem.shared.engine import device as engine_device
from tandem.tests.support.fake_cuda import FakeCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    fake = FakeCuda()
    preferred = torch.backends.cuda.cudnn_sdp_enabled()
    for name in dir(fake):
        if not name.startswith("_") and name not in ("current", "capability"):
            monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(engine_device, "_add_on", lambda device: None)
    monkeypatch.setattr(engine_device, "triton_problem", lambda device: "")
    yield fake
    torch.backends.cuda.enable_cudnn_sdp(preferred)
