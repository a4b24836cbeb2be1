"""The simulated libnvidia-ml.so.1 as the real pynvml and the real nvml.h see it."""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pynvml
import pytest

from agent.simulation import nvml as package
from agent.simulation.nvml import NvmlState, library_path
from agent.simulation.presets import preset_names
from tests.simulation.conftest import SimulatedNvml
from tests.simulation.nvml_clients import nvml_in_process, nvml_process

SOURCES = Path(package.__file__).parent
FUNCTIONS = re.findall(r'_nvmlGetFunctionPointer\("(\w+)"', Path(pynvml.__file__).read_text(encoding="utf-8"))
DEVICE_GETTERS = [
    "nvmlDeviceGetBrand",
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetSerial",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetIndex",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetBAR1MemoryInfo",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEccMode",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPersistenceMode",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceGetPcieReplayCounter",
    "nvmlDeviceGetMaxMigDeviceCount",
]


def test_every_function_pynvml_can_look_up_is_exported() -> None:
    library = ctypes.CDLL(str(library_path()))
    assert len(FUNCTIONS) > 400
    assert [name for name in FUNCTIONS if not hasattr(library, name)] == []


def test_the_library_carries_nvmls_own_soname(nvml: SimulatedNvml) -> None:
    program = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
    environment = os.environ | {"LD_LIBRARY_PATH": str(nvml.library.parent)}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "8"
    assert b"libnvidia-ml.so.1\0" in nvml.library.read_bytes()


def test_a_function_nobody_wrote_says_not_supported(client: ModuleType) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        client.nvmlDeviceGetFanSpeed(handle)


def test_no_call_works_before_init_and_after_shutdown(nvml: SimulatedNvml) -> None:
    with nvml_in_process(nvml.library) as client:
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            client.nvmlDeviceGetCount()
        client.nvmlInit()
        client.nvmlInit()
        client.nvmlShutdown()
        assert client.nvmlDeviceGetCount() == 8
        client.nvmlShutdown()
        with pytest.raises(pynvml.NVMLError_Uninitialized):
            client.nvmlShutdown()
    assert (nvml.state.inits, nvml.state.shutdowns) == (2, 2)


def test_without_a_state_the_driver_is_not_loaded(nvml: SimulatedNvml) -> None:
    nvml.state.path.rename(nvml.state.path.with_name("elsewhere"))
    with nvml_in_process(nvml.library) as client:
        with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
            client.nvmlInit()
        nvml.state.path.with_name("elsewhere").rename(nvml.state.path)
        client.nvmlInit()
        assert client.nvmlDeviceGetCount() == 8


