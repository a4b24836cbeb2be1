"""The uevent source over a scripted socket, and over the kernel's own where a test may trigger events."""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

from agent.errors import SourceError
from agent.model.facts import GpuRebound
from agent.simulation.presets import load_preset
from agent.simulation.roots import bind_pci_device, write_roots
from agent.sources.uevent import KERNEL_GROUP, UeventSocket, UeventSource, netlink_socket
from tests.sources.recorder import Recorder, until

PCI = "0000:3b:00.0"
"""The first GPU of the simulated node."""

BIND = {
    "ACTION": "bind",
    "DEVPATH": f"/devices/pci0000:3a/{PCI}",
    "SUBSYSTEM": "pci",
    "DRIVER": "nvidia",
    "PCI_CLASS": "30200",
    "PCI_ID": "10DE:1EB8",
    "PCI_SLOT_NAME": PCI,
    "SEQNUM": "4711",
}
UNBIND = {**{name: text for name, text in BIND.items() if name != "DRIVER"}, "ACTION": "unbind"}
MODULE = {"ACTION": "remove", "DEVPATH": "/module/nvidia", "SUBSYSTEM": "module", "SEQNUM": "4712"}
NETLINK_KOBJECT_UEVENT = 15
LOST: Mapping[str, object] = {}
"""What pyroute2 yields for an error of the socket."""


class Script:
    """Opens sockets that yield the events of a test."""

    def __init__(self) -> None:
        self.opened = 0
        self.closed = 0
        self.groups: list[int] = []
        self._events: deque[Mapping[str, object] | Exception] = deque()
        self._more = asyncio.Event()

    def feed(self, *events: Mapping[str, object] | Exception) -> None:
        self._events.extend(events)
        self._more.set()

    async def open(self) -> UeventSocket:
        self.opened += 1
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.closed += 1

    async def bind(self, groups: int) -> None:
        self.groups.append(groups)

    async def get(self) -> AsyncIterator[Mapping[str, object]]:
        while not self._events:
            self._more.clear()
            await self._more.wait()
        event = self._events.popleft()
        if isinstance(event, Exception):
            raise event
        yield event


class Listening:
    """A source that listens to a script."""

    def __init__(self, directory: Path, recorder: Recorder) -> None:
        self.spec = load_preset("4x-t4")
        write_roots(self.spec, directory)
        self.sys = directory / "sys"
        self.script = Script()
        self.changes = 0
        self.rescans = 0
        self.recorder = recorder
        self.source = UeventSource(
            inbox=recorder.inbox,
            sys_root=self.sys,
            on_change=self._changed,
            on_loss=self._lost,
            open_socket=self.script.open,
            reopen_pause_ns=0,
        )

    def _changed(self) -> None:
        self.changes += 1

    def _lost(self) -> None:
        self.rescans += 1

    async def received(self, *events: Mapping[str, object]) -> None:
        """Feed events, and return when they were handled."""
        seen = self.source.seen + len(events)
        self.script.feed(*events)
        await until(lambda: self.source.seen == seen)


@pytest.fixture
async def listening(tmp_path: Path, recorder: Recorder) -> AsyncIterator[Listening]:
    listening = Listening(tmp_path, recorder)
    task = asyncio.get_running_loop().create_task(listening.source.run(), name="uevents")
    yield listening
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert listening.script.closed == listening.script.opened


async def test_it_triggers_one_scan_at_the_start(listening: Listening) -> None:
    await until(lambda: listening.rescans == 1)
    assert listening.script.groups == [KERNEL_GROUP]


async def test_a_bound_gpu_is_emitted(listening: Listening) -> None:
    await listening.received(BIND)
    assert await listening.recorder.first(GpuRebound) == GpuRebound(PCI, bound=True)


@pytest.mark.parametrize("action", ["unbind", "remove"])
async def test_an_unbound_gpu_is_emitted(listening: Listening, action: str) -> None:
    await listening.received({**UNBIND, "ACTION": action})
    assert await listening.recorder.first(GpuRebound) == GpuRebound(PCI, bound=False)


@pytest.mark.parametrize(
    "other",
    [
        {"DRIVER": "vfio-pci"},
        {"PCI_ID": "8086:1EB8"},
        {"PCI_CLASS": "68000"},
        {"PCI_CLASS": "40300"},
        {"SUBSYSTEM": "net"},
        {"PCI_SLOT_NAME": "../../../etc"},
        {"ACTION": "change"},
        {"SYNTH_UUID": "0"},
    ],
)
async def test_other_events_are_no_binding(listening: Listening, other: Mapping[str, str]) -> None:
    await listening.received({**BIND, **other}, UNBIND)
    await listening.recorder.first(GpuRebound)
    assert [fact.bound for fact in listening.recorder.of(GpuRebound)] == [False]


async def test_a_bind_that_sysfs_does_not_show_is_not_emitted(listening: Listening) -> None:
    bind_pci_device(listening.spec.gpus[0], listening.sys, None)
    await listening.received(BIND, UNBIND)
    await listening.recorder.first(GpuRebound)
    assert [fact.bound for fact in listening.recorder.of(GpuRebound)] == [False]


