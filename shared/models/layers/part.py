"""Parts of a decoder: a tree that the loader walks."""

from __future__ import annotations

from collections.abc import Iterator

from ..parallel import WeightSlot


class Part:
    """A part of a decoder. Its children are the parts among its attributes, also in lists, tuples
    and dicts."""

    def children(self) -> Iterator[Part]:
        """The parts of this part."""
        for value in vars(self).values():
            if isinstance(value, dict):
                value = value.values()
            elif not isinstance(value, (list, tuple)):
                value = (value,)
            yield from (each for each in value if isinstance(each, Part))

    def own_slots(self) -> dict[str, WeightSlot]:
        """The parameters that belong to no child, by name."""
        return {}

    def pack(self) -> None:
        """Convert the loaded parameters of ``own_slots`` to the form in which they are used."""

    def weight_slots(self) -> dict[str, WeightSlot]:
        """All parameters by name, for the loader."""
        slots = dict(self.own_slots())
        for child in self.children():
            for name, slot in child.weight_slots().items():
                assert name not in slots, f"two parts have a parameter {name}"
                slots[name] = slot
        return slots

    def finish_loading(self) -> None:
        """Pack all parameters after loading."""
        for child in self.children():
            child.finish_loading()
        self.pack()
