"""Live changes of the simulated node: hangs, lost and added GPUs, the driver, MIG, readings."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import pynvml
import pytest

from agent.simulation.nvml import GpuProcess
from agent.simulation.presets import MigDeviceSpec
from tests.simulation.conftest import SimulatedNvml
from tests.simulation.nvml_clients import PATIENCE_S, NvmlCallError, nvml_process

PATIENCE_MS = int(PATIENCE_S * 1000)


class Call(threading.Thread):
    """A call that may hang, in a thread of its own."""

    def __init__(self, function: Callable[..., object], *given: object) -> None:
        super().__init__(daemon=True)
        self._function, self._given = function, given
        self.outcome: object = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._function(*self._given)
        except pynvml.NVMLError as error:
            self.outcome = error


def wait_for_hangs(nvml: SimulatedNvml, count: int) -> bool:
    return nvml.state.wait_until(lambda: nvml.state.hangs_entered == count, PATIENCE_S)


# --- hangs


def test_a_gpu_that_hangs_blocks_its_calls_alone_until_released(
    nvml: SimulatedNvml, client: ModuleType
) -> None:
    handles = [client.nvmlDeviceGetHandleByIndex(index) for index in range(8)]
    nvml.state.hang(gpu=3)
    stuck = Call(client.nvmlDeviceGetTemperature, handles[3], 0)
    assert wait_for_hangs(nvml, 1)
    assert [client.nvmlDeviceGetTemperature(handles[index], 0) for index in (2, 4)] == [30, 30]
    assert client.nvmlDeviceGetCount() == 8
    assert stuck.is_alive()
    nvml.state.release(gpu=3)
    stuck.join(PATIENCE_S)
    assert stuck.outcome == 30


def test_a_hung_driver_blocks_every_call_also_init_and_a_wait_under_way(
    nvml: SimulatedNvml, client: ModuleType
) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(0)
    events = client.nvmlEventSetCreate()
    client.nvmlDeviceRegisterEvents(handle, 8, events)
    calls = nvml.state.calls("nvmlEventSetWait")
    wait = Call(client.nvmlEventSetWait_v2, events, PATIENCE_MS)
    while nvml.state.calls("nvmlEventSetWait") == calls:
        nvml.state.wait_until(lambda: False, 0.001)
    nvml.state.hang()
    getter = Call(client.nvmlDeviceGetUUID, handle)
    with nvml_process(nvml.library) as other:
        other.start("nvmlInit")
        assert wait_for_hangs(nvml, 3)
        nvml.state.push_xid(0, 79)
        assert wait.is_alive()
        assert getter.is_alive()
        nvml.state.release()
        other.finish()
    for call in (wait, getter):
        call.join(PATIENCE_S)
    assert isinstance(wait.outcome, pynvml.c_nvmlEventData_t)
    assert getter.outcome == nvml.state.uuid(0)


def test_a_hang_outlives_the_client_and_takes_the_next_one(nvml: SimulatedNvml) -> None:
    nvml.state.hang()
    for entered in (1, 2):
        with nvml_process(nvml.library) as process:
            process.start("nvmlInit")
            assert wait_for_hangs(nvml, entered)
    assert nvml.state.inits == 0


# --- the driver


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH]
)
def test_without_its_driver_nothing_answers_and_a_wait_ends(nvml: SimulatedNvml, code: int) -> None:
    with nvml_process(nvml.library) as running, nvml_process(nvml.library) as starting:
        running.listen(1)
        running.start("nvmlEventSetWait_v2", "$events", PATIENCE_MS)
        nvml.state.unload_driver(code)
        for process, name in ((running, ""), (running, "nvmlDeviceGetCount"), (starting, "nvmlInit")):
            with pytest.raises(NvmlCallError) as raised:
                process.call(name) if name else process.finish()
            assert raised.value.code == code
        nvml.state.load_driver()
        starting.call("nvmlInit")
        assert running.call("nvmlDeviceGetCount") == 8


# --- MIG


def mig_names(client: ModuleType, handle: object) -> list[str]:
    names = []
    for index in range(client.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            mig = client.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except pynvml.NVMLError_NotFound:
            break
        names.append(client.nvmlDeviceGetName(mig))
    return names


def test_reconfiguring_mig_replaces_the_devices_and_ends_old_handles(
    nvml: SimulatedNvml, client: ModuleType
) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(0)
    assert client.nvmlDeviceGetMaxMigDeviceCount(handle) == 0
    uuids = nvml.state.set_mig(0, [MigDeviceSpec(profile="1g.10gb")] * 7)
    assert len(set(uuids)) == 7
    assert mig_names(client, handle) == ["NVIDIA H100 80GB HBM3 MIG 1g.10gb"] * 7
    old = client.nvmlDeviceGetMigDeviceHandleByIndex(handle, 0)
    nvml.state.set_mig(0, [MigDeviceSpec(profile="3g.40gb"), MigDeviceSpec(profile="4g.40gb", slices=2)])
    assert mig_names(client, handle) == [
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H100 80GB HBM3 MIG 2c.4g.40gb",
    ]
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        client.nvmlDeviceGetUUID(old)
    nvml.state.set_mig(0, [], enabled=False)
    assert client.nvmlDeviceGetMigMode(handle) == [0, 0]
    assert mig_names(client, handle) == []


# --- readings


def test_a_change_is_seen_whole_or_not_at_all(nvml: SimulatedNvml, client: ModuleType) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(0)
    nvml.state.set_processes(0, [GpuProcess(pid=1, memory_bytes=1)])

    def change() -> None:
        for number in range(300):
            count = (90, 1)[number % 2]
            nvml.state.set_processes(0, [GpuProcess(pid=count, memory_bytes=count)] * count)

    changer = threading.Thread(target=change)
    changer.start()
    seen = set()
    while changer.is_alive():
        # One call, since pynvml's own pair of calls fails where the list grows in between.
        room, listed = ctypes.c_uint(128), (pynvml.c_nvmlProcessInfo_v3_t * 128)()
        assert client.nvmlLib.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(room), listed) == 0
        seen |= {(room.value, each.pid) for each in listed[: room.value]}
    changer.join(PATIENCE_S)
    assert seen <= {(1, 1), (90, 90)}


def test_a_controller_killed_in_the_middle_of_a_change_blocks_no_client(
    nvml: SimulatedNvml, client: ModuleType
) -> None:
    program = """
import sys
from pathlib import Path
from agent.simulation.nvml.control import NodeControl
node = NodeControl.open(Path(sys.argv[1]))
with node.change(0):
    node.write_number("temperature", 0, 99)
    print("changing", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(nvml.state.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == b"changing\n"
        handle = client.nvmlDeviceGetHandleByIndex(0)
        assert client.nvmlDeviceGetTemperature(handle, 0) == 30
        controller.kill()
    nvml.state.set_pcie_replays(0, 1)
    assert client.nvmlDeviceGetTemperature(handle, 0) == 30
    assert client.nvmlDeviceGetPcieReplayCounter(handle) == 1
