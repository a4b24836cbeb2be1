"""The configuration file is seen to change however it is changed, and only then."""

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.directory_watch import DirectoryWatch
from agent.runtime import config_watch
from agent.runtime.config_watch import ConfigWatch, directories_of

PATIENCE_S = 60.0


class Reader:
    """Reads the file when it is called for a change, as a reload does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read: list[str] = []
        self.fingerprint: int | None = hash(path.read_bytes())
        self.changed = asyncio.Event()

    def _read(self) -> None:
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            self.fingerprint = None
            self.read.append("gone")
        else:
            self.fingerprint = hash(text.encode())
            self.read.append(text)

    async def wait_read(self, text: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.read[-1:] != [text]:
                await self.changed.wait()
                self.changed.clear()
                self._read()


@contextlib.asynccontextmanager
async def watching(path: Path, *, recheck_ns: int = 3600 * 10**9) -> AsyncIterator[Reader]:
    reader = Reader(path)
    watch = ConfigWatch(
        str(path), known=lambda: reader.fingerprint, on_change=reader.changed.set, recheck_ns=recheck_ns
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(watch.run())
        async with asyncio.timeout(PATIENCE_S):
            while not watch.reads:
                await asyncio.sleep(0.005)
        yield reader
        task.cancel()


def config_map(directory: Path, name: str, content: str) -> None:
    """Write a mounted config map's next version, as the kubelet's atomic writer does."""
    (directory / name).mkdir()
    (directory / name / "default").write_text(content)
    (directory / "..data_tmp").symlink_to(name)
    (directory / "..data_tmp").rename(directory / "..data")
    if not (directory / "default").is_symlink():
        (directory / "default").symlink_to("..data/default")


async def test_a_file_that_is_written_in_place_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("one")
    async with watching(path) as reader:
        path.write_text("two")
        await reader.wait_read("two")


async def test_a_file_that_is_replaced_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("one")
    async with watching(path) as reader:
        (tmp_path / "new").write_text("two")
        (tmp_path / "new").rename(path)
        await reader.wait_read("two")


async def test_a_new_version_of_a_mounted_config_map_is_read(tmp_path: Path) -> None:
    config_map(tmp_path, "..one", "one")
    async with watching(tmp_path / "default") as reader:
        for version in ("two", "three"):
            config_map(tmp_path, f"..{version}", version)
            await reader.wait_read(version)


async def test_a_link_that_nvidias_config_manager_swaps_is_read_and_so_is_what_it_then_points_to(
    tmp_path: Path,
) -> None:
    available, link = tmp_path / "available", tmp_path / "config" / "config.yaml"
    for name in ("a", "b"):
        (available / name).mkdir(parents=True)
        config_map(available / name, "..one", f"{name} one")
    link.parent.mkdir()
    link.symlink_to(available / "a" / "default")
    async with watching(link) as reader:
        link.unlink()
        link.symlink_to(available / "b" / "default")
        await reader.wait_read("b one")
        config_map(available / "b", "..two", "b two")
        await reader.wait_read("b two")


async def test_a_file_that_goes_and_comes_back_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("one")
    async with watching(path) as reader:
        path.unlink()
        await reader.wait_read("gone")
        path.write_text("two")
        await reader.wait_read("two")


async def test_a_touch_and_neighbours_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("one")
    async with watching(path) as reader:
        for number in range(20):
            (tmp_path / f"other{number}").write_text("x")
        path.write_text("one")
        os.utime(path)
        path.with_suffix(".marker").write_text("")
        (tmp_path / "new").write_text("two")
        (tmp_path / "new").rename(path)
        await reader.wait_read("two")
    assert reader.read == ["two"]


async def test_what_changed_before_the_watch_began_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("two")
    reader = Reader(path)
    reader.fingerprint = 1
    watch = ConfigWatch(str(path), known=lambda: reader.fingerprint, on_change=reader.changed.set)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(watch.run())
        await reader.wait_read("two")
        task.cancel()


async def test_without_inotify_the_file_is_read_periodically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def at_its_limit(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(config_watch, "DirectoryWatch", at_its_limit)
    path = tmp_path / "config.yaml"
    path.write_text("one")
    async with watching(path, recheck_ns=10_000_000) as reader:
        path.write_text("two")
        await reader.wait_read("two")
    (line,) = caplog.messages
    assert line.startswith("Could not watch the configuration file ")


def test_links_that_lead_to_each_other_are_followed_so_far_and_no_further(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert set(directories_of(tmp_path / "a")) == {tmp_path}


def test_a_directory_on_the_way_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "config.yaml").write_text("x")
    (tmp_path / "link").symlink_to("real")
    assert set(directories_of(tmp_path / "link" / "config.yaml")) == {tmp_path, tmp_path / "real"}


def test_a_directory_that_does_not_exist_leaves_no_watch_on_the_others(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names only
    with pytest.raises(FileNotFoundError):
        DirectoryWatch(tmp_path, tmp_path / "gone")
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208 - names only
