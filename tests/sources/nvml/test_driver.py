"""NVML is initialised, fails, and is initialised again."""

import asyncio
import logging
import re
import subprocess
import time
from pathlib import Path

import pytest

from agent.errors import NvmlOverdueError, SourceError
from agent.model.facts import (
    DriverCallAnswered,
    DriverCallOverdue,
    DriverReady,
    DriverUnavailable,
    GpuCallFailed,
    GpuProbePassed,
    GpusEnumerated,
    XidReported,
)
from agent.model.health import Reason
from agent.model.structs import replace
from agent.simulation.nvml import install_library
from agent.sources.nvml.gpu_watcher import cancel_and_wait
from agent.sources.nvml.library import LibraryLocation, LibraryMissingError, load
from tests.sources.conftest import MakeNode, StartSource
from tests.sources.recorder import PATIENCE_S, Recorder, until
from tests.sources.simulated import MS, QUICK, Node, running_source

INIT = "nvmlInitWithFlags"


# Up


async def test_a_missing_library_is_named_with_the_next_step(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4", library=False)
    source = await start_source(node)
    fact = await recorder.first(DriverUnavailable)
    assert fact.reason is Reason.DRIVER_NOT_LOADED
    assert str(node.library) in fact.message
    assert "--nvml-library" in fact.message
    assert source.library_missing_since_ns is not None


async def test_a_library_that_appears_later_is_found(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4", library=False)
    source = await start_source(node)
    await recorder.first(DriverUnavailable)
    node.state.unload_driver()
    install_library(node.directory)
    await recorder.first(DriverUnavailable, lambda fact: fact.unloaded)
    assert source.library_missing_since_ns is None
    node.state.load_driver()
    assert len((await recorder.first(GpusEnumerated)).gpus) == 4
    assert len(recorder.of(DriverUnavailable)) == 2


async def test_a_library_that_cannot_be_loaded_is_emitted_with_the_loaders_message(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.library.write_bytes(b"no library at all")
    await start_source(node)
    assert "invalid ELF header" in (await recorder.first(DriverUnavailable)).message or "file too short" in (
        recorder.of(DriverUnavailable)[0].message
    )


async def test_a_driver_that_is_not_loaded_is_emitted_once_and_found_when_it_is(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.state.unload_driver()
    await start_source(node)
    fact = await recorder.first(DriverUnavailable)
    assert (fact.reason, fact.unloaded) == (Reason.DRIVER_NOT_LOADED, True)
    assert "modprobe nvidia" in fact.message
    await until(lambda: node.state.calls(INIT) >= 3)
    node.state.load_driver()
    await recorder.at_least(4, GpuProbePassed)
    assert len(recorder.of(DriverUnavailable)) == 1
    assert node.state.inits == 1


async def test_another_reason_is_another_fact(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.state.unload_driver()
    await start_source(node)
    await recorder.first(DriverUnavailable)
    node.state.unload_driver(code=999)
    fact = await recorder.first(DriverUnavailable, lambda fact: not fact.unloaded)
    assert INIT in fact.message
    assert "999" in fact.message


async def test_init_is_tried_no_faster_than_the_setting(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.state.unload_driver()
    began_ns = time.monotonic_ns()
    await start_source(node, replace(QUICK, init_retry_ns=100 * MS))
    await until(lambda: node.state.calls(INIT) >= 4)
    took_ns = time.monotonic_ns() - began_ns
    assert took_ns >= 3 * 100 * MS
    assert node.state.calls(INIT) <= took_ns // (100 * MS) + 2


async def test_a_version_mismatch_has_a_reason_of_its_own(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.state.unload_driver(code=18)
    source = await start_source(node)
    fact = await recorder.first(DriverUnavailable)
    assert fact.reason is Reason.NVML_VERSION_MISMATCH
    assert str(node.library) in fact.message
    assert not source.library_replaced


async def test_a_library_that_was_replaced_asks_for_a_new_process(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    source = await start_source(node)
    await recorder.at_least(4, GpuProbePassed)
    install_library(node.directory)
    node.state.unload_driver(code=18)
    fact = await recorder.first(DriverUnavailable)
    assert "restart the agent" in fact.message
    assert source.library_replaced


async def test_the_first_outcome_is_good_once_nvml_is_initialised(
    make_node: MakeNode, start_source: StartSource
) -> None:
    source = await start_source(make_node("4x-t4"))
    await source.wait_first_outcome()


async def test_the_first_outcome_is_an_error_if_init_fails(
    make_node: MakeNode, start_source: StartSource
) -> None:
    node = make_node("4x-t4")
    node.state.unload_driver()
    source = await start_source(node)
    with pytest.raises(SourceError, match="kernel driver is not loaded"):
        await source.wait_first_outcome()


async def test_the_first_outcome_is_an_error_if_init_hangs(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.state.hang(function=INIT)
    source = await start_source(node, replace(QUICK, init_deadline_ns=50 * MS))
    with pytest.raises(NvmlOverdueError, match=r"nvmlInitWithFlags did not answer within 0\.05 s"):
        await source.wait_first_outcome()


# Overdue


async def test_an_init_that_hangs_is_emitted_and_continues_when_it_answers(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.state.hang(function=INIT)
    await start_source(node, replace(QUICK, init_deadline_ns=50 * MS))
    overdue = await recorder.first(DriverCallOverdue)
    assert overdue == DriverCallOverdue(call=INIT, deadline_ns=50 * MS)
    node.state.release(function=INIT)
    assert (await recorder.first(DriverCallAnswered)).call == INIT
    await recorder.at_least(4, GpuProbePassed)
    assert len(recorder.of(DriverCallOverdue)) == 1
    assert node.state.calls(INIT) == 1


@pytest.mark.parametrize("call", ["nvmlDeviceGetCount_v2", "nvmlEventSetWait_v2", "nvmlEventSetCreate"])
async def test_a_call_for_the_whole_node_that_hangs_is_emitted_and_so_is_its_answer(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, call: str
) -> None:
    node = make_node("4x-t4")
    if call == "nvmlEventSetCreate":
        node.state.hang(function=call)
    await start_source(node, replace(QUICK, call_deadline_ns=100 * MS))
    await recorder.at_least(4, GpuProbePassed)
    node.state.hang(function=call)
    overdue = await recorder.first(DriverCallOverdue)
    assert overdue.call == call.replace("Count_v2", "Count")
    recorder.forget()
    await recorder.at_least(8, GpuProbePassed)
    assert recorder.of(DriverCallOverdue) == []
    node.state.release(function=call)
    await recorder.first(DriverCallAnswered)


# Unloaded and loaded again


async def answers_nothing(node: Node, recorder: Recorder, code: int) -> DriverUnavailable:
    """Let every call fail with a code, and wait until the driver is emitted as unavailable."""
    recorder.forget()
    node.state.unload_driver(code=code)
    return await recorder.first(DriverUnavailable)


@pytest.mark.parametrize("code", [1, 9, 999])
async def test_a_driver_that_answers_for_no_gpu_is_released_and_found_again(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, code: int
) -> None:
    node = make_node("8x-a100")
    await start_source(node)
    await recorder.at_least(8, GpuProbePassed)
    fact = await answers_nothing(node, recorder, code)
    assert fact.reason is Reason.DRIVER_NOT_LOADED
    assert fact.unloaded == (code == 9)
    calls = node.state.calls(INIT)
    await until(lambda: node.state.calls(INIT) >= calls + 2)
    assert recorder.of(GpuProbePassed) == [] or recorder.facts.index(fact) > 0
    recorder.forget()
    node.state.load_driver()
    await recorder.at_least(8, GpuProbePassed)
    kinds = [type(fact) for fact in recorder.facts]
    assert kinds[:2] == [DriverReady, GpusEnumerated]
    assert recorder.of(GpuCallFailed) == []


async def test_xids_are_received_again_after_the_driver_was_reloaded(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node)
    await recorder.at_least(4, GpuProbePassed)
    await answers_nothing(node, recorder, 999)
    await until(lambda: node.state.calls(INIT) >= 3)
    registrations = node.state.calls("nvmlDeviceRegisterEvents")
    node.state.load_driver()
    await until(lambda: node.state.calls("nvmlDeviceRegisterEvents") >= registrations + 4)
    node.state.push_xid(2, 79)
    fact = await recorder.first(XidReported)
    assert (fact.gpu, fact.xid) == (node.uuid(2), 79)


async def test_calls_that_fail_for_every_gpu_although_init_works_are_tried_once_a_poll(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node, replace(QUICK, poll_ns=200 * MS))
    await recorder.at_least(4, GpuProbePassed)
    node.state.set_return("nvmlDeviceGetMemoryInfo", 999)
    await recorder.first(DriverUnavailable)
    recorder.forget()
    calls = node.state.calls(INIT)
    began_ns = time.monotonic_ns()
    await until(lambda: node.state.calls(INIT) >= calls + 3)
    assert time.monotonic_ns() - began_ns >= 2 * 200 * MS
    assert recorder.facts == []
    node.state.clear_return("nvmlDeviceGetMemoryInfo")
    await recorder.at_least(4, GpuProbePassed)


async def test_a_shutdown_that_fails_as_uninitialised_is_not_retried(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    node.inits_forgotten = 1
    await start_source(node)
    await recorder.at_least(4, GpuProbePassed)
    node.state.set_return("nvmlShutdown", 1)
    await answers_nothing(node, recorder, 999)
    await until(lambda: node.state.calls(INIT) >= 3)
    assert node.state.calls("nvmlShutdown") == 1


async def test_nvml_is_shut_down_while_the_driver_is_gone(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node)
    await recorder.at_least(4, GpuProbePassed)
    await answers_nothing(node, recorder, 9)
    await until(lambda: node.state.calls(INIT) >= 3)
    assert node.state.inits - node.state.shutdowns in (0, 1)
    await until(lambda: node.state.calls("nvmlShutdown") >= 1)


# Shutdown


async def test_nvml_is_shut_down_when_the_source_is_closed(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    await start_source(node)
    await recorder.at_least(4, GpuProbePassed)
    assert (node.state.inits, node.state.shutdowns) == (1, 0)
    # The fixture closes the source, and checks that every init is undone.


async def test_a_cancelled_source_can_be_run_again(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    source = await start_source(node)
    await recorder.at_least(4, GpuProbePassed)
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "nvml"]
    task.cancel()
    await asyncio.wait({task})
    recorder.forget()
    waits = node.state.calls("nvmlEventSetWait")
    async with asyncio.TaskGroup() as group:
        again = group.create_task(source.run())
        await recorder.at_least(4, GpuProbePassed)
        # Events before that are lost.
        await until(lambda: node.state.calls("nvmlEventSetWait") > waits)
        node.state.push_xid(1, 48)
        await recorder.first(XidReported)
        again.cancel()


async def test_no_descriptor_is_left_when_it_is_closed(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before = set(Path("/proc/self/fd").iterdir())
    node = make_node("4x-t4")
    source = await start_source(node)
    await recorder.at_least(4, GpuProbePassed)
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "nvml"]
    task.cancel()
    await asyncio.wait({task})
    assert await source.close()
    # One more than before: the file of the node's state.
    assert len(set(Path("/proc/self/fd").iterdir()) - before) <= 2
    assert caplog.records == []


async def test_a_source_that_is_cancelled_while_the_driver_is_unloaded_stops(
    make_node: MakeNode, recorder: Recorder
) -> None:
    node = make_node("4x-t4")
    async with asyncio.timeout(PATIENCE_S):
        for moment in range(12):
            recorder.forget()
            async with running_source(node, recorder.inbox):
                await recorder.at_least(4, GpuProbePassed)
                node.state.unload_driver(code=999)
                await asyncio.sleep(moment * 0.005)


async def test_a_task_that_loses_its_cancellation_is_cancelled_again() -> None:
    lost = 0

    async def fails_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise SourceError("it failed in the end")

    async def work() -> None:
        nonlocal lost
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fails_when_cancelled())
        except* SourceError:
            lost += 1
        await asyncio.Event().wait()

    task = asyncio.get_running_loop().create_task(work())
    await asyncio.sleep(0.01)
    async with asyncio.timeout(PATIENCE_S):
        await cancel_and_wait(task)
    assert (lost, task.cancelled()) == (1, True)


def test_an_existing_library_that_cannot_be_loaded_is_named_with_the_loaders_message(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "libnvidia-ml.so.1"
    broken.write_text("no library")
    needed = tmp_path / "libneeded.so"
    for path, linked in ((needed, ()), (tmp_path / "needing.so", (needed,))):
        command = [
            "cc",
            "-Wl,--no-as-needed",
            "-shared",
            "-nostdlib",
            "-x",
            "c",
            "/dev/null",
            "-x",
            "none",
            "-o",
            path,
            *linked,
        ]
        subprocess.run([*command, f"-Wl,-soname,{path.name}"], check=True)
    needed.unlink()
    for path, message in (
        (broken, f"cannot be loaded: {broken}: "),
        (tmp_path / "needing.so", "cannot be loaded: libneeded.so: cannot open shared object file"),
        (tmp_path / "none.so", f"No NVIDIA driver library was found at {tmp_path}/none.so: install"),
    ):
        with pytest.raises(LibraryMissingError, match=re.escape(message)):
            load(LibraryLocation(path))
