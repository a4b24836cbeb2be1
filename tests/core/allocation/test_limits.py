"""The operator's limits on shared devices, and conditions that keep a container from starting."""

import pytest

from agent.core.allocation.injection import ContainerAnswer
from agent.core.allocation.requests import Rejection, allocate, reject_start
from agent.model.facts import GpuCallFailed, HoldRequested
from agent.model.health import Condition, ConditionKey, Evidence, Reason, Recovery
from agent.model.ids import Placement, SourceName
from agent.model.policy import Policy
from agent.model.sharing import Share, Sharing
from agent.model.snapshot import Resource
from agent.model.structs import replace
from tests.core.build import C1B, GPU, U0, U1, Node, enumerated, gpu, healthy_node, mig_uuid, ready, xid

FOUR = (Share(GPU, 4),)


def sharing_node(sharing: Sharing) -> Node:
    return healthy_node(gpu(0), gpu(1), policy=Policy(sharing=sharing))


def resource_of(node: Node) -> Resource:
    return next(item for item in node.snapshot().resources if item.name == GPU)


def allocated(node: Node, *ids: str) -> ContainerAnswer | Rejection:
    return allocate(node.snapshot(), resource_of(node), ids)


# More than one


ONE_EACH = Sharing(shares=FOUR, fail_requests_greater_than_one=True)


def test_more_than_one_share_is_rejected_where_the_operator_limits_it() -> None:
    rejection = allocated(sharing_node(ONE_EACH), f"{U0}::0", f"{U1}::0")
    assert rejection == Rejection(
        "unsatisfiable",
        'invalid allocation request for "nvidia.com/gpu": invalid request: maximum request size for shared'
        " resources is 1; found 2; ask for 1 nvidia.com/gpu in each container",
    )


def test_one_share_is_allocated_also_if_it_is_named_twice() -> None:
    assert isinstance(allocated(sharing_node(ONE_EACH), f"{U0}::3", f"{U0}::3"), ContainerAnswer)


def test_devices_that_are_not_shared_are_not_limited() -> None:
    node = sharing_node(replace(ONE_EACH, shares=(), distinct_cards=True))
    assert isinstance(allocated(node, U0, U1), ContainerAnswer)


def test_without_the_limit_more_than_one_share_is_allocated() -> None:
    node = sharing_node(Sharing(shares=FOUR))
    assert isinstance(allocated(node, f"{U0}::0", f"{U1}::0"), ContainerAnswer)


def test_an_unknown_device_is_reported_before_the_limit() -> None:
    rejection = allocated(sharing_node(ONE_EACH), f"{U0}::0", f"{U0}::4")
    assert isinstance(rejection, Rejection)
    assert rejection.kind == "unknown"
    assert f"{U0}::0" not in rejection.message


# Distinct cards

DISTINCT = Sharing(shares=FOUR, distinct_cards=True)


def test_two_shares_of_one_card_are_rejected_with_the_name_of_the_card() -> None:
    """Case F1."""
    rejection = allocated(sharing_node(DISTINCT), f"{U0}::3", f"{U0}::2", f"{U1}::0")
    assert rejection == Rejection(
        "unsatisfiable",
        f"{U0} (GPU 0) was allocated more than once ({U0}::2 and {U0}::3), and this node gives a container"
        " each card once; delete the pod so that it is allocated anew, or ask for fewer nvidia.com/gpu",
    )


def test_shares_of_different_cards_are_allocated() -> None:
    node = sharing_node(DISTINCT)
    assert isinstance(allocated(node, f"{U0}::3", f"{U1}::3"), ContainerAnswer)


@pytest.mark.parametrize(("count", "rest"), [(4, " and {}"), (5, ", {} and 1 more")])
def test_of_many_shares_the_first_four_are_named(count: int, rest: str) -> None:
    node = sharing_node(replace(DISTINCT, shares=(Share(GPU, 6),)))
    rejection = allocated(node, *(f"{U1}::{number}" for number in range(count)))
    assert isinstance(rejection, Rejection)
    assert f"({U1}::0, {U1}::1, {U1}::2{rest.format(f'{U1}::3')})" in rejection.message


# Before a container starts


def started(node: Node, *ids: str) -> Rejection | None:
    return reject_start(node.snapshot(), resource_of(node), ids)


def test_a_device_that_broke_after_it_was_allocated_keeps_the_container_from_starting() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79, U1))
    assert started(node, U0) is None
    assert started(node, U0, U1) == Rejection(
        "unhealthy",
        f"{U1} (GPU 1) failed after it was allocated: xid: XID 79: GPU has fallen off the bus; reset the GPU"
        " or reboot the node; have it replaced if it repeats, or delete the pod so that it is allocated"
        " another device",
    )


def test_a_share_of_a_broken_device_does_so_too() -> None:
    node = sharing_node(Sharing(shares=FOUR))
    node.apply(GpuCallFailed(U0, code=15, call="nvmlDeviceGetMemoryInfo", message="GPU is lost"))
    rejection = started(node, f"{U0}::2")
    assert rejection is not None
    assert rejection.message.startswith(f"{U0}::2 (GPU 0) failed after it was allocated: gpu_lost")


def test_a_healthy_slice_starts_beside_an_unhealthy_one() -> None:
    node = healthy_node(C1B, policy=Policy(mig_strategy="single"))
    node.apply(xid(95, gi=1, ci=0))
    assert started(node, mig_uuid(0)) is not None
    assert started(node, mig_uuid(1)) is None


def test_no_container_starts_on_a_gpu_that_an_operator_holds() -> None:
    node = healthy_node(gpu(0))
    node.apply(HoldRequested(U0, "smells of smoke"))
    rejection = started(node, U0)
    assert rejection is not None
    assert "smells of smoke" in rejection.message


def with_condition(evidence: Evidence, *, flips: bool) -> Resource:
    resource = resource_of(healthy_node(gpu(0)))
    condition = Condition(
        key=ConditionKey(SourceName("nvml"), Reason.THERMAL, Placement(U0), 0),
        evidence=evidence,
        recovery=Recovery.SELF_CLEARING,
        flips=flips,
        message="hot",
        since_ns=1,
        last_ns=1,
    )
    [device] = resource.devices
    return replace(resource, devices=(replace(device, reasons=(condition,)),))


@pytest.mark.parametrize(
    ("evidence", "flips", "is_rejected"),
    [
        (Evidence.HARD, True, True),
        (Evidence.HARD, False, False),
        (Evidence.SOFT, True, False),
        (Evidence.SOFT, False, False),
    ],
)
def test_only_hard_evidence_that_makes_a_device_unhealthy_counts(
    evidence: Evidence, *, flips: bool, is_rejected: bool
) -> None:
    rejection = reject_start(Node().snapshot(), with_condition(evidence, flips=flips), [U0])
    assert (rejection is not None) is is_rejected


def test_an_unknown_device_keeps_no_container_from_starting() -> None:
    assert started(healthy_node(gpu(0)), U1, "no such device") is None


def test_a_device_that_was_not_probed_keeps_no_container_from_starting() -> None:
    node = Node()
    node.apply(ready(), enumerated(gpu(0)))
    assert isinstance(allocated(node, U0), Rejection)
    assert started(node, U0) is None
