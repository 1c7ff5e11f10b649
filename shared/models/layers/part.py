"""Parts of a decoder: a tree that the loader walks, so that no part lists another one's weights."""

from __future__ import annotations

from collections.abc import Iterator

from ..parallel import WeightSlot


class Part:
    """A part of a decoder. Parts among its attributes, or in lists among them, are its children."""

    def children(self) -> Iterator[Part]:
        """The parts of this one."""
        for value in vars(self).values():
            for each in value if isinstance(value, list) else (value,):
                if isinstance(each, Part):
                    yield each

    def own_slots(self) -> dict[str, WeightSlot]:
        """The parameters that belong to no child, by name."""
        return {}

    def pack(self) -> None:
        """Bring the loaded parameters of ``own_slots`` into the form that they are used in."""

    def weight_slots(self) -> dict[str, WeightSlot]:
        """All parameters by name, for the loader."""
        slots = self.own_slots()
        for child in self.children():
            slots |= child.weight_slots()
        return slots

    def finish_loading(self) -> None:
        """Pack all parameters, once they are loaded."""
        for child in self.children():
            child.finish_loading()
        self.pack()
