"""Listens to the kernel's uevents: GPUs bound to the driver or taken from it, and the driver's module.

Guarantees:

1. Events say when to look; what counts is what sysfs shows. A bind is told only of a GPU that sysfs
   shows bound to NVIDIA's driver, and events that a process asked the kernel for (``udevadm trigger``)
   are no binding at all. What any other sender than the kernel wrote is dropped: whoever has CAP_NET_ADMIN
   in this network namespace may write to the kernel's group.
2. ``on_change`` is called once for all events within COALESCE_NS, and after the last of them. At the
   start and where events were lost it is ``on_loss`` instead, so a loss costs a look and no knowledge.
3. Nothing piles up here: the kernel's buffer of the socket is the only queue.

Without uevents nothing is missed, only seen later: sysfs is looked at periodically anyway. That matters
in a user namespace (``hostUsers: false``), where the kernel delivers none and says nothing of it; a
network namespace of its own is no obstacle. No capability is needed.

*Cost:* nothing while the hardware rests; no period, no deadline. Importing pyroute2 takes 10 MiB of
memory and 0.15 s of processor time, which is why it is done here, late and in a thread.

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
from agent.errors import SourceError
from agent.log import about
from agent.model.facts import Fact, GpuRebound
from agent.model.policy import MILLISECOND_NS, SECOND_NS
from agent.sources.sysfs_scan import DRIVER, driver_of
from agent.threads import in_daemon_thread

COALESCE_NS: Final = 100 * MILLISECOND_NS
REOPEN_PAUSE_NS: Final = SECOND_NS
"""After events were lost, before the socket is opened anew: at most one try in this time."""

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
    """What is used of pyroute2's socket."""

    async def __aenter__(self) -> Self:
        """Begin to use it."""

    async def __aexit__(self, *_: object) -> None:
        """Close it."""

    async def bind(self, groups: int) -> None:
        """Listen to multicast groups."""

    def get(self) -> AsyncIterator[Uevent]:
        """Yield what came; a message without an action stands for an error."""


class UeventSource:
    """Tells of GPUs that are bound and unbound, and asks others to look."""

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
        """Take whom to call on the loop.

        ``on_change``: GPUs or the driver's modules came or went, and bindings were told. ``on_loss``: they
        may have, and nothing was told.
        """
        self._inbox = inbox
        self._sys_root = sys_root
        self._on_change = on_change
        self._on_loss = on_loss
        self._is_told = True
        self._open_socket = open_socket if open_socket is not None else netlink_socket
        self._reopen_pause_ns = reopen_pause_ns
        self._pending: asyncio.TimerHandle | None = None
        self._seen = 0
        self._losses = 0

    @property
    def seen(self) -> int:
        """Events that came, of whatever device."""
        return self._seen

    @property
    def losses(self) -> int:
        """How often the kernel's buffer was full."""
        return self._losses

    async def run(self) -> None:
        """Listen for ever; raises SourceError where there are no uevents. Two at once are not allowed."""
        try:
            while True:
                await self._listen()
                self._losses += 1
                _log.warning(
                    "Uevents were lost for the %(times)s. time, so the bus is read anew",
                    about(times=self._losses),
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
            # Nobody told of what changed until now.
            self._is_told = False
            self._note_change()
            while True:
                try:
                    async for event in listener.get():
                        if event.get("ACTION") is None:
                            return
                        self._seen += 1
                        self._take(event)
                except UnicodeDecodeError:
                    # Of a device whose name is no text; none of NVIDIA's is.
                    self._seen += 1

    def _take(self, event: Uevent) -> None:
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
            self._pending = guard.call_later("uevents", COALESCE_NS / 1e9, self._tell_change)

    def _tell_change(self) -> None:
        self._pending = None
        is_told, self._is_told = self._is_told, True
        (self._on_change if is_told else self._on_loss)()


def _gpu_of(event: Uevent) -> str | None:
    """Return the address of the GPU that an event is of."""
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
        """Takes messages of the kernel alone, which are those from port 0; an error has no sender."""

        def enqueue(self, data: bytes, addr: tuple[int, int] | None) -> object:
            return None if addr is not None and addr[0] != KERNEL_PORT else super().enqueue(data, addr)

    made: Callable[[], UeventSocket] = KernelUeventSocket
    return made
