"""Calls that never return: a GPU that hangs delays no other, and costs one thread."""

import asyncio
import threading

import pytest

from agent.model.facts import (
    DriverCallAnswered,
    DriverCallOverdue,
    DriverUnavailable,
    GpuCallFailed,
    GpuCallOverdue,
    GpuProbePassed,
    GpusEnumerated,
)
from agent.model.structs import replace
from tests.sources.conftest import MakeNode, StartSource
from tests.sources.recorder import Recorder
from tests.sources.simulated import MS, QUICK, all_probed

HASTY = replace(QUICK, call_deadline_ns=150 * MS)
"""A call is overdue soon, though not on a machine that is merely busy."""


async def test_a_gpu_that_hangs_is_emitted_once_and_the_others_still_pass(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("8x-a100")
    await start_source(node, HASTY)
    await all_probed(recorder, node)
    node.state.hang(gpu=3)
    overdue = await recorder.first(GpuCallOverdue)
    assert (overdue.gpu, overdue.deadline_ns) == (node.uuid(3), 150 * MS)
    recorder.forget()
    others = set(node.uuids()) - {node.uuid(3)}
    for _ in range(3):
        recorder.forget()
        await recorder.until(lambda: others <= {fact.gpu for fact in recorder.of(GpuProbePassed)})
    assert {fact.gpu for fact in recorder.of(GpuProbePassed)} == others
    assert recorder.of(GpuCallOverdue) == []
    assert recorder.of(DriverCallOverdue) == []
    assert recorder.of(GpusEnumerated) == []


async def test_a_gpu_that_hangs_costs_no_thread_and_no_call_for_each_poll(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node, HASTY)
    await all_probed(recorder, node)
    node.state.hang(gpu=1)
    await recorder.first(GpuCallOverdue)
    threads, hangs = threading.active_count(), node.state.hangs_entered
    recorder.forget()
    await recorder.at_least(12, GpuProbePassed)
    assert threading.active_count() == threads
    assert node.state.hangs_entered == hangs == 1


async def test_a_late_answer_does_not_count_and_the_probe_is_repeated(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node, replace(HASTY, poll_ns=3_600_000 * MS))
    await recorder.at_least(4, GpuProbePassed)
    node.state.hang(gpu=1)
    node.state.push_xid(1, 31)
    await recorder.first(GpuCallOverdue)
    recorder.forget()
    temperatures = node.state.calls("nvmlDeviceGetTemperature", gpu=1)
    node.state.release(gpu=1)
    await recorder.first(GpuProbePassed, lambda fact: fact.gpu == node.uuid(1))
    assert node.state.calls("nvmlDeviceGetTemperature", gpu=1) == temperatures + 2
    assert len(recorder.of(GpuProbePassed)) == 1


async def test_a_gpu_that_hangs_again_is_emitted_again(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node, HASTY)
    await recorder.at_least(4, GpuProbePassed)
    for _ in range(2):
        recorder.forget()
        node.state.hang(gpu=1)
        await recorder.first(GpuCallOverdue)
        node.state.release(gpu=1)
        await recorder.first(GpuProbePassed, lambda fact: fact.gpu == node.uuid(1))


@pytest.mark.parametrize(
    "call", ["nvmlDeviceGetTemperature", "nvmlDeviceGetUUID", "nvmlDeviceRegisterEvents"]
)
async def test_any_call_on_a_gpu_may_hang(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, call: str
) -> None:
    node = make_node("4x-t4")
    if call == "nvmlDeviceRegisterEvents":
        node.state.hang(function=call, gpu=2)
    await start_source(node, HASTY)
    await recorder.until(lambda: len({fact.gpu for fact in recorder.of(GpuProbePassed)}) >= 3)
    node.state.hang(function=call, gpu=2)
    overdue = await recorder.first(GpuCallOverdue)
    assert (overdue.gpu, overdue.call) == (node.uuid(2), call)
    node.state.release(function=call, gpu=2)
    recorder.forget()
    await recorder.first(GpuProbePassed, lambda fact: fact.gpu == node.uuid(2))
    assert recorder.of(GpuCallFailed) == []


async def test_every_gpu_that_hangs_is_emitted(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node, HASTY)
    await all_probed(recorder, node)
    node.state.hang()
    await recorder.until(lambda: {fact.gpu for fact in recorder.of(GpuCallOverdue)} == set(node.uuids()))
    await recorder.first(DriverCallOverdue)
    recorder.forget()
    node.state.release()
    await all_probed(recorder, node)
    await recorder.first(DriverCallAnswered)


async def test_a_gpu_whose_first_handle_hangs_does_not_keep_the_others_from_being_listed(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.state.hang(gpu=1)
    settings = replace(HASTY, first_handle_deadline_ns=200 * MS, first_probe_wait_ns=100 * MS)
    await start_source(node, settings)
    others = [node.uuid(0), node.uuid(2), node.uuid(3)]
    assert [gpu.uuid for gpu in (await recorder.first(GpusEnumerated)).gpus] == others
    await recorder.until(lambda: {fact.gpu for fact in recorder.of(GpuProbePassed)} == set(others))
    await asyncio.sleep(0.3)
    assert recorder.of(DriverCallOverdue) == []
    node.state.release(gpu=1)
    await recorder.first(GpuProbePassed, lambda fact: fact.gpu == node.uuid(1))
    assert [gpu.uuid for gpu in recorder.of(GpusEnumerated)[-1].gpus] == node.uuids()


async def test_the_driver_is_overdue_if_no_gpu_can_be_identified(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.state.hang(function="nvmlDeviceGetHandleByIndex")
    settings = replace(HASTY, first_handle_deadline_ns=100 * MS, first_probe_wait_ns=200 * MS)
    await start_source(node, settings)
    assert (await recorder.first(DriverCallOverdue)).call == "nvmlDeviceGetHandleByIndex"
    node.state.release(function="nvmlDeviceGetHandleByIndex")
    await recorder.first(DriverCallAnswered)
    await all_probed(recorder, node)


async def test_a_gpu_that_hangs_stays_listed_while_another_disappears(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node, HASTY)
    await all_probed(recorder, node)
    node.state.hang(gpu=1)
    await recorder.first(GpuCallOverdue)
    node.state.hide_gpu(2)
    wanted = {node.uuid(0), node.uuid(1), node.uuid(3)}
    await recorder.until(lambda: {gpu.uuid for gpu in recorder.of(GpusEnumerated)[-1].gpus} == wanted)


async def test_the_driver_is_not_gone_while_a_gpu_hangs_and_the_others_answer(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node, HASTY)
    await all_probed(recorder, node)
    node.state.hang(gpu=1)
    await recorder.first(GpuCallOverdue)
    node.state.set_return(None, 999, gpu=2)
    await recorder.first(GpuCallFailed)
    recorder.forget()
    await recorder.at_least(3, GpuCallFailed)
    assert recorder.of(DriverUnavailable) == []


async def test_closing_a_source_with_a_stuck_thread_fails_at_once(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    source = await start_source(node, HASTY)
    await recorder.at_least(4, GpuProbePassed)
    node.state.hang(gpu=1)
    await recorder.first(GpuCallOverdue)
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "nvml"]
    task.cancel()
    await asyncio.wait({task})
    assert not await source.close()
    assert node.state.shutdowns == 0


async def test_nvml_is_not_shut_down_while_a_thread_is_stuck_in_it(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node, HASTY)
    await recorder.at_least(4, GpuProbePassed)
    node.state.hang(gpu=1)
    await recorder.first(GpuCallOverdue)
    others = set(node.uuids()) - {node.uuid(1)}
    for gpu in (0, 2, 3):
        node.state.set_return(None, 999, gpu=gpu)
    await recorder.until(lambda: {fact.gpu for fact in recorder.of(GpuCallFailed)} == others)
    recorder.forget()
    await recorder.at_least(6, GpuCallFailed)
    assert (node.state.inits, node.state.shutdowns) == (1, 0)
    for gpu in (0, 2, 3):
        node.state.clear_return(None, gpu=gpu)
    await recorder.until(lambda: others == {fact.gpu for fact in recorder.of(GpuProbePassed)})
    assert recorder.of(DriverUnavailable) == []


async def test_nvml_is_shut_down_once_the_stuck_thread_returned(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node, HASTY)
    await recorder.at_least(4, GpuProbePassed)
    node.state.hang(gpu=1)
    await recorder.first(GpuCallOverdue)
    node.state.unload_driver()
    node.state.release(gpu=1)
    await recorder.first(DriverUnavailable)
    node.state.load_driver()
    recorder.forget()
    await all_probed(recorder, node)
