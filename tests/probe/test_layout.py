"""Both sides share one layout: sizes, members, numbers."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from agent.model.rm import RmEventKind
from agent.probe import btf, layout, syscalls
from agent.probe.probe import Probe
from agent.probe.programs import MAPS
from tests.probe.conftest import REPOSITORY

HEADER = (REPOSITORY / "bpf/gpu_probe.h").read_text()
PROCESS_MEMBERS = (
    "cgroup_id start_ns first_ns last_ns exited_ns calls opens closes allocs frees "
    "contexts_allocated contexts_freed errors rejected minors unsent window sent scan marks objects"
)
FORMATS = {
    "gpu_event": (
        layout.EVENT,
        "at_ns cgroup_id file tgid pid device fd kind rm_class client parent handle detail",
    ),
    "gpu_object_key": (layout.OBJECT_KEY, "client handle"),
    "gpu_object": (layout.OBJECT, "at_ns cgroup_id file start_ns uvm tgid rm_class parent gpu"),
    "gpu_process": (layout.PROCESS, PROCESS_MEMBERS),
    "gpu_forgotten": (layout.FORGOTTEN, "start_ns objects"),
    "gpu_cgroup": (layout.CGROUP, "objects"),
    "gpu_config": (layout.CONFIG, " ".join(layout.ProbeConfig._fields)),
    "gpu_check": (layout.CHECK, " ".join(layout.Check._fields)),
    "gpu_statistics": (
        layout.STATISTICS,
        " ".join((*layout.ProbeStatistics._fields[:-1], "reserve_failed")),
    ),
    "gpu_traced_call": (layout.TRACED, " ".join(layout.TracedCall._fields)),
    "gpu_held": (layout.HELD, "file table cgroup_id start_ns tgid fd device reserved"),
}


def section(path: Path, name: bytes) -> bytes:
    """Return a section of a 64-bit ELF file."""
    raw = path.read_bytes()
    (table,) = struct.unpack_from("<Q", raw, 40)
    size, count, names = struct.unpack_from("<HHH", raw, 58)
    heads = [struct.unpack_from("<IIQQQQ", raw, table + index * size) for index in range(count)]
    for head in heads:
        at = heads[names][4] + head[0]
        if raw[at : raw.index(b"\0", at)] == name:
            return raw[head[4] : head[4] + head[5]]
    raise KeyError(name)


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, btf.StructLayout]:
    """What clang makes of the header, for the target it is meant for."""
    if shutil.which("clang") is None:
        pytest.skip("clang is not installed")
    folder = tmp_path_factory.mktemp("layout")
    source, built = folder / "layout.c", folder / "layout.o"
    variables = "".join(f"struct {name} a_{name};\n" for name in FORMATS)
    source.write_text(f'#include "{REPOSITORY}/bpf/gpu_probe.h"\n{variables}')
    subprocess.run(["clang", "-g", "-target", "bpf", "-c", source, "-o", built], check=True)
    return btf.layouts(section(built, b".BTF"), set(FORMATS))


@pytest.mark.parametrize("name", FORMATS)
def test_members_are_where_the_compiler_has_them(described: dict[str, btf.StructLayout], name: str) -> None:
    form, members = FORMATS[name]
    codes = re.sub(r"(\d+)(\w)", lambda found: found[2] * int(found[1]), form.format.lstrip("="))

    at = {member: struct.calcsize("=" + codes[:index]) for index, member in enumerate(members.split())}
    assert described[name].size == form.size
    assert described[name].offsets == at


def test_the_numbers_of_events_are_those_of_the_header() -> None:
    body = re.search(r"enum gpu_event_kind \{(.*?)\};", HEADER, re.DOTALL)
    assert body is not None
    names = re.findall(r"^\s*GPU_(\w+)", body[1], re.MULTILINE)

    assert {name: kind.value for name, kind in RmEventKind.__members__.items()} == {
        name: index + 1 for index, name in enumerate(names)
    }


def test_programs_that_lose_events_are_named_as_in_the_header() -> None:
    found = re.findall(r"GPU_PROGRAM_(\w+)", HEADER.partition("enum gpu_program")[2].partition("}")[0])

    assert tuple(name.lower() for name in found) == layout.RESERVE_PROGRAMS


def test_the_kernel_made_maps_of_these_sizes(shared: Probe) -> None:
    sizes = {}
    for name in MAPS:
        info = syscalls.map_info(shared._maps[name])
        sizes[name] = (info.key_bytes, info.value_bytes)

    assert sizes == layout.SIZES


def test_an_event_of_a_kind_from_the_future_is_none() -> None:
    row = layout.EVENT.pack(1, 2, 3, 4, 5, 6, 7, 99, 8, 9, 10, 11, 12)

    assert layout.decode_event(row) is None


def test_a_thread_that_shares_a_table_is_not_counted_twice() -> None:
    def row(table: int, fd: int) -> bytes:
        return layout.HELD.pack(0xF, table, 1, 50 * layout.NS_PER_TICK, 42, fd, 195 << 20, 0)

    (held,) = layout.decode_held(row(1, 3) + row(1, 3) + row(1, 4) + row(2, 3) + b"cut off")

    assert (held.tgid, held.start_ticks, held.file, held.fds) == (42, 50, 0xF, 3)
