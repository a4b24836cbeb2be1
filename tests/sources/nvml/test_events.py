"""XIDs, and the event set that brings them."""

import asyncio
import time

import pytest

from agent.model.facts import (
    DriverUnavailable,
    GpuCallFailed,
    GpuProbePassed,
    GpusEnumerated,
    HealthEventsUnsupported,
    XidEventsHeard,
    XidReported,
)
from agent.model.structs import replace
from agent.simulation.presets import MigDeviceSpec
from agent.sources.nvml.events import RetiredError, SharedEventSet
from agent.sources.nvml.library import EventSet, Nvml
from tests.sources.conftest import MakeNode, StartSource
from tests.sources.recorder import PATIENCE_S, Recorder, until
from tests.sources.simulated import MS, QUICK, Node

REGISTER = "nvmlDeviceRegisterEvents"
CREATE = "nvmlEventSetCreate"
WAIT = "nvmlEventSetWait_v2"
RARELY = replace(QUICK, poll_ns=3_600_000 * MS)
"""No poll but the first comes by itself."""


async def receives(node: Node, recorder: Recorder, gpu: int, xid: int = 48) -> None:
    """Wait until an XID of a GPU is heard, then forget it."""
    sequence = node.state.push_xid(gpu, xid)
    await recorder.first(XidReported, lambda fact: (fact.gpu, fact.xid) == (node.uuid(gpu), xid))
    assert node.state.event_times(sequence).deliveries == 1
    recorder.forget()


async def until_received(node: Node, recorder: Recorder, gpu: int) -> None:
    """Wait until XIDs of a GPU are received, however many are lost before."""
    async with asyncio.timeout(PATIENCE_S):
        while node.uuid(gpu) not in {fact.gpu for fact in recorder.of(XidReported)}:
            node.state.push_xid(gpu, 48)
            await asyncio.sleep(0.02)


async def registered(node: Node, count: int) -> None:
    """Wait until so many registrations of events were made."""
    await until(lambda: node.state.calls(REGISTER) >= count)


