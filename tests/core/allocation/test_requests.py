"""What a container gets, and how a rejection reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.allocation.injection import ContainerAnswer, DeviceNode
from agent.core.allocation.requests import Rejection, allocate
from agent.model.facts import DeviceNodesSeen
from agent.model.gpu import Gpu
from agent.model.health import Reason
from agent.model.ids import ResourceName
from agent.model.policy import Injection, Policy
from agent.model.sharing import Sharing
from agent.model.snapshot import Finding, Resource
from agent.model.structs import replace
from tests.core.build import (
    C1B,
    GPU,
    U0,
    U1,
    U2,
    U3,
    Node,
    enumerated,
    gpu,
    healthy_node,
    mig_uuid,
    ready,
    xid,
)


def resource_of(node: Node, name: ResourceName = GPU) -> Resource:
    return next(item for item in node.snapshot().resources if item.name == name)


def allocated(node: Node, *ids: str) -> ContainerAnswer | Rejection:
    return allocate(node.snapshot(), resource_of(node), ids)


def shares(count: int, *gpus: Gpu) -> Node:
    return healthy_node(*gpus, policy=Policy(sharing=Sharing.of({GPU: count})))


def share(on: str, replica: int) -> str:
    return f"{on}::{replica}"


# Allocate


def test_a_container_sees_the_uuids_of_its_devices() -> None:
    node = healthy_node(gpu(0), gpu(1))
    assert allocated(node, U1) == ContainerAnswer(envs={"NVIDIA_VISIBLE_DEVICES": U1})


@given(st.permutations([0, 1, 2, 3]))
def test_the_answer_does_not_depend_on_the_order_of_the_request(order: list[int]) -> None:
    node = healthy_node(*[gpu(number) for number in range(4)])
    answer = allocated(node, *[gpu(number).uuid for number in order])
    assert isinstance(answer, ContainerAnswer)
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": f"{U0},{U1},{U2},{U3}"}


def test_devices_are_in_the_order_of_their_indexes_instances_and_shares() -> None:
    node = healthy_node(C1B, policy=Policy(mig_strategy="single"))
    answer = allocated(node, mig_uuid(2), mig_uuid(0))
    assert isinstance(answer, ContainerAnswer)
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": f"{mig_uuid(0)},{mig_uuid(2)}"}


def test_two_shares_of_one_card_are_that_card_once() -> None:
    """Case F1."""
    node = shares(4, gpu(0), gpu(1))
    one = allocated(node, share(U0, 2), share(U0, 3))
    both = allocated(node, share(U1, 0), share(U0, 0), share(U0, 1), share(U0, 1))
    assert isinstance(one, ContainerAnswer)
    assert isinstance(both, ContainerAnswer)
    assert one.envs == {"NVIDIA_VISIBLE_DEVICES": U0}
    assert both.envs == {"NVIDIA_VISIBLE_DEVICES": f"{U0},{U1}"}


def test_an_empty_request_has_an_empty_answer() -> None:
    assert allocated(healthy_node(gpu(0))) == ContainerAnswer(envs={"NVIDIA_VISIBLE_DEVICES": ""})


def test_device_nodes_are_in_the_answer_where_they_are_configured() -> None:
    node = healthy_node(
        gpu(0, minor=3),
        gpu(1),
        policy=Policy(injection=Injection(pass_device_specs=True, device_root="/run/X/")),
    )
    node.apply(
        replace(enumerated(gpu(0, minor=3), gpu(1)), control_nodes=("/dev/nvidiactl", "/dev/nvidia-uvm"))
    )
    answer = allocated(node, U0)
    assert isinstance(answer, ContainerAnswer)
    assert answer.device_nodes == tuple(
        DeviceNode(container_path=path, host_path="/run/X" + path, permissions="rw")
        for path in ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia3")
    )


def test_device_nodes_of_two_shares_are_given_once_and_at_the_root_as_they_are() -> None:
    node = healthy_node(
        gpu(0), policy=Policy(injection=Injection(pass_device_specs=True), sharing=Sharing.of({GPU: 2}))
    )
    answer = allocated(node, share(U0, 0), share(U0, 1))
    assert isinstance(answer, ContainerAnswer)
    assert answer.device_nodes == (DeviceNode("/dev/nvidia0", "/dev/nvidia0"),)


def test_a_gpu_with_a_node_of_unknown_path_is_rejected_where_nodes_are_given_by_path() -> None:
    blank = replace(gpu(0), minor=None)
    node = healthy_node(blank, gpu(1), policy=Policy(injection=Injection(pass_device_specs=True)))
    assert allocated(node, U0) == Rejection(
        "missing",
        f"{U0} (GPU 0) cannot be given to a container: the driver does not report the device node of"
        " its GPU; run nvidia-modprobe -u -c 0 (or reboot), or delete the pod so that it is allocated anew",
    )
    node.apply(DeviceNodesSeen(()))
    assert node.unhealthy() == {U0}
    assert [each.reason for each in node.conditions()] == [Reason.DEVICE_NODE_MISSING]
    assert allocated(healthy_node(blank), U0) == ContainerAnswer(envs={"NVIDIA_VISIBLE_DEVICES": U0})


def test_without_nvidia_uvm_a_container_gets_what_there_is_and_the_node_is_not_ready() -> None:
    node = healthy_node(gpu(0), policy=Policy(injection=Injection(pass_device_specs=True)))
    node.apply(replace(enumerated(gpu(0)), control_nodes=("/dev/nvidiactl",)))
    node.apply(DeviceNodesSeen(("/dev/nvidia-uvm",)))
    assert node.unhealthy() == set()
    answer = allocated(node, U0)
    assert isinstance(answer, ContainerAnswer)
    assert [each.container_path for each in answer.device_nodes] == ["/dev/nvidiactl", "/dev/nvidia0"]
    missing = Finding(
        Reason.DEVICE_NODE_MISSING, "/dev/nvidia-uvm does not exist, so no CUDA program can start"
    )
    assert missing in node.snapshot().findings
    node.apply(DeviceNodesSeen(()))
    assert missing not in node.snapshot().findings


def test_an_unhealthy_device_is_rejected_with_its_reason_and_the_next_step() -> None:
    node = healthy_node(gpu(0), gpu(1), gpu(2))
    node.apply(xid(79, U2))
    assert allocated(node, U1, U2) == Rejection(
        "unhealthy",
        f"{U2} (GPU 2) is unhealthy: xid: XID 79: GPU has fallen off the bus; reset the GPU or reboot the"
        " node; have it replaced if it repeats, or delete the pod so that it is allocated anew",
    )


def test_a_device_that_was_not_probed_is_rejected() -> None:
    node = Node()
    node.apply(ready(), enumerated(gpu(0)))
    assert allocated(node, U0) == Rejection(
        "unhealthy",
        f"{U0} has not been probed yet, or not for too long, so it is not known to work;"
        " try again in a moment",
    )


def test_an_unknown_device_is_rejected_by_name() -> None:
    node = healthy_node(gpu(0))
    assert allocated(node, U0, "GPU-nonsense", "GPU-nonsense", "b") == Rejection(
        "unknown",
        "invalid request: unknown devices: GPU-nonsense and b are not devices of nvidia.com/gpu on this"
        " node; delete the pod so that it is allocated anew",
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("x" * 64, "x" * 64),
        ("x" * 65, "x" * 61 + "..."),
        ("line\nbreak", r"'line\nbreak'"),
        ("\x1b[31m", r"'\x1b[31m'"),
        ("\udc80" * 40, "'" + r"\udc80" * 10 + "..."),
    ],
)
def test_a_name_from_outside_is_shown_short_and_printable(name: str, shown: str) -> None:
    rejection = allocated(healthy_node(gpu(0)), name)
    assert isinstance(rejection, Rejection)
    assert f"unknown device: {shown} is not" in rejection.message


def test_many_unknown_devices_are_named_by_the_first_four() -> None:
    rejection = allocated(healthy_node(gpu(0)), *[f"d{number}" for number in range(10_000)])
    assert isinstance(rejection, Rejection)
    assert "unknown devices: d0, d1, d2, d3 and 9996 more are not devices of" in rejection.message


@given(st.lists(st.one_of(st.text(max_size=80), st.sampled_from([U0, U1, U3])), max_size=20))
def test_every_request_is_answered_and_nothing_from_outside_gets_in(ids: list[str]) -> None:
    node = healthy_node(gpu(0), gpu(1))
    answer = allocated(node, *ids)
    if isinstance(answer, Rejection):
        assert set(ids) - {U0, U1}
        assert answer.message.isprintable()
        assert len(answer.message) < 600
    else:
        assert set(answer.envs["NVIDIA_VISIBLE_DEVICES"].split(",")) - {""} == set(ids)
