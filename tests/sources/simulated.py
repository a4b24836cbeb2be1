"""A node directory with a simulated driver, and the real NVML source on it."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agent.bus import Inbox
from agent.model.facts import Fact, GpuProbePassed
from agent.model.ids import GpuUuid
from agent.simulation.nvml import NvmlState, install_library
from agent.simulation.presets import load_preset
from agent.sources.nvml.source import LibraryLocation, NvmlSettings, NvmlSource
from tests.sources.recorder import PATIENCE_S, Recorder

MS = 1_000_000

QUICK = NvmlSettings(
    init_deadline_ns=5_000 * MS,
    first_handle_deadline_ns=5_000 * MS,
    call_deadline_ns=5_000 * MS,
    poll_ns=50 * MS,
    init_retry_ns=20 * MS,
    event_slice_ms=20,
    event_retry_ns=20 * MS,
    first_probe_wait_ns=5_000 * MS,
    close_wait_ns=5_000 * MS,
)
"""Short periods, long deadlines: only a call that hangs is overdue."""


@dataclass
class Node:
    """A node directory: a driver library with its state, and what stands for /dev and /sys."""

    directory: Path
    state: NvmlState
    inits_forgotten: int = 0
    """Inits that the library reports as missing when they are to be undone."""

    @classmethod
    def make(cls, directory: Path, hardware: str | Mapping[str, object], *, library: bool = True) -> "Node":
        """Make the node of a preset, with or without its driver's library."""
        state = NvmlState.create(directory / "nvml.state", load_preset(hardware))
        (directory / "dev").mkdir()
        (directory / "sys").mkdir()
        if library:
            install_library(directory)
        return cls(directory, state)

    def close(self) -> None:
        # A test that failed may have left calls hanging.
        self.state.clear_faults()
        self.state.close()

    @property
    def library(self) -> Path:
        return self.directory / "lib" / "libnvidia-ml.so.1"

    def uuid(self, gpu: int) -> GpuUuid:
        return GpuUuid(self.state.uuid(gpu))

    def uuids(self) -> list[GpuUuid]:
        return [self.uuid(gpu) for gpu in range(self.state.gpus)]


async def all_probed(recorder: Recorder, node: Node) -> None:
    """Return once every GPU of the node passed a probe, and no other did."""
    await recorder.until(lambda: {fact.gpu for fact in recorder.of(GpuProbePassed)} == set(node.uuids()))


@asynccontextmanager
async def running_source(
    node: Node, inbox: Inbox[Fact], settings: NvmlSettings = QUICK, *, released: bool = False
) -> AsyncIterator[NvmlSource]:
    """Run a source; at the end, check that it has shut NVML down."""
    source = NvmlSource(
        inbox=inbox,
        library=LibraryLocation(path=node.library),
        dev_root=node.directory / "dev",
        sys_root=node.directory / "sys",
        proc_root=node.directory / "proc",
        clock=time.monotonic_ns,
        settings=settings,
        released=released,
    )
    task = asyncio.get_running_loop().create_task(source.run(), name="nvml")
    try:
        yield source
    finally:
        node.state.clear_faults()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        async with asyncio.timeout(PATIENCE_S):
            # A call that hung until now may not have returned yet.
            while not await source.close():
                await asyncio.sleep(0.002)
        assert node.state.inits == node.state.shutdowns + node.inits_forgotten


def receives_every_xid(source: NvmlSource) -> bool:
    """Whether an XID of any GPU would be received: an event from before that is lost."""
    session = source._session
    if session is None:
        return False
    events = session.listener.events
    return events is not None and all(watcher.registered is events for watcher in session._watchers)
