"""The scenarios about MIG and sharing: each ends by itself, and the kubelet has shown what it should."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness import Command, play_scenario

GPU = "nvidia.com/gpu"
SHARED = "nvidia.com/gpu.shared"

pytestmark = pytest.mark.slow


def counts(result: Command, resource: str) -> list[tuple[int, int]]:
    return [(line["capacity"], line["allocatable"]) for line in result.lines if line["resource"] == resource]


def reasons(line: dict[str, Any]) -> dict[str, str]:
    return {device["id"]: device["reason"] for device in line["unhealthy"]}


async def test_slices_of_several_sizes_have_names_of_their_own_and_faults_of_their_own(
    node_dir: Path,
) -> None:
    result = await play_scenario("mig-mixed", node_dir)

    assert {line["resource"] for line in result.lines} == {
        GPU,
        *(f"nvidia.com/mig-{profile}" for profile in ("3g.40gb", "2g.20gb", "1g.10gb")),
    }
    for resource in (GPU, "nvidia.com/mig-3g.40gb", "nvidia.com/mig-2g.20gb"):
        assert counts(result, resource) == [(1, 1)]
    assert counts(result, "nvidia.com/mig-1g.10gb") == [(2, 2), (2, 1)]
    assert set(reasons(result.lines[-1]).values()) == {"xid"}


async def test_a_node_that_is_sliced_anew_advertises_what_there_is_and_no_more(node_dir: Path) -> None:
    result = await play_scenario("mig-reconfigure", node_dir)

    small, large = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-7g.80gb"
    assert counts(result, GPU)[0] == (8, 8)
    assert counts(result, GPU)[-1] == counts(result, small)[-1] == (0, 0)
    assert (56, 56) in counts(result, small)
    assert counts(result, large)[-1] == (8, 8)
    assert all(capacity == allocatable for capacity, allocatable in counts(result, small))


async def test_shared_gpus_are_renamed_under_a_running_agent_and_unhealthy_ones_stay_so(
    node_dir: Path,
) -> None:
    result = await play_scenario("time-slicing", node_dir)

    assert counts(result, GPU) == [(16, 16), (16, 12), (0, 0)]
    assert counts(result, SHARED) == [(16, 12)]
    (renamed,) = [line for line in result.lines if line["resource"] == SHARED]
    broken = "GPU-00000000-0000-4000-8000-000000000003"
    assert reasons(renamed) == {f"{broken}::{replica}": "xid" for replica in range(4)}


async def test_gpus_shared_by_mps_are_unhealthy_while_its_daemon_is_away(node_dir: Path) -> None:
    result = await play_scenario("mps", node_dir)

    assert counts(result, GPU) == [(16, 0), (16, 16), (16, 0), (16, 16)]
    for line in (result.lines[0], result.lines[2]):
        assert set(reasons(line).values()) == {"mps_not_ready"}
        assert ".ready does not exist" in line["unhealthy"][0]["message"]