@pytest.mark.parametrize(
    "event", [BIND, {**BIND, "ACTION": "add"}, UNBIND, MODULE, {**BIND, "SYNTH_UUID": "0"}]
)
async def test_a_change_triggers_a_scan(listening: Listening, event: Mapping[str, str]) -> None:
    await until(lambda: listening.rescans == 1)
    await listening.received(event)
    await until(lambda: listening.changes == 1)


async def test_simultaneous_events_trigger_one_scan(listening: Listening) -> None:
    await until(lambda: listening.rescans == 1)
    await listening.received(*[BIND, MODULE, UNBIND] * 100)
    await until(lambda: listening.changes == 1)
    await listening.received(MODULE)
    await until(lambda: listening.changes == 2)


async def test_other_devices_and_modules_trigger_no_scan(listening: Listening) -> None:
    await until(lambda: listening.rescans == 1)
    await listening.received(
        {"ACTION": "add", "SUBSYSTEM": "module", "DEVPATH": "/module/nvme"},
        {"ACTION": "change", "SUBSYSTEM": "block", "DEVPATH": "/devices/virtual/block/loop0"},
    )
    await listening.received(MODULE)
    await until(lambda: listening.changes == 1)


async def test_lost_events_trigger_a_scan(listening: Listening, caplog: pytest.LogCaptureFixture) -> None:
    await until(lambda: listening.rescans == 1)
    with caplog.at_level(logging.WARNING):
        listening.script.feed(LOST)
        await until(lambda: listening.rescans == 2)
    assert (listening.source.losses, listening.script.opened, listening.script.closed) == (1, 2, 1)
    assert "Uevents were lost" in caplog.text
    await listening.received(BIND)


async def test_an_event_that_is_no_text_is_skipped(listening: Listening) -> None:
    listening.script.feed(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"))
    listening.script.feed(BIND)
    await listening.recorder.first(GpuRebound)
    assert (listening.source.seen, listening.source.losses) == (2, 0)


async def test_missing_netlink_sockets_are_reported(tmp_path: Path, recorder: Recorder) -> None:
    async def unsupported() -> UeventSocket:
        raise OSError(97, "Address family not supported by protocol")

    source = UeventSource(
        inbox=recorder.inbox,
        sys_root=tmp_path,
        on_change=lambda: None,
        on_loss=lambda: None,
        open_socket=unsupported,
    )
    with pytest.raises(SourceError, match="Uevents cannot be received: Address family not supported"):
        await source.run()


# The kernel's own

TRIGGER = Path("/sys/devices/virtual/mem/null/uevent")


def trigger(path: Path = TRIGGER) -> None:
    with path.open("w") as file:
        file.write("change")


def needs_uevents() -> None:
    if not os.access(TRIGGER, os.W_OK):
        pytest.skip(f"{TRIGGER} cannot be written here, so no uevent can be triggered")


async def test_the_kernels_own_events_arrive(tmp_path: Path, recorder: Recorder) -> None:
    needs_uevents()
    listens = asyncio.Event()
    source = UeventSource(
        inbox=recorder.inbox, sys_root=tmp_path, on_change=lambda: None, on_loss=listens.set
    )
    task = asyncio.get_running_loop().create_task(source.run(), name="uevents")
    await listens.wait()
    trigger()
    await until(lambda: source.seen >= 1)
    assert source.losses == 0
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_what_another_sender_writes_to_the_kernels_group_is_dropped(
    tmp_path: Path, recorder: Recorder
) -> None:
    needs_uevents()
    write_roots(load_preset("4x-t4"), tmp_path)
    listens = asyncio.Event()
    source = UeventSource(
        inbox=recorder.inbox, sys_root=tmp_path / "sys", on_change=lambda: None, on_loss=listens.set
    )
    task = asyncio.get_running_loop().create_task(source.run(), name="uevents")
    await listens.wait()
    words = [f"bind@{BIND['DEVPATH']}", *(f"{name}={text}" for name, text in BIND.items())]
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_KOBJECT_UEVENT) as forger:
        forger.sendto("\0".join(words).encode() + b"\0", (0, KERNEL_GROUP))
    trigger()
    await until(lambda: source.seen >= 1)
    assert recorder.of(GpuRebound) == []
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_the_kernels_loss_of_events_is_noticed(tmp_path: Path, recorder: Recorder) -> None:
    needs_uevents()
    rescans = 0

    def lost() -> None:
        nonlocal rescans
        rescans += 1

    async def small() -> UeventSocket:
        opened = await netlink_socket()
        if source.losses == 0:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # type: ignore[attr-defined]
        return opened

    source = UeventSource(
        inbox=recorder.inbox,
        sys_root=tmp_path,
        on_change=lambda: None,
        on_loss=lost,
        open_socket=small,
        reopen_pause_ns=0,
    )
    task = asyncio.get_running_loop().create_task(source.run(), name="uevents")
    await until(lambda: rescans == 1)
    for _ in range(100):
        trigger()
    await until(lambda: source.losses >= 1)
    await until(lambda: rescans >= 2)
    seen = source.seen
    trigger()
    await until(lambda: source.seen > seen)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
