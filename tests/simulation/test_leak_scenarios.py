"""The shipped scenarios of leaks: real eBPF on the driver double, and what a person reads of it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness import Command, gpu_agent, why_no_driver_double
from tests.probe.conftest import why_no_bcc, why_no_probe

U = [f"GPU-00000000-0000-4000-8000-{number:012x}" for number in range(8)]

pytestmark = pytest.mark.slow


@pytest.fixture
def _possible(tmp_path: Path) -> None:
    """Skip, with the reason, where no probe can be loaded or nothing can stand for the driver."""
    from agent.probe.loaded import OBJECT  # noqa: PLC0415 - the loader's own

    why = why_no_driver_double() or why_no_probe() or (None if OBJECT.exists() else why_no_bcc(tmp_path))
    if why:
        pytest.skip(why)


async def play(name: str, node_dir: Path) -> Command:
    return await gpu_agent("demo", f"--scenario={name}", "--json", f"--node-dir={node_dir}")


def reported(result: Command) -> list[dict[str, Any]]:
    """The conditions that were waited for."""
    assert result.status == 0, result.err
    return [line for line in result.lines if line["kind"] == "condition"]


def shown(result: Command) -> list[dict[str, Any]]:
    """The kubelet's view."""
    return [line for line in result.lines if line["kind"] == "allocatable"]


def involved(line: dict[str, Any], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(each[name] for name in names) for each in line["detail"]["culprits"]]


@pytest.mark.usefixtures("_possible")
async def test_a_leaked_context_is_found_and_makes_the_gpu_unhealthy_while_no_pod_has_it(
    node_dir: Path,
) -> None:
    result = await play("context-leak", node_dir)

    (found,) = reported(result)
    assert found.items() >= {"reason": "context_leak", "gpu": 0, "active": True, "evidence": "soft"}.items()
    assert (found["detail"]["kind"], found["detail"]["contexts"]) == ("orphaned_client", 4)
    owner, holder = sorted(involved(found, "role", "comm", "pod", "contexts"), reverse=True)
    assert owner == ("owner", "train", "ml/train", 4)
    assert holder == ("holder", "worker", "ml/train", 0)
    assert all(each["pid"] > 0 for each in found["detail"]["culprits"])
    assert [line["allocatable"] for line in shown(result)] == [8, 7, 8]
    (device,) = shown(result)[1]["unhealthy"]
    assert device.items() >= {"id": U[0], "gpu": 0, "reason": "context_leak", "evidence": "soft"}.items()
    assert [each["pod"] for each in device["detail"]["culprits"]] == ["ml/train"] * len(
        device["detail"]["culprits"]
    )
    assert found["at_ms"] < shown(result)[1]["at_ms"]
    assert result.err == ""


@pytest.mark.usefixtures("_possible")
async def test_a_child_that_holds_what_its_parent_made_is_reported_until_it_ends(node_dir: Path) -> None:
    result = await play("fork-holds", node_dir)

    found, over = reported(result)
    assert (found["gpu"], found["detail"]["kind"], found["detail"]["contexts"]) == (3, "orphaned_client", 2)
    assert involved(found, "role", "comm") == [("owner", "train"), ("holder", "worker")]
    assert (over["gpu"], over["active"]) == (3, False)
    assert [line["allocatable"] for line in shown(result)] == [8]


@pytest.mark.usefixtures("_possible")
async def test_a_process_whose_pod_is_gone_is_reported_with_the_pod(node_dir: Path) -> None:
    result = await play("pod-gone", node_dir)

    found, over = reported(result)
    assert (found["gpu"], found["detail"]["kind"]) == (0, "pod_gone")
    assert involved(found, "comm", "pod", "contexts", "used_bytes", "killable") == [
        ("train", "ml/train", 2, 1024 << 20, True)
    ]
    assert not over["active"]
    assert [line["allocatable"] for line in shown(result)] == [8]


@pytest.mark.usefixtures("_possible")
async def test_processes_on_gpus_that_they_were_not_given_are_reported(node_dir: Path) -> None:
    result = await play("foreign-process", node_dir)

    of_pod, of_host, *over = reported(result)
    assert (of_pod["gpu"], involved(of_pod, "comm", "owner", "pod", "contexts")) == (
        5,
        [("train", "pod", "ml/train", 1)],
    )
    assert (of_host["gpu"], involved(of_host, "comm", "owner", "pod", "contexts")) == (
        6,
        [("miner", "host", None, 1)],
    )
    assert [(each["reason"], each["gpu"], each["active"]) for each in over] == [
        ("foreign_process", 5, False),
        ("foreign_process", 6, False),
    ]


async def test_where_nothing_can_stand_for_the_driver_the_demo_reports_it_in_one_sentence(
    node_dir: Path,
) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    without = ("setpriv", "--bounding-set=-sys_admin")
    result = await gpu_agent(
        "demo", "--scenario=fork-holds", "--json", f"--node-dir={node_dir}", launcher=without
    )

    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("gpu-agent: The simulated node has no driver double, which needs root and")
    assert result.err.count("\n") == 1
    assert not node_dir.exists()
