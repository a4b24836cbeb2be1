"""What a machine permits, read from roots that simulate it."""

import os
import platform
from pathlib import Path

import pytest

from agent.errors import ProbeLoadError
from agent.probe import kernel
from agent.probe.kernel import Majors, Roots
from agent.simulation.driver_double import abi
from tests.probe.conftest import REPOSITORY
from tests.probe.machines import Machine

DOCUMENTS = ("README.md", "bpf/README.md", "agent/simulation/presets/gb200.yaml")

ENTRY_POINTS = (
    "nvidia_unlocked_ioctl",
    "uvm_unlocked_ioctl_entry",
    "nvidia_open",
    "nvidia_close",
)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def error_code(roots: Roots) -> str:
    with pytest.raises(ProbeLoadError) as caught:
        kernel.check(roots)
    return caught.value.code


def test_device_numbers_are_read_from_the_character_devices(machine: Machine) -> None:
    machine.with_driver()

    assert kernel.majors(machine.roots) == Majors(nvidia=195, uvm=509, caps=507)


def test_older_drivers_name_their_frontend(machine: Machine) -> None:
    machine.write("proc/devices", "Character devices:\n195 nvidia-frontend\n")

    assert kernel.majors(machine.roots) == Majors(nvidia=195)


def test_without_a_driver_no_number_is_invented(machine: Machine) -> None:
    assert kernel.majors(machine.roots) == Majors(0, 0, 0)


@pytest.mark.parametrize(
    "version", ["515.43.04", "520.56", "525.147.05", "530.41", "535.104.05", "570.148.08", "1000.1"]
)
def test_an_older_driver_has_its_status_elsewhere(machine: Machine, version: str) -> None:
    machine.with_driver(version=version)

    branch = kernel.driver_branch(machine.roots)
    assert branch == int(version.partition(".")[0])
    known = abi.layout(version)
    for size in (known.nvos21_size, known.nvos64_size):
        assert kernel.alloc_status(branch, size) == known.alloc_status(size)
    assert kernel.alloc_status(branch, 47) is None


def test_a_driver_of_unknown_branch_counts_as_a_new_one(machine: Machine) -> None:
    assert kernel.driver_branch(machine.roots) == 0
    assert (kernel.alloc_status(0, 32), kernel.alloc_status(0, 40)) == (28, 36)


@pytest.mark.parametrize(
    ("text", "version"),
    [("6.18.44-fc", (6, 18)), ("5.8.0", (5, 8)), ("5.15.0-139-generic", (5, 15)), ("odd", (0, 0))],
)
def test_a_release_has_a_version(text: str, version: tuple[int, int]) -> None:
    assert kernel.version_of(text) == version


def test_a_kernel_that_is_too_old_is_reported(tmp_path: Path) -> None:
    assert error_code(Machine(tmp_path, release="5.4.0-89-generic").roots) == "bpf_unsupported"


