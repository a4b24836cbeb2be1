"""A kubelet without a node: the peer of device plugins, with the behaviour and the failures of a real one.

The facts it follows are those of kubelet 1.32 to 1.36 (facts: kubelet items 1 to 22). Where a real one
polls, this one acts at the event, so a reader gets a change when it happens.

Guarantees:

1. Everything runs on the loop it was entered on; nothing polls.
2. When the context ends, no task, connection or (unless asked for) socket file of it is left.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from agent.errors import AgentError
from agent.simulation.kubelet.admission import Admission
from agent.simulation.kubelet.fault_actions import FaultActions
from agent.simulation.kubelet.faults import Fault, parse_fault
from agent.simulation.kubelet.node import Node
from agent.simulation.kubelet.plugin_client import PluginClient
from agent.simulation.kubelet.pods import Requests
from agent.simulation.kubelet.process import KubeletProcess
from agent.simulation.kubelet.records import (
    AllocatableChange,
    Allocation,
    DeviceList,
    DeviceView,
    KubeletStatistics,
    PodOutcome,
    Registration,
    StreamEnd,
)
from agent.simulation.kubelet.registry import Registry
from agent.simulation.kubelet.services import (
    POD_RESOURCES,
    REGISTRATION,
    pod_resources_methods,
    registration_methods,
)
from agent.simulation.kubelet.static_pods import StaticPods
from agent.simulation.kubelet.watch import ChangeStream
from agent.simulation.kubelet.wire import sever

DIAL_TIMEOUT_S: Final = 10.0
"""How long Register waits for the plugin's connection."""
ACTIVE_PODS_ONLY: Final = (1, 34)
"""From this release on PodResources lists no finished pods (gate KubeletPodResourcesListUseActivePods)."""
HAS_ALLOCATABLE: Final = (1, 21)
"""From this release on there is GetAllocatableResources."""
ENDPOINT_STOP_GRACE_S: Final = 300.0
"""How long a resource keeps its capacity after its stream ended. Source: devicemanager/types.go."""


