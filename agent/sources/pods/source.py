"""Polls the kubelet for the node's pods and the devices that they hold.

Guarantees:

1. The facts are emitted with every list, changed or not, so that their age is known. While the kubelet does
   not answer nothing is emitted, and the last facts become stale.
2. One list in ``period_ns``, and at most one more after a failure. The source waits quietly for an absent
   kubelet: it logs one line when the kubelet is absent, one when it answers again.
3. The kubelet's answer is bounded, and parsed in a thread.

*Cost:* one call every ``period_ns`` (10 s), with a deadline of ``deadline_ns`` (5 s). 110 pods take
10 ms of a processor, 1,000 pods 0.1 s.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from agent.bus import Inbox
from agent.errors import KubeletError
from agent.log import about
from agent.model.facts import AllocationsListed, Fact, PodsSeen
from agent.model.policy import SECOND_NS
from agent.sources.pods.finished import FinishedPods
from agent.sources.pods.holders import DeviceHolders
from agent.sources.pods.uids import SeenPods, pods_by_uid
from agent.sources.pods.wire import AbsentError, Listing, list_pods, listing_of
from agent.threads import in_daemon_thread

PERIOD_NS: Final = 10 * SECOND_NS
DEADLINE_NS: Final = 5 * SECOND_NS
RETRY_NS: Final = SECOND_NS
"""After a failure, before the one retry of the period."""

RESOURCE_PREFIX: Final = "nvidia.com/"

_log = logging.getLogger(__name__)


class PodsSource:
    """Emits which pods hold which of the node's GPU devices."""

    def __init__(
        self,
        *,
        inbox: Inbox[Fact],
        socket: Path,
        pod_logs: Path,
        checkpoint: Path,
        clock: Callable[[], int],
        period_ns: int = PERIOD_NS,
        deadline_ns: int = DEADLINE_NS,
        retry_ns: int = RETRY_NS,
        resource_prefix: str = RESOURCE_PREFIX,
        finished: FinishedPods | None = None,
        prove: Callable[[], object] = lambda: None,
    ) -> None:
        """``socket`` is the kubelet's for pod-resources, ``pod_logs`` where it keeps the logs of pods.

        Only devices of resources with the prefix are emitted. ``finished`` finds finished pods. ``prove`` is
        called after each poll, whatever its outcome.
        """
        self._inbox = inbox
        self._socket = socket
        self._pod_logs = pod_logs
        self._checkpoint = checkpoint
        self._clock = clock
        self._prove = prove
        self._period_ns = period_ns
        self._deadline_ns = deadline_ns
        self._retry_ns = retry_ns
        self._prefix = resource_prefix
        self._holders = DeviceHolders()
        self._finished_pods = finished
        self._last_failure: str | None = None

    async def run(self) -> None:
        """Poll until cancelled. May be run again afterwards; two at once are not allowed."""
        while True:
            began_ns = self._clock()
            if not await self._poll() and self._retry_ns < self._period_ns:
                await asyncio.sleep(self._retry_ns / 1e9)
                if not await self._poll():
                    # Pods may start and finish meanwhile, so the next list cannot be compared with the last.
                    self._forget()
            self._prove()
            await asyncio.sleep(max(0, began_ns + self._period_ns - self._clock()) / 1e9)

    async def _poll(self) -> bool:
        """Poll once; returns whether the kubelet answered, or is absent, so that a retry is pointless."""
        try:
            answer = await list_pods(self._socket, timeout_s=self._deadline_ns / 1e9)
            listing, pods, finished = await in_daemon_thread("pods-list", lambda: self._read(answer))
        except AbsentError as error:
            self._log_failure(logging.INFO, "Waiting for the kubelet's pod-resources socket", error)
            self._forget()
            return True
        except KubeletError as error:
            self._log_failure(logging.WARNING, "Listing the pods that hold devices failed", error)
            return False
        if self._last_failure is not None:
            self._last_failure = None
            _log.info("The kubelet lists which pods hold devices at %(path)s", about(path=str(self._socket)))
        self._inbox.put(AllocationsListed(pods=self._holders.after(listing.claims, finished)))
        if pods is not None:
            self._inbox.put(PodsSeen(pods.pods, complete=pods.complete))
        return True

    def _read(self, answer: bytes) -> tuple[Listing, SeenPods | None, Collection[str]]:
        listing = listing_of(answer, prefix=self._prefix)
        pods = pods_by_uid(
            listing.names, listing.claims, pod_logs=self._pod_logs, checkpoint=self._checkpoint
        )
        if pods is None or self._finished_pods is None:
            return listing, pods, ()
        return listing, pods, self._finished_pods.after(listing.claims, pods.pods)

    def _forget(self) -> None:
        self._holders.forget()
        if self._finished_pods is not None:
            self._finished_pods.forget()

    def _log_failure(self, level: int, message: str, error: KubeletError) -> None:
        """Log a failure when it begins or changes, not on every poll."""
        if self._last_failure != message:
            self._last_failure = message
            path = str(self._socket)
            _log.log(level, "%(what)s: %(detail)s", about(what=message, path=path, detail=str(error)))
