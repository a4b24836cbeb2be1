"""Fault 18: whatever Allocate is asked for, the answer is a valid one or names what was wrong."""

from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2_grpc as rpc
from agent.sinks.plugin.answers import MAX_ERROR_CHARS
from agent.sinks.plugin.service import SERVICE
from agent.sinks.plugin.wire import MAX_CONTAINERS, MAX_ID_BYTES, MAX_IDS
from tests.sinks.plugin_process import PluginProcess, plugin_process
from tests.sinks.raw_http2 import PATIENCE_S
from tests.sinks.snapshots import uuid

HEALTHY = [uuid(number) for number in range(7)]
BROKEN = uuid(7)
NODES = {"/dev/nvidiactl", *(f"/dev/nvidia{number}" for number in range(8))}
INVALID, FAILED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION

hostile_ids = (
    some.sampled_from([*HEALTHY, BROKEN])
    | some.text(max_size=MAX_ID_BYTES + 10)
    | some.sampled_from(
        ["", "..", "../../etc/passwd", "/dev/nvidia0", "GPU-\0", "%s%n", "\x1b[31m", uuid(0) + "/.."]
    )
)
requests = some.lists(some.lists(hostile_ids, max_size=10), max_size=4)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PluginProcess]:
    with plugin_process(tmp_path_factory.mktemp("plugin")) as served:
        yield served


@pytest.fixture(scope="module")
def channel(process: PluginProcess) -> Iterator[Any]:
    with grpc.insecure_channel(f"unix:{process.socket}") as opened:
        yield opened


