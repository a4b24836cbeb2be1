"""S6: what Allocate costs, beside the yardstick."""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, Final

import grpc

from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as plugin_pb
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2_grpc as plugin_grpc
from tests.bench import yardstick
from tests.bench.figures import Effort, Figure, Measurement, MeasurementError, beside_yardstick, quantile
from tests.bench.node import BenchNode, MeasuredAgent, bench_node
from tests.bench.waiting import Bystander, Trial, agent_cpu, undisturbed_beside_yardstick

_CALLERS: Final = 8
_UUIDS_VARIABLE: Final = "NVIDIA_VISIBLE_DEVICES"
_WARM_UP: Final = 50


async def _allocate(effort: Effort) -> AsyncGenerator[Figure, None]:
    """Call Allocate with a blocking grpcio client on a node of 8 GPUs, and that of the yardstick in turn.

    A figure is the whole call: client, socket, HTTP/2, answer. ``undisturbed``: only calls in which the
    threads of agent and client together waited less than 0.1 ms for a CPU. ``cpu``: what the agent ran.
    ``8_callers``: eight calls are begun together, again and again; the median rate counts.
    """
    count = effort.of(quick=100, usual=1000, full=5000)
    rounds = effort.of(quick=20, usual=200, full=1000)
    async with AsyncExitStack() as stack:
        clients = []
        for program in (("agent", "run"), (yardstick.PROGRAM,)):
            node = await stack.enter_async_context(bench_node())
            agent = stack.enter_context(node.agent(program=program))
            stack.push_async_callback(agent.end)
            await agent.ready()
            clients.append(stack.enter_context(_client(node, agent)))
        for gpus in (1, len(clients[0].uuids)):
            trials: tuple[list[Trial], list[Trial]] = [], []
            for number in range(_WARM_UP + count):
                for client, made in zip(clients, trials, strict=True):
                    made.append(client.allocate(number, gpus))
            ours, beside = (made[_WARM_UP:] for made in trials)
            for figure in _figures(f"S6.allocate_{gpus}", ours, beside):
                yield figure
        rates: tuple[list[float], list[float]] = [], []
        for _ in range(rounds):
            for client, measured in zip(clients, rates, strict=True):
                measured.append(client.rate())
    name, (value, other) = f"S6.allocate_{_CALLERS}_callers", (quantile(each, 0.5) for each in rates)
    yield Figure(name, value, "1/s", 0.9, at_least=True, yardstick=other)


def _figures(name: str, ours: Sequence[Trial], beside: Sequence[Trial]) -> Iterator[Figure]:
    took_ns, beside_ns = [each.took_ns for each in ours], [each.took_ns for each in beside]
    yield from beside_yardstick(name, took_ns, beside_ns, p50=1.15, p99=1.5)
    yield from undisturbed_beside_yardstick(name, ours, beside, p50=1.15, p99=1.5)
    yield from agent_cpu(name, [each.ran_ns for each in ours], yardstick_ns=[each.ran_ns for each in beside])


class _Client:
    """Blocks the loop, which has nothing to do meanwhile: so no other task is in the times."""

    def __init__(self, channel: grpc.Channel, uuids: Sequence[str], bystander: Bystander) -> None:
        self._stub: Any = plugin_grpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]
        self.uuids = uuids
        self._bystander = bystander

    def allocate(self, number: int, gpus: int) -> Trial:
        """Allocate the n-th GPU, or that and those that follow it."""
        ids = [self.uuids[(number + each) % len(self.uuids)] for each in range(gpus)]
        request = _request(ids)
        self._bystander.begin()
        began_ns = time.monotonic_ns()
        answer = self._stub.Allocate(request)
        trial = self._bystander.trial(time.monotonic_ns() - began_ns)
        given = answer.container_responses[0].envs[_UUIDS_VARIABLE].split(",")
        if sorted(given) != sorted(ids):
            raise MeasurementError(f"Allocate of {ids} was answered with {given}")
        return trial

    def rate(self) -> float:
        """Return the calls per second of so many callers at once."""
        requests = [_request([uuid]) for uuid in self.uuids[:_CALLERS]]
        began_ns = time.monotonic_ns()
        for call in [self._stub.Allocate.future(request) for request in requests]:
            call.result()
        return len(requests) / (time.monotonic_ns() - began_ns) * 1e9


def _request(ids: Sequence[str]) -> plugin_pb.AllocateRequest:
    return plugin_pb.AllocateRequest(container_requests=[plugin_pb.ContainerAllocateRequest(devices_ids=ids)])


@contextmanager
def _client(node: BenchNode, agent: MeasuredAgent) -> Iterator[_Client]:
    with grpc.insecure_channel(f"unix:{node.plugin_socket}") as channel:
        yield _Client(channel, node.uuids, Bystander(agent.pid))


ALLOCATE: Final = Measurement("S6", "Allocate", _allocate)
