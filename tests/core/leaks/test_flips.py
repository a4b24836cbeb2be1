"""A leak takes a free GPU out where the operator wants it, whatever else soft evidence may flip."""

from agent.model.policy import Policy
from tests.core.build import U0, S
from tests.core.use import FLIPPING, POD_A, allocated, node, pods, process, repeat_facts, seen

GRACE_NS = Policy().leaks.pod_gone_ns


def test_a_process_whose_pod_is_gone_makes_a_free_gpu_unhealthy() -> None:
    assert not FLIPPING.soft_flips
    free = node(FLIPPING)
    repeat_facts(free, GRACE_NS + 2 * S, seen(process(501, pod=POD_A)), pods(a=False), allocated())

    assert free.unhealthy() == {str(U0)}


def test_an_allocated_gpu_stays_healthy() -> None:
    flipped = node(FLIPPING)
    repeat_facts(
        flipped,
        GRACE_NS + 2 * S,
        seen(process(501, pod=POD_A)),
        pods(a=False),
        allocated((str(U0), "ns1/job-b")),
    )

    assert flipped.unhealthy() == set()
