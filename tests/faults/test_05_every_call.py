"""Fault 5 as a table: every call the agent makes, every code that NVML has.

Right, whatever a call answers: the agent goes on, calls no more often than it polls, and speaks of no GPU but
the one whose call it was. The readings have a table of their own (tests/sources/nvml/test_sampling.py).
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.model.facts import DriverUnavailable, GpuCallFailed, GpuProbePassed, GpusEnumerated
from agent.model.ids import GpuUuid
from agent.model.structs import replace
from tests.sources.recorder import Recorder, until
from tests.sources.simulated import MS, QUICK, Node, running_source

pytestmark = pytest.mark.slow

CODES = (1, 2, *range(5, 13), *range(14, 31), 999, 3, 4, 13)
"""Every code of nvml.h but success; last, those after which a call is not made any more."""

OFTEN = replace(QUICK, poll_ns=10 * MS, init_retry_ns=10 * MS, event_retry_ns=10 * MS, event_slice_ms=5)
THREE_T4 = {"preset": "4x-t4", "gpus": 3}
THREE_MIG = {
    "preset": "8x-a100",
    "gpus": 3,
    "gpu": {"mig": {"enabled": True, "devices": [{"profile": "1g.10gb", "gi": 1}]}},
}

OF_A_GPU = (
    "nvmlDeviceGetHandleByPciBusId",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetIndex",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId",
)
AT_THE_FIRST_READING = (
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetSerial",
    "nvmlDeviceGetBoardPartNumber",
    "nvmlDeviceGetVbiosVersion",
    "nvmlDeviceGetAttributes",
    "nvmlDeviceGetGpuInstanceById",
    "nvmlGpuInstanceGetInfo",
    "nvmlDeviceGetGpuInstanceProfileInfo",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceRegisterEvents",
)
OF_THE_NODE = ("nvmlDeviceGetCount", "nvmlEventSetCreate", "nvmlEventSetFree", "nvmlEventSetWait")
OF_AN_INIT = (
    "nvmlInitWithFlags",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetNVMLVersion",
)


@asynccontextmanager
async def recorded(directory: Path, hardware: dict[str, object]) -> AsyncIterator[tuple[Node, Recorder]]:
    recorder = Recorder()
    node = Node.make(directory, hardware)
    try:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(recorder.run(), name="recorder")
            yield node, recorder
            task.cancel()
    finally:
        node.close()
        recorder.inbox.close()


def passed(recorder: Recorder) -> set[GpuUuid]:
    return {fact.gpu for fact in recorder.of(GpuProbePassed)}


async def wait_rounds(recorder: Recorder, node: Node, rounds: int) -> None:
    """Wait until the GPUs other than the one under test passed so many polls."""
    others = (node.uuid(0), node.uuid(2))
    await recorder.until(
        lambda: all(
            sum(fact.gpu == other for fact in recorder.of(GpuProbePassed)) >= rounds for other in others
        )
    )


@pytest.mark.parametrize("call", OF_A_GPU)
async def test_whatever_a_call_of_a_poll_answers_concerns_its_gpu_alone(tmp_path: Path, call: str) -> None:
    async with recorded(tmp_path, THREE_MIG) as (node, recorder), running_source(node, recorder.inbox, OFTEN):
        await recorder.until(lambda: passed(recorder) == set(node.uuids()))
        for code in CODES:
            calls, polls = node.state.calls(call, gpu=1), node.state.calls("nvmlDeviceGetHandleByPciBusId")
            recorder.forget()
            node.state.set_return(call, code, gpu=1)
            await wait_rounds(recorder, node, 3)
            assert {fact.gpu for fact in recorder.of(GpuCallFailed)} <= {node.uuid(1)}, code
            assert recorder.of(DriverUnavailable) == [], code
            polls = node.state.calls("nvmlDeviceGetHandleByPciBusId") - polls
            assert node.state.calls(call, gpu=1) - calls <= 4 * polls, code
            for fact in recorder.of(GpusEnumerated):
                assert {node.uuid(0), node.uuid(2)} <= {gpu.uuid for gpu in fact.gpus}, code
            node.state.clear_return(call, gpu=1)
            recorder.forget()
            await recorder.until(lambda: passed(recorder) == set(node.uuids()))


@pytest.mark.parametrize("call", AT_THE_FIRST_READING)
async def test_whatever_a_call_of_the_first_reading_answers_the_others_are_advertised(
    tmp_path: Path, call: str
) -> None:
    async with recorded(tmp_path, THREE_MIG) as (node, recorder):
        for code in CODES:
            recorder.forget()
            node.state.set_return(call, code, gpu=1)
            async with running_source(node, recorder.inbox, OFTEN):
                await wait_rounds(recorder, node, 2)
                assert {fact.gpu for fact in recorder.of(GpuCallFailed)} <= {node.uuid(1)}, code
                assert recorder.of(DriverUnavailable) == [], code
                node.state.clear_return(call, gpu=1)
                recorder.forget()
                await recorder.until(lambda: passed(recorder) == set(node.uuids()))


@pytest.mark.parametrize("call", OF_THE_NODE)
async def test_whatever_a_call_of_the_node_answers_no_gpu_is_blamed(tmp_path: Path, call: str) -> None:
    async with recorded(tmp_path, THREE_T4) as (node, recorder), running_source(node, recorder.inbox, OFTEN):
        await recorder.until(lambda: passed(recorder) == set(node.uuids()))
        for code in CODES:
            recorder.forget()
            node.state.set_return(call, code)
            await recorder.until(lambda: passed(recorder) == set(node.uuids()))
            assert recorder.of(GpuCallFailed) == [], code
            assert recorder.of(DriverUnavailable) == [], code
            assert node.state.inits == 1, code
            node.state.clear_return(call)


@pytest.mark.parametrize("call", OF_AN_INIT)
async def test_whatever_an_init_answers_it_is_reported_once_and_tried_at_its_pace(
    tmp_path: Path, call: str
) -> None:
    async with recorded(tmp_path, THREE_T4) as (node, recorder):
        for code in CODES:
            recorder.forget()
            node.state.set_return(call, code)
            began_ns, calls = time.monotonic_ns(), node.state.calls("nvmlInitWithFlags")
            async with running_source(node, recorder.inbox, OFTEN):
                await recorder.first(DriverUnavailable)
                await until(lambda calls=calls: node.state.calls("nvmlInitWithFlags") >= calls + 3)  # type: ignore[misc]
                tried = node.state.calls("nvmlInitWithFlags") - calls
                assert tried <= (time.monotonic_ns() - began_ns) // OFTEN.init_retry_ns + 2, code
                assert len(recorder.of(DriverUnavailable)) == 1, code
                node.state.clear_return(call)
                await recorder.until(lambda: passed(recorder) == set(node.uuids()))