async def test_an_xid_is_emitted_with_its_gpu(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("8x-a100")
    await start_source(node)
    await registered(node, 8)
    node.state.push_xid(3, 79)
    assert await recorder.first(XidReported) == XidReported(gpu=node.uuid(3), xid=79)


async def test_an_xid_of_a_mig_device_is_emitted_with_its_instances(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node({"preset": "8x-a100", "gpus": 1})
    node.state.set_mig(0, [MigDeviceSpec(profile="3g.40gb"), MigDeviceSpec(profile="1g.10gb")])
    await start_source(node)
    await registered(node, 1)
    node.state.push_xid(0, 94, gi=2, ci=0)
    assert await recorder.first(XidReported) == XidReported(gpu=node.uuid(0), xid=94, gi=2, ci=0)


async def test_an_xid_of_an_unreadable_device_marks_none(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node)
    await registered(node, 4)
    node.state.push_xid(None, 79)
    assert await recorder.first(XidReported) == XidReported(gpu=None, xid=79)


async def test_events_that_are_no_xids_are_not_emitted(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("8x-a100")
    await start_source(node)
    await registered(node, 8)
    node.state.push_event(1, 0x1)
    node.state.push_event(1, 0x2)
    await receives(node, recorder, 2)
    assert recorder.of(XidReported) == []


async def test_many_xids_are_all_emitted(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node)
    await registered(node, 4)
    for number in range(503):
        node.state.push_xid(number % 4, 13)
    await recorder.until(lambda: sum(fact.count for fact in recorder.of(XidReported)) == 503)


async def test_a_gpu_is_probed_at_once_after_an_xid(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node, RARELY)
    await registered(node, 4)
    await recorder.at_least(4, GpuProbePassed)
    recorder.forget()
    node.state.push_xid(2, 79)
    assert await recorder.first(GpuProbePassed) == GpuProbePassed(gpu=node.uuid(2))
    assert len(recorder.of(GpuProbePassed)) == 1


async def test_an_xid_storm_makes_no_storm_of_probes(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node, RARELY)
    await registered(node, 4)
    await recorder.at_least(4, GpuProbePassed)
    began_ns = time.monotonic_ns()
    for _ in range(500):
        node.state.push_xid(2, 13)
    await recorder.until(lambda: sum(fact.count for fact in recorder.of(XidReported)) == 500)
    took_s = (time.monotonic_ns() - began_ns) / 1e9
    assert node.state.calls("nvmlDeviceGetTemperature", gpu=2) <= 3 + took_s


@pytest.mark.parametrize("call", [REGISTER, "nvmlDeviceGetSupportedEventTypes"])
@pytest.mark.parametrize("code", [3, 4, 13])
async def test_a_gpu_without_events_is_emitted_once_and_probed_all_the_same(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, call: str, code: int
) -> None:
    node = make_node("4x-t4")
    node.state.set_return(call, code, gpu=1)
    await start_source(node)
    await recorder.until(lambda: sum(fact.gpu == node.uuid(1) for fact in recorder.of(GpuProbePassed)) >= 3)
    assert [fact.gpu for fact in recorder.of(HealthEventsUnsupported)] == [node.uuid(1)]
    assert recorder.of(GpuCallFailed) == []
    await receives(node, recorder, 0)


async def test_a_gpu_that_sends_other_events_but_no_xids_is_emitted(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node({"preset": "4x-t4", "gpus": [{"event_types": 0x3}, {}]})
    await start_source(node)
    assert (await recorder.first(HealthEventsUnsupported)).gpu == node.uuid(0)
    await registered(node, 1)
    await receives(node, recorder, 1)


async def test_a_gpu_whose_events_cannot_be_registered_has_not_passed(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.state.set_return(REGISTER, 999, gpu=1)
    await start_source(node)
    await recorder.at_least(3, GpuCallFailed)
    assert {(fact.gpu, fact.code, fact.call) for fact in recorder.of(GpuCallFailed)} == {
        (node.uuid(1), 999, REGISTER)
    }
    assert node.uuid(1) not in {fact.gpu for fact in recorder.of(GpuProbePassed)}
    node.state.clear_return(REGISTER, gpu=1)
    await recorder.first(GpuProbePassed, lambda fact: fact.gpu == node.uuid(1))
    await receives(node, recorder, 1)


# The set breaks


@pytest.mark.parametrize("code", [1, 2, 9, 15, 16, 999])
async def test_a_wait_that_fails_marks_no_gpu_and_xids_are_received_again(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, code: int
) -> None:
    node = make_node("4x-t4")
    await start_source(node)
    await registered(node, 4)
    creations = node.state.calls(CREATE)
    node.state.set_return(WAIT, code)
    await until(lambda: node.state.calls(CREATE) > creations)
    lost = await recorder.first(XidEventsHeard)
    assert not lost.is_heard
    assert lost.lost_since_ns <= time.monotonic_ns()
    node.state.clear_return(WAIT)
    for gpu in range(4):
        await until_received(node, recorder, gpu)
    # The whole time is reported, however often the set was lost in it.
    assert await recorder.first(XidEventsHeard, lambda fact: fact.is_heard) == replace(lost, is_heard=True)
    assert recorder.of(GpuCallFailed) == []
    assert recorder.of(DriverUnavailable) == []


async def test_a_wait_that_keeps_failing_does_not_spin(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.state.set_return(WAIT, 15)
    began_ns = time.monotonic_ns()
    await start_source(node, replace(QUICK, event_retry_ns=100 * MS))
    await until(lambda: node.state.calls(CREATE) >= 4)
    took_ns = time.monotonic_ns() - began_ns
    assert took_ns >= 3 * 100 * MS
    assert node.state.calls(WAIT) <= took_ns // (100 * MS) + 1


async def test_a_lost_gpu_does_not_silence_the_others(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node)
    await registered(node, 4)
    node.state.set_return(None, 15, gpu=1)
    node.state.set_return(WAIT, 15)
    await recorder.first(GpuCallFailed)
    node.state.clear_return(WAIT)
    for gpu in (0, 2, 3):
        await until_received(node, recorder, gpu)
    assert {fact.gpu for fact in recorder.of(GpuCallFailed)} <= {node.uuid(1)}


async def test_xids_of_a_gpu_that_was_lost_are_received_again_once_it_answers(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node)
    await registered(node, 4)
    node.state.set_return(None, 15, gpu=1)
    await recorder.first(GpuCallFailed)
    registrations = node.state.calls(REGISTER, gpu=1)
    node.state.clear_return(None, gpu=1)
    await until(lambda: node.state.calls(REGISTER, gpu=1) > registrations)
    await receives(node, recorder, 1)


async def test_xids_of_a_gpu_that_appears_late_are_received(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.state.hide_gpu(3)
    await start_source(node)
    await registered(node, 3)
    node.state.reveal_gpu(3)
    await recorder.first(GpusEnumerated, lambda fact: len(fact.gpus) == 4)
    await registered(node, 4)
    await receives(node, recorder, 3)


async def test_creating_a_set_is_retried(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.state.set_return(CREATE, 23)
    await start_source(node)
    await until(lambda: node.state.calls(CREATE) >= 3)
    await recorder.at_least(4, GpuProbePassed)
    node.state.clear_return(CREATE)
    await until_received(node, recorder, 0)


async def test_sets_are_freed_when_they_are_replaced(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.state.set_return(WAIT, 15)
    await start_source(node)
    # The library has room for 64.
    await until(lambda: node.state.calls(CREATE) >= 70)
    node.state.clear_return(WAIT)
    await until_received(node, recorder, 0)


class Frees(Nvml):
    """Counts the sets that are freed."""

    def __init__(self) -> None:
        self.freed: list[EventSet] = []

    def free_event_set(self, events: EventSet) -> None:
        self.freed.append(events)


def test_a_set_is_freed_by_its_last_user() -> None:
    nvml = Frees()
    shared = SharedEventSet(EventSet("set"))
    with shared.in_use(nvml):
        with shared.in_use(nvml) as events:
            shared.retire(nvml)
        assert nvml.freed == []
    assert nvml.freed == [events]


def test_a_set_that_is_retired_is_used_no_more_and_freed_once() -> None:
    nvml = Frees()
    shared = SharedEventSet(EventSet("set"))
    shared.retire(nvml)
    shared.retire(nvml)
    with pytest.raises(RetiredError), shared.in_use(nvml):
        raise AssertionError("it must not be used")
    assert len(nvml.freed) == 1
