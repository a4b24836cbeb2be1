"""What the simulated library does with device doubles, and its events of GPUs bound and unbound."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pynvml
import pytest

from agent.errors import SourceError
from agent.simulation.hanging_nodes import HangingNodes
from agent.simulation.nvml import STATE_VARIABLE
from agent.simulation.roots import write_dev
from tests.simulation.conftest import SimulatedNvml
from tests.simulation.nvml_clients import PATIENCE_S, NvmlCallError, nvml_in_process, nvml_process

EVENT_TYPES = pynvml.nvmlSystemEventTypeGpuDriverBind | pynvml.nvmlSystemEventTypeGpuDriverUnbind


@pytest.fixture
def dev(nvml: SimulatedNvml) -> Path:
    directory = nvml.state.path.parent / "dev"
    write_dev(nvml.spec, directory)
    return directory


def open_devices(dev: Path) -> set[str]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.add(str(link.readlink()))
    return {path.removeprefix(f"{dev}/") for path in found if path.startswith(f"{dev}/")}


# Open and closed


def test_the_drivers_node_is_open_from_the_first_init_to_the_last_shutdown(
    nvml: SimulatedNvml, dev: Path
) -> None:
    with nvml_in_process(nvml.library) as client:
        client.nvmlInit()
        client.nvmlInit()
        assert open_devices(dev) == {"nvidiactl"}
        client.nvmlShutdown()
        assert open_devices(dev) == {"nvidiactl"}
        client.nvmlShutdown()
        assert open_devices(dev) == set()


def test_a_gpus_node_is_open_once_its_handle_was_asked_for(dev: Path, client: ModuleType) -> None:
    client.nvmlDeviceGetHandleByIndex(3)
    client.nvmlDeviceGetHandleByIndex(3)
    assert open_devices(dev) == {"nvidiactl", "nvidia3"}
    client.nvmlShutdown()
    client.nvmlInit()
    assert open_devices(dev) == {"nvidiactl"}


def test_a_driver_that_is_gone_does_not_keep_a_client_from_letting_go(
    nvml: SimulatedNvml, dev: Path, client: ModuleType
) -> None:
    client.nvmlDeviceGetHandleByIndex(0)
    nvml.state.unload_driver(code=999)
    client.nvmlShutdown()
    assert open_devices(dev) == set()
    with pytest.raises(pynvml.NVMLError):
        client.nvmlInit()
    assert open_devices(dev) == set()


def test_a_node_that_is_missing_is_no_trouble(nvml: SimulatedNvml, dev: Path) -> None:
    (dev / "nvidia0").unlink()
    with nvml_in_process(nvml.library) as client:
        client.nvmlInit()
        assert client.nvmlDeviceGetIndex(client.nvmlDeviceGetHandleByIndex(0)) == 0
        assert open_devices(dev) == {"nvidiactl"}


def test_the_nodes_are_those_beside_the_state_that_is_named(
    make_nvml: Callable[..., SimulatedNvml], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_nvml("4x-t4"), make_nvml("4x-t4")
    dev = other.state.path.parent / "dev"
    write_dev(other.spec, dev)
    monkeypatch.setenv(STATE_VARIABLE, str(other.state.path))
    with nvml_in_process(one.library) as client:
        client.nvmlInit()
        assert open_devices(dev) == {"nvidiactl"}


# Held in the kernel


@pytest.fixture
def hanging(dev: Path) -> Iterator[HangingNodes]:
    names = ("nvidiactl", "nvidia1")
    try:
        made = HangingNodes(names)
    except SourceError as error:
        pytest.skip(str(error))
    with made:
        for name in names:
            made.replace(dev / name)
        yield made


def held(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_a_first_handle_is_held_by_the_gpus_node_and_no_other_gpu_is(
    hanging: HangingNodes, client: ModuleType
) -> None:
    hanging.hang("nvidia1")
    thread = held(lambda: client.nvmlDeviceGetHandleByIndex(1))
    assert hanging.wait_held(1, PATIENCE_S)
    assert client.nvmlDeviceGetIndex(client.nvmlDeviceGetHandleByIndex(0)) == 0
    assert thread.is_alive()
    hanging.release_all()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("node", ["nvidia1", "nvidiactl"])
def test_any_call_on_a_gpu_is_held_by_its_node_or_the_drivers(
    hanging: HangingNodes, client: ModuleType, node: str
) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(1)
    hanging.hang(node)
    thread = held(lambda: client.nvmlDeviceGetTemperature(handle, 0))
    assert hanging.wait_held(1, PATIENCE_S)
    hanging.release_all()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_call_that_belongs_to_no_gpu_is_held_by_the_drivers_node_alone(
    hanging: HangingNodes, client: ModuleType
) -> None:
    client.nvmlDeviceGetHandleByIndex(1)
    hanging.hang("nvidia1")
    assert client.nvmlDeviceGetCount() == 8
    hanging.hang("nvidiactl")
    thread = held(client.nvmlDeviceGetCount)
    assert hanging.wait_held(1, PATIENCE_S)
    hanging.release_all()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


# GPUs bound and unbound


def events_of(client: ModuleType, events: object, room: int = 4) -> list[tuple[int, int]]:
    data = (pynvml.c_nvmlSystemEventData_v1_t * room)()
    version = pynvml.nvmlSystemEventSetWaitRequest_v1
    found = client.nvmlSystemEventSetWait(version, events, 0, data, room)
    return [(event["eventType"], event["gpuId"]) for event in found]


def registered(client: ModuleType, types: int = EVENT_TYPES) -> object:
    events = client.nvmlSystemEventSetCreate(pynvml.nvmlSystemEventSetCreateRequest_v1)
    client.nvmlSystemRegisterEvents(pynvml.nvmlSystemRegisterEventRequest_v1, types, events)
    return events


def test_events_of_the_system_are_not_supported_unless_offered(client: ModuleType) -> None:
    with pytest.raises(pynvml.NVMLError_NotSupported):
        registered(client)


def test_a_bind_and_an_unbind_are_told_with_the_gpus_address(nvml: SimulatedNvml, client: ModuleType) -> None:
    nvml.state.offer_system_events()
    nvml.state.push_rebind(0, bound=True)
    events = registered(client)
    assert events_of(client, events) == []
    nvml.state.push_rebind(1, bound=False)
    nvml.state.push_rebind(1, bound=True)
    info = client.nvmlDeviceGetPciInfo(client.nvmlDeviceGetHandleByIndex(1))
    address = info.domain << 16 | info.bus << 8 | info.device
    assert events_of(client, events) == [(1, address), (2, address)]


def test_only_the_types_asked_for_are_told_and_no_more_than_there_is_room_for(
    nvml: SimulatedNvml, client: ModuleType
) -> None:
    nvml.state.offer_system_events()
    events = registered(client, pynvml.nvmlSystemEventTypeGpuDriverBind)
    for _ in range(3):
        nvml.state.push_rebind(0, bound=False)
        nvml.state.push_rebind(0, bound=True)
    assert [kind for kind, _ in events_of(client, events, room=2)] == [2, 2]
    assert [kind for kind, _ in events_of(client, events, room=2)] == [2]


def test_one_that_looks_seldom_gets_the_newest(nvml: SimulatedNvml, client: ModuleType) -> None:
    nvml.state.offer_system_events()
    events = registered(client)
    for _ in range(100):
        nvml.state.push_rebind(0, bound=False)
    nvml.state.push_rebind(1, bound=True)
    found = events_of(client, events, room=100)
    assert len(found) == 64
    assert found[-1][0] == 2


def test_a_second_set_and_a_second_registration_are_refused(nvml: SimulatedNvml, client: ModuleType) -> None:
    nvml.state.offer_system_events()
    events = registered(client)
    with pytest.raises(pynvml.NVMLError):
        client.nvmlSystemEventSetCreate(pynvml.nvmlSystemEventSetCreateRequest_v1)
    client.nvmlSystemEventSetFree(pynvml.nvmlSystemEventSetFreeRequest_v1, events)
    with pytest.raises(pynvml.NVMLError_Unknown):
        registered(client)


def test_a_set_of_before_the_shutdown_is_invalid(nvml: SimulatedNvml, client: ModuleType) -> None:
    nvml.state.offer_system_events()
    events = registered(client)
    client.nvmlShutdown()
    client.nvmlInit()
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        events_of(client, events)


# Another reading


def test_a_page_retirement_that_waits_is_told_where_there_are_such(
    make_nvml: Callable[..., SimulatedNvml],
) -> None:
    nvml = make_nvml("4x-t4")
    with nvml_process(nvml.library) as client:
        client.call("nvmlInit")
        client.call("nvmlDeviceGetHandleByIndex", 0, keep="gpu")
        assert client.call("nvmlDeviceGetRetiredPagesPendingStatus", "$gpu") == 0
        nvml.state.set_pages_pending(0, pending=True)
        assert client.call("nvmlDeviceGetRetiredPagesPendingStatus", "$gpu") == 1
        nvml.state.set_pages_pending(0, pending=None)
        with pytest.raises(NvmlCallError) as refused:
            client.call("nvmlDeviceGetRetiredPagesPendingStatus", "$gpu")
        assert refused.value.code == pynvml.NVML_ERROR_NOT_SUPPORTED