class EmulatedKubelet:
    """An asynchronous context manager; see the guarantees above.

    ``device_plugins`` and ``pod_resources`` are the two folders, created where missing; in ``pod_logs``
    each pod has a directory. ``present``
    False leaves it down until ``start`` or the fault ``clear``. ``seed`` decides every random choice.
    ``version`` is the Kubernetes release whose behaviour it has where releases differ. ``numa_affinity`` are
    the NUMA nodes that a topology manager would choose for every container. ``manifests`` is a folder whose
    pods run here.
    """

    def __init__(
        self,
        device_plugins: Path,
        pod_resources: Path,
        *,
        dial_timeout_s: float = DIAL_TIMEOUT_S,
        endpoint_stop_grace_s: float = ENDPOINT_STOP_GRACE_S,
        seed: int = 0,
        present: bool = True,
        remove_sockets: bool = True,
        checkpoint: bool = True,
        pod_logs: Path | None = None,
        manifests: Path | None = None,
        version: tuple[int, int] = (1, 36),
        numa_affinity: frozenset[int] | None = None,
    ) -> None:
        self._version = version
        self._manifests = manifests
        self.device_plugins = device_plugins
        self.pod_resources = pod_resources
        self._present = present
        self._remove_sockets = remove_sockets
        self._node = Node(
            device_plugins, grace_s=endpoint_stop_grace_s, checkpoint=checkpoint, pod_logs=pod_logs
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None
        self._process: KubeletProcess | None = None
        self._life = asyncio.Lock()
        self._up = asyncio.Event()
        self._stopping = asyncio.Event()
        self._starts = 0
        self._admitting = asyncio.Lock()
        self._registry = Registry(
            device_plugins, node=self._node, dial_timeout_s=dial_timeout_s, spawn=self._spawn
        )
        rng = random.Random(seed)  # noqa: S311 (a seed makes a run repeatable)
        self._admission = Admission(
            self._node.devices, self._node.pods, self._registry, rng, numa_affinity=numa_affinity
        )
        self._faults = FaultActions(self, self._registry, device_plugins, self._spawn)

    async def __aenter__(self) -> Self:
        try:
            for directory in (self.device_plugins, self.pod_resources):
                directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            raise AgentError(f"The simulated kubelet cannot make its directories: {error}") from error
        if self._present:
            await self.start()
        if self._manifests is not None:
            self._spawn(StaticPods(self._manifests, self, self._spawn).run(), "kubelet-static-pods")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        async with self._life:
            if self._process is not None and self._remove_sockets:
                self._process.unlink()
            await self._die(kill=False)
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._up.set()  # wakes pods that wait for a kubelet, which then fail, since there is none
        self._node.watchers.finish()
        if self._failure is not None and error is None:
            raise self._failure

    # The node's view.

    @property
    def resources(self) -> tuple[str, ...]:
        """Every resource the kubelet knows, sorted."""
        return self._node.devices.resources

    def capacity(self, resource: str) -> int:
        """Return how many devices the node has of a resource, 0 for an unknown one."""
        return self._node.summary(resource).capacity

    def allocatable(self, resource: str) -> int:
        """Return how many healthy devices the node has of a resource, in use or not."""
        return self._node.summary(resource).allocatable

    def unhealthy(self, resource: str) -> tuple[str, ...]:
        """Return the ids of a resource's unhealthy devices, sorted."""
        return self._node.summary(resource).unhealthy

    def devices(self, resource: str) -> dict[str, DeviceView]:
        """Return every device of a resource with its health, NUMA nodes and active pod."""
        return self._node.view(resource)

    def changes(self, *, current: bool = False) -> ChangeStream:
        """Follow every change from now on; with ``current`` each resource's present state comes first."""
        return self._node.follow(current=current)

    async def wait_for(self, predicate: Callable[["EmulatedKubelet"], bool], timeout_s: float = 60.0) -> None:
        """Wait until the predicate holds; it is evaluated at every event. TimeoutError has the last state."""
        if self._failure is not None:
            raise self._failure
        if not await self._node.watchers.wait(lambda: predicate(self), timeout_s):
            raise TimeoutError(f"Not met within {timeout_s:g} s; the kubelet: {self.describe()}")

    def describe(self) -> str:
        """Return the state in one line, for a failed test or a log."""
        shown = [
            f"{name} {each.allocatable}/{each.capacity}" for name, each in sorted(self._node.shown.items())
        ]
        words = ["running" if self.running else "down", *(shown or ["no resource"])]
        words.append(f"{self._registry.registration_count} registrations")
        if self._registry.registrations and self._registry.registrations[-1].error is not None:
            words.append(f"last rejected with {self._registry.registrations[-1].error!r}")
        if self._registry.stream_ends:
            words.append(f"last stream ended with {self._registry.stream_ends[-1].cause!r}")
        return ", ".join(words)

    # What it remembers.

    @property
    def change_history(self) -> tuple[AllocatableChange, ...]:
        """The last MAX_CHANGES changes."""
        return tuple(self._node.changes)

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """The last MAX_REGISTRATIONS Register calls that were answered."""
        return tuple(self._registry.registrations)

    @property
    def lists(self) -> tuple[DeviceList, ...]:
        """The last MAX_LISTS ListAndWatch messages."""
        return tuple(self._registry.lists)

    @property
    def stream_ends(self) -> tuple[StreamEnd, ...]:
        """The last MAX_LISTS ends of a ListAndWatch stream, with what ended it."""
        return tuple(self._registry.stream_ends)

    @property
    def allocations(self) -> tuple[Allocation, ...]:
        """The last MAX_ALLOCATIONS Allocate calls."""
        return tuple(self._admission.allocations)

    def statistics(self) -> KubeletStatistics:
        """Return how often what happened, also of what is no longer remembered."""
        return KubeletStatistics(
            starts=self._starts,
            registrations=self._registry.registration_count,
            rejected=self._registry.rejected_count,
            lists=self._registry.list_count,
            stream_ends=self._registry.stream_end_count,
            allocations=self._admission.allocation_count,
        )

    @property
    def running(self) -> bool:
        """Whether the kubelet is up and accepts connections."""
        return self._up.is_set() and not self._stopping.is_set()

    def client(self, resource: str) -> PluginClient | None:
        """Return the connection Allocate would use, for calls a kubelet would never make."""
        return self._registry.client(resource)

    # Its life.

    async def start(self) -> None:
        """Start, unless it runs."""
        async with self._life:
            await self._live(rejecting_s=0.0)

    async def stop(self, *, kill: bool = False) -> None:
        """Stop, unless it is down; kubelet.sock stays and refuses connections (facts: kubelet item 19)."""
        async with self._life:
            await self._die(kill=kill)

    async def restart(self, *, downtime_s: float = 0.0, kill: bool = False, rejecting_s: float = 0.0) -> None:
        """Stop and start again; returns when the new kubelet.sock accepts connections."""
        async with self._life:
            await self._die(kill=kill)
            await self._pause(downtime_s)
            await self._live(rejecting_s=rejecting_s)

    async def _live(self, *, rejecting_s: float) -> None:
        if self._process is not None or self._stopping.is_set():
            return
        process = KubeletProcess(self.device_plugins, self.pod_resources)
        services = (
            (REGISTRATION, registration_methods(self._registry, process.peer_pid)),
            (
                POD_RESOURCES,
                pod_resources_methods(
                    self._node.devices,
                    self._node.pods,
                    lists_finished=self._version < ACTIVE_PODS_ONLY,
                    has_allocatable=self._version >= HAS_ALLOCATABLE,
                ),
            ),
        )
        self._node.kubelet_started(first=self._starts == 0)
        try:
            await process.start(services, before_listening=lambda: self._pause(rejecting_s))
        except BaseException as error:
            process.unlink()
            await process.finish()
            if isinstance(error, OSError):
                where = self.device_plugins
                raise AgentError(f"The simulated kubelet cannot serve in {where}: {error}") from error
            raise
        self._process = process
        self._starts += 1
        self._up.set()
        self._node.watchers.evaluate()

    async def _die(self, *, kill: bool) -> None:
        process = self._process
        if process is None:
            return
        self._up.clear()
        process.close(kill=kill)
        if kill:
            for client in self._registry.live():
                sever(client.path)
        await self._registry.forget()
        await process.finish()
        # Only now: a caller that is cancelled on the way leaves a kubelet that can still be stopped.
        self._process = None
        self._node.kubelet_stopped()

    async def _pause(self, seconds: float) -> None:
        """Wait, but not longer than the emulation lasts."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    # Pods.

    async def run_pod(self, name: str, namespace: str, containers: Requests) -> PodOutcome:
        """Admit a pod that asks for ``{container: {resource: amount}}`` and return what became of it.

        While the kubelet is down the pod waits, and one whose admission a restart cut short is admitted
        anew, as a pod the API server still holds. Raises UsageError for a name in use.
        """
        while True:
            await self._up.wait()
            async with self._admitting:
                if self._stopping.is_set():
                    raise AgentError(
                        f"Pod {namespace}/{name} was not admitted: the simulated kubelet has stopped"
                    )
                outcome = await self._admit(name, namespace, containers) if self._up.is_set() else None
                if outcome is not None:
                    return outcome

    async def _admit(self, name: str, namespace: str, containers: Requests) -> PodOutcome | None:
        """Admit a pod; None where the kubelet died over it."""
        starts = self._starts
        pod = self._node.pods.add(name, namespace, containers)
        try:
            await self._admission.admit(pod)
        except BaseException:
            self._node.pods.remove(name, namespace)
            raise
        if pod.phase != "Running" and not (self._up.is_set() and self._starts == starts):
            self._node.pods.remove(name, namespace)
            return None
        self._node.pods_changed()
        return pod.outcome(self._node.devices)

    def pod(self, name: str, namespace: str) -> PodOutcome:
        """Return a pod as it is now; raises UsageError where there is none."""
        return self._node.pods.get(name, namespace).outcome(self._node.devices)

    @property
    def pods(self) -> tuple[PodOutcome, ...]:
        """Every pod of the node, finished ones included, oldest first."""
        return tuple(pod.outcome(self._node.devices) for pod in self._node.pods.all())

    def finish_pod(self, name: str, namespace: str, *, failed: bool = False) -> None:
        """End a pod; its devices can be allocated again."""
        self._node.pods.get(name, namespace).phase = "Failed" if failed else "Succeeded"
        self._node.pods_changed()

    def delete_pod(self, name: str, namespace: str) -> None:
        """Remove a pod from the node, finished or not."""
        self._node.pods.remove(name, namespace)
        self._node.pods_changed()

    # Faults.

    async def apply_fault(self, name: str, **params: object) -> None:
        """Apply the fault of this name; raises UsageError for a bad name or parameter.

        Returns when it is done: a restart when the new kubelet accepts connections, ``absent`` when it is
        down. Lasting faults end by their own parameters or by ``clear``.
        """
        await self.apply(parse_fault(name, params))

    async def apply(self, fault: Fault) -> None:
        """Apply an already checked fault; see ``apply_fault``."""
        await self._faults.apply(fault)

    def _spawn(self, work: Coroutine[Any, Any, object], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            self._node.watchers.fail(AgentError(f"The simulated kubelet failed: {self._failure!r}"))
