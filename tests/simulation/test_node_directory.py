import os
from pathlib import Path

import pytest

from agent.errors import AlreadyRunningError, UsageError
from agent.simulation.directory import NodeDirectory, holder_of
from tests.harness import short_directory


def test_a_directory_is_made_for_its_owner_alone_and_removed_with_all_it_holds() -> None:
    with short_directory() as parent:
        place = parent / "runtime" / "node"
        with NodeDirectory.hold(place) as directory:
            assert place.stat().st_mode & 0o777 == 0o700
            assert holder_of(place) == os.getpid()
            (directory.agent / "state.json").write_text("{}")

        assert not place.exists()


def test_what_was_made_above_it_is_removed_unless_another_uses_it() -> None:
    with short_directory() as parent:
        with NodeDirectory.hold(parent / "a" / "b" / "node"):
            pass
        assert not list(parent.iterdir())

        with NodeDirectory.hold(parent / "a" / "b" / "node"):
            (parent / "a" / "other").touch()
        assert [each.name for each in (parent / "a").iterdir()] == ["other"]


def test_a_second_holder_is_shown_the_first() -> None:
    with short_directory() as parent, NodeDirectory.hold(parent / "node"):
        with pytest.raises(AlreadyRunningError) as caught:
            NodeDirectory.hold(parent / "node")

        assert f"process {os.getpid()}" in str(caught.value)
        assert "--node-dir" in str(caught.value)


def test_what_a_killed_run_left_is_removed_at_the_next_start() -> None:
    with short_directory() as parent:
        place = parent / "node"
        killed = NodeDirectory.hold(place)
        (killed.device_plugins / "kubelet.sock").write_text("left")
        os.close(killed._lock)

        with NodeDirectory.hold(place) as directory:
            assert not list(directory.device_plugins.iterdir())


def test_a_run_killed_before_it_signed_leaves_a_directory_that_can_be_used() -> None:
    with short_directory() as parent:
        (parent / "node").mkdir()
        (parent / "node" / "lock").touch()

        NodeDirectory.hold(parent / "node").release()


@pytest.mark.parametrize("name", ["precious", "lock"])
def test_a_directory_that_is_not_ours_is_left_alone(name: str) -> None:
    with short_directory() as parent:
        precious = parent / name
        precious.write_text("mine")

        with pytest.raises(UsageError, match="not empty and no simulated node of ours"):
            NodeDirectory.hold(parent)

        assert precious.read_text() == "mine"


def test_a_symbolic_link_inside_is_removed_and_not_followed() -> None:
    with short_directory() as parent:
        (parent / "outside").mkdir()
        (parent / "outside" / "precious").write_text("mine")
        with NodeDirectory.hold(parent / "node") as directory:
            (directory.path / "link").symlink_to(parent / "outside")

        assert (parent / "outside" / "precious").read_text() == "mine"


def test_a_file_or_a_link_in_its_place_is_rejected() -> None:
    with short_directory() as parent:
        (parent / "file").touch()
        (parent / "link").symlink_to(parent)

        for name in ("file", "link"):
            with pytest.raises(UsageError, match="is not a directory"):
                NodeDirectory.hold(parent / name)


def test_a_path_too_long_for_the_sockets_in_it_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose a shorter one with --node-dir"):
        NodeDirectory.hold(tmp_path / ("x" * 60))


def test_a_place_that_others_could_swap_is_rejected() -> None:
    with short_directory() as parent:
        (parent / "shared").mkdir()
        (parent / "shared").chmod(0o777)

        with pytest.raises(UsageError, match="another user's to change"):
            NodeDirectory.hold(parent / "shared" / "node")


def test_a_place_that_cannot_be_written_is_one_sentence() -> None:
    with pytest.raises(
        UsageError, match=r"Could not set up the node directory /proc/nowhere/node: .*--node-dir"
    ):
        NodeDirectory.hold("/proc/nowhere/node")
