"""Events for returns: their definitions, and the removal of unused ones.

The kernel's side of it is played by ``make test-vm``; a file stands for its list of definitions here.
"""

import os
from pathlib import Path

import pytest

from agent.probe import returns
from agent.probe.attach import attach, remove_events
from agent.probe.programs import BY_NAME
from tests.probe.machines import Machine

UNUSED_PID = 1 << 22
"""No process can have this number."""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.with_kprobes(pmu=0)
    made.write("sys/kernel/tracing/events/syscalls/x", "")
    return made


def commands(machine: Machine) -> list[str]:
    return Path(machine.roots.sys, "kernel/tracing/kprobe_events").read_text().splitlines()


def test_a_return_is_defined_with_how_many_calls_are_followed(machine: Machine) -> None:
    machine.write("sys/kernel/tracing/kprobe_events", "")

    with pytest.raises(FileNotFoundError, match="/id"):
        returns.define("nvidia_unlocked_ioctl", f"{machine.roots.sys}/kernel/tracing")

    (command,) = commands(machine)
    assert command.startswith(f"r{returns.MAX_ACTIVE}:gpu_agent/nvidia_unlocked_ioctl_{os.getpid()}_")
    assert command.endswith(" nvidia_unlocked_ioctl")


def test_an_entry_needs_no_event(machine: Machine) -> None:
    machine.write("sys/kernel/tracing/kprobe_events", "")

    attach([BY_NAME["driver_ioctl"]], {"driver_ioctl": -1}, sys_root=machine.roots.sys)

    assert commands(machine) == []


def test_unused_events_are_removed(machine: Machine) -> None:
    name = "gpu_agent/nvidia_open"
    before = [
        f"r1024:{name}_{UNUSED_PID}_0 nvidia_open",
        f"r1024:{name}_{os.getpid()}_1 nvidia_open",
        f"r1024:{name}_1_0 nvidia_open",
        f"r1024:another/nvidia_open_{UNUSED_PID}_0 nvidia_open",
        f"p:{name}_{UNUSED_PID}_3 nvidia_open",
    ]
    machine.write("sys/kernel/tracing/kprobe_events", "\n".join(before) + "\n")

    remove_events(machine.roots.sys)

    assert commands(machine)[len(before) :] == [f"-:{name}_{UNUSED_PID}_0", f"-:{name}_{os.getpid()}_1"]


def test_without_a_trace_file_system_there_is_nothing_to_remove(tmp_path: Path) -> None:
    machine = Machine(tmp_path)

    remove_events(machine.roots.sys)

    assert not Path(machine.roots.sys, "kernel").exists()
