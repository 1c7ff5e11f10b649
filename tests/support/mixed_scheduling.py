"""How files of tests are given to workers."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class MixedScheduling(LoadFileScheduling):
    """Half of the workers take tests that start processes, which wait more than they compute, and
    the others those that compute, as long as there are any: cores neither idle nor are fought
    for."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        waits = self.nodes.index(node) % 2 == 0
        preferred = (file for file in self.workqueue if ("/end_to_end/" in file) == waits)
        if (file := next(preferred, None)) is not None:
            self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)
