"""WAGMA-SGD: averages over small groups that change from step to step."""

import dataclasses

from decentjax._core.butterfly import butterfly_hops
from decentjax.rounds import Rounds


@dataclasses.dataclass(frozen=True)
class Wagma(Rounds):
    """Rounds of every step over the groups of `butterfly_groups`.

    Between peers no group waits for a late member, but in every `period`-th step all
    workers form one, and wait for each other.

    Args:
      group_size: S.
      period: number of steps from one mean of all workers to the next.
    """

    group_size: int = 1
    period: int = 1

    def is_global(self, step: int) -> bool:
        """Whether all workers form one group."""
        return (step + 1) % self.period == 0

    def hops(self, step: int) -> list[int]:
        """The distances to the partners of a step: partner = worker XOR hop."""
        size = self.num_workers if self.is_global(step) else self.group_size
        return butterfly_hops(self.num_workers, size, step)

    def partners(self, worker: int) -> list[int]:
        """The partners of a worker in all steps."""
        every = butterfly_hops(self.num_workers, self.num_workers, 0)
        return [worker ^ hop for hop in every]
