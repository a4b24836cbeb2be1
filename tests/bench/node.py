"""A simulated node for a benchmark, and the real agent on it as a process of its own.

The kubelet, the simulated hardware and what measures share the benchmark's process, the agent has its own,
so on two cores neither waits for the other. Both use CLOCK_MONOTONIC, so their times compare.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from agent.simulation.children import environment_of_children
from agent.simulation.directory import NodeDirectory
from agent.simulation.kubelet import EmulatedKubelet, Registration
from agent.simulation.node import DriverWanted, SimulatedNode
from agent.simulation.presets import NodeSpec, gpu_uuid, load_preset
from tests.bench.figures import MeasurementError

GPU: Final = "nvidia.com/gpu"
PRESET: Final = "dgx-h100"
PATIENCE_S: Final = 30.0
"""Longer than any promise; whatever takes so long does not work at all."""
SETTLE_S: Final = 2.0
"""After which an agent that has just started has nothing left to import or write."""

ROOT: Final = Path(__file__).resolve().parents[2]
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_NOT_FOR_AGENTS: Final = ("GPU_AGENT_SIM_STATE", "GPU_AGENT_NODE_DIR")


class BenchNode:
    """A running simulated node; agents are started on it one after another, or two for an upgrade."""

    def __init__(self, node: SimulatedNode, log: Path) -> None:
        self.simulated = node
        self.kubelet: Final[EmulatedKubelet] = node.kubelet
        self.uuids: Final = tuple(node.nvml.uuid(number) for number in range(node.nvml.gpus))
        self._log = log

    @property
    def plugin_socket(self) -> Path:
        """The agent's socket, while it serves."""
        return self.simulated.directory.device_plugins / "nvidia-gpu.sock"

    def agent(
        self,
        flags: Mapping[str, str] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = ("agent", "run"),
        launcher: Sequence[str] = (),
    ) -> "MeasuredAgent":
        """Start an agent, or a module that is one; a context manager that sees to its end.

        ``launcher`` is a command that becomes the one that follows it.
        """
        given = self.simulated.directory.agent_flags() | {"http-listen": "", "log-format": "json"}
        options = [f"--{name}={text}" for name, text in (given | dict(flags or {})).items()]
        command = [*launcher, sys.executable, "-m", *program, *options]
        return MeasuredAgent(self, command, self._log, dict(environment or {}))

    async def wait(self, condition: Callable[[EmulatedKubelet], bool], what: str) -> None:
        """Wait for something at the kubelet; MeasurementError names what did not come."""
        try:
            await self.kubelet.wait_for(condition, PATIENCE_S)
        except TimeoutError as error:
            raise MeasurementError(f"{what} did not come: {error}; {self.last_words()}") from None

    async def wait_allocatable(self, devices: int) -> None:
        """Wait until the kubelet shows so many devices."""
        await self.wait(lambda kubelet: kubelet.allocatable(GPU) == devices, f"{devices} devices")

    def last_words(self) -> str:
        """Return what the agent logged last, for a failure."""
        with contextlib.suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            if lines:
                return f"the agent logged last: {lines[-1][:500]}"
        return "the agent logged nothing"


@contextlib.asynccontextmanager
async def bench_node(
    spec: NodeSpec | None = None, *, driver: DriverWanted = "none"
) -> AsyncIterator[BenchNode]:
    """Run a node, by default one with 8 GPUs; ``driver`` is as for the simulated node."""
    with _short_directory() as parent, NodeDirectory.hold(parent / "node") as directory:
        async with SimulatedNode(directory, spec or load_preset(PRESET), driver=driver) as node:
            yield BenchNode(node, parent / "agent.log")


def sixteen_gpus(spec: NodeSpec) -> NodeSpec:
    """Return a node of 8 GPUs twice, as machines with 16 are built: two boards."""
    twins = [
        msgspec.structs.replace(
            gpu,
            uuid=gpu_uuid(number),
            minor=number,
            serial=None,
            pci_bus_id=gpu.pci_bus_id.replace("0000:", "0001:", 1),
        )
        for number, gpu in enumerate(spec.gpus, start=len(spec.gpus))
    ]
    if len(twins) != 8:
        raise MeasurementError(f"the preset {PRESET} has {len(spec.gpus)} GPUs, 8 are needed")
    return msgspec.structs.replace(spec, gpus=(*spec.gpus, *twins))


@contextlib.contextmanager
def _short_directory() -> Iterator[Path]:
    """Make a directory whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="gpu-bench-") as name:
        yield Path(name)


class MeasuredAgent:
    """``gpu-agent run`` as users run it. Leaving the context kills it if it still runs."""

    def __init__(
        self, node: BenchNode, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> None:
        """Start it; ``began_ns`` is the moment before the process was made."""
        self._node = node
        variables = environment_of_children(os.environ, _NOT_FOR_AGENTS) | dict(environment)
        with log.open("ab") as errors:
            self.began_ns = time.monotonic_ns()
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                process_group=0,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    async def registered(self) -> Registration:
        """Wait for this process's first accepted registration."""
        await self._node.wait(lambda _kubelet: self._registration() is not None, "the registration")
        registration = self._registration()
        if registration is None:
            raise MeasurementError("the registration was forgotten before it was read")
        return registration

    def _registration(self) -> Registration | None:
        return next(
            (
                each
                for each in self._node.kubelet.registrations
                if each.accepted and each.peer_pid == self.pid
            ),
            None,
        )

    async def ready(self) -> None:
        """Wait until the kubelet shows every GPU of the node healthy."""
        await self.registered()
        await self._node.wait_allocatable(len(self._node.uuids))

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end of the process; returns the nanoseconds it took.

        but for SIGKILL, MeasurementError if it does not exit with 0.
        """
        began_ns = time.monotonic_ns()
        self.signal(number)
        await self._ended()
        ended_ns = time.monotonic_ns()
        status = self._process.wait()
        if number != signal.SIGKILL and status != 0:
            words = self._node.last_words()
            raise MeasurementError(f"the agent ended with status {status} after signal {number}; {words}")
        return ended_ns - began_ns

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def _ended(self) -> None:
        descriptor = os.pidfd_open(self.pid)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(descriptor, ended.set)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await ended.wait()
        except TimeoutError:
            raise MeasurementError(f"the agent did not end within {PATIENCE_S:g} s") from None
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def rss_bytes(self) -> int:
        """Return the resident memory, VmRSS of proc(5)."""
        return rss_bytes(self.pid)

    def threads(self) -> int:
        """Return how many threads it has."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def descriptors(self) -> int:
        """Return how many files it has open; those of the threads that call the driver are not among them."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def wakeups(self) -> int:
        """Return how often its threads gave the CPU up by themselves, so had to be woken again."""
        total = 0
        for thread in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                text = (thread / "status").read_text(encoding="ascii", errors="replace")
                total += int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        return total

    def cpu_s(self) -> float:
        """Return the CPU time of all threads so far. Source: proc(5), fields 14 and 15 of stat."""
        text = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


async def share_of_core(agent: MeasuredAgent, seconds: float) -> float:
    """Return how much of one core an agent uses once it has settled, in percent."""
    await agent.ready()
    await asyncio.sleep(SETTLE_S)
    cpu_s, began_s = agent.cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    return 100 * (agent.cpu_s() - cpu_s) / (time.monotonic() - began_s)


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise MeasurementError(f"process {pid} has ended")


def free_port() -> int:
    """Return a free port of this machine's loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
