"""The kernel's side of a simulated node: its log, the bus, modules and device nodes, as sources see them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import pytest

from agent.errors import ConfigError, UsageError
from agent.simulation.actions import parse
from agent.simulation.node import SimulatedNode
from agent.sources.kmsg_records import XidLine, parse_line, parse_record, split_lines
from agent.sources.sysfs_scan import Exclusions, Roots, SysfsScan, scan_sysfs
from agent.threads import in_daemon_thread
from tests.harness import PATIENCE_S, simulated_node

NODES = [f"/dev/nvidia{minor}" for minor in range(4)]


@pytest.fixture
async def node() -> AsyncIterator[SimulatedNode]:
    async with simulated_node("4x-t4") as node:
        yield node


async def seen(node: SimulatedNode) -> SysfsScan:
    """What a source sees of the node now."""
    directory = node.directory
    roots = Roots(directory.sys, directory.proc, directory.dev, strict_nodes=False)
    return await in_daemon_thread("scan", lambda: scan_sysfs(roots, NODES, Exclusions()))


def pci(node: SimulatedNode) -> list[str]:
    return [gpu.pci_bus_id for gpu in node.spec.gpus]


class Reader:
    """Reads a simulated log as the source does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_unix_connection(str(self._path))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def line(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.readline()


# The log


async def test_an_xid_in_the_log_is_one_that_the_source_reads(node: SimulatedNode) -> None:
    async with Reader(node.directory.kernel_log) as log:
        await node.do("kernel-xid", {"xid": "94", "gpu": "1", "gi": "5", "ci": "0", "text": "Contained"})
        record = parse_record((await log.line()).rstrip(b"\n"))
    assert record is not None
    found = parse_line(split_lines(record))
    assert isinstance(found, XidLine)
    assert (found.pci, found.xid, found.gi, found.ci) == (pci(node)[1], 94, 5, 0)
    assert found.detail == "Contained"


async def test_a_gpu_that_falls_off_the_bus_is_reported_in_two_lines_as_by_the_driver(
    node: SimulatedNode,
) -> None:
    async with Reader(node.directory.kernel_log) as log:
        await node.do("kernel-xid", {"xid": "79", "gpu": "0"})
        lines = [(await log.line()).partition(b";")[2] for _ in range(2)]
    assert lines == [
        b"NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n",
        b"NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.\n",
    ]


async def test_a_reader_that_comes_late_gets_what_was_written_before(node: SimulatedNode) -> None:
    await node.do("kernel-log", {"text": "first\nsecond \\ \u20ac"})
    async with Reader(node.directory.kernel_log) as log:
        assert (await log.line()).partition(b";")[2] == b"first\\x0asecond \\x5c \\xe2\\x82\\xac\n"


# The bus, modules and nodes


async def test_a_gpu_that_is_unbound_is_gone_for_nvml_and_the_source(node: SimulatedNode) -> None:
    await node.do("unbind", {"gpu": "1", "driver": "vfio-pci"})
    assert (await seen(node)).gpus == (pci(node)[0], *pci(node)[2:])
    await node.do("bind", {"gpu": "1"})
    assert (await seen(node)).gpus == tuple(pci(node))


async def test_a_gpu_that_is_bound_again_is_another_binding(node: SimulatedNode) -> None:
    before = (await seen(node)).bindings
    await node.do("bind", {"gpu": "2"})
    changed = {
        address for address, binding in (await seen(node)).bindings.items() if binding != before[address]
    }
    assert changed == {pci(node)[2]}


async def test_a_gpu_that_is_not_on_the_bus_cannot_be_bound(node: SimulatedNode) -> None:
    await node.do("remove-gpu", {"gpu": "1"})
    with pytest.raises(UsageError, match="not on the bus; bring it back with add-gpu"):
        await node.do("bind", {"gpu": "1"})


async def test_modules_that_are_loaded_anew_are_others_and_bind_every_gpu_anew(node: SimulatedNode) -> None:
    await node.do("unbind", {"gpu": "3", "driver": "vfio-pci"})
    before = await seen(node)
    await node.do("reload-module", {})
    after = await seen(node)
    assert after.module not in {None, before.module}
    assert after.bindings.keys() == before.bindings.keys()
    assert all(after.bindings[address] != binding for address, binding in before.bindings.items())


async def test_a_driver_that_is_unloaded_is_gone_from_sys(node: SimulatedNode) -> None:
    await node.do("remove-gpu", {"gpu": "3"})
    await node.do("driver", {"state": "unloaded"})
    assert ((await seen(node)).module, (await seen(node)).gpus) == (None, ())
    await node.do("driver", {"state": "loaded"})
    assert (await seen(node)).module is not None
    assert (await seen(node)).gpus == tuple(pci(node)[:3])


async def test_a_node_that_is_removed_is_missed_until_it_is_added(node: SimulatedNode) -> None:
    await node.do("remove-node", {"name": "nvidia2"})
    await node.do("remove-node", {"name": "nvidiactl"})
    assert (await seen(node)).missing == ("/dev/nvidia2", "/dev/nvidiactl")
    for name in ("nvidia2", "nvidiactl"):
        await node.do("add-node", {"name": name})
    assert (await seen(node)).missing == ()


@pytest.mark.parametrize("name", ["sda", "nvidia/../../x", "../nvidia0", "nvidia\u20ac"])
def test_a_node_of_others_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="must be a node of the driver"):
        parse("remove-node", {"name": name})
