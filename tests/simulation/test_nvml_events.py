"""NVML events of the simulated node: which waits get them, how often, and what happens to slow readers."""

import threading
import time
from contextlib import ExitStack
from types import ModuleType

import pynvml
import pytest

from agent.simulation.nvml import NvmlState, NvmlStateError
from tests.simulation.conftest import SimulatedNvml
from tests.simulation.nvml_clients import PATIENCE_S, NvmlCallError, nvml_process

PATIENCE_MS = int(PATIENCE_S * 1000)
RING = 1024


@pytest.fixture
def events(client: ModuleType) -> object:
    """An event set that listens to the XIDs of all GPUs."""
    made: object = client.nvmlEventSetCreate()
    for index in range(8):
        client.nvmlDeviceRegisterEvents(client.nvmlDeviceGetHandleByIndex(index), 8, made)
    return made


def test_a_blocked_wait_is_woken_by_an_xid(nvml: SimulatedNvml, client: ModuleType, events: object) -> None:
    got: list[object] = []

    def wait() -> None:
        got.append(client.nvmlEventSetWait_v2(events, PATIENCE_MS))

    waiter = threading.Thread(target=wait)
    waiter.start()
    sequence = nvml.state.push_xid(3, 79)
    waiter.join(PATIENCE_S)
    (event,) = got
    assert isinstance(event, pynvml.c_nvmlEventData_t)
    assert (event.eventType, event.eventData) == (pynvml.nvmlEventTypeXidCriticalError, 79)
    assert (event.gpuInstanceId, event.computeInstanceId) == (0xFFFFFFFF, 0xFFFFFFFF)
    assert client.nvmlDeviceGetUUID(event.device) == nvml.state.uuid(3)
    times = nvml.state.event_times(sequence)
    assert times.deliveries == 1
    assert times.returned_ns is not None
    assert times.pushed_ns <= times.returned_ns <= time.monotonic_ns()


def test_two_processes_get_every_event_exactly_once(nvml: SimulatedNvml) -> None:
    with ExitStack() as stack:
        processes = [stack.enter_context(nvml_process(nvml.library)) for _ in range(2)]
        for process in processes:
            process.listen(8)
        pushed = [(8, 100 + number, nvml.state.uuid(number % 8)) for number in range(40)]
        for number in range(40):
            nvml.state.push_xid(number % 8, 100 + number)
        for process in processes:
            got = [tuple(process.call("nvmlEventSetWait_v2", "$events", PATIENCE_MS)) for _ in pushed]
            assert got == pushed
            with pytest.raises(NvmlCallError) as nothing_left:
                process.call("nvmlEventSetWait_v2", "$events", 0)
            assert nothing_left.value.code == pynvml.NVML_ERROR_TIMEOUT
    assert nvml.state.event_times(0).deliveries == 2
    assert nvml.state.events_lost == 0


def test_a_killed_client_takes_nothing_from_the_others(nvml: SimulatedNvml) -> None:
    with nvml_process(nvml.library) as survivor:
        survivor.listen(8)
        with nvml_process(nvml.library) as killed:
            killed.listen(8)
            killed.start("nvmlEventSetWait_v2", "$events", PATIENCE_MS)
        nvml.state.push_xid(5, 95)
        assert survivor.call("nvmlEventSetWait_v2", "$events", PATIENCE_MS)[1] == 95


def test_several_controllers_may_report_at_once(
    nvml: SimulatedNvml, client: ModuleType, events: object
) -> None:
    def report(first: int) -> None:
        with NvmlState.open(nvml.state.path) as state:
            for xid in range(first, first + 50):
                state.push_xid(first % 8, xid)

    threads = [threading.Thread(target=report, args=(1000 * number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    got = sorted(client.nvmlEventSetWait_v2(events, PATIENCE_MS).eventData for _ in range(200))
    assert got == [1000 * number + xid for number in range(1, 5) for xid in range(50)]


def test_a_reader_too_far_behind_loses_the_oldest_and_that_is_counted(
    nvml: SimulatedNvml, client: ModuleType, events: object
) -> None:
    for number in range(RING + 100):
        nvml.state.push_xid(0, number)
    first = client.nvmlEventSetWait_v2(events, PATIENCE_MS).eventData
    assert nvml.state.events_lost == first == 101
    rest = [client.nvmlEventSetWait_v2(events, PATIENCE_MS).eventData for _ in range(RING - 2)]
    assert rest == list(range(first + 1, RING + 100))
    with pytest.raises(NvmlStateError, match="event 0 is not among the last"):
        nvml.state.event_times(0)
