"""Admitting pods: picking devices and asking the plugin, one pod at a time.

Guarantees (facts: kubelet items 2, 9, 10, 15, 20, 21):

1. Pods are admitted strictly one after another, so an Allocate that hangs stops them all.
2. A resource without a plugin is not checked: the pod runs without a device.
3. Ids go out in random order, decided by the seed alone.
4. The plugin is asked for a preference as the kubelet asks it: among the devices on the NUMA nodes of the
   pod where those are more than enough; else those are allocated, and it is asked among all with them as
   ``must_include`` (facts: kubelet item 21).
"""

import random
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from agent.simulation.kubelet.devices import DeviceTable
from agent.simulation.kubelet.plugin_client import PluginCallError, PluginClient
from agent.simulation.kubelet.pods import Grant, Pod, PodTable
from agent.simulation.kubelet.records import MAX_ALLOCATIONS, Allocation
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as plugin_pb

UNEXPECTED = "UnexpectedAdmissionError"
CREATE_CONFIG = "CreateContainerConfigError"


class AdmissionRejectedError(Exception):
    """The pod cannot run here; the text is what its status shows."""


class Endpoints(Protocol):
    """The plugins that serve resources at the moment."""

    def client(self, resource: str) -> PluginClient | None:
        """Return the client that Allocate would use."""


class Admission:
    """Decides which devices a pod gets; the caller sees to it that one pod is admitted at a time."""

    def __init__(
        self,
        devices: DeviceTable,
        pods: PodTable,
        endpoints: Endpoints,
        rng: random.Random,
        *,
        numa_affinity: frozenset[int] | None,
    ) -> None:
        """``numa_affinity`` is what the topology manager decides for each container; None: nothing."""
        self._devices = devices
        self._pods = pods
        self._endpoints = endpoints
        self._rng = rng
        self._numa_affinity = numa_affinity
        self.allocations: deque[Allocation] = deque(maxlen=MAX_ALLOCATIONS)
        self.allocation_count = 0

    async def admit(self, pod: Pod) -> None:
        """Give a pending pod its devices, or fail it for good."""
        try:
            for container, wanted in pod.requests.items():
                await self._allocate(pod, container, wanted)
        except (AdmissionRejectedError, PluginCallError) as error:
            pod.phase, pod.reason = "Failed", UNEXPECTED
            pod.message = f"Pod was rejected: Allocate failed due to {error}, which is unexpected"
            return
        try:
            await self._pre_start(pod)
        except PluginCallError as error:
            pod.reason, pod.message = CREATE_CONFIG, str(error)
            return
        pod.phase = "Running"

    async def _allocate(self, pod: Pod, container: str, wanted: Mapping[str, int]) -> None:
        grants = pod.grants.setdefault(container, {})
        for resource, amount in wanted.items():
            if amount <= 0 or not self._devices.knows(resource):
                continue
            client = self._endpoints.client(resource)
            ids = await self._pick(client, resource, amount)
            answer = await self._ask(pod, client, resource, ids)
            known = self._devices.devices(resource)
            numa = {id_: known[id_].numa_nodes for id_ in ids if id_ in known}
            grants[resource] = Grant(tuple(sorted(ids)), numa, answer)

    async def _pick(self, client: PluginClient | None, resource: str, amount: int) -> list[str]:
        healthy = self._devices.healthy(resource)
        if not healthy:
            raise AdmissionRejectedError(
                f"no healthy devices present; cannot allocate unhealthy devices {resource}"
            )
        held = self._pods.holders(resource)
        available = [id_ for id_ in healthy if id_ not in held]
        if len(available) < amount:
            raise AdmissionRejectedError(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {amount}, Available: {len(available)}"
            )
        self._rng.shuffle(available)
        aligned = self._aligned(resource, available)
        if amount < len(aligned):
            picked = _first(amount, await _preferred(client, aligned, (), amount), aligned)
        else:
            picked = aligned
            if amount > len(aligned):
                preferred = await _preferred(client, available, aligned, amount)
                picked = _first(amount, aligned, preferred, available)
        self._rng.shuffle(picked)
        return picked

    def _aligned(self, resource: str, available: Sequence[str]) -> list[str]:
        """Return the devices on the NUMA nodes of the pod; none where nothing was decided on those."""
        affinity, devices = self._numa_affinity, self._devices.devices(resource)
        if affinity is None or not any(devices[id_].numa_nodes for id_ in available):
            return []
        return [id_ for id_ in available if affinity.intersection(devices[id_].numa_nodes)]

    async def _ask(
        self, pod: Pod, client: PluginClient | None, resource: str, ids: list[str]
    ) -> plugin_pb.ContainerAllocateResponse:
        if client is None:
            raise AdmissionRejectedError(f"unknown Device Plugin {resource}")
        began = time.monotonic_ns()
        error: str | None = None
        try:
            return await client.allocate(ids)
        except PluginCallError as failure:
            error = str(failure)
            raise
        finally:
            duration_ns = time.monotonic_ns() - began
            self.allocation_count += 1
            self.allocations.append(Allocation(began, duration_ns, pod.key, resource, tuple(ids), error))

    async def _pre_start(self, pod: Pod) -> None:
        for grants in pod.grants.values():
            for resource, grant in grants.items():
                client = self._endpoints.client(resource)
                if client is not None and client.options.pre_start_required:
                    ids = list(grant.ids)
                    self._rng.shuffle(ids)
                    await client.pre_start(ids)


async def _preferred(
    client: PluginClient | None, available: Sequence[str], must_include: Sequence[str], amount: int
) -> list[str]:
    """Return what the plugin prefers of the available devices; nothing where it has no preference."""
    if client is None or not client.options.get_preferred_allocation_available:
        return []
    answered = set(await client.preferred(available, must_include, amount))
    return [id_ for id_ in available if id_ in answered]


def _first(amount: int, *lists: Iterable[str]) -> list[str]:
    """Return the first ids of the lists together, each once."""
    return list(dict.fromkeys(id_ for listed in lists for id_ in listed))[:amount]
