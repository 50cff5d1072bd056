"""The budget of counterfactual branches of one tree.

A launch in the rubric stage may be run B times from clones of one state. The number of worlds that a
tree has created counts up from 1 (the root's); a launch gets a whole group while the count is below
the budget, so with B = 8 and a budget of 16 it goes 1 -> 9 -> 17: a soft cap of at most two groups a
tree (SERA, arXiv 2610.04902, counterfactual sampling). Launches inside branches draw on the same
budget; later launches run once, in the shared world.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class ForkBudget:
    """Worlds created so far by one tree, and whether another group fits.

    Attributes:
      branches: B, branches of a group; below 2 there are no groups.
      limit: No group starts once ``created`` has reached it.
      created: Worlds created, the root's included.
    """

    branches: int
    limit: int
    created: int = 1

    def reserve(self) -> bool:
        """Takes one group if it fits; True when it did.

        >>> budget = ForkBudget(branches=8, limit=16)
        >>> budget.reserve(), budget.created, budget.reserve(), budget.created, budget.reserve()
        (True, 9, True, 17, False)
        """
        if self.branches < 2 or self.created >= self.limit:
            return False
        self.created += self.branches
        return True

    def release(self) -> None:
        """Gives one group back: it was reserved, but its rubric could not be parsed."""
        self.created -= self.branches