def test_the_state_can_be_named_by_the_environment(
    make_nvml: Callable[..., SimulatedNvml], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_nvml("dgx-h100"), make_nvml("4x-t4")
    monkeypatch.setenv("GPU_AGENT_SIM_STATE", str(second.state.path))
    with nvml_in_process(first.library) as client:
        client.nvmlInit()
        assert client.nvmlDeviceGetCount() == 4


def test_a_state_of_another_layout_is_refused(nvml: SimulatedNvml) -> None:
    nvml.state.path.write_bytes(b"\0" * nvml.state.path.stat().st_size)
    with pytest.raises(package.NvmlStateError, match="this version"):
        NvmlState.open(nvml.state.path)
    with nvml_in_process(nvml.library) as client, pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        client.nvmlInit()


@pytest.mark.parametrize("preset", preset_names())
def test_a_presets_gpus_are_what_nvml_lists(make_nvml: Callable[..., SimulatedNvml], preset: str) -> None:
    node = make_nvml(preset)
    with nvml_in_process(node.library) as client:
        client.nvmlInit()
        assert client.nvmlSystemGetDriverVersion() == node.spec.driver_version
        assert client.nvmlSystemGetCudaDriverVersion_v2() == node.spec.cuda_version
        assert client.nvmlDeviceGetCount() == len(node.spec.gpus)
        for index, gpu in enumerate(node.spec.gpus):
            handle = client.nvmlDeviceGetHandleByIndex(index)
            pci = client.nvmlDeviceGetPciInfo(handle)
            assert client.nvmlDeviceGetUUID(handle) == gpu.uuid
            assert client.nvmlDeviceGetName(handle) == gpu.name
            assert client.nvmlDeviceGetSerial(handle) == gpu.serial
            assert client.nvmlDeviceGetMinorNumber(handle) == gpu.minor
            assert client.nvmlDeviceGetIndex(handle) == index
            assert client.nvmlDeviceGetCudaComputeCapability(handle) == tuple(gpu.compute_capability)
            assert client.nvmlDeviceGetNumaNodeId(handle) == gpu.numa_node
            assert client.nvmlDeviceGetMemoryInfo(handle).total == gpu.memory_mib << 20
            assert client.nvmlDeviceGetVbiosVersion(handle) == gpu.vbios_version
            assert pci.busId.lower() == f"0000{gpu.pci_bus_id}"
            assert pci.busIdLegacy.lower() == gpu.pci_bus_id
            assert pci.pciDeviceId == gpu.pci_device_id
            for found in (
                client.nvmlDeviceGetHandleByUUID(gpu.uuid),
                client.nvmlDeviceGetHandleBySerial(gpu.serial),
                client.nvmlDeviceGetHandleByPciBusId(gpu.pci_bus_id),
                client.nvmlDeviceGetHandleByPciBusId(pci.busId),
            ):
                assert client.nvmlDeviceGetUUID(found) == gpu.uuid


def test_a_h100_has_eighteen_links_to_switches_and_a_complete_fabric(client: ModuleType) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(0)
    assert [client.nvmlDeviceGetNvLinkState(handle, link) for link in range(18)] == [1] * 18
    assert client.nvmlDeviceGetNvLinkRemoteDeviceType(handle, 0) == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
    assert client.nvmlDeviceGetNvLinkRemotePciInfo(handle, 17).busId == "00000000:0A:00.0"
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        client.nvmlDeviceGetNvLinkState(handle, 18)
    fabric = pynvml.c_nvmlGpuFabricInfo_v3_t()
    client.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(fabric))
    assert (fabric.state, fabric.status) == (pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0)
    assert fabric.healthSummary == pynvml.NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY


def test_a_t4_has_no_links_no_mig_no_fabric_and_no_row_remapping(
    make_nvml: Callable[..., SimulatedNvml],
) -> None:
    with nvml_in_process(make_nvml("4x-t4").library) as client:
        client.nvmlInit()
        handle = client.nvmlDeviceGetHandleByIndex(0)
        fabric = pynvml.c_nvmlGpuFabricInfo_v3_t()
        for name, given in (
            ("nvmlDeviceGetNvLinkState", (0,)),
            ("nvmlDeviceGetMigMode", ()),
            ("nvmlDeviceGetGpuFabricInfoV", (ctypes.byref(fabric),)),
            ("nvmlDeviceGetRemappedRows", ()),
        ):
            with pytest.raises(pynvml.NVMLError_NotSupported):
                getattr(client, name)(handle, *given)
        assert client.nvmlDeviceGetMaxMigDeviceCount(handle) == 0
        assert client.nvmlDeviceGetRetiredPagesPendingStatus(handle) == 0
        (field,) = client.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        assert field.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_topology_tells_switch_socket_and_system_apart(make_nvml: Callable[..., SimulatedNvml]) -> None:
    with nvml_in_process(make_nvml("8x-a100").library) as client:
        client.nvmlInit()
        handles = [client.nvmlDeviceGetHandleByIndex(index) for index in range(8)]
        assert client.nvmlDeviceGetTopologyCommonAncestor(handles[0], handles[1]) == 20
        assert client.nvmlDeviceGetTopologyCommonAncestor(handles[0], handles[2]) == 50
        nearest = client.nvmlDeviceGetTopologyNearestGpus(handles[2], 20)
        assert [client.nvmlDeviceGetIndex(handle) for handle in nearest] == [3]


def test_a_cpu_list_becomes_the_affinity_mask(client: ModuleType) -> None:
    words = list(client.nvmlDeviceGetCpuAffinity(client.nvmlDeviceGetHandleByIndex(0), 4))
    cpus = {64 * word + bit for word, mask in enumerate(words) for bit in range(64) if mask >> bit & 1}
    assert cpus == set(range(56)) | set(range(112, 168))


def test_a_structure_of_another_version_is_refused(client: ModuleType) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(0)
    assert client.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2).reserved == 551 << 20
    with pytest.raises(pynvml.NVMLError_ArgumentVersionMismatch):
        client.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2 + 1)


