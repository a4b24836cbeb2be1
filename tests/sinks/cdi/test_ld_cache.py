"""The reader of the linker's cache returns what makes sense, whatever the bytes are."""

import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.simulation.driver_tree import linker_cache
from agent.sinks.cdi.ld_cache import MAX_LIBRARIES, libraries

CUDA = {"libcuda.so.1": "/opt/nvidia/lib64/libcuda.so.1"}
MACHINE_S_OWN = Path("/etc/ld.so.cache")


def test_each_library_is_returned_with_its_path() -> None:
    paths = {**CUDA, "libz.so.1": "/lib/libz.so.1"}
    assert dict(libraries(linker_cache(paths))) == paths


@pytest.mark.skipif(not MACHINE_S_OWN.exists(), reason="this machine has no linker's cache")
def test_the_cache_of_this_machine_is_read_as_ldconfig_reads_it() -> None:
    printed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    lines = [line.strip() for line in printed.splitlines() if "=>" in line and "64" in line.split("=>")[0]]
    expected = {(line.split()[0], line.split("=> ")[1]) for line in lines}
    assert set(libraries(MACHINE_S_OWN.read_bytes())) == expected
    assert expected


def test_the_old_format_before_the_new_one_is_passed_over() -> None:
    old = struct.pack("<12sI", b"ld.so-1.7.0", 3) + 3 * struct.pack("<iII", 1, 0, 0)
    padding = b"\0" * (-len(old) % 8)
    assert dict(libraries(old + padding + linker_cache(CUDA))) == CUDA


@pytest.mark.parametrize("flags", [0x0003, 0x0803, 0x0903, 0x0300])
def test_a_library_that_is_no_64_bit_elf_is_left_out(flags: int) -> None:
    assert list(libraries(linker_cache(CUDA, flags=flags))) == []


@pytest.mark.parametrize("path", ["lib/libcuda.so.1", "", "/lib/\xff"])
def test_a_path_that_is_none_is_left_out(path: str) -> None:
    assert list(libraries(linker_cache({"libcuda.so.1": path}))) == []


def test_a_count_beyond_the_bytes_is_not_believed() -> None:
    raw = bytearray(linker_cache(CUDA))
    struct.pack_into("<I", raw, 20, 2**32 - 1)
    assert len(list(libraries(bytes(raw)))) <= 1


def test_so_many_libraries_are_read_and_no_more() -> None:
    paths = {f"lib{number}.so": "/l" for number in range(MAX_LIBRARIES + 1)}
    assert len(list(libraries(linker_cache(paths)))) == MAX_LIBRARIES


@given(st.binary(max_size=200))
def test_any_bytes_are_no_cache(raw: bytes) -> None:
    assert list(libraries(raw)) == []


@given(st.data())
def test_a_cache_with_any_damage_is_read_to_its_end(data: st.DataObject) -> None:
    raw = bytearray(linker_cache({**CUDA, "libz.so.1": "/lib/libz.so.1"}))
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for name, path in libraries(bytes(raw[:cut])):
        assert name
        assert path.startswith("/")
