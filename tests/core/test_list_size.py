"""The longest message that lists a resource's devices, against the encoder that writes it."""

from dataclasses import dataclass, replace

from hypothesis import example, given
from hypothesis import strategies as st

from agent.config.sharing_file import MAX_REPLICAS
from agent.core.list_size import MAX_LIST_BYTES, is_too_long, list_bytes, lists_too_long
from agent.model.gpu import Gpu
from agent.model.health import Health, Reason
from agent.model.ids import DeviceId, GpuUuid, Placement, replica_id
from agent.model.policy import Policy
from agent.model.sharing import Sharing
from agent.model.snapshot import Device
from agent.sinks.plugin_wire import encode_list
from tests.core.build import GPU, gpu, registered_node

MIG_ID = "MIG-GPU-b1028956-cfa2-0990-bf4a-5da9abb51763/13/7"


@dataclass(frozen=True)
class Listed:
    id: str
    numa_node: int | None


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
    devices = [device(*each) for each in listed]
    assert list_bytes(devices) == len(encode_list(devices))


def test_the_limit_is_met_exactly() -> None:
    one = Listed("x" * 200, 0)
    size = list_bytes([one])
    most = MAX_LIST_BYTES // size
    assert not is_too_long((one,) * most)
    assert is_too_long((one,) * (most + 1))


def test_one_device_with_as_many_replicas_as_can_be_configured_always_fits() -> None:
    shares = tuple(Listed(replica_id(MIG_ID, number), 7) for number in range(MAX_REPLICAS))
    assert list_bytes(shares) < MAX_LIST_BYTES // 50


BIG = Policy(sharing=Sharing.of({GPU: MAX_REPLICAS}))


def with_long_ids(number: int) -> tuple[Gpu, ...]:
    """GPUs of whose shares the kubelet could not take the list."""
    return tuple(
        replace(gpu(0), uuid=GpuUuid(f"GPU-{'x' * 200}-{index}"), pci=f"{index:04x}")
        for index in range(number)
    )


def test_a_list_that_the_kubelet_would_not_take_is_a_finding_and_not_silent() -> None:
    few, many = with_long_ids(8), with_long_ids(24)
    assert lists_too_long(few, BIG) == ()
    node = registered_node(*many, policy=BIG)
    (finding,) = [each for each in node.snapshot().findings if each.reason is Reason.LIST_TOO_LONG]
    (sentence,) = lists_too_long(many, BIG)
    assert finding.message == sentence
    assert sentence.startswith("nvidia.com/gpu has 24576 devices, whose list can take ")
    assert sentence.endswith(" bytes, and the kubelet takes 4194304; configure fewer replicas")
