"""Fault 7: a GPU falls off the bus, and it or the others return with another index.

Right: a GPU is its UUID. What is known of it stays with it wherever NVML lists it, its device id never
means another card, and Allocate of one that is not there is rejected.
"""

import random
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.allocation.injection import VISIBLE_DEVICES, ContainerAnswer
from agent.core.allocation.requests import Rejection, allocate
from agent.model.health import Health, Reason
from agent.model.ids import GpuUuid
from agent.model.policy import Policy
from agent.model.structs import replace
from tests.core.build import GPU, Node, enumerated, gpu, healthy_node, passed, ready, uuid, xid
from tests.faults.watched_node import watched_node
from tests.sources.recorder import until

CARDS: Final = 5
QUICK = Policy(recovery_clean_probes=2, recovery_quiet_ns=0)

RESET_XID: Final = 48


class Bus:
    """A node whose GPUs come and go, and what is true of each by its UUID."""

    def __init__(self) -> None:
        self.node = Node(QUICK)
        self.node.apply(ready())
        self.order: list[int] = []
        self.seen: set[int] = set()
        self.lost: set[int] = set()
        self.broken: set[int] = set()
        self.returned: set[int] = set()
        """Gone and back: initialised anew, which with clean probes cures them."""

    def list(self, order: list[int]) -> None:
        """NVML lists these cards, in this order."""
        self.returned = (self.returned | self.lost) & set(order)
        self.order = order
        self.seen |= set(order)
        self.lost = self.seen - set(order)
        self.node.apply(enumerated(*(gpu(card, index=index) for index, card in enumerate(order))))

    def poll(self) -> None:
        """Every card that is listed passes as often as recovery asks for."""
        for _ in range(QUICK.recovery_clean_probes):
            self.node.apply(*(passed(uuid(card)) for card in self.order))
        self.broken -= self.returned & set(self.order)
        self.returned = set()

    def xid_at(self, index: int) -> None:
        """The card at an index reports an error that takes a reset."""
        if self.order:
            card = self.order[index % len(self.order)]
            self.broken.add(card)
            self.returned.discard(card)
            self.node.apply(xid(RESET_XID, uuid(card)))

    def check(self) -> None:
        """What must be so at every moment."""
        devices = {str(device.id): device for device in self.node.devices()}
        assert set(devices) == {uuid(card) for card in self.seen}
        for card in self.seen:
            device = devices[uuid(card)]
            assert (device.uuid, device.placement.gpu) == (uuid(card), uuid(card))
            reasons = {reason.reason for reason in device.reasons}
            assert (Reason.XID in reasons) >= (card in self.broken)
            if card in self.lost:
                assert Reason.GPU_LOST in reasons
            else:
                assert device.index == self.order.index(card)
            self._check_allocate(card, device.health)

    def _check_allocate(self, card: int, health: Health) -> None:
        snapshot = self.node.snapshot()
        (resource,) = [one for one in snapshot.resources if one.name == GPU]
        answer = allocate(snapshot, resource, [uuid(card)])
        if health is Health.HEALTHY:
            assert isinstance(answer, ContainerAnswer)
            assert answer.envs == {VISIBLE_DEVICES: uuid(card)}
        else:
            assert isinstance(answer, Rejection)
            assert answer.kind == "unhealthy"
            assert uuid(card) in answer.message


ORDERS = st.permutations(range(CARDS)).flatmap(
    lambda order: st.integers(0, CARDS).map(lambda length: list(order[:length]))
)
STEPS = st.one_of(
    st.tuples(st.just("list"), ORDERS),
    st.tuples(st.just("poll"), st.none()),
    st.tuples(st.just("xid"), st.integers(0, CARDS)),
)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=20))
def test_whatever_is_listed_where_each_gpu_keeps_what_is_its_own(steps: list[tuple[str, object]]) -> None:
    bus = Bus()
    bus.list(list(range(CARDS)))
    bus.poll()
    for kind, given_ in steps:
        match kind, given_:
            case "list", list(order):
                bus.list(order)
            case "xid", int(index):
                bus.xid_at(index)
            case _:
                bus.poll()
        bus.check()


