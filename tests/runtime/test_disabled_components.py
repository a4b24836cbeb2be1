"""What is disabled where the agent was given less than it can use."""

from pathlib import Path

import pytest

from agent.config.load import load
from agent.config.settings import DEFAULT, Settings
from agent.errors import MissingRightsError
from agent.model.structs import replace
from agent.runtime.bootstrap import disabled_components, with_usable_state_dir, without_unreadable_log


def settings(tmp_path: Path, **flags: str) -> Settings:
    """Everything there is, under a directory."""
    (tmp_path / "pod-resources").mkdir(exist_ok=True)
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "kmsg").touch()
    (tmp_path / "proc" / "self").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc" / "self" / "uid_map").write_text("         0          0 4294967295\n")
    given = {
        "kernel-log": str(tmp_path / "kmsg"),
        "pod-resources-socket": str(tmp_path / "pod-resources" / "kubelet.sock"),
        "control-socket": str(tmp_path / "run" / "control.sock"),
        "proc-root": str(tmp_path / "proc"),
        "state-dir": str(tmp_path / "state"),
    }
    return load(given | {name.replace("_", "-"): value for name, value in flags.items()}, {})


def names(given: Settings, *, is_in_container: bool = True) -> list[str]:
    return [part.name for part in disabled_components(given, is_in_container=is_in_container)]


def test_nothing_is_off_where_everything_is_given(tmp_path: Path) -> None:
    assert names(settings(tmp_path)) == []


def test_a_kubelet_that_is_down_takes_nothing_away(tmp_path: Path) -> None:
    assert not (tmp_path / "pod-resources" / "kubelet.sock").exists()
    assert "pods" not in names(settings(tmp_path))


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"kernel_log": "/nonexistent/kmsg"}, "kernel log"),
        ({"pod_resources_socket": "/nonexistent/kubelet.sock"}, "pods"),
        ({"pod_resources_socket": f"/{'x' * 300}/kubelet.sock"}, "pods"),
        ({"control_socket": "/proc/self/none/control.sock"}, "control socket"),
    ],
)
def test_each_part_that_is_off_is_named_with_what_switches_it_on(
    tmp_path: Path, flags: dict[str, str], name: str
) -> None:
    (part,) = disabled_components(settings(tmp_path, **flags), is_in_container=True)
    assert part.name == name
    assert str(part) == f"{name}: {part.why}; {part.remedy}"


def test_a_kernel_log_that_may_not_be_read_is_not_read_unless_it_was_asked_for(tmp_path: Path) -> None:
    given = settings(tmp_path, kernel_log="/nonexistent/kmsg")
    assert without_unreadable_log(given) == given
    by_default = replace(
        given, given={**given.given, "kernel-log": given.given["kernel-log"]._replace(origin=DEFAULT)}
    )
    assert without_unreadable_log(by_default).kernel_log == ""
    readable = replace(by_default, kernel_log=str(tmp_path / "kmsg"))
    assert without_unreadable_log(readable) == readable


def test_what_an_operator_switched_off_is_not_reported(tmp_path: Path) -> None:
    assert names(settings(tmp_path, kernel_log="", pod_resources_socket="", uevents="false")) == []


def test_the_kernel_sends_no_uevents_to_a_user_namespace(tmp_path: Path) -> None:
    given = settings(tmp_path)
    (tmp_path / "proc" / "self" / "uid_map").write_text("         0     100000      65536\n")
    assert names(given) == ["uevents"]
    assert names(settings(tmp_path, proc_root="/nonexistent")) == []


def test_state_in_a_containers_own_files_is_reported_and_on_a_node_it_is_not(tmp_path: Path) -> None:
    unusable = replace(load({"proc-root": "/nonexistent"}, {}), state_dir="/proc/self/none")
    fallbacks = ("/proc/none", str(tmp_path / "fallback"))
    usable = with_usable_state_dir(unusable, is_in_container=True, fallbacks=fallbacks)
    assert usable.state_dir == str(tmp_path / "fallback")
    assert "state over restarts" in names(usable)
    assert "state over restarts" not in names(usable, is_in_container=False)
    with pytest.raises(MissingRightsError):
        with_usable_state_dir(unusable, is_in_container=False)


def test_state_is_kept_nowhere_that_others_may_write(tmp_path: Path) -> None:
    unusable = replace(load({"proc-root": "/nonexistent"}, {}), state_dir="/proc/self/none")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    fallbacks = tuple(str(tmp_path / name) for name in ("link", "open", "own"))
    usable = with_usable_state_dir(unusable, is_in_container=True, fallbacks=fallbacks)
    assert usable.state_dir == str(tmp_path / "own")


def test_a_state_directory_that_was_asked_for_is_not_replaced() -> None:
    asked = load({"state-dir": "/proc/self/none"}, {})
    with pytest.raises(MissingRightsError, match="/proc/self/none"):
        with_usable_state_dir(asked, is_in_container=True)
