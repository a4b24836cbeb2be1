"""The longest message that lists a resource's devices, against the encoder that writes it."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.core.allocation.list_size import MAX_LIST_BYTES, device_bytes, replicas_bytes
from agent.core.health.inventory import oversized
from agent.model.facts import PolicyChanged
from agent.model.health import Health, Reason
from agent.model.ids import DeviceId, GpuUuid, Placement, replica_id
from agent.model.policy import Policy
from agent.model.sharing import Sharing
from agent.model.snapshot import Device
from agent.sinks.plugin.wire import encode_list
from tests.core.build import GPU, gpu, registered_node

MIG_ID = "MIG-GPU-b1028956-cfa2-0990-bf4a-5da9abb51763/13/7"


def device(device_id: str, numa_node: int | None) -> Device:
    return Device(
        id=DeviceId(device_id),
        uuid=device_id,
        placement=Placement(GpuUuid("GPU-0")),
        index=0,
        replica=None,
        numa_node=numa_node,
        health=Health.UNHEALTHY,
    )


@given(
    st.lists(
        st.tuples(
            st.text("GPU-0123456789:", min_size=1, max_size=256),
            st.none() | st.integers(min_value=0, max_value=2**20),
        ),
        max_size=8,
    )
)
@example([("x" * 100, 0), ("x" * 118, None), ("x" * 127, 127), ("x" * 128, 128)])
def test_it_is_as_long_as_the_encoder_writes_it(listed: list[tuple[str, int | None]]) -> None:
    total = sum(device_bytes(len(device_id), numa_node) for device_id, numa_node in listed)
    assert total == len(encode_list([device(*each) for each in listed]))


@pytest.mark.parametrize("replicas", [0, 1, 2, 9, 10, 11, 99, 100, 101, 1_234])
def test_replicas_are_counted_without_being_made(replicas: int) -> None:
    made = [device(replica_id(MIG_ID, number), 7) for number in range(replicas)]
    assert replicas_bytes(len(MIG_ID), 7, replicas) == len(encode_list(made))


def test_as_many_replicas_as_the_kubelet_accepts_are_advertised_and_not_one_more() -> None:
    card = gpu(0, numa=1)
    most = next(n for n in range(70_000, 0, -1) if replicas_bytes(len(card.uuid), 1, n) <= MAX_LIST_BYTES)
    fits, over = (Policy(sharing=Sharing.of({GPU: count})) for count in (most, most + 1))
    node = registered_node(card, policy=fits)
    (resource,) = node.snapshot().resources
    assert len(resource.devices) == most
    unhealthy = [device(each.id, each.numa_node) for each in resource.devices]
    assert MAX_LIST_BYTES - 100 < len(encode_list(unhealthy)) <= MAX_LIST_BYTES
    assert oversized([card], fits) == ()

    node.apply(PolicyChanged(over))
    (resource,) = node.snapshot().resources
    assert resource.devices == ()
    (finding,) = [each for each in node.snapshot().findings if each.reason is Reason.LIST_TOO_LONG]
    size = replicas_bytes(len(card.uuid), 1, most + 1)
    assert finding.message == (
        f"nvidia.com/gpu would have {most + 1} devices, whose list takes up to {size} bytes,"
        " and the kubelet takes 4194304; configure fewer replicas"
    )
    assert [each.message for each in oversized([card], over)] == [finding.message]
