"""The policy in effect: the operator's, with what the core needs and an operator has no say in."""

import os
from typing import Final

from agent.config.settings import Settings
from agent.model.policy import Policy
from agent.model.structs import replace

NEVER_NS: Final = 10**18
"""Thirty years: nobody opens ListAndWatch where nothing was registered."""


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
            # So does another root: sources look where they looked.
            injection=replace(policy.injection, device_root=self.now.injection.device_root),
        )
        return self.now

    def _completed(self, settings: Settings) -> Policy:
        policy = replace(settings.policy, jitter_seed=self._jitter_seed)
        return policy if settings.registers else replace(policy, watch_timeout_ns=NEVER_NS)
