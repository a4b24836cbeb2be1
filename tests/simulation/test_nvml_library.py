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


def test_every_function_pynvml_can_load_is_exported() -> None:
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


def test_a_function_that_is_not_written_returns_not_supported(client: ModuleType) -> None:
    handle = client.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(pynvml.NVMLError_NotSupported):
        client.nvmlDeviceGetFanSpeed(handle)


def test_the_state_can_be_named_by_the_environment(
    make_nvml: Callable[..., SimulatedNvml], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_nvml("dgx-h100"), make_nvml("4x-t4")
    monkeypatch.setenv("GPU_AGENT_SIM_STATE", str(second.state.path))
    with nvml_in_process(first.library) as client:
        client.nvmlInit()
        assert client.nvmlDeviceGetCount() == 4


def test_a_state_of_another_layout_is_rejected(nvml: SimulatedNvml) -> None:
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
                client.nvmlDeviceGetHandleByPciBusId(gpu.pci_bus_id),
                client.nvmlDeviceGetHandleByPciBusId(pci.busId),
            ):
                assert client.nvmlDeviceGetUUID(found) == gpu.uuid


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