@pytest.fixture(scope="module")
def stub(channel: Any) -> Any:
    return rpc.DevicePluginStub(channel)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def every_strategy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A node that gives devices by every strategy at once."""
    with (
        plugin_process(tmp_path_factory.mktemp("plugin"), "all") as served,
        grpc.insecure_channel(f"unix:{served.socket}") as opened,
    ):
        yield rpc.DevicePluginStub(opened)  # type: ignore[no-untyped-call]
        assert served.log_lines() == []


def allocate(stub: Any, containers: Sequence[Sequence[str]]) -> Any:
    """Return the answer, or the error."""
    request = pb.AllocateRequest(
        container_requests=[pb.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
    )
    try:
        return stub.Allocate(request, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return error


@settings(deadline=None, max_examples=200)
@given(containers=requests)
@example(containers=[])
@example(containers=[[]])
@example(containers=[[HEALTHY[0]] * 5])
def test_an_answer_holds_only_what_is_asked_for_and_known(stub: Any, containers: list[list[str]]) -> None:
    answer = allocate(stub, containers)
    asked = {name for ids in containers for name in ids}
    if not asked <= {*HEALTHY, BROKEN}:
        assert answer.code() in {INVALID, FAILED}
        assert 0 < len(answer.details()) <= MAX_ERROR_CHARS
        return
    if BROKEN in asked:
        assert answer.code() is FAILED
        return
    assert len(answer.container_responses) == len(containers)
    for ids, container in zip(containers, answer.container_responses, strict=True):
        assert dict(container.envs) == {"NVIDIA_VISIBLE_DEVICES": ",".join(sorted(set(ids)))}
        assert {spec.host_path for spec in container.devices} <= NODES
        assert len(container.devices) == 1 + len(set(ids))


DIRECTORY = "/var/run/nvidia-container-devices"
CDI = "k8s.device-plugin.nvidia.com/gpu"


@settings(deadline=None, max_examples=200)
@given(containers=requests)
@example(containers=[[f"{HEALTHY[0]}/../../../etc"]])
@example(containers=[["../../../../etc/shadow", HEALTHY[1]]])
@example(containers=[[HEALTHY[1], f"{HEALTHY[0]}::0", "all", "none", "void"]])
@example(containers=[[HEALTHY[3], HEALTHY[0]], [], [HEALTHY[3]]])
def test_whatever_the_strategies_nothing_of_an_answer_is_built_from_a_request(
    every_strategy: Any, containers: list[list[str]]
) -> None:
    answer = allocate(every_strategy, containers)
    asked = {name for ids in containers for name in ids}
    if not asked <= set(HEALTHY):
        assert answer.code() in {INVALID, FAILED}
        return
    assert len(answer.container_responses) == len(containers)
    for ids, container in zip(containers, answer.container_responses, strict=True):
        devices = sorted(set(ids))
        names = [f"{CDI}={device}" for device in devices]
        assert dict(container.envs) == {"NVIDIA_VISIBLE_DEVICES": DIRECTORY}
        assert [mount.container_path for mount in container.mounts] == [
            f"{DIRECTORY}/{device}" for device in devices
        ]
        assert {mount.host_path for mount in container.mounts} <= {"/dev/null"}
        assert {spec.host_path for spec in container.devices} <= NODES
        assert [device.name for device in container.cdi_devices] == names
        assert list(container.annotations.values()) == ([",".join(names)] if names else [])


@pytest.mark.parametrize("ids", [[], [HEALTHY[0]], ["GPU-gone"], ["../.."] * 10_000])
def test_nothing_but_a_broken_device_keeps_a_container_from_starting(stub: Any, ids: list[str]) -> None:
    stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=ids), timeout=PATIENCE_S)


@settings(deadline=None, max_examples=200)
@given(data=some.binary(max_size=300))
@example(data=b"\x0a\x00" * 500_000)
@example(data=b"\x50\x00" * 500_000)
@pytest.mark.parametrize("method", ["Allocate", "GetPreferredAllocation", "PreStartContainer"])
def test_bytes_that_are_no_request_are_rejected_at_once(channel: Any, method: str, data: bytes) -> None:
    call = channel.unary_unary(f"{SERVICE}/{method}").future(data, timeout=PATIENCE_S)
    assert call.code() in {grpc.StatusCode.OK, INVALID, FAILED}


@pytest.mark.parametrize(
    ("containers", "code", "words"),
    [
        ([[f"GPU-{number}" for number in range(10_000)]], INVALID, "and 9996 more are not devices"),
        ([["x"] * (MAX_IDS + 1)], INVALID, f"more than {MAX_IDS} devices"),
        ([["x" * (MAX_ID_BYTES + 1)]], INVALID, f"longer than {MAX_ID_BYTES} bytes"),
        ([[HEALTHY[0]]] * (MAX_CONTAINERS + 1), INVALID, f"more than {MAX_CONTAINERS} containers"),
        ([["GPU-00000000-0000-4000-8000-00000000dead"]], INVALID, "dead is not a device of nvidia.com/gpu"),
        ([[HEALTHY[0], BROKEN]], FAILED, BROKEN),
    ],
    ids=["10000-unknown", "ids", "id", "containers", "unknown", "unhealthy"],
)
def test_a_rejection_names_what_is_wrong(
    stub: Any, containers: list[list[str]], code: grpc.StatusCode, words: str
) -> None:
    answer = allocate(stub, containers)
    assert answer.code() is code
    assert words in answer.details()


def test_10000_times_the_same_device_is_that_device(stub: Any) -> None:
    [container] = allocate(stub, [[HEALTHY[2]] * 10_000]).container_responses
    assert dict(container.envs) == {"NVIDIA_VISIBLE_DEVICES": HEALTHY[2]}


def test_16_at_once_and_1000_in_a_row_are_all_answered(stub: Any) -> None:
    request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[HEALTHY[0]])])
    running = [stub.Allocate.future(request, timeout=PATIENCE_S) for _ in range(16)]
    assert all(len(call.result().container_responses) == 1 for call in running)
    for _ in range(1_000):
        assert len(stub.Allocate(request, timeout=PATIENCE_S).container_responses) == 1


def test_nothing_of_all_this_was_worth_a_log_line(process: PluginProcess) -> None:
    assert process.is_alive
    assert process.log_lines() == []
