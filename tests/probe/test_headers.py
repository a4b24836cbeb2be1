"""Which kernel headers are compiled with."""

import io
import tarfile
from pathlib import Path

import pytest

from agent.errors import ProbeLoadError
from agent.probe import headers
from tests.probe.machines import NEW_RELEASE, OTHER_RELEASE, RELEASE, Machine


@pytest.fixture
def scratch(tmp_path: Path) -> str:
    folder = tmp_path / "scratch"
    folder.mkdir()
    return str(folder)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_running_kernels_build_directory_comes_first(machine: Machine, scratch: str) -> None:
    machine.with_btf()
    tree = machine.with_headers(f"modules/{NEW_RELEASE}/build")
    machine.with_headers("sources/linux-headers-9.9.9-1-amd64")

    assert headers.find(machine.roots, scratch) == headers.Headers(NEW_RELEASE, str(tree), native=True)


def test_the_running_kernels_own_need_no_btf(machine: Machine, scratch: str) -> None:
    machine.with_headers(f"modules/{NEW_RELEASE}/build")

    assert headers.find(machine.roots, scratch).native


def test_the_kernels_own_archive_comes_second(machine: Machine, scratch: str) -> None:
    machine.with_btf()
    machine.with_headers(f"modules/{OTHER_RELEASE}/build")
    archive = machine.root / "sys/kernel/kheaders.tar.xz"
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz") as file:
        entry = tarfile.TarInfo("./include/linux/kconfig.h")
        entry.size = 4
        file.addfile(entry, io.BytesIO(b"kept"))

    found = headers.find(machine.roots, scratch)

    assert (found.release, found.native) == (NEW_RELEASE, True)
    assert Path(found.directory, "include/linux/kconfig.h").read_text() == "kept"
    assert found.directory.startswith(scratch)


def test_foreign_headers_suffice_when_the_kernel_has_btf(machine: Machine, scratch: str) -> None:
    machine.with_btf()
    tree = machine.with_headers(f"modules/{OTHER_RELEASE}/build")

    found = headers.find(machine.roots, scratch)

    assert found == headers.Headers(OTHER_RELEASE, str(tree), native=False)


def test_the_newest_foreign_headers_are_used(machine: Machine, scratch: str) -> None:
    machine.with_btf()
    for release in ("5.4.0-84", "5.15.0-9", "5.4.0-150"):
        machine.with_headers(f"modules/{release}/build")

    assert headers.find(machine.roots, scratch).release == "5.15.0-9"


def test_headers_outside_of_the_modules_directory_are_found(machine: Machine, scratch: str) -> None:
    machine.with_btf()
    tree = machine.with_headers("sources/linux-headers-6.6.0-1-custom")

    assert headers.find(machine.roots, scratch).directory == str(tree)


@pytest.mark.parametrize("place", ["build and source", "build alone", "sources alone"])
def test_debians_pair_is_merged(machine: Machine, scratch: str, place: str) -> None:
    machine.with_btf()
    tree = machine.with_headers("sources/linux-headers-6.1.0-9-amd64", common=True)
    if place != "sources alone":
        folder = machine.root / "modules/6.1.0-9-amd64"
        folder.mkdir()
        (folder / "build").symlink_to(tree)
        if place == "build and source":
            (folder / "source").symlink_to(tree.with_name("linux-headers-6.1.0-9-common"))

    found = Path(headers.find(machine.roots, scratch).directory)

    assert found.is_relative_to(scratch)
    for name, half in {
        "include/linux/kconfig.h": "common",
        "include/generated/autoconf.h": "generated",
        "arch/x86/include/asm/page.h": "common",
        "arch/x86/include/generated/asm/x.h": "generated",
    }.items():
        assert (found / name).read_text() == half


def test_a_second_tier_gets_the_headers_that_the_first_one_merged(machine: Machine, scratch: str) -> None:
    machine.with_btf()
    machine.with_headers("sources/linux-headers-6.1.0-9-amd64", common=True)

    assert headers.find(machine.roots, scratch) == headers.find(machine.roots, scratch)


def test_half_a_pair_is_no_headers(machine: Machine, scratch: str) -> None:
    machine.with_btf()
    machine.write("sources/linux-headers-6.1.0-9-amd64/include/generated/autoconf.h", "")

    with pytest.raises(ProbeLoadError) as caught:
        headers.find(machine.roots, scratch)
    assert caught.value.code == "kernel_headers_missing"


def test_missing_headers_are_reported_with_the_release(machine: Machine, scratch: str) -> None:
    machine.with_btf()

    with pytest.raises(ProbeLoadError) as caught:
        headers.find(machine.roots, scratch)

    assert caught.value.code == "kernel_headers_missing"
    assert NEW_RELEASE in str(caught.value)


def test_foreign_headers_alone_are_a_mismatch_with_both_releases(tmp_path: Path, scratch: str) -> None:
    machine = Machine(tmp_path / "old", release=RELEASE)
    machine.with_headers(f"modules/{OTHER_RELEASE}/build")

    with pytest.raises(ProbeLoadError) as caught:
        headers.find(machine.roots, scratch)

    assert caught.value.code == "kernel_headers_mismatch"
    assert RELEASE in str(caught.value)
    assert OTHER_RELEASE in str(caught.value)


def test_a_damaged_archive_is_reported(machine: Machine, scratch: str) -> None:
    machine.write("sys/kernel/kheaders.tar.xz", "no archive")

    with pytest.raises(ProbeLoadError) as caught:
        headers.find(machine.roots, scratch)

    assert caught.value.code == "kernel_headers_missing"
