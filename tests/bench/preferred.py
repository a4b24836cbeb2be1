"""S6: how long GetPreferredAllocation takes on nodes whose GPUs are connected in different ways."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Final, cast

import grpc
import msgspec

from agent.commands.client import AgentClient
from agent.simulation.presets import GpuSpec, NodeSpec, load_preset
from agent.simulation.presets.spec import NvLinkSpec, PcieSpec
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as plugin_pb
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2_grpc as plugin_grpc
from tests.bench.figures import Effort, Figure, Measurement, MeasurementError, median_and_tail
from tests.bench.node import PATIENCE_S, PRESET, BenchNode, bench_node, sixteen_gpus
from tests.bench.waiting import Bystander, Trial, agent_cpu, undisturbed

_TARGET_MS: Final = 5.0
_WARM_UP: Final = 20
_ASK_AGAIN_S: Final = 0.05
_PAIR_LINKS: Final = 4


async def _preferred(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Call GetPreferredAllocation with a blocking grpcio client, after the agent knows the connections.

    ``dgx``: every GPU has the same NVLinks to every other, through switches. ``pairs``: every two GPUs have
    NVLinks, the rest is PCIe; of ``mixed`` only the first eight have. Asked is for one GPU up to all but one,
    of all GPUs and of random parts of them, so that many questions have no answer that is best in an obvious
    way. A figure is the whole call: client, socket, HTTP/2, search. ``undisturbed`` and ``cpu`` are as for
    Allocate.
    """
    count = effort.of(quick=100, usual=1000, full=5000)
    for kind, spec in _nodes().items():
        async with bench_node(spec) as node:
            with node.agent() as agent:
                await agent.ready()
                await _wait_topology(node)
                trials = _trials(node, Bystander(agent.pid), count)
                await agent.end()
        name, promised = f"S6.preferred_{kind}", {"p50_ms": _TARGET_MS, "p99_ms": _TARGET_MS}
        for figure in median_and_tail(name, [trial.took_ns for trial in trials], **promised):
            yield figure
        for figure in undisturbed(name, trials, **promised):
            yield figure
        for figure in agent_cpu(name, [trial.ran_ns for trial in trials], p99_ms=_TARGET_MS):
            yield figure


def _nodes() -> dict[str, NodeSpec]:
    eight = load_preset(PRESET)
    sixteen = sixteen_gpus(eight)
    return {
        "8_dgx": eight,
        "8_pairs": _with_links(eight, lambda _number: True),
        "16_dgx": sixteen,
        "16_pairs": _with_links(sixteen, lambda _number: True),
        "16_mixed": _with_links(sixteen, lambda number: number < 8),
    }


def _with_links(spec: NodeSpec, has_links: Callable[[int], bool]) -> NodeSpec:
    """Return a node with NVLinks between neighbours, where they are, and two PCIe switches to a board."""

    def connected(number: int, gpu: GpuSpec) -> GpuSpec:
        peer = spec.gpus[number ^ 1].pci_bus_id
        links = NvLinkSpec(peers={peer: _PAIR_LINKS}) if has_links(number) else None
        pcie = PcieSpec(generation=gpu.pcie.generation, switch=number // 4, host_bridge=number // 8)
        return msgspec.structs.replace(gpu, nvlink=links, fabric=None, pcie=pcie)

    gpus = tuple(connected(number, gpu) for number, gpu in enumerate(spec.gpus))
    return msgspec.structs.replace(spec, gpus=gpus)


async def _wait_topology(node: BenchNode) -> None:
    """Wait until the agent knows how every two GPUs are connected."""
    client = AgentClient(node.simulated.directory.agent_flags()["control-socket"])
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        gpus: list[dict[str, Any]] = []
        if client.accepts():
            gpus = cast("list[dict[str, Any]]", client.get("/v1/topology")["gpus"])
        if len(gpus) == len(node.uuids) and all(link["kind"] for gpu in gpus for link in gpu["links"]):
            return
        await asyncio.sleep(_ASK_AGAIN_S)
    raise MeasurementError(f"the connections were not known after {PATIENCE_S:g} s")


def _trials(node: BenchNode, bystander: Bystander, count: int) -> list[Trial]:
    questions = list(_questions(node.uuids, _WARM_UP + count))
    trials: list[Trial] = []
    with grpc.insecure_channel(f"unix:{node.plugin_socket}") as channel:
        stub: Any = plugin_grpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
        for available, size in questions:
            request = plugin_pb.PreferredAllocationRequest(
                container_requests=[
                    plugin_pb.ContainerPreferredAllocationRequest(
                        available_deviceIDs=available, allocation_size=size
                    )
                ]
            )
            bystander.begin()
            began_ns = time.monotonic_ns()
            answer = stub.GetPreferredAllocation(request)
            trials.append(bystander.trial(time.monotonic_ns() - began_ns))
            chosen = set(answer.container_responses[0].deviceIDs)
            if len(chosen) != size or not chosen <= set(available):
                raise MeasurementError(f"of {len(available)} GPUs {size} were asked for, {len(chosen)} given")
    return trials[_WARM_UP:]


def _questions(uuids: Sequence[str], count: int) -> Iterator[tuple[list[str], int]]:
    rng = random.Random(6)
    for number in range(count):
        part = len(uuids) if number % 2 else rng.randint(2, len(uuids))
        available = rng.sample(uuids, part)
        yield available, 1 + number // 2 % (part - 1)


PREFERRED: Final = Measurement("S6", "GetPreferredAllocation on 8 and 16 GPUs", _preferred)
