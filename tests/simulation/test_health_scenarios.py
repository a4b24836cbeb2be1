"""The scenarios about health: each ends by itself, and the kubelet has shown exactly what it should."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.harness import PATIENCE_S, Command, play_scenario, running_command

U3 = "GPU-00000000-0000-4000-8000-000000000003"
ALL_HEALTHY, ONE_UNHEALTHY, NONE_HEALTHY = (8, 8), (8, 7), (8, 0)

pytestmark = pytest.mark.slow


def counts(result: Command) -> list[tuple[int, int]]:
    return [(line["capacity"], line["allocatable"]) for line in result.lines]


def assert_fails_and_recovers(seen: list[tuple[int, int]]) -> None:
    """Assert that all failed at once and recovered: together, or where that takes long those that can."""
    assert seen[:2] == [ALL_HEALTHY, NONE_HEALTHY]
    assert seen[-1] == ALL_HEALTHY
    assert sorted(set(seen[1:])) == seen[1:]


def reasons(line: dict[str, Any]) -> dict[str, str]:
    return {device["id"]: device["reason"] for device in line["unhealthy"]}


async def test_a_gpu_that_was_reset_comes_back_without_any_restart(node_dir: Path) -> None:
    result = await play_scenario("recover", node_dir)

    assert counts(result) == [ALL_HEALTHY, ONE_UNHEALTHY, ALL_HEALTHY]
    (device,) = result.lines[1]["unhealthy"]
    assert device.items() >= {"id": U3, "reason": "xid", "number": 119, "evidence": "hard"}.items()


async def test_a_driver_that_hangs_as_a_whole_makes_every_device_unhealthy_until_it_answers(
    node_dir: Path,
) -> None:
    result = await play_scenario("nvml-hang-driver", node_dir)

    assert_fails_and_recovers(counts(result))
    assert set(reasons(result.lines[1]).values()) == {"driver_hung"}


async def test_a_gpu_that_nvml_lists_no_more_stays_known_and_is_lost(node_dir: Path) -> None:
    result = await play_scenario("gpu-lost", node_dir)

    assert counts(result) == [ALL_HEALTHY, ONE_UNHEALTHY]
    assert reasons(result.lines[1]) == {U3: "gpu_lost"}


async def test_a_driver_is_loaded_anew_under_a_running_agent(node_dir: Path) -> None:
    result = await play_scenario("driver-reload", node_dir)

    assert_fails_and_recovers(counts(result))
    assert set(reasons(result.lines[1]).values()) == {"maintenance"}


async def test_a_gpu_that_fails_again_and_again_stays_unhealthy_although_it_answers(node_dir: Path) -> None:
    result = await play_scenario("flapping", node_dir)

    assert counts(result) == [
        ALL_HEALTHY,
        ONE_UNHEALTHY,
        ALL_HEALTHY,
        ONE_UNHEALTHY,
        ALL_HEALTHY,
        ONE_UNHEALTHY,
    ]
    assert [reasons(result.lines[at]) for at in (1, 3, 5)] == [
        {U3: "nvml_error"},
        {U3: "nvml_error"},
        {U3: "flapping"},
    ]


async def test_a_gpu_is_unhealthy_for_as_long_as_an_operator_holds_it(node_dir: Path) -> None:
    result = await play_scenario("hold", node_dir)

    assert counts(result) == [ALL_HEALTHY, ONE_UNHEALTHY, ALL_HEALTHY]
    (device,) = result.lines[1]["unhealthy"]
    assert device.items() >= {"id": U3, "reason": "held"}.items()
    assert "fan is noisy" in device["message"]


async def test_a_gpu_unhealthy_at_the_kill_of_the_agent_is_so_from_the_first_list_on(
    node_dir: Path,
) -> None:
    result = await play_scenario("kill-restart", node_dir)

    assert counts(result) == [ALL_HEALTHY, ONE_UNHEALTHY, NONE_HEALTHY, ONE_UNHEALTHY]
    assert reasons(result.lines[1]) == reasons(result.lines[3]) == {U3: "xid"}
    assert set(reasons(result.lines[2]).values()) == {"unknown"}


# Watched while it plays


async def status_of(node_dir: Path, target: str) -> int | None:
    """Ask the agent; None while it does not serve."""
    try:
        reader, writer = await asyncio.open_unix_connection(os.fspath(node_dir / "agent" / "control.sock"))
    except OSError:
        return None
    try:
        writer.write(f"GET {target} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        words = (await reader.readline()).split()
    except OSError:
        return None
    finally:
        writer.close()
    return int(words[1]) if len(words) > 1 else None


async def livez_until(node_dir: Path, is_over: asyncio.Event, seen: list[int | None]) -> None:
    while not is_over.is_set():
        seen.append(await status_of(node_dir, "/livez"))
        await asyncio.sleep(0.05)


async def test_a_gpu_that_hangs_is_unhealthy_until_it_answers_and_the_agent_is_live_throughout(
    node_dir: Path,
) -> None:
    lines: list[dict[str, Any]] = []
    while_out: list[int | None] = []
    before: list[int | None] = []
    playing = running_command("demo", "--scenario=nvml-hang", "--json", f"--node-dir={node_dir}")
    async with playing as process, asyncio.timeout(2 * PATIENCE_S):
        assert process.stdout is not None
        is_out, is_back = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(livez_until(node_dir, is_out, before), name="test-livez-before")
            async for raw in process.stdout:
                lines.append(json.loads(raw))
                if len(lines) == 2:
                    is_out.set()
                    group.create_task(livez_until(node_dir, is_back, while_out), name="test-livez-out")
                elif len(lines) == 3:
                    is_back.set()
            is_out.set()
            is_back.set()
        _, err = await process.communicate()

    assert (process.returncode, err) == (0, b"")
    assert [(line["capacity"], line["allocatable"]) for line in lines] == [
        ALL_HEALTHY,
        ONE_UNHEALTHY,
        ALL_HEALTHY,
    ]
    assert reasons(lines[1]) == {U3: "nvml_timeout"}
    assert set(before) - {None} == {200}
    assert len(while_out) > 5
    assert set(while_out) == {200}