@settings(deadline=None)
@given(st.lists(ORDERS, max_size=6), ORDERS.filter(lambda order: len(order) == CARDS))
def test_all_that_return_are_healthy_again_wherever_they_are_listed(
    listings: list[list[int]], last: list[int]
) -> None:
    bus = Bus()
    bus.list(list(range(CARDS)))
    bus.poll()
    for order in listings:
        bus.list(order)
        bus.poll()
    bus.list(last)
    bus.poll()
    assert bus.node.unhealthy() == set()
    assert [str(device.id) for device in bus.node.devices()] == [uuid(card) for card in range(CARDS)]


def test_another_card_in_the_same_slot_is_another_device_and_the_old_id_is_rejected() -> None:
    node = healthy_node(gpu(0), gpu(1), policy=QUICK)
    new = replace(gpu(1), uuid=uuid(9))
    node.apply(enumerated(gpu(0), new), passed(uuid(9)))
    snapshot = node.snapshot()
    (resource,) = snapshot.resources
    rejected = allocate(snapshot, resource, [uuid(1)])
    assert isinstance(rejected, Rejection)
    assert rejected.kind == "unhealthy"
    assert isinstance(allocate(snapshot, resource, [uuid(9)]), ContainerAnswer)


def test_an_id_that_never_was_is_unknown() -> None:
    node = healthy_node(gpu(0), policy=QUICK)
    snapshot = node.snapshot()
    rejected = allocate(snapshot, snapshot.resources[0], [uuid(7)])
    assert isinstance(rejected, Rejection)
    assert rejected.kind == "unknown"


# Over the simulated library


@pytest.mark.parametrize("seed", range(4))
async def test_gpus_that_go_and_come_over_nvml_keep_their_verdicts(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with watched_node(tmp_path, "4x-t4") as watched:
        state = watched.node.state
        hidden: set[int] = set()
        for _ in range(6):
            number = chance.randrange(4)
            if number in hidden:
                hidden.discard(number)
                state.reveal_gpu(number)
            else:
                hidden.add(number)
                state.hide_gpu(number)
            await watched.until_unhealthy(*hidden)
            for lost in hidden:
                assert watched.reasons(lost) == {Reason.GPU_LOST}
        for number in hidden:
            state.reveal_gpu(number)
        await watched.until_unhealthy()


async def test_an_xid_of_a_gpu_whose_index_moved_marks_that_gpu(tmp_path: Path) -> None:
    async with watched_node(tmp_path, "4x-t4") as watched:
        watched.node.state.hide_gpu(0)
        await watched.until_unhealthy(0)
        # What had index 3 has 2 now, and it is still heard.
        waits = watched.node.state.calls("nvmlEventSetWait_v2")
        await until(lambda: watched.node.state.calls("nvmlEventSetWait_v2") > waits)
        watched.node.state.push_xid(3, 79)
        await watched.until_unhealthy(0, 3)
        assert watched.reasons(3) == {Reason.XID}
        watched.node.state.reveal_gpu(0)
        await watched.until_unhealthy(3)


async def test_a_lost_gpu_that_comes_back_as_another_index_is_the_same_device(tmp_path: Path) -> None:
    async with watched_node(tmp_path, "4x-t4") as watched:
        state = watched.node.state
        ids = set(watched.health)
        state.hide_gpu(2)
        await watched.until_unhealthy(2)
        state.hide_gpu(0)
        await watched.until_unhealthy(0, 2)
        state.reveal_gpu(2)
        await watched.until_unhealthy(0)
        assert watched.indexes() == {GpuUuid(state.uuid(number)): number - 1 for number in (1, 2, 3)}
        assert set(watched.health) == ids
