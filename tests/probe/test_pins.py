"""The probe stays in the kernel while no agent runs, and the next one goes on with it."""

import os
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import SourceError
from agent.probe import pins, syscalls
from agent.probe.layout import INDEX
from agent.probe.pins import Pins
from agent.probe.request import Doubles, Request
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.driver_double.nodes import UVM_MAJOR
from tests.probe.caller import Caller
from tests.probe.conftest import DOUBLES, LoadProbe
from tests.probe.readings import objects
from tests.probe.test_workloads import GPUS, Machine
from tests.probe.watcher import watching

OPENED = "fd = os.open(sys.argv[1], os.O_RDWR)\n"
HELD = OPENED + "for handle in range(7): alloc(fd, handle + 3, CONTEXT)\nwait()\nfree(fd, 3)\nwait()\n"
VERSION = "570.148.08"


@pytest.fixture
def bpffs(tmp_path: Path) -> Iterator[Path]:
    """A BPF file system of the test's own."""
    mounted = tmp_path / "bpf"
    mounted.mkdir()
    made = subprocess.run(["mount", "-t", "bpf", "-o", "mode=700", "bpf", mounted], check=False)
    if made.returncode:
        pytest.skip("bpffs cannot be mounted here")
    yield mounted
    subprocess.run(["umount", mounted], check=True)


def kept_in(folder: Path) -> set[str]:
    """The names in a directory of pins, over all versions."""
    return {each.name for each in folder.glob("*/*")}


# ---- over a restart ----


@pytest.fixture
async def double() -> AsyncIterator[DriverDouble]:
    try:
        started = await DriverDouble.start(GPUS, version=VERSION)
    except SourceError as error:
        pytest.skip(str(error))
    async with started:
        yield started


async def test_a_restart_keeps_contexts_and_finds_owners_that_exited_meanwhile(
    loader: dict[str, Any], double: DriverDouble, bpffs: Path
) -> None:
    doubles = Doubles(filesystem=double.file_system, uvm_major=UVM_MAJOR)
    request = Request(doubles=doubles, pins=str(bpffs / "gpu-agent"), **loader)
    async with AsyncExitStack() as stack:
        async with watching(double, GPUS, request) as watcher:
            machine = Machine(double, watcher, stack)
            stays, frees, ends, dies, gives = [await machine.process(name) for name in "abcde"]
            for number, process in enumerate((stays, frees, ends, dies, gives), start=1):
                await process.create(number % len(GPUS), number)
            child = await machine.fork(dies, "child")
            await watcher.agrees()
            assert watcher.probe.pinned
        # While no agent is there:
        await frees.destroy(1)
        await ends.exit()
        await dies.kill()
        receiver = await machine.process("receiver")
        await gives.give(receiver)
        late = await machine.process("late")
        await late.create(1, 2)
        async with watching(double, GPUS, request) as watcher:
            assert watcher.probe.was_kept
            live = await watcher.agrees()
            usage = await watcher.settled_usage()
            assert {pid: sum(of.values()) for pid, of in live.items()} == {
                stays.pid: 1,
                frees.pid: 1,
                dies.pid: 4,
                gives.pid: 5,
                late.pid: 2,
            }
            (orphan,) = usage.orphans
            assert (orphan.owner.key.pid, orphan.contexts) == (dies.pid, 4)
            assert [holder.pid for holder in orphan.holders] == [child.pid]
            assert not any(process.partial for process in usage.processes)
            rows = {row.tgid for row in watcher.probe.read_processes()}
            assert not rows & {ends.pid, dies.pid}, "rows of those that ended meanwhile"
            # And it goes on.
            await late.destroy(1)
            await watcher.agrees()


def test_changes_while_no_agent_ran_are_read_from_the_maps_alone(
    load_probe: LoadProbe, core: dict[str, Any], bpffs: Path, gpu: Path
) -> None:
    options = core | {"pins": str(bpffs / "gpu-agent")}
    first = load_probe(**options)
    first.close()
    with Caller(HELD, gpu) as caller:
        second = load_probe(**options)

        assert second.was_kept
        assert second.ring.pending_bytes == 0
        assert len(objects(second, caller.pid)) == 7
        caller.resume()
        assert len(objects(second, caller.pid)) == 6
        assert second.ring.pending_bytes > 0
        assert second.config.scan == first.config.scan


# ---- another version ----


