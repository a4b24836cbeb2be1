"""Has the MPS control daemon watched from when the policy needs it on, and not before."""

from typing import Final

from agent.core.freshness import Terms
from agent.model.facts import MPS
from agent.model.policy import SECOND_NS, Policy
from agent.runtime.assembly import Assembly
from agent.runtime.tasks import Tasks

DEADLINE_NS: Final = 5 * SECOND_NS
"""How long a look may take."""


class MpsWatch:
    """Follows the policy: whether GPUs are shared by MPS, and where its daemon is."""

    def __init__(self, assembly: Assembly, tasks: Tasks) -> None:
        self._assembly = assembly
        self._tasks = tasks
        self._root: str | None = None
        """Where the daemon is watched; None: nowhere."""

    def follow(self, policy: Policy) -> None:
        """Watch where this policy says, if it needs the daemon."""
        root = policy.injection.mps_root
        if policy.sharing.strategy != "mps" or root == self._root:
            return
        terms = Terms(self._assembly.look_ns, DEADLINE_NS)
        source = self._assembly.make_mps(root, terms)
        if self._root is None:
            self._tasks.keep_part(MPS, "source", source.run, terms=terms)
        else:
            self._tasks.replace(MPS, source.run)
        self._root = root
