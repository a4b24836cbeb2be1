"""Live changes of the simulated node: hangs, lost and added GPUs, the driver, MIG, readings."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from types import ModuleType

import pynvml
import pytest

from agent.simulation.nvml import GpuProcess, NvmlStateError
from agent.simulation.presets import MigDeviceSpec, PresetError
from tests.simulation.conftest import SimulatedNvml
from tests.simulation.nvml_clients import PATIENCE_S, NvmlCallError, nvml_in_process, nvml_process

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


def test_one_function_of_one_gpu_may_hang(nvml: SimulatedNvml, client: ModuleType) -> None:
    first, second = (client.nvmlDeviceGetHandleByIndex(index) for index in (0, 1))
    nvml.state.hang(function="nvmlDeviceGetPowerUsage", gpu=1)
    stuck = Call(client.nvmlDeviceGetPowerUsage, second)
    assert wait_for_hangs(nvml, 1)
    assert client.nvmlDeviceGetPowerUsage(first) == 70000
    assert client.nvmlDeviceGetTemperature(second, 0) == 30
    nvml.state.release(function="nvmlDeviceGetPowerUsage", gpu=1)
    stuck.join(PATIENCE_S)
    assert stuck.outcome == 70000


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
            with pytest.raises(NvmlCallError) as refused:
                process.call(name) if name else process.finish()
            assert refused.value.code == code
        nvml.state.load_driver()
        starting.call("nvmlInit")
        assert running.call("nvmlDeviceGetCount") == 8


def test_an_upgrade_changes_the_versions(nvml: SimulatedNvml, client: ModuleType) -> None:
    nvml.state.set_versions(driver="580.82.07", nvml="13.580.82.07", cuda=13000)
    assert client.nvmlSystemGetDriverVersion() == "580.82.07"
    assert client.nvmlSystemGetCudaDriverVersion() == 13000


# --- GPUs that go and come


def test_a_removed_gpu_shrinks_the_count_and_moves_the_later_ones_up(
    nvml: SimulatedNvml, client: ModuleType
) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(3)
    nvml.state.hide_gpu(3)
    assert client.nvmlDeviceGetCount() == 7
    listed = [client.nvmlDeviceGetUUID(client.nvmlDeviceGetHandleByIndex(index)) for index in range(7)]
    assert listed == [nvml.state.uuid(gpu) for gpu in range(8) if gpu != 3]
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        client.nvmlDeviceGetUUID(handle)
    with pytest.raises(pynvml.NVMLError_NotFound):
        client.nvmlDeviceGetHandleByUUID(nvml.state.uuid(3))
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        client.nvmlDeviceGetHandleByIndex(7)
    nvml.state.reveal_gpu(3)
    assert client.nvmlDeviceGetIndex(handle) == 3


def test_the_handles_of_a_removed_gpu_answer_what_was_asked_for(
    nvml: SimulatedNvml, client: ModuleType
) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(0)
    nvml.state.hide_gpu(0, code=pynvml.NVML_ERROR_UNKNOWN)
    with pytest.raises(pynvml.NVMLError_Unknown):
        client.nvmlDeviceGetName(handle)


def test_a_gpu_can_be_added(make_nvml: Callable[..., SimulatedNvml]) -> None:
    whole = make_nvml("8x-a100")
    few = make_nvml({"preset": "8x-a100", "gpus": 1})
    with nvml_in_process(few.library) as client:
        client.nvmlInit()
        assert client.nvmlDeviceGetCount() == 1
        assert few.state.add_gpu(whole.spec.gpus[5]) == 1
        assert client.nvmlDeviceGetCount() == 2
        added = client.nvmlDeviceGetHandleByIndex(1)
        assert client.nvmlDeviceGetUUID(added) == whole.spec.gpus[5].uuid


def test_a_gpu_that_does_not_exist_cannot_be_changed(nvml: SimulatedNvml) -> None:
    for gpu in (8, -1):
        with pytest.raises(NvmlStateError):
            nvml.state.set_temperature(gpu, 40)
        with pytest.raises(NvmlStateError):
            nvml.state.push_xid(gpu, 79)
        with pytest.raises(NvmlStateError):
            nvml.state.set_mig(gpu, [])


def test_more_gpus_than_slots_are_refused(make_nvml: Callable[..., SimulatedNvml]) -> None:
    node = make_nvml("8x-a100")
    for _ in range(24):
        node.state.add_gpu(node.spec.gpus[0])
    with pytest.raises(NvmlStateError):
        node.state.add_gpu(node.spec.gpus[0])
    assert node.state.gpus == 32


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


def test_mig_devices_of_a_preset_are_listed_with_their_places(
    make_nvml: Callable[..., SimulatedNvml],
) -> None:
    devices = [{"profile": "1g.10gb", "gi": gi} for gi in (1, 2, 3)]
    node = make_nvml({"preset": "8x-a100", "gpus": 1, "gpu": {"mig": {"enabled": True, "devices": devices}}})
    with nvml_in_process(node.library) as client:
        client.nvmlInit()
        handle = client.nvmlDeviceGetHandleByIndex(0)
        assert client.nvmlDeviceGetMigMode(handle) == [1, 1]
        for index, gi in enumerate((1, 2, 3)):
            mig = client.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            uuid = f"MIG-00000000-0000-5000-8000-0000{gi:04x}0000"
            assert client.nvmlDeviceIsMigDeviceHandle(mig)
            assert client.nvmlDeviceGetUUID(mig) == uuid
            assert client.nvmlDeviceGetName(mig) == "NVIDIA A100-SXM4-80GB MIG 1g.10gb"
            assert client.nvmlDeviceGetGpuInstanceId(mig) == gi
            assert client.nvmlDeviceGetComputeInstanceId(mig) == 0
            assert client.nvmlDeviceGetMemoryInfo(mig).total == 9728 << 20
            assert client.nvmlDeviceGetAttributes_v2(mig).multiprocessorCount == 14
            parent = client.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig)
            assert client.nvmlDeviceGetUUID(parent) == node.state.uuid(0)
            assert client.nvmlDeviceGetUUID(client.nvmlDeviceGetHandleByUUID(uuid)) == uuid
        with pytest.raises(pynvml.NVMLError_NotFound):
            client.nvmlDeviceGetMigDeviceHandleByIndex(handle, 3)


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


def test_instances_and_profiles_can_be_walked(nvml: SimulatedNvml, client: ModuleType) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(0)
    nvml.state.set_mig(0, [MigDeviceSpec(profile="2g.20gb", gi=3), MigDeviceSpec(profile="1g.10gb", gi=9)])
    profile = client.nvmlDeviceGetGpuInstanceProfileInfo(handle, pynvml.NVML_GPU_INSTANCE_PROFILE_2_SLICE)
    assert (profile.id, profile.sliceCount, profile.memorySizeMB) == (14, 2, 20096)
    instance = client.nvmlDeviceGetGpuInstanceById(handle, 3)
    info = client.nvmlGpuInstanceGetInfo(instance)
    assert (info.id, info.profileId, info.placement.start, info.placement.size) == (3, 14, 0, 2)
    compute = client.nvmlGpuInstanceGetComputeInstanceById(instance, 0)
    assert (
        client.nvmlComputeInstanceGetInfo(compute).profileId == pynvml.NVML_COMPUTE_INSTANCE_PROFILE_2_SLICE
    )
    with pytest.raises(pynvml.NVMLError_NotFound):
        client.nvmlDeviceGetGpuInstanceById(handle, 4)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        client.nvmlDeviceGetGpuInstanceProfileInfo(handle, pynvml.NVML_GPU_INSTANCE_PROFILE_8_SLICE)


def test_a_mig_layout_the_gpu_has_no_room_for_is_refused(nvml: SimulatedNvml, client: ModuleType) -> None:
    with pytest.raises(PresetError, match=r"no room on one GPU for 3g\.40gb, 3g\.40gb, 3g\.40gb"):
        nvml.state.set_mig(0, [MigDeviceSpec(profile="3g.40gb")] * 3)
    assert client.nvmlDeviceGetMigMode(client.nvmlDeviceGetHandleByIndex(0)) == [0, 0]


# --- readings


def test_readings_follow_the_state(nvml: SimulatedNvml, client: ModuleType) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(2)
    state = nvml.state
    state.set_temperature(2, 91)
    state.set_clock_reasons(2, 0x40)
    state.set_power(2, 650_000)
    state.set_utilization(2, gpu_percent=98, memory_percent=55)
    state.set_memory_used(2, 1 << 30)
    state.set_pcie(2, generation=1, width=8)
    state.set_pcie_replays(2, 5)
    state.set_ecc(2, 3, location="sram")
    state.set_remapped_rows(2, uncorrectable=2, pending=True)
    state.set_fabric(2, "in_progress")
    state.set_nvlink(2, 7, up=False)
    assert client.nvmlDeviceGetTemperature(handle, 0) == 91
    assert client.nvmlDeviceGetCurrentClocksThrottleReasons(handle) == 0x40
    assert client.nvmlDeviceGetPowerUsage(handle) == 650_000
    assert client.nvmlDeviceGetUtilizationRates(handle).gpu == 98
    assert client.nvmlDeviceGetMemoryInfo(handle).used == (1 << 30) + (551 << 20)
    assert client.nvmlDeviceGetCurrPcieLinkGeneration(handle) == 1
    assert client.nvmlDeviceGetMaxPcieLinkGeneration(handle) == 5
    assert client.nvmlDeviceGetCurrPcieLinkWidth(handle) == 8
    assert client.nvmlDeviceGetPcieReplayCounter(handle) == 5
    assert client.nvmlDeviceGetTotalEccErrors(handle, 1, 0) == 3
    assert client.nvmlDeviceGetTotalEccErrors(handle, 0, 0) == 0
    assert client.nvmlDeviceGetMemoryErrorCounter(handle, 1, 0, pynvml.NVML_MEMORY_LOCATION_SRAM) == 3
    assert client.nvmlDeviceGetRemappedRows(handle) == (0, 2, 1, 0)
    assert [client.nvmlDeviceGetNvLinkState(handle, link) for link in (6, 7)] == [1, 0]
    fabric = pynvml.c_nvmlGpuFabricInfo_t()
    client.nvmlDeviceGetGpuFabricInfo(handle, ctypes.byref(fabric))
    assert fabric.state == pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS
    with pytest.raises(NvmlStateError, match="no NVLink 18"):
        state.set_nvlink(2, 18, up=False)


def test_a_field_without_a_method_is_set_by_its_name(nvml: SimulatedNvml, client: ModuleType) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(0)
    nvml.state.set_number(0, "persistence_mode", 0)
    assert client.nvmlDeviceGetPersistenceMode(handle) == 0
    nvml.state.set_number(0, "persistence_mode", None)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        client.nvmlDeviceGetPersistenceMode(handle)
    with pytest.raises(NvmlStateError, match="no number persistance_mode"):
        nvml.state.set_number(0, "persistance_mode", 0)


def test_the_recovery_action_is_field_230_where_the_driver_has_it(
    nvml: SimulatedNvml, client: ModuleType
) -> None:
    def action() -> tuple[int, int]:
        handle = client.nvmlDeviceGetHandleByIndex(0)
        recovery, other = client.nvmlDeviceGetFieldValues(handle, [230, 94])
        assert other.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED
        return recovery.nvmlReturn, recovery.value.uiVal

    assert action() == (0, 0)
    nvml.state.set_recovery_action(0, 1)
    assert action() == (0, 1)
    nvml.state.set_recovery_action(0, None)
    assert action()[0] == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_processes_are_listed_on_the_gpu_and_on_their_mig_device(
    nvml: SimulatedNvml, client: ModuleType
) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(0)
    nvml.state.set_mig(0, [MigDeviceSpec(profile="1g.10gb", gi=7), MigDeviceSpec(profile="1g.10gb", gi=8)])
    mine = GpuProcess(pid=11, memory_bytes=1 << 20, gi=8, ci=0)
    nvml.state.set_processes(0, [mine, GpuProcess(pid=12, memory_bytes=2 << 20, kind="graphics", gi=7, ci=0)])
    (listed,) = client.nvmlDeviceGetComputeRunningProcesses(handle)
    assert (listed.pid, listed.usedGpuMemory, listed.gpuInstanceId) == (11, 1 << 20, 8)
    assert [each.pid for each in client.nvmlDeviceGetGraphicsRunningProcesses(handle)] == [12]
    first, second = (client.nvmlDeviceGetMigDeviceHandleByIndex(handle, index) for index in (0, 1))
    assert client.nvmlDeviceGetComputeRunningProcesses(first) == []
    assert [each.pid for each in client.nvmlDeviceGetComputeRunningProcesses(second)] == [11]
    assert client.nvmlDeviceGetMemoryInfo(second).used == 1 << 20
    assert client.nvmlDeviceGetMemoryInfo(handle).used == (3 << 20) + (551 << 20)


def test_the_process_table_is_bounded(nvml: SimulatedNvml, client: ModuleType) -> None:
    processes = [GpuProcess(pid=pid, memory_bytes=1) for pid in range(1, 130)]
    with pytest.raises(NvmlStateError, match="129 processes are too many"):
        nvml.state.set_processes(0, processes)
    nvml.state.set_processes(0, processes[:128])
    handle = client.nvmlDeviceGetHandleByIndex(0)
    assert len(client.nvmlDeviceGetComputeRunningProcesses(handle)) == 128


def test_clear_faults_makes_the_node_well_again(nvml: SimulatedNvml, client: ModuleType) -> None:
    state = nvml.state
    state.set_return(None, pynvml.NVML_ERROR_UNKNOWN)
    state.set_return("nvmlDeviceGetUUID", pynvml.NVML_ERROR_GPU_IS_LOST, gpu=1)
    state.hide_gpu(2)
    state.hang(gpu=0)
    state.unload_driver()
    state.clear_faults()
    uuids = [client.nvmlDeviceGetUUID(client.nvmlDeviceGetHandleByIndex(index)) for index in range(8)]
    assert uuids == [gpu.uuid for gpu in nvml.spec.gpus]


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


def test_a_controller_killed_in_the_middle_of_a_change_blocks_nobody(
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
    nvml.state.set_power(0, 1)
    assert client.nvmlDeviceGetTemperature(handle, 0) == 30
    assert client.nvmlDeviceGetPowerUsage(handle) == 1
