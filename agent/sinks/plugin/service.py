"""The device plugin service of one resource: what the kubelet may ask, answered from the snapshot.

Guarantees: no answer waits for a driver, a file or another call. A watcher is sent the newest state
when it connects, then the first change at once and further ones within WINDOW_S in one message. Devices
that recover while others are still unhealthy wait for those, up to GATHER_S. A slow watcher skips
messages, but gets the last one, and holds one message in memory. Watchers end with a clean end of
stream, without a last list.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
from grpclib.const import Cardinality, Status
from grpclib.const import Handler as Method
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from agent.bus import Inbox, Latest
from agent.core.allocation.list_size import MAX_LIST_BYTES
from agent.counts import Count
from agent.log import about
from agent.model.facts import Fact, ListWritten, WatchersChanged
from agent.model.health import Health
from agent.model.ids import ResourceName
from agent.model.snapshot import Device, ListSent, Snapshot
from agent.sinks.plugin.answers import Answers, CdiSpecs, NoCdiSpecs
from agent.sinks.plugin.grpc_server import receive_request
from agent.sinks.plugin.wire import encode_list

WINDOW_S: Final = 0.05
"""Changes that follow a message within this time are sent together."""
GATHER_S: Final = 1.0
"""After trouble of the whole driver every GPU is healthy again, but each is polled at a moment of its own."""
BETWEEN_CALLS_NS: Final = 20_000_000
"""Longer than a kubelet takes from one answer to the next call for the same pod."""

SERVICE: Final = "/v1beta1.DevicePlugin"

log = logging.getLogger("agent.sinks.plugin.sink")


class _List(msgspec.Struct, frozen=True):
    data: bytes
    devices: Sequence[Device]
    changed_at_ns: int


class PluginService:
    """The five methods, for one resource."""

    lists_sent = Count("lists_sent_total", "lists", "ListAndWatch messages written to a stream.")
    allocations = Count("allocations_total", "calls", "Allocate calls answered with devices.")
    preferences = Count("preferred_allocations_total", "calls", "GetPreferredAllocation calls answered.")
    pre_starts = Count("container_pre_starts_total", "calls", "PreStartContainer calls answered.")

    def __init__(
        self,
        *,
        resource: ResourceName,
        generation: int,
        inbox: Inbox[Fact],
        latest: Latest[Snapshot],
        clock: Callable[[], int],
        cdi: CdiSpecs | None = None,
        on_sent: Callable[[ListSent], None] | None = None,
    ) -> None:
        self.resource: Final = resource
        self._generation = generation
        self._reported_watchers: int | None = None
        """As reported for this generation; None: none was."""
        self._inbox = inbox
        self._latest = latest
        self._clock = clock
        self._on_sent = on_sent
        self.answers = Answers(resource=resource, latest=latest, cdi=cdi or NoCdiSpecs())
        self._watchers = self._watched = 0
        self._asking = 0
        self._answered_ns: int | None = None
        # None ends the watchers.
        self._written: dict[int, _List | None] = {}
        """The list that each watcher was written last, by a number of the stream."""
        self._lists: Latest[_List | None] = Latest(_List(b"", (), latest.value.at_ns))
        self._refresh()

    def methods(self) -> dict[str, Method]:
        """Return grpclib's table of methods; messages are bytes."""
        unary, streaming = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        return {
            f"{SERVICE}/GetDevicePluginOptions": Method(self._options, unary, bytes, bytes),
            f"{SERVICE}/ListAndWatch": Method(self._list_and_watch, streaming, bytes, bytes),
            f"{SERVICE}/GetPreferredAllocation": Method(self._preferred, unary, bytes, bytes),
            f"{SERVICE}/Allocate": Method(self._allocate, unary, bytes, bytes),
            f"{SERVICE}/PreStartContainer": Method(self._pre_start, unary, bytes, bytes),
        }

    @property
    def generation(self) -> int:
        """Which registration watchers belong to."""
        return self._generation

    def begin(self, generation: int) -> None:
        """Serve for a registration that begins now."""
        self._generation, self._reported_watchers = generation, None

    def belong_to(self, generation: int) -> None:
        """Report the watchers for a registration that replaces the present one, if they were reported."""
        self._generation = generation
        if self._reported_watchers is not None:
            self._report_watchers()

    @property
    def watchers(self) -> int:
        """ListAndWatch streams open now."""
        return self._watchers

    async def follow(self) -> None:
        """Send each change to the watchers until cancelled."""
        while True:
            version = self._latest.version
            await self._gather()
            if self._refresh():
                await asyncio.sleep(WINDOW_S)
            await self._latest.wait_newer_first(version)

    def is_up_to_date(self) -> bool:
        """Return whether each watcher was written the newest list, compared with what is advertised now.

        The answer does not depend on the task that sends the lists to the watchers.
        """
        resource = self.answers.advertised()
        if resource is None or not self._written:
            return True
        newest: bytes | None = None
        for written in self._written.values():
            if written is None:
                return False
            if written.devices is not resource.devices:
                newest = newest or encode_list(resource.devices)
                if written.data != newest:
                    return False
        return True

    async def wait_between_pods(self, within_s: float) -> None:
        """Return when no pod is being admitted, but wait no longer than this.

        The kubelet drops its connection when a stream ends, and a pod whose calls are cut off by that is
        rejected for good. It makes several calls for one pod, one after another.
        """
        deadline_ns = self._clock() + round(within_s * 1e9)
        while (now_ns := self._clock()) < deadline_ns:
            last_ns = now_ns if self._asking else self._answered_ns
            if last_ns is None or now_ns - last_ns >= BETWEEN_CALLS_NS:
                return
            await asyncio.sleep((min(last_ns + BETWEEN_CALLS_NS, deadline_ns) - now_ns) / 1e9)

    def end_watchers(self) -> None:
        """Let every ListAndWatch stream end, and every new one at once."""
        if self._lists.value is not None:
            self._lists.publish(None)

    async def _gather(self) -> None:
        """Wait a moment while devices recover one by one; a device that becomes unhealthy ends the wait."""
        try:
            async with asyncio.timeout(GATHER_S):
                while self._recovers_in_part():
                    await self._latest.wait_newer_first(self._latest.version)
        except TimeoutError:
            return

    def _recovers_in_part(self) -> bool:
        """Return whether all that changed is that some of the unhealthy devices are healthy again."""
        shown, resource = self._lists.value, self.answers.advertised()
        if shown is None or resource is None or resource.devices is shown.devices:
            return False
        if len(resource.devices) != len(shown.devices):
            return False
        # Most of a long list is the same as at the last comparison.
        changed = [
            pair for pair in zip(shown.devices, resource.devices, strict=True) if pair[0] is not pair[1]
        ]
        has_recovered = False
        for old, new in changed:
            if old.id != new.id or (old.health is Health.HEALTHY and new.health is not Health.HEALTHY):
                return False
            has_recovered |= old.health is Health.UNHEALTHY and new.health is Health.HEALTHY
        return has_recovered and any(device.health is Health.UNHEALTHY for device in resource.devices)

    def _refresh(self) -> bool:
        """Publish the list if it is another one now; return whether it was."""
        shown = self._lists.value
        snapshot = self._latest.value
        resource = self.answers.advertised()
        if shown is None or resource is None or resource.devices is shown.devices:
            return False
        data = encode_list(resource.devices)
        if data == shown.data:
            return False
        self._lists.publish(_List(data, resource.devices, snapshot.at_ns))
        return True

    async def _options(self, stream: Stream[bytes, bytes]) -> None:
        await receive_request(stream)
        await stream.send_message(self.answers.options())

    async def _list_and_watch(self, stream: Stream[bytes, bytes]) -> None:
        await receive_request(stream)
        self._watched += 1
        watcher = self._watched
        self._written[watcher] = None
        self._count_watcher(1)
        try:
            await self._send_lists(stream, watcher)
        finally:
            del self._written[watcher]
            self._count_watcher(-1)

    def _count_watcher(self, change: int) -> None:
        self._watchers += change
        # Streams we end ourselves are nothing the core should act on.
        if self._lists.value is not None:
            self._report_watchers()

    def _report_watchers(self) -> None:
        self._reported_watchers = self._watchers
        self._inbox.put(WatchersChanged(self.resource, self._generation, self._watchers))

    async def _send_lists(self, stream: Stream[bytes, bytes], watcher: int) -> None:
        self._refresh()
        sent: bytes | None = None
        while (shown := self._lists.value) is not None:
            version = self._lists.version
            if shown.data != sent:
                if len(shown.data) > MAX_LIST_BYTES:
                    raise self._too_large(shown)
                began_ns = self._clock()
                await stream.send_message(shown.data)
                sent = shown.data
                self._written[watcher] = shown
                self._emit_list_written(shown, began_ns)
            await self._lists.wait_newer_first(version)

    def _too_large(self, shown: _List) -> GRPCError:
        log.error(
            "Could not send the list of %(resource)s: the kubelet accepts no %(bytes)s bytes",
            about(resource=self.resource, devices=len(shown.devices), bytes=len(shown.data)),
        )
        return GRPCError(
            Status.RESOURCE_EXHAUSTED,
            f"The list of {len(shown.devices)} devices has {len(shown.data)} bytes, the kubelet accepts"
            f" {MAX_LIST_BYTES}; configure fewer replicas",
        )

    def _emit_list_written(self, shown: _List, began_ns: int) -> None:
        self.lists_sent += 1
        healthy = frozenset(device.id for device in shown.devices if device.health is Health.HEALTHY)
        self._inbox.put(ListWritten(self.resource, self._generation, healthy))
        if self._on_sent is not None:
            self._on_sent(
                ListSent(
                    self.resource,
                    self._generation,
                    devices=len(shown.devices),
                    unhealthy=tuple(each for each in shown.devices if each.health is not Health.HEALTHY),
                    bytes=len(shown.data),
                    changed_at_ns=shown.changed_at_ns,
                    began_ns=began_ns,
                    sent_at_ns=self._clock(),
                )
            )

    async def _allocate(self, stream: Stream[bytes, bytes]) -> None:
        with self._pod_call():
            await self.answers.settle()
            await stream.send_message(self.answers.allocated(await receive_request(stream)))
        self.allocations += 1

    async def _preferred(self, stream: Stream[bytes, bytes]) -> None:
        with self._pod_call():
            await stream.send_message(self.answers.preferred(await receive_request(stream)))
        self.preferences += 1

    async def _pre_start(self, stream: Stream[bytes, bytes]) -> None:
        with self._pod_call():
            await stream.send_message(self.answers.started(await receive_request(stream)))
        self.pre_starts += 1

    @contextmanager
    def _pod_call(self) -> Iterator[None]:
        """Count a call from its first moment on, see ``wait_between_pods``."""
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1
            self._answered_ns = self._clock()
