"""The processes that use a simulated node's GPUs: by name, in pods, in agreement with what NVML lists.

Guarantees:

1. NVML lists the processes that live and have contexts, with the memory of those; a GPU's used memory is that
   of every context the driver has, also of owners that have exited. Both follow each command and each exit.
2. Every process exits with the node.
3. Processes are bounded.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.errors import AgentError, UsageError
from agent.simulation.directory import NodeDirectory, cgroup_root
from agent.simulation.driver_double.double import Books, DriverDouble
from agent.simulation.driver_double.nodes import Gpu, capability_node
from agent.simulation.gpu_processes.places import ProcessPlaces
from agent.simulation.gpu_processes.process import SimulatedProcess
from agent.simulation.nvml import GpuProcess, NvmlState
from agent.simulation.presets import NodeSpec
from agent.simulation.roots import (
    CAPABILITY_DIRECTORY,
    GENERAL_CAPABILITIES,
    capability_minors,
    gpu_capabilities,
)

MAX_PROCESSES: Final = 2_048
DEFAULT_MEMORY_MIB: Final = 512
"""Of each context."""
CONTAINER: Final = "main"
"""The container of every pod that the simulated node runs."""
_MIB: Final = 1 << 20


@dataclass(slots=True)
class NodeProcess:
    """A process that was started, forked or is still paid for by the driver."""

    name: str
    process: SimulatedProcess
    pod: str | None
    """``namespace/name``."""
    positions: tuple[int, ...]
    """GPUs it was started for."""
    memory_mib: int
    gi: int | None = None
    ci: int | None = None
    """The MIG device it runs on, as NVML lists it."""

    @property
    def title(self) -> str:
        """What it is called in sentences."""
        return f"Process {self.name} ({self.process.pid})"


class NodeProcesses:
    """The processes of one node; ``report`` gets the exits that no command caused."""

    def __init__(
        self,
        directory: NodeDirectory,
        spec: NodeSpec,
        driver: DriverDouble,
        nvml: NvmlState,
        report: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._spec = spec
        self._driver = driver
        self._nvml = nvml
        self._report = report
        self._gpus = gpus_of(spec)
        self._places = ProcessPlaces(cgroup_root(directory.path))
        self._living: dict[str, NodeProcess] = {}
        self._memory_mib: dict[int, int] = {}
        """Of each context of a process, by its id; kept while the driver has contexts of it."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._in_use: set[int] = set()
        """Positions whose memory these processes determine."""

    def get(self, name: str) -> NodeProcess:
        """Return a process that lives; raises UsageError where there is none."""
        found = self._living.get(name)
        if found is None:
            known = ", ".join(self._living) or "none"
            raise UsageError(f"No process {name} runs on the simulated node; those that run: {known}")
        return found

    @property
    def all(self) -> Sequence[NodeProcess]:
        """Every process that lives."""
        return tuple(self._living.values())

    async def start(
        self,
        name: str,
        positions: Sequence[int],
        *,
        contexts: int = 1,
        comm: str | None = None,
        pod: str | None = None,
        memory_mib: int = DEFAULT_MEMORY_MIB,
        gi: int | None = None,
        ci: int | None = None,
    ) -> NodeProcess:
        """Start a process with so many contexts on each of some GPUs; ``pod`` is ``namespace/name``.

        Raises UsageError for a name in use or an unknown pod, AgentError over MAX_PROCESSES.
        """
        self._check_new(name)
        cgroup = None if pod is None else self._cgroup_of_pod(pod)
        process = await SimulatedProcess.start(
            comm or name,
            folder=self._directory.dev,
            version=self._spec.driver_version,
            gpus=self._gpus,
            cgroup=cgroup,
        )
        made = NodeProcess(name, process, pod, tuple(positions), memory_mib, gi, ci)
        self._add(made)
        for position in positions:
            if gi is not None and ci is not None:
                await self._open_capabilities(made, position, gi, ci)
            await self.create(made, position, contexts)
        return made

    async def _open_capabilities(self, owner: NodeProcess, position: int, gi: int, ci: int) -> None:
        """Have a process open what gives access to a MIG device, as libcuda does before it uses one."""
        for minor in capability_minors(self._gpus[position].minor, gi, ci):
            await owner.process.command("open", name=f"{CAPABILITY_DIRECTORY}/{capability_node(minor)}")

    async def create(self, owner: NodeProcess, position: int, contexts: int) -> None:
        """Have a process create contexts on a GPU."""
        await owner.process.create(self._gpus[position].minor, contexts)
        await self.agree()

    async def fork(self, parent: NodeProcess, name: str) -> NodeProcess:
        """Have a process fork; the child is called by the name. Raises as ``start``."""
        self._check_new(name)
        child = await parent.process.fork(name)
        made = NodeProcess(name, child, parent.pod, parent.positions, parent.memory_mib, parent.gi, parent.ci)
        self._add(made)
        return made

    async def leak(self, owner: NodeProcess, position: int, contexts: int, every_s: float) -> None:
        """Have a process create contexts one after the other at that pace, while it lives."""
        await self.create(owner, position, 1)
        self._spawn(self._go_on(owner, position, contexts - 1, every_s), f"simulation-leak-{owner.name}")

    async def _go_on(self, owner: NodeProcess, position: int, contexts: int, every_s: float) -> None:
        # The process may exit meanwhile.
        with contextlib.suppress(AgentError):
            for _ in range(contexts):
                await asyncio.sleep(every_s)
                await self.create(owner, position, 1)

    async def agree(self) -> None:
        """Make NVML agree with the driver's books."""
        books = await self._driver.books()
        paid = {context.pid for context in books.contexts}
        living = {each.process.pid: each for each in self._living.values()}
        for pid in self._memory_mib.keys() - paid - living.keys():
            del self._memory_mib[pid]
        for position, gpu in enumerate(self._gpus):
            self._show(position, gpu.minor, books, living)

    def _show(self, position: int, minor: int, books: Books, living: dict[int, NodeProcess]) -> None:
        held: dict[int, int] = {}
        for context in books.contexts:
            if context.minor == minor:
                held[context.pid] = held.get(context.pid, 0) + self._memory_mib.get(context.pid, 0) * _MIB
        if not held and position not in self._in_use:
            # What a test or scenario set by hand stays.
            return
        (self._in_use.add if held else self._in_use.discard)(position)
        listed = [
            GpuProcess(pid, used, gi=living[pid].gi, ci=living[pid].ci)
            for pid, used in sorted(held.items())
            if pid in living
        ]
        self._nvml.set_processes(position, listed)
        self._nvml.set_memory_used(position, sum(held.values()))

    async def close(self) -> None:
        """End every process."""
        self._is_closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(
            *self._tasks, *(each.process.close() for each in self.all), return_exceptions=True
        )
        await self._places.close()

    # Inside

    def _check_new(self, name: str) -> None:
        if name in self._living:
            raise UsageError(f"A process {name} runs already; choose another name")
        if len(self._living) >= MAX_PROCESSES:
            raise AgentError(f"The simulated node has {MAX_PROCESSES} processes already; stop some of them")

    def _cgroup_of_pod(self, pod: str) -> Path:
        """Return the cgroup of a pod that the kubelet shows; its directory of logs names the UID."""
        prefix = pod.replace("/", "_", 1) + "_"
        logs = self._directory.pod_logs
        names = [path.name for path in logs.iterdir()] if logs.is_dir() else []
        found = [name for name in names if name.startswith(prefix)]
        if not found:
            raise UsageError(f"There is no pod {pod} on the simulated node; run it first, with run-pod")
        cgroup = self._places.of_pod(found[0].removeprefix(prefix), CONTAINER)
        if cgroup is None:
            raise AgentError("No process can be put into a pod here: no hierarchy of cgroups can be written")
        return cgroup

    def _add(self, made: NodeProcess) -> None:
        self._living[made.name] = made
        self._memory_mib[made.process.pid] = made.memory_mib
        self._spawn(self._follow(made), f"simulation-process-{made.name}")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, started: NodeProcess) -> None:
        await started.process.exited()
        self._living.pop(started.name, None)
        if not self._is_closing:
            self._report(f"{started.title} has exited")
        # The driver may have exited first.
        with contextlib.suppress(AgentError):
            await self.agree()


def capabilities_of(spec: NodeSpec) -> list[int]:
    """Return the minors of the nodes that the node's MIG devices may have."""
    able = [gpu.minor for gpu in spec.gpus if gpu.mig is not None]
    return [number for minor in able for number in gpu_capabilities(minor)] + list(GENERAL_CAPABILITIES)


def gpus_of(spec: NodeSpec) -> tuple[Gpu, ...]:
    """Return a node's GPUs as its driver knows them, in the order of their positions."""
    return tuple(
        Gpu(gpu.minor, gpu.uuid, position, gpu.pci_bus_id, gpu.pci_device_id)
        for position, gpu in enumerate(spec.gpus)
    )
