"""The simulated node: NVML state, /dev, /proc, /sys, a kernel log and a kubelet in one directory and process.

Guarantees: what happens is reported in ``feed``, in order; when the context ends, the kubelet is down and the
NVML state is closed. The directory itself belongs to its holder.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self

from agent.errors import AgentError, SourceError, UsageError
from agent.simulation.action_table import Invocation
from agent.simulation.actions import parse
from agent.simulation.directory import NodeDirectory
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.expectation import ConditionExpectation
from agent.simulation.feed import Feed
from agent.simulation.gpu_processes.node_processes import NodeProcesses, capabilities_of, gpus_of
from agent.simulation.kernel_log import KernelLog
from agent.simulation.kubelet import AllocatableChange, DeviceList, EmulatedKubelet, StreamEnd
from agent.simulation.nvml import (
    LibraryNotBuiltError,
    NvmlState,
    NvmlStateError,
    install_library,
)
from agent.simulation.presets import NodeSpec
from agent.simulation.roots import CAPABILITY_DIRECTORY, write_device_node, write_roots

DriverWanted = Literal["none", "if-possible", "required"]
WITHOUT_DRIVER: Final = (
    "The simulated node has no driver double, which needs root and /dev/fuse; run it where it has both"
)
UNWANTED_DRIVER: Final = (
    "This scenario's node has no driver double, which is made where a step starts a process; "
    "use a demo without a scenario, or give the scenario such a step"
)
_PUMP: Final = "simulation-changes"


class SimulatedNode:
    """An asynchronous context manager; see the guarantees above. ``label`` names it in the feed.

    With a driver double its device files answer as the driver's, and processes can use its GPUs; without,
    they are empty files. Where one cannot be, one that is "required" raises AgentError.
    """

    def __init__(
        self,
        directory: NodeDirectory,
        spec: NodeSpec,
        *,
        label: str = "node",
        kubelet_present: bool = True,
        seed: int = 0,
        driver: DriverWanted = "none",
    ) -> None:
        self.directory = directory
        self.spec = spec
        self.feed = Feed()
        self.kubelet = EmulatedKubelet(
            directory.device_plugins,
            directory.pod_resources,
            pod_logs=directory.pod_logs,
            present=kubelet_present,
            seed=seed,
        )
        self.kernel_log = KernelLog(directory.kernel_log)
        self._label = label
        self._started_ns = time.monotonic_ns()
        self._nvml: NvmlState | None = None
        self._driver_wanted = driver
        self._driver: DriverDouble | None = None
        self._processes: NodeProcesses | None = None
        self._reported = asyncio.Event()
        self._reported_ns = 0
        self._reporting_stopped = asyncio.Event()
        self._stack = contextlib.AsyncExitStack()

    @property
    def nvml(self) -> NvmlState:
        """The NVML state; there while the context lasts."""
        if self._nvml is None:
            raise AgentError("The simulated node does not run")
        return self._nvml

    @property
    def has_driver(self) -> bool:
        """Whether there is a driver double."""
        return self._driver is not None

    @property
    def driver(self) -> DriverDouble:
        """The driver double; raises UsageError for a node without."""
        if self._driver is None:
            raise self._without_driver()
        return self._driver

    @property
    def processes(self) -> NodeProcesses:
        """The processes that use GPUs; raises UsageError for a node without a driver double."""
        if self._processes is None:
            raise self._without_driver()
        return self._processes

    def _without_driver(self) -> UsageError:
        return UsageError(UNWANTED_DRIVER if self._driver_wanted == "none" else WITHOUT_DRIVER)

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            try:
                install_library(self.directory.path)
                self._nvml = stack.enter_context(NvmlState.create(self.directory.nvml_state, self.spec))
                write_roots(self.spec, self.directory.path)
            except LibraryNotBuiltError as error:
                raise AgentError(f"The simulated node cannot start: {error}") from error
            except NvmlStateError as error:
                raise AgentError(
                    f"The simulated node cannot start: {error}; where its library is of another version, "
                    "make setup in a checkout builds it again"
                ) from error
            except OSError as error:
                raise AgentError(
                    f"The simulated node cannot be made in {self.directory.path}: {error.strerror}; "
                    "choose another directory with --node-dir"
                ) from error
            self.feed.put(self._description())
            await stack.enter_async_context(self.kernel_log)
            await stack.enter_async_context(self.kubelet)
            if self._driver_wanted != "none":
                await self._start_driver(stack)
            pump = asyncio.get_running_loop().create_task(self._report_changes(), name=_PUMP)
            stack.push_async_callback(_finish, pump)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.feed.close()
        await self._stack.__aexit__(kind, error, trace)

    async def _start_driver(self, stack: contextlib.AsyncExitStack) -> None:
        """Put device files that answer into the node's /dev; raises AgentError where they have to."""
        version, capabilities = self.spec.driver_version, capabilities_of(self.spec)
        try:
            driver = await DriverDouble.start(gpus_of(self.spec), version=version, capabilities=capabilities)
        except SourceError as error:
            if self._driver_wanted == "required":
                raise AgentError(f"{WITHOUT_DRIVER} ({error})") from error
            return
        await stack.enter_async_context(driver)
        for name in driver.names:
            driver.replace(name, self.directory.dev)
        self._driver = driver
        self.show_capabilities()
        self._processes = NodeProcesses(self.directory, self.spec, driver, self.nvml, self.report)
        stack.push_async_callback(self._processes.close)
        # Processes that are held could not end.
        stack.push_async_callback(driver.release_all)

    def add_device_node(self, name: str) -> None:
        """Make a device node that was removed."""
        if self._driver is not None and name in self._driver.names:
            self._driver.replace(name, self.directory.dev)
        else:
            write_device_node(name, self.directory.dev)

    def show_capabilities(self) -> None:
        """Let the nodes of MIG devices that are there answer as the driver's."""
        folder = self.directory.dev / CAPABILITY_DIRECTORY
        for path in folder.iterdir() if self._driver is not None and folder.is_dir() else ():
            if self._driver is not None and not path.is_symlink():
                self._driver.replace(path.name, folder)

    # What can be done to it.

    async def apply(self, invocation: Invocation) -> str:
        """Execute an action and report it; returns what was done. Raises AgentError."""
        try:
            done = await invocation.action.apply(self)
        except NvmlStateError as error:
            raise UsageError(f"{invocation.name} is not possible: {error}") from error
        self.report(done)
        return done

    async def do(self, name: str, given: Mapping[str, str]) -> str:
        """Do the action of a name with its parameters as text; see ``apply``."""
        return await self.apply(parse(name, given))

    def position(self, gpu: str) -> int:
        """Return the position of a GPU given by position or UUID; raises UsageError for an unknown one."""
        positions = range(self.nvml.gpus)
        if gpu.isascii() and gpu.isdigit() and len(gpu) < 9 and int(gpu) in positions:
            return int(gpu)
        for position in positions:
            if self.nvml.uuid(position).lower() == gpu.lower():
                return position
        raise UsageError(
            f"There is no GPU {gpu[:80]} on the simulated node; it has 0 to {positions[-1]}"
            if positions
            else "The simulated node has no GPU"
        )

    def gpu_name(self, position: int) -> str:
        """Return a GPU's name for people: position and UUID."""
        return f"GPU {position} ({self.nvml.uuid(position)})"

    # What it reports.

    def at_ms(self, at_ns: int | None = None) -> int:
        """Return milliseconds since the node started, of a moment or of now."""
        return ((time.monotonic_ns() if at_ns is None else at_ns) - self._started_ns) // 1_000_000

    def report(self, text: str) -> None:
        """Put a sentence for people into the feed."""
        self.feed.put({"kind": "event", "at_ms": self.at_ms(), "text": text})

    def report_condition(self, expected: ConditionExpectation, seen: Mapping[str, Any] | None) -> None:
        """Put a condition that was waited for into the feed, as the agent reports it; None: no longer."""
        reported = seen or {}
        self.feed.put(
            {
                "kind": "condition",
                "at_ms": self.at_ms(),
                "gpu": self._places().get(reported.get("gpu_uuid", ""), expected.gpu),
                "reason": expected.code,
                "active": expected.active,
                "evidence": reported.get("evidence"),
                "message": reported.get("message"),
                "detail": reported.get("details"),
            }
        )

    def devices_changed(self) -> None:
        """Report every device again, because a pod was added or deleted."""
        for resource in self.kubelet.resources:
            self.feed.put(self._devices(resource))

    async def caught_up(self) -> None:
        """Wait until the feed has every change the kubelet has shown so far."""
        newest = self.kubelet.change_history[-1:]
        while newest and self._reported_ns < newest[0].at_ns and not self._reporting_stopped.is_set():
            self._reported.clear()
            await self._reported.wait()

    async def _report_changes(self) -> None:
        try:
            async for change in self.kubelet.changes(current=True):
                self.feed.put(self._allocatable(change))
                self.feed.put(self._devices(change.resource))
                self._reported_ns = change.at_ns
                self._reported.set()
        finally:
            self._reporting_stopped.set()
            self._reported.set()

    def _description(self) -> dict[str, Any]:
        return {
            "kind": "node",
            "label": self._label,
            "gpus": [
                {"gpu": position, "uuid": gpu.uuid, "model": gpu.name}
                for position, gpu in enumerate(self.spec.gpus)
            ],
        }

    def _allocatable(self, change: AllocatableChange) -> dict[str, Any]:
        places = self._places()
        return {
            "kind": "allocatable",
            "at_ms": self.at_ms(change.at_ns),
            "at_ns": change.at_ns,
            "resource": change.resource,
            "capacity": change.capacity,
            "allocatable": change.allocatable,
            "unhealthy": [{"id": id_, "gpu": places.get(_uuid(id_))} for id_ in change.unhealthy],
            "connected": self._is_connected(change),
        }

    def _is_connected(self, change: AllocatableChange) -> bool:
        """Return whether a change came from the plugin's list, not from the end of its stream."""

        def newest(records: Sequence[DeviceList | StreamEnd]) -> int:
            mine = (each.at_ns for each in reversed(records) if each.resource == change.resource)
            return next((at_ns for at_ns in mine if at_ns <= change.at_ns), 0)

        return newest(self.kubelet.lists) > newest(self.kubelet.stream_ends)

    def _devices(self, resource: str) -> dict[str, Any]:
        places = self._places()
        return {
            "kind": "devices",
            "resource": resource,
            "devices": [
                {"id": id_, "gpu": places.get(_uuid(id_)), "healthy": device.healthy, "pod": device.pod}
                for id_, device in sorted(self.kubelet.devices(resource).items())
            ],
        }

    def _places(self) -> dict[str, int]:
        """Return the position of every UUID, those of MIG devices included."""
        places: dict[str, int] = {}
        for position in range(self.nvml.gpus):
            places[self.nvml.uuid(position)] = position
            for row in range(self.nvml.number(position, "mig_count")):
                places[self.nvml.text(position, "mig_uuid", row)] = position
        return places


def _uuid(device_id: str) -> str:
    """Return a device id without its replica."""
    return device_id.partition("::")[0]


async def _finish(task: asyncio.Task[None]) -> None:
    """Let a task that ends with the kubelet finish; its failure is raised here."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
