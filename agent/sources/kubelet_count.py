"""Polls the kubelet's count of healthy devices, which is compared with what it was sent.

An open stream does not prove that the kubelet reads it: older kubelets forget an
endpoint and leave its stream open. Only the kubelet's own count shows it.

Guarantees:

1. The kubelet is polled SOON_NS after a list was sent, and every ``period_ns`` while it has what it was sent.
   It is never polled more often than every ``soon_ns``, nor while nothing is registered.
2. No answer is no count: a kubelet that is absent, too old for the call, rejects it or takes too long is
   polled again after ``period_ns``, and nothing is emitted meanwhile.

*Cost:* one call a minute, with a deadline.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agent.bus import Inbox, Latest
from agent.core.freshness import Terms
from agent.errors import KubeletError
from agent.log import about
from agent.model.components import KUBELET_COUNT
from agent.model.facts import Fact, KubeletCounted
from agent.model.ids import ComponentId
from agent.model.policy import SECOND_NS
from agent.model.snapshot import RegistrationPhase, Snapshot
from agent.proofs import Proofs
from agent.sources.pods.source import DEADLINE_NS, RESOURCE_PREFIX
from agent.sources.pods.wire import AbsentError, UnsupportedError, count_devices, counts_of
from agent.threads import in_daemon_thread

PERIOD_NS: Final = 60 * SECOND_NS
SOON_NS: Final = 5 * SECOND_NS

_log = logging.getLogger(__name__)


class KubeletCountSource:
    """Emits the kubelet's own count of healthy devices."""

    def __init__(
        self,
        *,
        inbox: Inbox[Fact],
        latest: Latest[Snapshot],
        socket: Path,
        clock: Callable[[], int],
        proofs: Proofs,
        period_ns: int = PERIOD_NS,
        soon_ns: int = SOON_NS,
        deadline_ns: int = DEADLINE_NS,
        resource_prefix: str = RESOURCE_PREFIX,
    ) -> None:
        """``socket`` is the kubelet's for pod-resources; resources without the prefix are ignored."""
        self._inbox = inbox
        self._latest = latest
        self._socket = socket
        self._clock = clock
        self._proofs = proofs
        self._period_ns = period_ns
        self._soon_ns = min(soon_ns, period_ns)
        self._deadline_ns = deadline_ns
        self._prefix = resource_prefix
        self._last_failure: str | None = None

    async def run(self) -> None:
        """Poll until cancelled. May be run again afterwards; two at once are not allowed."""
        while True:
            if not _is_registered(self._latest.value):
                self._proofs.waive(ComponentId(KUBELET_COUNT))
                await self._wait_until(_is_registered)
                self._expect()
            await asyncio.sleep(self._soon_ns / 1e9)
            is_counted = await self._poll(self._clock())
            within_ns = self._period_ns - self._soon_ns
            if is_counted:
                await self._wait_until(_is_uncounted, within_ns=within_ns)
            else:
                await asyncio.sleep(within_ns / 1e9)

    def _expect(self) -> None:
        self._proofs.expect(ComponentId(KUBELET_COUNT), Terms(self._period_ns, self._deadline_ns))

    async def _wait_until(self, holds: Callable[[Snapshot], bool], *, within_ns: int | None = None) -> None:
        version = self._latest.version
        try:
            async with asyncio.timeout(None if within_ns is None else within_ns / 1e9):
                while not holds(self._latest.value):
                    version = await self._latest.wait_newer(version)
        except TimeoutError:
            return

    async def _poll(self, asked_ns: int) -> bool:
        """Poll once; returns whether the kubelet answered with its devices."""
        component = ComponentId(KUBELET_COUNT)
        try:
            answer = await count_devices(self._socket, timeout_s=self._deadline_ns / 1e9)
            healthy = await in_daemon_thread("kubelet-count", lambda: counts_of(answer, prefix=self._prefix))
        except (AbsentError, UnsupportedError) as error:
            self._proofs.waive(component)
            self._log_failure(logging.INFO, error)
            return False
        except KubeletError as error:
            self._expect()
            self._log_failure(logging.WARNING, error)
            return False
        self._expect()
        self._proofs.prove(component)
        self._last_failure = None
        self._inbox.put(KubeletCounted(healthy, asked_ns))
        return True

    def _log_failure(self, level: int, error: KubeletError) -> None:
        """Log a failure when it begins or changes, not on every poll."""
        if self._last_failure != str(error):
            self._last_failure = str(error)
            message = "Asking the kubelet which devices it has failed: %(detail)s"
            _log.log(level, message, about(detail=str(error), path=str(self._socket)))


def _is_registered(snapshot: Snapshot) -> bool:
    return any(resource.phase is RegistrationPhase.REGISTERED for resource in snapshot.resources)


def _is_uncounted(snapshot: Snapshot) -> bool:
    """Return whether the kubelet's count does not confirm yet what it was sent."""
    return any(
        resource.phase is RegistrationPhase.REGISTERED and not resource.counted
        for resource in snapshot.resources
    )
