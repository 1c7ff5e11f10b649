"""Files that a clone without Git LFS has instead of large ones."""

from __future__ import annotations

LFS_POINTER = b"version https://git-lfs"
LFS_REMEDY = (
    "a Git LFS pointer and not the file itself: run git lfs pull in its folder, or download it "
    "with hf download"
)
