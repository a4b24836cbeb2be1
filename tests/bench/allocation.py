"""S6: what Allocate costs beyond an empty call."""

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import grpc

from agent.simulation.presets import load_preset
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as plugin_pb
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2_grpc as plugin_grpc
from tests.bench.figures import (
    Effort,
    Figure,
    Measurement,
    MeasurementError,
    median_and_tail,
)
from tests.bench.node import PRESET, BenchNode, bench_node, sixteen_gpus
from tests.bench.waiting import Bystander, Trial, agent_cpu, undisturbed

_AT_ONCE: Final = 16
_UUIDS_VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
_WARM_UP: Final = 50


async def _allocate(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Call the agent's socket with a blocking grpcio client, on a node of 16 GPUs.

    Allocate of one GPU and GetDevicePluginOptions take turns, and each pair gives one difference, so what
    client, socket and HTTP/2 cost is not in it. ``16_at_once``: 16 calls are begun together, and the
    difference is of the times until the last answer, divided by 16. ``undisturbed``: only pairs in which the
    threads of agent and client together waited less than 0.1 ms for a CPU. ``cpu``: what the agent ran.
    """
    async with bench_node(sixteen_gpus(load_preset(PRESET))) as node:
        with node.agent() as agent:
            await agent.ready()
            with _client(node, Bystander(agent.pid)) as client:
                pairs = client.alternate(effort.of(quick=100, usual=1000, full=5000))
                at_once = client.alternate_at_once(effort.of(quick=20, usual=200, full=1000))
            await agent.end()
    name = "S6.allocate_minus_empty"
    extra = [_minus(allocate, empty) for allocate, empty in pairs]
    for figure in median_and_tail(name, [each.took_ns for each in extra], p50_ms=0.2, p99_ms=1):
        yield figure
    for figure in undisturbed(name, extra, p50_ms=0.2, p99_ms=1):
        yield figure
    for figure in agent_cpu(name, [each.ran_ns for each in extra]):
        yield figure
    per_call = [(allocate - empty) / _AT_ONCE for allocate, empty in at_once]
    for figure in median_and_tail("S6.allocate_minus_empty_16_at_once", per_call, p50_ms=0.2, p99_ms=1):
        yield figure


def _minus(allocate: Trial, empty: Trial) -> Trial:
    return Trial(
        allocate.took_ns - empty.took_ns,
        allocate.waited_ns + empty.waited_ns,
        allocate.ran_ns - empty.ran_ns,
    )


class _Client:
    """Blocks the loop, which has nothing to do meanwhile: so no other task is in the times."""

    def __init__(self, channel: grpc.Channel, uuids: Sequence[str], bystander: Bystander) -> None:
        self._stub: Any = plugin_grpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
        self._empty = plugin_pb.Empty()
        self._uuids = uuids
        self._bystander = bystander
        self._requests = [
            plugin_pb.AllocateRequest(
                container_requests=[plugin_pb.ContainerAllocateRequest(devices_ids=[uuid])]
            )
            for uuid in uuids
        ]

    def alternate(self, count: int) -> list[tuple[Trial, Trial]]:
        """Return pairs of trials: Allocate, and an empty call."""
        self._warm_up()
        pairs: list[tuple[Trial, Trial]] = []
        for number in range(count):
            if number % 2:
                allocate = self._trial(self._one_allocate, number)
                empty = self._trial(self._one_empty, number)
            else:
                empty = self._trial(self._one_empty, number)
                allocate = self._trial(self._one_allocate, number)
            pairs.append((allocate, empty))
        return pairs

    def _trial(self, call: Callable[[int], int], number: int) -> Trial:
        self._bystander.begin()
        return self._bystander.trial(call(number))

    def alternate_at_once(self, count: int) -> list[tuple[int, int]]:
        """Return pairs of durations of 16 Allocates at once, and of 16 empty calls at once."""
        allocate, empty = self._stub.Allocate, self._stub.GetDevicePluginOptions
        return [
            (
                _timed(lambda: [allocate.future(request) for request in self._requests]),
                _timed(lambda: [empty.future(self._empty) for _ in self._requests]),
            )
            for _ in range(count)
        ]

    def _warm_up(self) -> None:
        for number in range(_WARM_UP):
            self._one_empty(number)
            self._one_allocate(number)

    def _one_empty(self, _number: int) -> int:
        began_ns = time.monotonic_ns()
        self._stub.GetDevicePluginOptions(self._empty)
        return time.monotonic_ns() - began_ns

    def _one_allocate(self, number: int) -> int:
        uuid = self._uuids[number % len(self._uuids)]
        began_ns = time.monotonic_ns()
        answer = self._stub.Allocate(self._requests[number % len(self._uuids)])
        took_ns = time.monotonic_ns() - began_ns
        envs = answer.container_responses[0].envs
        if envs[_UUIDS_VARIABLE] != uuid:
            raise MeasurementError(f"Allocate of {uuid} was answered with {envs}")
        return took_ns


def _timed(begin: Callable[[], list[Any]]) -> int:
    """Return how long it took until every call that was begun was answered."""
    began_ns = time.monotonic_ns()
    for call in begin():
        call.result()
    return time.monotonic_ns() - began_ns


@contextmanager
def _client(node: BenchNode, bystander: Bystander) -> Iterator[_Client]:
    with grpc.insecure_channel(f"unix:{node.plugin_socket}") as channel:
        yield _Client(channel, node.uuids, bystander)


ALLOCATE: Final = Measurement("S6", "Allocate minus an empty call", _allocate)
