"""Fault 5: NVML returns every error code. One broken GPU is one Unhealthy GPU, and nothing spins."""

import asyncio
import time
from pathlib import Path

import pytest

from agent.model.facts import KernelXidSeen
from agent.model.health import Reason
from tests.faults.watched_node import watched_node
from tests.sources.recorder import PATIENCE_S, until
from tests.sources.simulated import QUICK

CODES = (1, 2, *range(5, 13), *range(14, 31), 999)
"""Every code of nvml.h but those for an answer that cannot be had (3, 4, 13)."""

THREE_T4 = {"preset": "4x-t4", "gpus": 3}
REASONS = {15: Reason.GPU_LOST, 16: Reason.RESET_REQUIRED}


@pytest.mark.parametrize("code", CODES)
async def test_a_gpu_whose_calls_return_a_code_is_the_only_one_marked(tmp_path: Path, code: int) -> None:
    async with watched_node(tmp_path, THREE_T4) as watched:
        watched.node.state.set_return("nvmlDeviceGetTemperature", code, gpu=1)
        await watched.until_unhealthy(1)
        assert watched.reasons(1) == {REASONS.get(code, Reason.NVML_ERROR)}
        calls = watched.node.state.calls("nvmlDeviceGetTemperature", gpu=0)
        await until(lambda: watched.node.state.calls("nvmlDeviceGetTemperature", gpu=0) > calls + 2)
        assert watched.ever_unhealthy == {watched.node.uuid(1)}


@pytest.mark.parametrize("code", [3, 4, 13])
async def test_a_code_for_an_answer_that_cannot_be_had_marks_none(tmp_path: Path, code: int) -> None:
    async with watched_node(tmp_path, THREE_T4) as watched:
        watched.node.state.set_return("nvmlDeviceGetTemperature", code)
        calls = watched.node.state.calls("nvmlDeviceGetTemperature", gpu=0)
        await until(lambda: watched.node.state.calls("nvmlDeviceGetTemperature", gpu=0) > calls + 2)
        assert watched.ever_unhealthy == set()


@pytest.mark.parametrize("code", [15, 16, 999])
async def test_a_gpu_that_answers_nothing_not_even_its_uuid_is_the_only_one_marked(
    tmp_path: Path, code: int
) -> None:
    async with watched_node(tmp_path, THREE_T4) as watched:
        watched.node.state.set_return(None, code, gpu=1)
        await watched.until_unhealthy(1)
        assert watched.ever_unhealthy == {watched.node.uuid(1)}


@pytest.mark.parametrize("code", CODES)
async def test_an_event_wait_that_returns_a_code_marks_none_and_does_not_spin(
    tmp_path: Path, code: int
) -> None:
    async with watched_node(tmp_path, THREE_T4) as watched:
        state = watched.node.state
        state.set_return("nvmlEventSetWait_v2", code)
        before, began_ns = state.calls("nvmlEventSetWait_v2"), time.monotonic_ns()
        calls = state.calls("nvmlDeviceGetTemperature", gpu=0)
        await until(lambda: state.calls("nvmlDeviceGetTemperature", gpu=0) > calls + 4)
        assert watched.ever_unhealthy == set()
        if code != 10:
            # The next wait comes with a new set.
            waits = state.calls("nvmlEventSetWait_v2") - before
            assert waits <= (time.monotonic_ns() - began_ns) // QUICK.event_retry_ns + 2


async def test_an_xid_from_while_event_waits_fail_counts_by_the_kernel_log_alone(tmp_path: Path) -> None:
    async with watched_node(tmp_path, THREE_T4) as watched:
        state = watched.node.state
        creations = state.calls("nvmlEventSetCreate")
        state.set_return("nvmlEventSetWait_v2", 999)
        await until(lambda: state.calls("nvmlEventSetCreate") > creations)
        pci = next(view.gpu.pci for view in watched.gpus if view.gpu.uuid == watched.node.uuid(2))
        watched.put(KernelXidSeen(pci, 95))
        await watched.until_unhealthy(2)
        state.clear_return("nvmlEventSetWait_v2")
        async with asyncio.timeout(PATIENCE_S):
            while Reason.XID not in watched.reasons(1):
                state.push_xid(1, 48)
                await asyncio.sleep(0.02)
        assert watched.ever_unhealthy == {watched.node.uuid(1), watched.node.uuid(2)}


async def test_a_lost_gpu_is_marked_and_xids_of_the_others_are_heard(tmp_path: Path) -> None:
    async with watched_node(tmp_path, THREE_T4) as watched:
        state = watched.node.state
        state.set_return(None, 15, gpu=1)
        state.set_return("nvmlEventSetWait_v2", 15)
        await watched.until_unhealthy(1)
        state.clear_return("nvmlEventSetWait_v2")
        async with asyncio.timeout(PATIENCE_S):
            while Reason.XID not in watched.reasons(2):
                state.push_xid(2, 48)
                await asyncio.sleep(0.02)
        await watched.until_unhealthy(1, 2)


async def test_an_xid_of_a_device_that_cannot_be_identified_marks_none(tmp_path: Path) -> None:
    async with watched_node(tmp_path, THREE_T4) as watched:
        state = watched.node.state
        sequence = state.push_xid(None, 79)
        await until(lambda: state.event_times(sequence).deliveries == 1)
        calls = state.calls("nvmlDeviceGetTemperature", gpu=0)
        await until(lambda: state.calls("nvmlDeviceGetTemperature", gpu=0) > calls + 2)
        assert watched.ever_unhealthy == set()


async def test_an_event_set_that_cannot_be_made_marks_none(tmp_path: Path) -> None:
    async with watched_node(tmp_path, THREE_T4) as watched:
        state = watched.node.state
        state.set_return("nvmlEventSetCreate", 23)
        state.set_return("nvmlEventSetWait_v2", 2)
        creations = state.calls("nvmlEventSetCreate")
        await until(lambda: state.calls("nvmlEventSetCreate") > creations + 3)
        assert watched.ever_unhealthy == set()