def test_other_programs_of_the_same_layout_get_the_rows(
    load_probe: LoadProbe, core: dict[str, Any], bpffs: Path, gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = core | {"pins": str(bpffs / "gpu-agent")}
    before = load_probe(**options)
    with Caller(HELD, gpu) as caller:
        of_caller = set(objects(before, caller.pid))
        before.close()
        layout = pins._version().partition("-")[0]
        monkeypatch.setattr(pins, "_version", lambda: f"{layout}-other")

        after = load_probe(**options)

        assert set(objects(after, caller.pid)) == of_caller
        assert after.was_kept
        assert [each.name for each in (bpffs / "gpu-agent").iterdir()] == [f"{layout}-other"]
        caller.resume()
        assert len(objects(after, caller.pid)) == len(of_caller) - 1


def test_another_layout_starts_empty_and_removes_the_earlier_pins(
    load_probe: LoadProbe, core: dict[str, Any], bpffs: Path, gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = core | {"pins": str(bpffs / "gpu-agent")}
    load_probe(**options).close()
    with Caller(HELD, gpu) as caller:
        monkeypatch.setattr(pins, "_version", lambda: "another-layout")

        after = load_probe(**options)

        assert not after.was_kept
        assert objects(after, caller.pid) == []
        assert after.pinned
        assert [each.name for each in (bpffs / "gpu-agent").iterdir()] == ["another-layout"]


# ---- what is in the way ----


def _foreign_map(kept: Path) -> None:
    (kept / "map_objects").unlink()
    other = syscalls.array(4)
    syscalls.pin(other, str(kept / "map_objects"))
    os.close(other)


def _map_for_a_link(kept: Path) -> None:
    (kept / "link_exit_ioctl").unlink()
    other = syscalls.array(4)
    syscalls.pin(other, str(kept / "link_exit_ioctl"))
    os.close(other)


def _garbage(kept: Path) -> None:
    note = syscalls.pinned(str(kept / "about"))
    syscalls.map_update(note, INDEX.pack(0), b"{" * pins.MAX_ABOUT_BYTES)
    os.close(note)


@pytest.mark.parametrize(
    "damage",
    [
        _foreign_map,
        _map_for_a_link,
        _garbage,
        lambda kept: (kept / "about").unlink(),
        lambda kept: (kept / "link_enter_ioctl").unlink(),
        lambda kept: (kept / "map_statistics").unlink(),
    ],
    ids=["foreign map", "map for a link", "garbage", "no description", "no link", "no map"],
)
def test_damaged_pins_are_named_and_a_new_probe_is_loaded(
    load_probe: LoadProbe,
    core: dict[str, Any],
    bpffs: Path,
    gpu: Path,
    damage: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = core | {"pins": str(bpffs / "gpu-agent")}
    load_probe(**options).close()
    (kept,) = (bpffs / "gpu-agent").iterdir()
    whole = kept_in(bpffs / "gpu-agent")
    damage(kept)

    probe = load_probe(**options)

    assert probe.pinned
    assert kept_in(bpffs / "gpu-agent") == whole
    assert "loading a new one" in caplog.text
    with Caller(HELD, gpu) as caller:
        assert len(objects(probe, caller.pid)) == 7


def _others_may_write(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o770)


def _of_another(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 65_534, 65_534)


def _a_link(folder: Path) -> None:
    folder.symlink_to("/tmp")


@pytest.mark.parametrize("make", [_others_may_write, _of_another, _a_link])
def test_a_directory_that_others_could_have_filled_is_not_used(
    load_probe: LoadProbe, core: dict[str, Any], bpffs: Path, make: Any
) -> None:
    make(bpffs / "gpu-agent")

    probe = load_probe(pins=str(bpffs / "gpu-agent"), **core)

    assert not probe.pinned
    assert "Other users could write" in probe.not_pinned
    assert kept_in(bpffs / "gpu-agent").isdisjoint({pins.ABOUT, "map_objects"})


def test_a_file_system_that_is_not_mounted_or_read_only_is_named(
    load_probe: LoadProbe, core: dict[str, Any], bpffs: Path, tmp_path: Path
) -> None:
    assert "mount -t bpf" in load_probe(pins=str(tmp_path / "gpu-agent"), **core).not_pinned
    subprocess.run(["mount", "-o", "remount,ro", bpffs], check=True)

    assert "mount it writable" in load_probe(pins=str(bpffs / "gpu-agent"), **core).not_pinned


def test_a_file_system_that_is_full_leaves_nothing_half_done(
    load_probe: LoadProbe, core: dict[str, Any], bpffs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin, room = syscalls.pin, iter(range(9))

    def pin_nine(descriptor: int, path: str) -> None:
        if next(room, None) is None:
            raise OSError(28, "No space left on device")
        pin(descriptor, path)

    monkeypatch.setattr(syscalls, "pin", pin_nine)

    probe = load_probe(pins=str(bpffs / "gpu-agent"), **core)

    assert "No space left on device" in probe.not_pinned
    assert kept_in(bpffs / "gpu-agent") == set()


def test_unwanted_pins_are_removed(load_probe: LoadProbe, core: dict[str, Any], bpffs: Path) -> None:
    folder = bpffs / "gpu-agent"
    load_probe(pins=str(folder), **core).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    Pins(str(folder)).remove_all()

    assert not folder.exists()


def test_a_probe_of_another_loader_than_requested_is_not_used(
    load_probe: LoadProbe, core: dict[str, Any], bpffs: Path
) -> None:
    options = core | {"pins": str(bpffs / "gpu-agent")}
    load_probe(**options).close()
    request = Request(doubles=DOUBLES, tier="syscalls", **options)

    again = load_probe(**options | {"ring_bytes": request.ring_bytes * 2})

    assert again.was_kept, "the rows are"
    assert syscalls.map_info(again.maps["events"]).max_entries == replace(request).ring_bytes * 2
