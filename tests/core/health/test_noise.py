"""S13 in small: what resembles a fault and is none flips no device; what is one does."""

import random
from collections.abc import Callable

import pytest

from agent.model.facts import GpuSampled, XidReported
from agent.model.ids import GpuUuid
from agent.model.policy import Policy
from tests.bench.noise import GPUS, NoisyNode, false_flips
from tests.core.polls import HEALTHY, sample


def test_healthy_nodes_flip_no_device_for_thousands_of_gpu_hours() -> None:
    lived = false_flips(8_000, seed=1)
    assert (lived.gpu_hours, lived.flips) == (8_000, 0)
    assert lived.facts > 1_000
    assert sum(lived.noise.values()) > 100


def test_every_kind_of_noise_is_made() -> None:
    node = NoisyNode(random.Random("all"), Policy(mig_strategy="mixed", xid_policy="catalog"))
    node.begin()
    for make, weight in node.kinds():
        assert weight > 0
        for _ in range(3):
            make()
    assert node.flips == 0


def test_the_same_seed_is_the_same_life_and_another_is_another() -> None:
    one = false_flips(2_000, seed=1)
    assert false_flips(2_000, seed=1) == one
    assert false_flips(2_000, seed=2) != one


def test_at_least_as_many_gpu_hours_are_lived_as_were_asked_for() -> None:
    assert [false_flips(asked, seed=1).gpu_hours for asked in (0, 1, GPUS, GPUS + 1)] == [0, 16, 16, 32]


@pytest.mark.parametrize(
    "fault",
    [
        lambda uuid: XidReported(uuid, 79),
        lambda uuid: GpuSampled(uuid, sample(fabric_state=2)),
    ],
    ids=["an XID of a reset class", "a fabric that is not set up"],
)
def test_a_fault_among_the_noise_would_be_counted(
    fault: Callable[[GpuUuid], XidReported | GpuSampled],
) -> None:
    node = NoisyNode(random.Random("faulty"), Policy())
    node.begin()
    assert node.flips == 0
    node.apply(fault(node.gpus[3].uuid))
    assert node.flips == 1
    node.apply(GpuSampled(node.gpus[3].uuid, HEALTHY))
    assert node.flips == 1


def test_a_device_that_does_not_come_back_would_be_counted() -> None:
    node = NoisyNode(random.Random("faulty"), Policy())
    node.begin()
    node.apply(XidReported(node.gpus[3].uuid, 64))
    node.gpu_is_reset()
    assert node.flips >= 2
