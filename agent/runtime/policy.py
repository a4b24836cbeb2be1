"""The policy in effect: the operator's, with what the core needs and an operator does not set."""

import os
from typing import Final

from agent.config.settings import Settings
from agent.core.freshness import Terms
from agent.model.facts import MPS
from agent.model.policy import SECOND_NS, Policy
from agent.model.structs import replace
from agent.runtime.assembly import Assembly
from agent.runtime.tasks import Tasks

NEVER_NS: Final = 10**18
"""Thirty years: no kubelet opens ListAndWatch where nothing was registered."""


class PolicyInEffect:
    """Follows the settings, as far as that needs no restart."""

    def __init__(self, settings: Settings) -> None:
        self._jitter_seed = int.from_bytes(os.urandom(4))
        self.now: Policy = self._completed(settings)

    def follow(self, settings: Settings) -> Policy:
        """Put the settings of a reload into effect, and return what is in effect now."""
        policy = self._completed(settings)
        self.now = replace(
            policy,
            # What is registered stays registered, so to begin to observe needs a restart.
            observe=policy.observe and self.now.observe,
            # So does another root: sources read where they read at the start.
            injection=replace(policy.injection, device_root=self.now.injection.device_root),
        )
        return self.now

    def _completed(self, settings: Settings) -> Policy:
        policy = replace(settings.policy, jitter_seed=self._jitter_seed)
        return policy if settings.registers else replace(policy, watch_timeout_ns=NEVER_NS)


DEADLINE_NS: Final = 5 * SECOND_NS
"""How long one check of the MPS control daemon may take."""


class MpsWatch:
    """Follows the policy: whether GPUs are shared by MPS, and where its daemon is."""

    def __init__(self, assembly: Assembly, tasks: Tasks) -> None:
        self._assembly = assembly
        self._tasks = tasks
        self._root: str | None = None
        """Where the daemon is watched; None: nowhere."""

    def follow(self, policy: Policy) -> None:
        """Watch the root of this policy, if it needs the daemon."""
        root = policy.injection.mps_root
        if policy.sharing.strategy != "mps" or root == self._root:
            return
        terms = Terms(self._assembly.recheck_ns, DEADLINE_NS)
        source = self._assembly.make_mps(root, terms)
        if self._root is None:
            self._tasks.keep_component(MPS, "source", source.run, terms=terms)
        else:
            self._tasks.replace(MPS, source.run)
        self._root = root