def test_a_handle_that_never_was_is_an_invalid_argument(client: ModuleType) -> None:
    for bits in (0, 1, 0x1234, 0x5347_2000_0000_0000 | 31 << 32, 0xFFFF_FFFF_FFFF_FFFF):
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            client.nvmlDeviceGetUUID(ctypes.c_void_p(bits))


@pytest.mark.parametrize("name", DEVICE_GETTERS)
def test_a_forced_code_answers_on_its_gpu_alone(nvml: SimulatedNvml, client: ModuleType, name: str) -> None:
    first, second = (client.nvmlDeviceGetHandleByIndex(index) for index in (0, 1))
    nvml.state.set_return(name, pynvml.NVML_ERROR_RESET_REQUIRED, gpu=1)
    with pytest.raises(pynvml.NVMLError_ResetRequired):
        getattr(client, name)(second)
    getattr(client, name)(first)
    nvml.state.clear_return(name, gpu=1)
    getattr(client, name)(second)


def test_every_exported_function_can_be_forced_and_is_counted(nvml: SimulatedNvml) -> None:
    library = ctypes.CDLL(str(nvml.library))
    assert library.nvmlInit_v2() == 0
    handle = ctypes.c_void_p()
    assert library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0
    nvml.state.set_return(None, pynvml.NVML_ERROR_UNKNOWN)
    given = (handle, *(ctypes.c_void_p() for _ in range(5)))
    for name in FUNCTIONS:
        if name == "nvmlErrorString":
            continue
        if name.startswith(
            ("nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByPci", "nvmlDeviceGetHandleByS")
        ):
            text = ctypes.create_string_buffer(b"GPU-x")
            answer = getattr(library, name)(text, ctypes.byref(ctypes.c_void_p()))
        else:
            answer = getattr(library, name)(*given)
        assert (name, answer) == (name, pynvml.NVML_ERROR_UNKNOWN)
        assert (name, nvml.state.calls(name) > 0) == (name, True)
    nvml.state.clear_return(None)
    assert library.nvmlShutdown() == 0


def test_the_most_particular_rule_counts(nvml: SimulatedNvml, client: ModuleType) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(2)
    nvml.state.set_return(None, pynvml.NVML_ERROR_GPU_IS_LOST, gpu=2)
    nvml.state.set_return("nvmlDeviceGetUUID", 0, gpu=2)
    assert client.nvmlDeviceGetUUID(handle) == nvml.state.uuid(2)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        client.nvmlDeviceGetName(handle)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        client.nvmlDeviceGetHandleByIndex(2)
    assert client.nvmlDeviceGetName(client.nvmlDeviceGetHandleByIndex(1)) == "NVIDIA H100 80GB HBM3"


def test_calls_are_counted_by_function_and_gpu(nvml: SimulatedNvml, client: ModuleType) -> None:
    handles = [client.nvmlDeviceGetHandleByIndex(index) for index in range(3)]
    for handle in handles:
        client.nvmlDeviceGetTemperature(handle, 0)
    client.nvmlDeviceGetTemperature(handles[2], 0)
    assert nvml.state.calls("nvmlDeviceGetTemperature") == 4
    assert nvml.state.calls("nvmlDeviceGetTemperature", gpu=2) == 2
    assert nvml.state.calls("nvmlDeviceGetHandleByIndex") == 3


def test_a_name_nvml_does_not_have_is_an_error(nvml: SimulatedNvml) -> None:
    with pytest.raises(package.NvmlStateError, match="no function nvmlDeviceGetTemprature"):
        nvml.state.set_return("nvmlDeviceGetTemprature", 1)
    with pytest.raises(package.NvmlStateError, match="no GPU 8"):
        nvml.state.set_return("nvmlDeviceGetTemperature", 1, gpu=8)


def test_the_state_outlives_its_controller_and_its_clients(nvml: SimulatedNvml) -> None:
    with nvml_process(nvml.library) as first:
        first.call("nvmlInit")
        nvml.state.set_temperature(4, 77)
    path = nvml.state.path
    with NvmlState.open(path) as second, nvml_process(nvml.library) as process:
        nvml.state.close()
        process.call("nvmlInit")
        process.call("nvmlDeviceGetHandleByIndex", 4, keep="gpu")
        assert process.call("nvmlDeviceGetTemperature", "$gpu", 0) == 77
        second.set_temperature(4, 31)
        assert process.call("nvmlDeviceGetTemperature", "$gpu", 0) == 31
    with NvmlState.open(path) as again:
        assert again.number(4, "temperature") == 31
