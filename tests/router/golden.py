"""Recorded responses and streams, byte for byte except ids and times.

``TANDEM_TEST_REFRESH=1 pytest tests/router -k golden`` records them anew.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

STREAMS = Path(__file__).with_name("golden_streams")
# What differs between two runs, and its replacement.
VARYING = (
    (re.compile(r'"(msg|toolu|chatcmpl|cmpl|call|resp|rs|fc)([_-])[\w-]+"'), r'"\1\2ID"'),
    (re.compile(r'"(created|created_at|completed_at)":[\d.]+'), r'"\1":0'),
    (re.compile(r'"system_fingerprint":"[^"]+"'), '"system_fingerprint":"FINGERPRINT"'),
    (re.compile(r'"signature":"[^"]+"'), '"signature":"SIGNATURE"'),
    (re.compile(r'"created_at":"[^"]+"'), '"created_at":"TIME"'),
    (re.compile(r'"(\w+_duration)":\d+'), r'"\1":0'),
)


def check_golden(name: str, stream: str) -> None:
    """Compare a stream with the recorded one of this name."""
    for pattern, instead in VARYING:
        stream = pattern.sub(instead, stream)
    path = STREAMS / f"{name}.txt"
    if os.environ.get("TANDEM_TEST_REFRESH"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(stream)
    assert stream == path.read_text(), "if meant: TANDEM_TEST_REFRESH=1, and a CHANGELOG line"
