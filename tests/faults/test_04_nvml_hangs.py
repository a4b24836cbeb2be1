"""Fault 4: an NVML call hangs. Its GPU is marked, no other, and it costs one thread."""

import threading
from pathlib import Path

from agent.model.health import Reason
from agent.model.structs import replace
from tests.faults.watched_node import watched_node
from tests.sources.recorder import until
from tests.sources.simulated import MS, QUICK

HASTY = replace(QUICK, call_deadline_ns=200 * MS)


async def test_a_gpu_that_hangs_is_marked_and_healthy_again_when_it_answers(tmp_path: Path) -> None:
    async with watched_node(tmp_path, "8x-a100", HASTY) as watched:
        state = watched.node.state
        state.hang(gpu=3)
        await watched.until_unhealthy(3)
        assert watched.reasons(3) == {Reason.NVML_TIMEOUT}
        threads, hangs = threading.active_count(), state.hangs_entered
        polls = state.calls("nvmlDeviceGetTemperature", gpu=0)
        await until(lambda: state.calls("nvmlDeviceGetTemperature", gpu=0) >= polls + 1)
        assert (threading.active_count(), state.hangs_entered) == (threads, hangs)
        state.release(gpu=3)
        await watched.until_unhealthy()
        assert watched.ever_unhealthy == {watched.node.uuid(3)}


async def test_two_gpus_that_hang_are_the_driver(tmp_path: Path) -> None:
    async with watched_node(tmp_path, "4x-t4", HASTY) as watched:
        watched.node.state.hang(gpu=1)
        watched.node.state.hang(gpu=2)
        await watched.until_unhealthy(0, 1, 2, 3)
        assert watched.reasons(0) == {Reason.DRIVER_HUNG}
        watched.node.state.release(gpu=1)
        watched.node.state.release(gpu=2)
        await watched.until_unhealthy()


async def test_a_driver_that_hangs_marks_every_gpu_until_it_answers(tmp_path: Path) -> None:
    async with watched_node(tmp_path, "4x-t4", HASTY) as watched:
        watched.node.state.hang(function="nvmlEventSetWait_v2")
        await watched.until_unhealthy(0, 1, 2, 3)
        assert watched.reasons(2) == {Reason.DRIVER_HUNG}
        watched.node.state.release(function="nvmlEventSetWait_v2")
        await watched.until_unhealthy()
