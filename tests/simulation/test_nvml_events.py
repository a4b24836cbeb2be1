"""NVML events of the simulated node: who gets them, how often, and what happens to slow readers."""

import threading
import time
from collections.abc import Callable
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


def test_a_sleeping_wait_wakes_within_a_millisecond(nvml: SimulatedNvml) -> None:
    delays_ns = []
    with nvml_process(nvml.library) as process:
        process.listen(8)
        for number in range(30):
            process.start("nvmlEventSetWait_v2", "$events", PATIENCE_MS)
            while nvml.state.calls("nvmlEventSetWait_v2") == number:
                time.sleep(0.001)
            sequence = nvml.state.push_xid(0, 48)
            process.finish()
            times = nvml.state.event_times(sequence)
            assert times.returned_ns is not None
            delays_ns.append(times.returned_ns - times.pushed_ns)
    assert min(delays_ns) < 1_000_000  # the typical one, whatever else the machine does


def test_an_event_carries_the_mig_instance(nvml: SimulatedNvml, client: ModuleType, events: object) -> None:
    nvml.state.push_xid(0, 48, gi=2, ci=0)
    nvml.state.push_xid(0, 48, gi=2)
    first, second = (client.nvmlEventSetWait_v2(events, PATIENCE_MS) for _ in range(2))
    assert (first.gpuInstanceId, first.computeInstanceId) == (2, 0)
    assert (second.gpuInstanceId, second.computeInstanceId) == (2, 0xFFFFFFFF)


def test_an_event_may_have_a_device_nobody_can_name(
    nvml: SimulatedNvml, client: ModuleType, events: object
) -> None:
    nvml.state.push_xid(None, 79)
    event = client.nvmlEventSetWait_v2(events, PATIENCE_MS)
    assert event.eventData == 79
    with pytest.raises(pynvml.NVMLError_Unknown):
        client.nvmlDeviceGetUUID(event.device)


def test_a_wait_without_an_event_times_out(client: ModuleType, events: object) -> None:
    with pytest.raises(pynvml.NVMLError_Timeout):
        client.nvmlEventSetWait_v2(events, 1)


def test_only_what_was_registered_is_delivered(nvml: SimulatedNvml, client: ModuleType) -> None:
    events = client.nvmlEventSetCreate()
    nvml.state.push_xid(1, 31)
    client.nvmlDeviceRegisterEvents(client.nvmlDeviceGetHandleByIndex(1), 8, events)
    nvml.state.push_xid(0, 43)
    nvml.state.push_event(1, pynvml.nvmlEventTypeDoubleBitEccError)
    nvml.state.push_xid(1, 48)
    assert client.nvmlEventSetWait_v2(events, PATIENCE_MS).eventData == 48
    with pytest.raises(pynvml.NVMLError_Timeout):
        client.nvmlEventSetWait_v2(events, 0)


def test_a_type_the_gpu_does_not_report_cannot_be_registered(
    make_nvml: Callable[..., SimulatedNvml], client: ModuleType
) -> None:
    events = client.nvmlEventSetCreate()
    handle = client.nvmlDeviceGetHandleByIndex(0)
    assert client.nvmlDeviceGetSupportedEventTypes(handle) & 8
    with pytest.raises(pynvml.NVMLError_NotSupported):
        client.nvmlDeviceRegisterEvents(handle, 1 << 40, events)


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


def test_event_sets_are_bounded_and_reusable(client: ModuleType) -> None:
    made = [client.nvmlEventSetCreate() for _ in range(64)]
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        client.nvmlEventSetCreate()
    for each in made:
        client.nvmlEventSetFree(each)
    client.nvmlEventSetFree(client.nvmlEventSetCreate())


def test_a_wait_on_a_freed_set_is_an_invalid_argument(client: ModuleType) -> None:
    made = client.nvmlEventSetCreate()
    client.nvmlEventSetFree(made)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        client.nvmlEventSetWait_v2(made, PATIENCE_MS)


def test_shutting_down_ends_a_wait_in_another_thread_and_frees_its_set(
    nvml: SimulatedNvml, client: ModuleType, events: object
) -> None:
    outcomes: list[object] = []

    def wait() -> None:
        try:
            client.nvmlEventSetWait_v2(events, PATIENCE_MS)
        except pynvml.NVMLError as error:
            outcomes.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    while nvml.state.calls("nvmlEventSetWait_v2") == 0:
        time.sleep(0.001)
    client.nvmlShutdown()
    waiter.join(PATIENCE_S)
    assert [type(outcome) for outcome in outcomes] == [pynvml.NVMLError_Uninitialized]
    client.nvmlInit()
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        client.nvmlEventSetWait_v2(events, 0)
