"""Files are read as a process would that has this root, and no others."""

import os
from pathlib import Path

import pytest

from agent.sinks.cdi.file_tree import MAX_LINKS, FileTree, TooMuchError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("secret")
    root = tmp_path / "root"
    (root / "usr/lib").mkdir(parents=True)
    (root / "usr/lib/a.so.1").write_text("a")
    (root / "lib").symlink_to("usr/lib")
    return root


def test_a_link_is_followed_to_the_file(root: Path) -> None:
    (root / "usr/lib/a.so").symlink_to("a.so.1")
    assert FileTree(str(root)).resolve("/lib/a.so") == "/usr/lib/a.so.1"


def test_an_absolute_link_begins_at_the_root(root: Path) -> None:
    (root / "usr/lib/a.so").symlink_to("/lib/a.so.1")
    assert FileTree(str(root)).resolve("/usr/lib/a.so") == "/usr/lib/a.so.1"


@pytest.mark.parametrize("target", ["{outside}/secret", "../../../outside/secret", "/../outside/secret"])
def test_no_link_leads_out_of_the_root(root: Path, target: str) -> None:
    (root / "usr/lib/out.so").symlink_to(target.format(outside=root.parent / "outside"))
    tree = FileTree(str(root))
    assert tree.resolve("/usr/lib/out.so") is None
    assert tree.read("/usr/lib/out.so", 100) is None


def test_a_linked_directory_leads_nowhere_else(root: Path) -> None:
    (root / "opt").symlink_to(root.parent / "outside")
    assert list(FileTree(str(root)).matching("/opt", "*")) == []


def test_a_circle_of_links_ends(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    assert FileTree(str(root)).resolve("/a") is None


def test_a_chain_of_links_ends(root: Path) -> None:
    (root / "l0").symlink_to("lib/a.so.1")
    for number in range(MAX_LINKS):
        (root / f"l{number + 1}").symlink_to(f"l{number}")
    tree = FileTree(str(root))
    assert tree.resolve(f"/l{MAX_LINKS - 2}") == "/usr/lib/a.so.1"
    assert tree.resolve(f"/l{MAX_LINKS}") is None


@pytest.mark.parametrize("name", ["a\nb.so", "a::b.so", "\udcff.so", "a\x1b.so", "a$b.so"])
def test_a_name_that_no_driver_gives_is_not_there(root: Path, name: str) -> None:
    (root / "usr/lib" / name).touch()
    tree = FileTree(str(root))
    assert list(tree.matching("/usr/lib", "*")) == ["/usr/lib/a.so.1"]
    assert tree.resolve(f"/usr/lib/{name}") is None


def test_what_is_no_regular_file_is_not_read(root: Path) -> None:
    os.mkfifo(root / "pipe")
    tree = FileTree(str(root))
    assert tree.read("/pipe", 100) is None
    assert tree.read("/usr", 100) is None
    assert tree.read("/nothing", 100) is None


def test_a_file_that_is_too_long_is_not_read(root: Path) -> None:
    (root / "long").write_bytes(b"x" * 11)
    assert FileTree(str(root)).read("/long", 10) is None
    assert FileTree(str(root)).read("/long", 11) == b"x" * 11


def test_a_directory_with_too_many_entries_is_an_error(root: Path) -> None:
    for number in range(4):
        (root / "usr/lib" / f"b{number}").touch()
    with pytest.raises(TooMuchError, match="usr/lib has over 3 entries"):
        FileTree(str(root), max_names=3).names("/usr/lib")


def test_a_search_that_takes_too_long_is_an_error(root: Path) -> None:
    tree = FileTree(str(root), max_calls=10)
    with pytest.raises(TooMuchError, match="over 10 system calls"):
        list(map(tree.resolve, (f"/usr/lib/{number}" for number in range(20))))


def test_the_root_of_the_machine_is_a_root_too() -> None:
    assert FileTree("/").resolve("/proc/self/../uptime") is not None
    assert FileTree("/").is_directory("/proc")
