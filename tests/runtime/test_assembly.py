"""Where the agent reads driver and device nodes, which a container sees elsewhere than the node."""

from pathlib import Path

import pytest

from agent.bus import Inbox, Latest
from agent.config.load import load
from agent.core.health.snapshot import snapshot_of
from agent.core.health.state import initial_state
from agent.model.policy import Policy
from agent.proofs import Proofs
from agent.runtime.assembly import Assembly


def assembly(tmp_path: Path, *, is_in_container: bool, **flags: str) -> Assembly:
    given = {"driver-root": str(tmp_path / "host-driver"), "driver-root-ctr-path": str(tmp_path / "mounted")}
    given |= {name.replace("_", "-"): value for name, value in flags.items()}
    latest = Latest(snapshot_of(initial_state(Policy(), None, now_ns=0)))
    return Assembly(
        load(given, {}),
        Inbox(clock=lambda: 0),
        latest,
        lambda: 0,
        proofs=Proofs(clock=lambda: 0),
        is_in_container=is_in_container,
    )


def test_on_a_node_roots_are_where_they_are_set(tmp_path: Path) -> None:
    (tmp_path / "mounted" / "dev").mkdir(parents=True)
    made = assembly(tmp_path, is_in_container=False)
    assert (made.driver_root, made.dev_root) == (tmp_path / "host-driver", tmp_path / "host-driver" / "dev")
    assert assembly(tmp_path, is_in_container=False, dev_root="/").dev_root == Path("/dev")


def test_in_a_container_the_driver_is_where_it_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "mounted" / "dev").mkdir(parents=True)
    made = assembly(tmp_path, is_in_container=True)
    assert (made.driver_root, made.dev_root) == (tmp_path / "mounted", tmp_path / "mounted" / "dev")


def test_a_container_without_the_driver_root_uses_the_dev_root_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "given" / "dev").mkdir(parents=True)
    made = assembly(tmp_path, is_in_container=True, driver_root="/", dev_root=str(tmp_path / "given"))
    assert (made.driver_root, made.dev_root) == (Path("/"), tmp_path / "given" / "dev")


@pytest.mark.parametrize("is_mounted", [True, False])
def test_a_container_that_has_no_device_nodes_of_the_node_has_its_own(
    tmp_path: Path, *, is_mounted: bool
) -> None:
    if is_mounted:
        (tmp_path / "mounted").mkdir()
    assert assembly(tmp_path, is_in_container=True).dev_root == Path("/dev")
