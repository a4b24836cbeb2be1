"""Listens to the kernel's uevents: GPUs bound to the driver or unbound from it, and the driver's module.

Guarantees:

1. Events trigger a scan; what sysfs shows decides. A bind is emitted only for a GPU that sysfs
   shows bound to NVIDIA's driver, and synthetic events (``udevadm trigger``) are no binding at all.
   Messages from any other sender than the kernel are dropped: a process with CAP_NET_ADMIN
   in this network namespace may write to the kernel's group.
2. ``on_change`` is called once for all events within COALESCE_NS, and after the last of them. At the
   start and where events were lost ``on_loss`` is called instead, so a loss costs a scan and no information.
3. Nothing queues up here: the kernel's buffer of the socket is the only queue.

Without uevents changes are only found later: sysfs is scanned periodically anyway. That matters
in a user namespace (``hostUsers: false``), where the kernel silently delivers none; a
network namespace of its own is no obstacle. No capability is needed.

*Cost:* nothing while the hardware does not change; no period, no deadline. Importing pyroute2 takes 10 MiB of
memory and 0.15 s of processor time, so it is done here, late and in a thread.

Sources: kernel lib/kobject_uevent.c, drivers/base/dd.c, drivers/pci/pci-driver.c (pci_uevent),
net/netlink/af_netlink.c.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final, Protocol, Self

from agent import guard
from agent.bus import Inbox
from agent.counts import Count
from agent.errors import SourceError
from agent.log import about
from agent.model.facts import Fact, GpuRebound
from agent.model.policy import MILLISECOND_NS, SECOND_NS
from agent.sources.sysfs_scan import DRIVER, driver_of
from agent.threads import in_daemon_thread

COALESCE_NS: Final = 100 * MILLISECOND_NS
REOPEN_PAUSE_NS: Final = SECOND_NS
"""After events were lost, before the socket is opened again: at most one attempt in this time."""

KERNEL_GROUP: Final = 1
"""The multicast group of the kernel's own events; udev's have another."""

KERNEL_PORT: Final = 0
"""The netlink port of the kernel, which no process can have."""

_VENDOR: Final = "10DE:"
_CLASS: Final = re.compile(r"30[02][0-9A-Fa-f]{2}")
"""VGA and 3D controllers, as ``PCI_CLASS`` has them: hexadecimal, without a leading zero."""
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_MODULE_PATHS: Final = frozenset({"/module/nvidia", "/module/nvidia_uvm"})

_log = logging.getLogger(__name__)

Uevent = Mapping[str, object]


class UeventSocket(Protocol):
    """The part of pyroute2's socket that is used."""

    async def __aenter__(self) -> Self:
        """Open it."""

    async def __aexit__(self, *_: object) -> None:
        """Close it."""

    async def bind(self, groups: int) -> None:
        """Listen to multicast groups."""

    def get(self) -> AsyncIterator[Uevent]:
        """Yield messages; one without an action stands for an error."""


class UeventSource:
    """Emits GPUs that are bound and unbound, and triggers scans."""

    seen = Count("uevents_total", "events", "Uevents received, of any device.")
    losses = Count("uevent_losses_total", "losses", "How often the kernel's buffer of uevents was full.")

    def __init__(
        self,
        *,
        inbox: Inbox[Fact],
        sys_root: Path,
        on_change: Callable[[], None],
        on_loss: Callable[[], None],
        open_socket: Callable[[], Awaitable[UeventSocket]] | None = None,
        reopen_pause_ns: int = REOPEN_PAUSE_NS,
    ) -> None:
        """Call ``on_change`` and ``on_loss`` on the loop.

        ``on_change``: GPUs or the driver's modules were added or removed, and bindings were emitted.
        ``on_loss``: they may have been, and nothing was emitted.
        """
        self._inbox = inbox
        self._sys_root = sys_root
        self._on_change = on_change
        self._on_loss = on_loss
        self._is_emitted = True
        self._open_socket = open_socket if open_socket is not None else netlink_socket
        self._reopen_pause_ns = reopen_pause_ns
        self._pending: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        """Listen until cancelled; raises SourceError where there are no uevents. No two at once."""
        try:
            while True:
                await self._listen()
                self.losses += 1
                _log.warning(
                    "Uevents were lost for the %(times)s. time; scanning the bus again",
                    about(times=self.losses),
                )
                await asyncio.sleep(self._reopen_pause_ns / 1e9)
        except OSError as error:
            raise SourceError(
                f"Uevents cannot be received: {error.strerror or error}; "
                "allow netlink sockets (RestrictAddressFamilies=AF_NETLINK)"
            ) from None
        finally:
            if self._pending is not None:
                self._pending.cancel()
                self._pending = None

    async def _listen(self) -> None:
        """Listen until events are lost."""
        async with await self._open_socket() as listener:
            await listener.bind(groups=KERNEL_GROUP)
            # Changes until now were not emitted.
            self._is_emitted = False
            self._note_change()
            while True:
                try:
                    async for event in listener.get():
                        if event.get("ACTION") is None:
                            return
                        self.seen += 1
                        self._handle_event(event)
                except UnicodeDecodeError:
                    # From a device whose name is no UTF-8; NVIDIA's are.
                    self.seen += 1

    def _handle_event(self, event: Uevent) -> None:
        if event.get("SUBSYSTEM") == "module":
            if event.get("DEVPATH") in _MODULE_PATHS:
                self._note_change()
            return
        pci = _gpu_of(event)
        if pci is None or event.get("ACTION") == "change":
            return
        self._note_change()
        if event.get("SYNTH_UUID") is not None:
            return
        match event.get("ACTION"):
            case "bind" if event.get("DRIVER") == DRIVER == driver_of(self._sys_root, pci):
                self._inbox.put(GpuRebound(pci=pci, bound=True))
            case "unbind" | "remove":
                self._inbox.put(GpuRebound(pci=pci, bound=False))

    def _note_change(self) -> None:
        if self._pending is None:
            self._pending = guard.call_later("uevents", COALESCE_NS / 1e9, self._report_change)

    def _report_change(self) -> None:
        self._pending = None
        is_emitted, self._is_emitted = self._is_emitted, True
        (self._on_change if is_emitted else self._on_loss)()


def _gpu_of(event: Uevent) -> str | None:
    """Return the address of the GPU that an event is about."""
    pci = str(event.get("PCI_SLOT_NAME", ""))
    is_gpu = (
        event.get("SUBSYSTEM") == "pci"
        and str(event.get("PCI_ID", "")).upper().startswith(_VENDOR)
        and _CLASS.fullmatch(str(event.get("PCI_CLASS", "")))
    )
    return pci if is_gpu and _ADDRESS.fullmatch(pci) else None


async def netlink_socket() -> UeventSocket:
    """Return a socket for the kernel's uevents."""
    return (await in_daemon_thread("uevent-import", _socket_class))()


def _socket_class() -> Callable[[], UeventSocket]:
    from pyroute2.netlink.uevent import AsyncUeventSocket  # noqa: PLC0415 - see the cost above

    class KernelUeventSocket(AsyncUeventSocket):  # type: ignore[misc]  # pyroute2 has no types here
        """Accepts only the kernel's messages, which come from port 0; an error has no sender."""

        def enqueue(self, data: bytes, addr: tuple[int, int] | None) -> object:
            return None if addr is not None and addr[0] != KERNEL_PORT else super().enqueue(data, addr)

    made: Callable[[], UeventSocket] = KernelUeventSocket
    return made
