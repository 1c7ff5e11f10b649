from __future__ import annotations

import pytest
import torch

from tandem.shared.models.layers.part import Part
from tandem.shared.models.parallel import WeightSlot, replicated_slot


class Leaf(Part):
    def __init__(self, name: str, packed: list[str]) -> None:
        self.slots = {name: replicated_slot(torch.empty(1))}
        self._name, self._packed = name, packed

    def own_slots(self) -> dict[str, WeightSlot]:
        return self.slots

    def pack(self) -> None:
        self._packed.append(self._name)


class Branch(Leaf):
    def __init__(self, name: str, packed: list[str], *children: object) -> None:
        super().__init__(name, packed)
        self.one, self.more = children[0], children[1:]


def test_parts_are_found_wherever_an_attribute_holds_them_and_packed_after_their_children() -> None:
    packed: list[str] = []
    a, b, c, d = (Leaf(name, packed) for name in "abcd")
    inner = Branch("inner", packed, [c, None], 3.0)
    root = Branch("root", packed, {"a": a, "none": None}, b, d, inner)
    assert list(root.weight_slots()) == ["root", "a", "b", "d", "inner", "c"]
    assert list(root.own_slots()) == ["root"], "asking a part changes nothing in it"
    root.finish_loading()
    assert packed == ["a", "b", "d", "c", "inner", "root"]


@pytest.mark.parametrize("again", ["root", "a"])
def test_two_parameters_of_one_name_are_an_error(again: str) -> None:
    packed: list[str] = []
    root = Branch("root", packed, Leaf("a", packed), Branch("b", packed, Leaf(again, packed)))
    with pytest.raises(AssertionError, match=f"two parts have a parameter {again}"):
        root.weight_slots()
