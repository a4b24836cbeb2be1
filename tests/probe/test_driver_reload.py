"""Reloads of the driver: programs are attached again, and its device numbers are read again.

A raw tracepoint stands for an entry point of the driver, since a kernel may have no kprobes: what is under
test is when the agent detaches and when it attaches, and that the program runs again afterwards.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.model.rm import HeldFile, RmEventKind
from agent.probe import core_loader
from agent.probe.attach import attach
from agent.probe.kernel import Majors, Roots
from agent.probe.loaded import Loaded
from agent.probe.probe import REATTACH_TRIES, Probe
from agent.probe.programs import BY_NAME, MAPS
from agent.probe.request import Reply, Request
from tests.probe.caller import Caller
from tests.probe.conftest import LoadProbe, why_no_probe
from tests.probe.machines import DEVICES, Machine

STAND_IN = "process_fork"
UNTRACEABLE = "driver_ioctl"
"""A function that this machine's kernel does not have, or cannot trace."""

MakeProbe = Callable[..., Probe]


@pytest.fixture(scope="module")
def in_kernel(object_path: Path) -> Loaded:
    """Programs that are not attached yet."""
    if why := why_no_probe():
        pytest.skip(why)
    return core_loader.load(Request(loader="core", object_path=str(object_path)), "driver")


@pytest.fixture
def machine(core: dict[str, Any], tmp_path: Path) -> Machine:
    assert core
    return Machine(tmp_path)


def load_module(machine: Machine) -> None:
    Path(machine.roots.sys, "module/nvidia").mkdir(parents=True)


def unload_module(machine: Machine) -> None:
    # Kept, so that the next one is another inode, as it is in sysfs.
    gone = len(list(machine.root.glob("gone-*")))
    Path(machine.roots.sys, "module/nvidia").rename(machine.root / f"gone-{gone}")


@pytest.fixture
def make_probe(in_kernel: Loaded, machine: Machine) -> Iterator[MakeProbe]:
    """Attach programs on the machine as it is."""
    probes: list[Probe] = []

    def make(*names: str) -> Probe:
        maps = {name: os.dup(in_kernel.maps[name]) for name in MAPS}
        programs = {name: os.dup(in_kernel.programs[name]) for name in names}
        outcome = attach([BY_NAME[name] for name in names], programs, sys_root=machine.roots.sys)
        reply = Reply(
            loader="core",
            tier="driver",
            headers="",
            maps=tuple(maps),
            programs=tuple(programs),
            attached=tuple(outcome.attached),
            missing=outcome.missing,
            load_ms=0,
            attach_ms=0,
        )
        descriptors = [*maps.values(), *programs.values(), *outcome.attached.values()]
        request = Request(roots=replace(Roots(), sys=machine.roots.sys, node_proc=machine.roots.node_proc))
        probes.append(Probe(reply, descriptors, request))
        return probes[-1]

    yield make
    for probe in probes:
        probe.close()


def sees_forks(probe: Probe) -> bool:
    """Return whether the program runs."""
    while probe.ring.read():
        pass
    with Caller("wait()\nif os.fork() == 0: os._exit(0)\nos.wait()\nwait()") as caller:
        probe.watch([HeldFile(caller.pid, 1, 1, 1, 1, 1)])
        caller.resume()
        events = [event for event in probe.ring.read() if event.tgid == caller.pid]
        probe.forget_processes([(caller.pid, 1)])
    return RmEventKind.FORK in {event.kind for event in events}


def test_nothing_is_done_while_nothing_changed(make_probe: MakeProbe, machine: Machine) -> None:
    load_module(machine)
    probe = make_probe(STAND_IN)

    assert [probe.reattach() for _ in range(100)] == [()] * 100
    assert probe.attached == (STAND_IN,)


def test_an_unloaded_driver_is_detached_from_and_named(make_probe: MakeProbe, machine: Machine) -> None:
    load_module(machine)
    probe = make_probe(STAND_IN)
    assert sees_forks(probe)

    unload_module(machine)

    assert probe.reattach() == ()
    assert probe.attached == ()
    assert probe.missing == {STAND_IN: "the driver was unloaded"}


def test_a_reloaded_driver_is_attached_to(make_probe: MakeProbe, machine: Machine) -> None:
    load_module(machine)
    probe = make_probe(STAND_IN)
    unload_module(machine)
    probe.reattach()
    load_module(machine)

    assert probe.reattach() == (STAND_IN,)
    assert probe.missing == {}
    assert sees_forks(probe)
    assert probe.reattach() == ()


def test_a_driver_reloaded_between_two_polls_is_attached_to(make_probe: MakeProbe, machine: Machine) -> None:
    load_module(machine)
    probe = make_probe(STAND_IN)
    unload_module(machine)
    load_module(machine)

    assert probe.reattach() == (STAND_IN,)
    assert sees_forks(probe)


def test_a_function_that_cannot_be_traced_is_retried_a_few_times_for_each_driver(
    make_probe: MakeProbe, machine: Machine
) -> None:
    probe = make_probe(UNTRACEABLE)
    tries: list[int] = []
    for _ in range(2):
        load_module(machine)
        for _ in range(10):
            probe.reattach()
            tries.append(probe._tries_left)
        unload_module(machine)

    assert tries == [*range(REATTACH_TRIES - 1, -1, -1), *[0] * (10 - REATTACH_TRIES)] * 2
    assert UNTRACEABLE in probe.missing


def test_a_hundred_reloads_leave_nothing_open(make_probe: MakeProbe, machine: Machine) -> None:
    load_module(machine)
    probe = make_probe(STAND_IN)
    before = descriptors()
    for _ in range(100):
        unload_module(machine)
        load_module(machine)
        assert probe.reattach() == (STAND_IN,)

    # Closing is done by threads of their own.
    while descriptors() > before:
        pass
    assert probe.attached == (STAND_IN,)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_system_calls_are_traced_whatever_the_driver_does(
    load_probe: LoadProbe, core: dict[str, Any], machine: Machine
) -> None:
    probe = load_probe(**core)
    attached = probe.attached

    assert probe.reattach() == ()
    assert probe.attached == attached


def test_changed_device_numbers_are_set_for_the_programs(make_probe: MakeProbe, machine: Machine) -> None:
    probe = make_probe(STAND_IN)
    machine.write("proc/devices", DEVICES.replace("509 nvidia-uvm", "511 nvidia-uvm"))

    assert probe.refresh()
    assert not probe.refresh()
    assert (probe.config.nvidia_major, probe.config.uvm_major, probe.config.caps_major) == (195, 511, 507)
    assert probe._read_config() == probe.config


def test_a_driver_that_is_gone_leaves_no_number_of_another(make_probe: MakeProbe, machine: Machine) -> None:
    probe = make_probe(STAND_IN)
    machine.with_driver()
    probe.refresh()
    machine.write("proc/devices", "Character devices:\n509 something-else\n")

    assert probe.refresh()
    assert (probe.config.uvm_major, probe.config.caps_major) == (0, 0)


def test_the_version_of_a_driver_selects_its_layout(make_probe: MakeProbe, machine: Machine) -> None:
    probe = make_probe(STAND_IN)
    machine.with_driver(version="525.60.13")

    assert probe.refresh()
    assert probe.config.driver_branch == 525
    probe.set_majors(Majors())
    assert probe.config.driver_branch == 525