def test_another_machine_than_x86_is_rejected_with_its_name(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")

    with pytest.raises(ProbeLoadError, match="only on x86_64, and this is aarch64") as caught:
        kernel.check(machine.roots)

    assert caught.value.code == "bpf_unsupported"
    texts = [(REPOSITORY / name).read_text() for name in DOCUMENTS]
    assert all("arm64" in text for text in texts), "in every document about it"


def test_a_locked_down_kernel_is_reported(machine: Machine) -> None:
    machine.write("sys/kernel/security/lockdown", "none integrity [confidentiality]\n")

    assert error_code(machine.roots) == "kernel_lockdown"


def test_a_lockdown_of_integrity_does_not_forbid_reading(machine: Machine) -> None:
    machine.write("sys/kernel/security/lockdown", "none [integrity] confidentiality\n")
    if os.geteuid() != 0:
        pytest.skip("needs root, else capabilities are missing")

    kernel.check(machine.roots)


def test_entry_points_are_those_of_the_drivers_modules(machine: Machine) -> None:
    machine.with_driver(*ENTRY_POINTS, "nvidia_open_deferred")
    machine.write(
        "proc/kallsyms",
        (machine.root / "proc/kallsyms").read_text()
        + "ffffffff81000010 t nvidia_close\nffffffffc0de0000 t nvidia_close.isra.0\t[other]\n",
    )

    assert kernel.entry_points(machine.roots) == {name: name for name in ENTRY_POINTS}


@pytest.mark.parametrize(
    ("has", "traced"),
    [
        (["nvidia_unlocked_ioctl.isra.0"], "nvidia_unlocked_ioctl.isra.0"),
        (["nvidia_unlocked_ioctl.constprop.12"], "nvidia_unlocked_ioctl.constprop.12"),
        (["nvidia_unlocked_ioctl", "nvidia_unlocked_ioctl.isra.0"], "nvidia_unlocked_ioctl"),
        (["nvidia_frontend_unlocked_ioctl", "nvidia_ioctl"], "nvidia_frontend_unlocked_ioctl"),
        (["nvidia_frontend_unlocked_ioctl.isra.0"], "nvidia_frontend_unlocked_ioctl.isra.0"),
        (["nvidia_frontend_unlocked_ioctl", "nvidia_unlocked_ioctl"], "nvidia_unlocked_ioctl"),
        # Parts of a function, and what is none of its names.
        (["nvidia_unlocked_ioctl.cold", "nvidia_unlocked_ioctl.part.0", "nvidia_ioctl"], None),
    ],
)
def test_the_entry_point_has_the_name_of_branch_and_compiler(
    machine: Machine, has: list[str], traced: str | None
) -> None:
    machine.with_kprobes()
    machine.with_driver(*has, "nvidia_open", version="535.104.05")

    assert kernel.entry_points(machine.roots).get("nvidia_unlocked_ioctl") == traced
    tier = kernel.choose_tier("auto", machine.roots, doubles=False)
    assert tier == ("syscalls" if traced is None else "driver")


def test_tier_driver_is_chosen_where_it_is_possible(machine: Machine) -> None:
    machine.with_kprobes()
    machine.with_driver(*ENTRY_POINTS)

    assert kernel.choose_tier("auto", machine.roots, doubles=False) == "driver"


def test_a_driver_that_is_not_loaded_yet_is_waited_for(machine: Machine) -> None:
    machine.with_kprobes()

    assert kernel.choose_tier("auto", machine.roots, doubles=False) == "driver"


def test_without_kprobes_system_calls_are_traced(machine: Machine) -> None:
    machine.with_driver(*ENTRY_POINTS)

    assert kernel.choose_tier("auto", machine.roots, doubles=False) == "syscalls"


def test_a_driver_with_other_entry_points_is_traced_by_system_calls(machine: Machine) -> None:
    machine.with_kprobes()
    machine.with_driver("nvidia_open")

    assert kernel.choose_tier("auto", machine.roots, doubles=False) == "syscalls"


def test_device_doubles_have_no_entry_points(machine: Machine) -> None:
    machine.with_kprobes()
    machine.with_driver(*ENTRY_POINTS)

    assert kernel.choose_tier("auto", machine.roots, doubles=True) == "syscalls"


@pytest.mark.parametrize("kprobes", [False, True])
def test_a_requested_tier_that_is_not_possible_is_rejected_with_its_reason(
    machine: Machine, *, kprobes: bool
) -> None:
    if kprobes:
        machine.with_kprobes()
    machine.with_driver("nvidia_open")

    with pytest.raises(ProbeLoadError) as caught:
        kernel.choose_tier("driver", machine.roots, doubles=False)

    assert caught.value.code == "tier_unavailable"
    assert ("nvidia_unlocked_ioctl" if kprobes else "no kprobes") in str(caught.value)


def test_this_kernel_decides_the_tier_by_what_it_has() -> None:
    has_kprobes = Path("/sys/bus/event_source/devices/kprobe/type").exists()

    assert kernel.choose_tier("auto", Roots(), doubles=False) == ("driver" if has_kprobes else "syscalls")
