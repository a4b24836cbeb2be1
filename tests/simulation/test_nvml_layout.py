"""Our declarations of NVML's binary interface against the real nvml.h, where nvidia-nvml-dev is installed."""

import re
import subprocess
from pathlib import Path

import pynvml
import pytest

from agent.simulation import nvml as package

SOURCES = Path(package.__file__).parent
STRUCTURES = {
    "abi_pci_t": "nvmlPciInfo_t",
    "abi_utilization_t": "nvmlUtilization_t",
    "abi_memory_t": "nvmlMemory_t",
    "abi_memory_v2_t": "nvmlMemory_v2_t",
    "abi_process_v1_t": "nvmlProcessInfo_v1_t",
    "abi_process_v2_t": "nvmlProcessInfo_v2_t",
    "abi_attributes_t": "nvmlDeviceAttributes_t",
    "abi_addressing_mode_t": "nvmlDeviceAddressingMode_v1_t",
    "abi_event_t": "nvmlEventData_t",
    "abi_system_set_t": "nvmlSystemEventSetCreateRequest_v1_t",
    "abi_system_register_t": "nvmlSystemRegisterEventRequest_v1_t",
    "abi_system_event_t": "nvmlSystemEventData_v1_t",
    "abi_system_wait_t": "nvmlSystemEventSetWaitRequest_v1_t",
    "abi_value_t": "nvmlValue_t",
    "abi_field_value_t": "nvmlFieldValue_t",
    "abi_fabric_t": "nvmlGpuFabricInfo_t",
    "abi_fabric_v2_t": "nvmlGpuFabricInfo_v2_t",
    "abi_fabric_v3_t": "nvmlGpuFabricInfo_v3_t",
    "abi_gi_profile_t": "nvmlGpuInstanceProfileInfo_t",
    "abi_gi_profile_v3_t": "nvmlGpuInstanceProfileInfo_v3_t",
    "abi_placement_t": "nvmlGpuInstancePlacement_t",
    "abi_gi_info_t": "nvmlGpuInstanceInfo_t",
}
VALUES = {
    "ABI_CLOCKS": "NVML_CLOCK_COUNT",
    "ABI_ECC_TYPES": "NVML_MEMORY_ERROR_TYPE_COUNT",
    "ABI_ECC_COUNTERS": "NVML_ECC_COUNTER_TYPE_COUNT",
    "ABI_ECC_LOCATIONS": "NVML_MEMORY_LOCATION_COUNT",
    "ABI_THRESHOLDS": "NVML_TEMPERATURE_THRESHOLD_GPU_MAX + 1",
    "ABI_LINK_TO_GPU": "NVML_NVLINK_DEVICE_TYPE_GPU",
    "ABI_LINK_TO_SWITCH": "NVML_NVLINK_DEVICE_TYPE_SWITCH",
    "ABI_TOPOLOGY_INTERNAL": "NVML_TOPOLOGY_INTERNAL",
    "ABI_TOPOLOGY_MULTIPLE": "NVML_TOPOLOGY_MULTIPLE",
    "ABI_TOPOLOGY_HOSTBRIDGE": "NVML_TOPOLOGY_HOSTBRIDGE",
    "ABI_TOPOLOGY_NODE": "NVML_TOPOLOGY_NODE",
    "ABI_TOPOLOGY_SYSTEM": "NVML_TOPOLOGY_SYSTEM",
    "ABI_FI_GPU_RECOVERY_ACTION": "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
    "ABI_VALUE_UNSIGNED_INT": "NVML_VALUE_TYPE_UNSIGNED_INT",
    "ABI_GPU_UNBOUND": "nvmlSystemEventTypeGpuDriverUnbind",
    "ABI_GPU_BOUND": "nvmlSystemEventTypeGpuDriverBind",
    "ABI_VERSION(abi_system_set_t, 1)": "nvmlSystemEventSetCreateRequest_v1",
    "ABI_VERSION(abi_system_set_t, 1) + 0": "nvmlSystemEventSetFreeRequest_v1",
    "ABI_VERSION(abi_system_register_t, 1)": "nvmlSystemRegisterEventRequest_v1",
    "ABI_VERSION(abi_system_wait_t, 1)": "nvmlSystemEventSetWaitRequest_v1",
    "ABI_VERSION(abi_memory_v2_t, 2)": "nvmlMemory_v2",
    "ABI_VERSION(abi_addressing_mode_t, 1)": "nvmlDeviceAddressingMode_v1",
    "ABI_VERSION(abi_fabric_v2_t, 2)": "nvmlGpuFabricInfo_v2",
    "ABI_VERSION(abi_fabric_v3_t, 3)": "nvmlGpuFabricInfo_v3",
    "ABI_VERSION(abi_gi_profile_v3_t, 3)": "nvmlGpuInstanceProfileInfo_v3",
    "NODE_LINKS": "NVML_NVLINK_MAX_LINKS",
}


def fields(declarations: str, structure: str) -> list[str]:
    body = re.search(r"\{([^{}]*)\} " + structure + ";", declarations)
    assert body is not None, structure
    names: list[str] = []
    for statement in re.sub(r"/\*.*?\*/", "", body.group(1), flags=re.DOTALL).split(";"):
        if statement.strip():
            # Everything but the last word before the first comma is the type.
            first, *more = statement.split(",")
            names += [re.sub(r"\[.*", "", name).strip(" *\n") for name in (first.split()[-1], *more)]
    return names


def nvml_header() -> Path:
    found = sorted(Path(pynvml.__file__).parent.glob("nvidia/**/include/nvml.h"))
    if not found:
        pytest.skip("nvml.h is not installed: `pip install nvidia-nvml-dev` compares with the real one")
    return found[-1]


def test_our_declarations_have_the_layout_of_the_real_header(tmp_path: Path) -> None:
    header = nvml_header()
    ours = (SOURCES / "abi.h").read_text(encoding="utf-8")
    codes = re.findall(r"RC_(\w+) = ", ours)
    assert len(codes) > 30
    checks = [f"(int)RC_{code} == (int)NVML_{'' if code == 'SUCCESS' else 'ERROR_'}{code}" for code in codes]
    checks += [f"(long)({one}) == (long)({other})" for one, other in VALUES.items()]
    for one, other in STRUCTURES.items():
        checks.append(f"sizeof({one}) == sizeof({other})")
        checks += [f"offsetof({one}, {name}) == offsetof({other}, {name})" for name in fields(ours, one)]
        checks += [
            f"sizeof((({one} *)0)->{name}) == sizeof((({other} *)0)->{name})" for name in fields(ours, one)
        ]
    asserts = [f'_Static_assert({check}, "");' for check in checks]
    program = tmp_path / "layout.c"
    includes = ["#define NVML_NO_UNVERSIONED_FUNC_DEFS", "#include <nvml.h>", f'#include "{SOURCES}/node.h"']
    program.write_text("\n".join([*includes, *asserts, ""]), encoding="utf-8")
    compiled = subprocess.run(
        ["gcc", "-std=gnu11", "-fsyntax-only", f"-I{header.parent}", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.stderr == ""
    assert compiled.returncode == 0


def test_every_structure_we_declare_is_compared() -> None:
    ours = (SOURCES / "abi.h").read_text(encoding="utf-8")
    assert set(re.findall(r"\} (abi_\w+_t);", ours)) == set(STRUCTURES)
