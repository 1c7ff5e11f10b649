"""Files that Git LFS has left out of a clone, and put a pointer to their contents in their place."""

from __future__ import annotations

LFS_POINTER = b"version https://git-lfs"
LFS_REMEDY = (
    "a Git LFS pointer and not the file itself: run git lfs pull in its folder, or download it "
    "with hf download"
)
