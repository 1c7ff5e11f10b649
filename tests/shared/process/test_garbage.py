"""The garbage collector during imports."""

from __future__ import annotations

import gc

import pytest

from tandem.shared.process.garbage import lasting_imports


def test_what_is_imported_is_left_out_of_collections() -> None:
    before = gc.get_freeze_count()
    with lasting_imports():
        assert not gc.isenabled()
        objects: list[object] = [[] for _ in range(1000)]
    assert gc.isenabled() and gc.get_freeze_count() >= before + len(objects)


def test_collections_go_on_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), lasting_imports():
        raise ImportError
    assert gc.isenabled()
