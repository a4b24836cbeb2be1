"""The driver is released completely on request, and used again after a resume."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest

from agent.model.facts import (
    DriverCallAnswered,
    DriverCallOverdue,
    DriverReady,
    DriverReleased,
    DriverUnavailable,
    Fact,
    GpuCallOverdue,
    GpuProbePassed,
    GpusEnumerated,
    XidReported,
)
from agent.model.structs import replace
from agent.simulation.presets import load_preset
from agent.simulation.roots import write_dev
from agent.sources.nvml.source import NvmlSettings, NvmlSource
from tests.sources.conftest import MakeNode, StartSource
from tests.sources.recorder import Recorder, until
from tests.sources.simulated import MS, QUICK, Node, all_probed, receives_every_xid

INIT = "nvmlInitWithFlags"
HASTY = replace(QUICK, call_deadline_ns=150 * MS)


def node_with_devices(make_node: MakeNode, hardware: str = "4x-t4") -> Node:
    node = make_node(hardware)
    write_dev(load_preset(hardware), node.directory / "dev")
    return node


def open_devices(node: Node) -> set[str]:
    """The device doubles that any thread of this process has open, whichever table they are in."""
    found = set()
    for link in Path("/proc/self/task").glob("*/fd/*"):
        with suppress(OSError):
            found.add(str(link.readlink()))
    prefix = f"{node.directory}/dev/"
    return {path.removeprefix(prefix) for path in found if path.startswith(prefix)}


def calls_of_any_kind(node: Node) -> int:
    names = ("nvmlInitWithFlags", "nvmlDeviceGetCount", "nvmlEventSetWait", "nvmlDeviceGetTemperature")
    return sum(node.state.calls(name) for name in names)


async def passed(recorder: Recorder, node: Node) -> None:
    recorder.forget()
    await all_probed(recorder, node)


async def running(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, settings: NvmlSettings = QUICK
) -> tuple[Node, NvmlSource]:
    """A source all of whose GPUs passed a probe."""
    node = node_with_devices(make_node)
    source = await start_source(node, settings)
    await passed(recorder, node)
    return node, source


async def released(source: NvmlSource, recorder: Recorder) -> None:
    """Release the driver and wait for the fact."""
    source.release()
    await recorder.first(DriverReleased)


async def test_a_running_source_has_the_drivers_files_open(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = node_with_devices(make_node)
    await start_source(node)
    await passed(recorder, node)
    assert open_devices(node) == {"nvidiactl", "nvidia0", "nvidia1", "nvidia2", "nvidia3"}


async def test_a_release_is_emitted_when_no_file_of_the_driver_is_open(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node, source = await running(make_node, start_source, recorder)
    await released(source, recorder)
    assert open_devices(node) == set()
    assert node.state.inits == node.state.shutdowns == 1


async def test_nothing_is_called_while_the_driver_is_released(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node, source = await running(make_node, start_source, recorder)
    await released(source, recorder)
    recorder.forget()
    calls = calls_of_any_kind(node)
    source.release()
    source.request()
    await asyncio.sleep(5 * QUICK.poll_ns / 1e9)
    assert calls_of_any_kind(node) == calls
    assert recorder.facts == []


async def test_a_resumed_driver_is_emitted_as_at_the_start_and_its_xids_are_received(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node, source = await running(make_node, start_source, recorder)
    await released(source, recorder)
    recorder.forget()
    source.resume()
    await all_probed(recorder, node)
    assert [type(fact) for fact in recorder.facts[:2]] == [DriverReady, GpusEnumerated]
    await until(lambda: receives_every_xid(source))
    node.state.push_xid(2, 79)
    assert (await recorder.first(XidReported)).gpu == node.uuid(2)


async def test_it_can_be_released_and_resumed_repeatedly(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = node_with_devices(make_node)
    source = await start_source(node)
    for round_ in range(1, 6):
        await passed(recorder, node)
        source.release()
        await recorder.first(DriverReleased)
        source.resume()
        source.resume()
        assert node.state.shutdowns == round_


async def test_changes_meanwhile_are_emitted_at_the_resume(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node, source = await running(make_node, start_source, recorder)
    await released(source, recorder)
    node.state.hide_gpu(1)
    recorder.forget()
    source.resume()
    gpus = (await recorder.first(GpusEnumerated)).gpus
    assert [gpu.uuid for gpu in gpus] == [node.uuid(0), node.uuid(2), node.uuid(3)]


async def test_a_missing_driver_at_the_resume_is_emitted_and_waited_for(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = node_with_devices(make_node)
    node.state.unload_driver()
    source = await start_source(node)
    before = await recorder.first(DriverUnavailable)
    node.state.load_driver()
    await passed(recorder, node)
    await released(source, recorder)
    node.state.unload_driver()
    recorder.forget()
    source.resume()
    assert await recorder.first(DriverUnavailable) == before
    node.state.load_driver()
    await passed(recorder, node)


# From other states


async def test_a_source_that_waits_for_the_driver_can_be_released(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = node_with_devices(make_node)
    node.state.unload_driver()
    source = await start_source(node)
    await recorder.first(DriverUnavailable)
    await released(source, recorder)
    calls = node.state.calls(INIT)
    await asyncio.sleep(5 * QUICK.init_retry_ns / 1e9)
    assert node.state.calls(INIT) == calls


async def test_a_source_that_starts_released_makes_no_call_and_emits_the_release(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = node_with_devices(make_node)
    source = await start_source(node, released=True)
    await recorder.first(DriverReleased)
    await source.wait_first_outcome()
    assert node.state.calls(INIT) == 0
    source.resume()
    await passed(recorder, node)


async def test_a_restarted_source_stays_released(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node, source = await running(make_node, start_source, recorder)
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "nvml"]
    task.cancel()
    await asyncio.wait({task})
    source.release()
    recorder.forget()
    async with asyncio.TaskGroup() as group:
        again = group.create_task(source.run())
        await recorder.first(DriverReleased)
        assert open_devices(node) == set()
        again.cancel()


# Calls that hang


def kinds(recorder: Recorder) -> set[type[Fact]]:
    return {type(fact) for fact in recorder.facts}


async def test_a_gpu_that_hangs_delays_the_release_and_is_emitted_and_logged(
    make_node: MakeNode,
    start_source: StartSource,
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    node, source = await running(make_node, start_source, recorder, HASTY)
    node.state.hang(gpu=1)
    await until(lambda: node.state.hangs_entered == 1)
    source.release()
    assert (await recorder.first(GpuCallOverdue)).gpu == node.uuid(1)
    await until(lambda: "Could not release the driver yet" in caplog.text)
    await asyncio.sleep(5 * QUICK.init_retry_ns / 1e9)
    assert DriverReleased not in kinds(recorder)
    assert node.state.shutdowns == 0
    (record,) = [
        one for one in caplog.records if one.message.startswith("Could not release the driver yet: ")
    ]
    assert "calls under way" in str(record.__dict__)
    node.state.release(gpu=1)
    await recorder.first(DriverReleased)
    assert open_devices(node) == set()
    assert node.state.inits == node.state.shutdowns == 1


async def test_an_event_wait_that_hangs_delays_the_release_and_is_emitted(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node, source = await running(make_node, start_source, recorder, HASTY)
    node.state.hang(function="nvmlEventSetWait_v2")
    await until(lambda: node.state.hangs_entered == 1)
    source.release()
    assert (await recorder.first(DriverCallOverdue)).call == "nvmlEventSetWait_v2"
    assert DriverReleased not in kinds(recorder)
    node.state.release(function="nvmlEventSetWait_v2")
    await recorder.first(DriverReleased)
    await recorder.first(DriverCallAnswered)


async def test_an_init_that_hangs_is_undone_when_it_returns(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = node_with_devices(make_node)
    node.state.hang(function=INIT)
    source = await start_source(node, HASTY)
    await until(lambda: node.state.hangs_entered == 1)
    source.release()
    await source.wait_first_outcome()
    node.state.release(function=INIT)
    await recorder.first(DriverReleased)
    assert node.state.inits == node.state.shutdowns == 1
    assert GpusEnumerated not in kinds(recorder)


async def test_a_driver_that_could_not_be_released_stays_in_use_when_it_is_resumed(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node, source = await running(
        make_node, start_source, recorder, replace(HASTY, first_probe_wait_ns=100 * MS)
    )
    node.state.hang(gpu=1)
    await until(lambda: node.state.hangs_entered == 1)
    source.release()
    await recorder.first(GpuCallOverdue)
    source.resume()
    recorder.forget()
    others = set(node.uuids()) - {node.uuid(1)}
    await recorder.until(lambda: others <= {fact.gpu for fact in recorder.of(GpuProbePassed)})
    assert (node.state.inits, node.state.shutdowns) == (1, 0)
    node.state.release(gpu=1)
    await passed(recorder, node)
    assert recorder.of(DriverReleased) == []


async def test_a_failed_shutdown_is_retried_until_it_succeeds(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node, source = await running(make_node, start_source, recorder)
    node.state.set_return("nvmlShutdown", 999)
    source.release()
    await until(lambda: node.state.calls("nvmlShutdown") >= 3)
    assert DriverReleased not in kinds(recorder)
    node.state.clear_return("nvmlShutdown")
    await recorder.first(DriverReleased)


async def test_a_file_that_the_library_leaves_open_is_named_and_delays_the_release(
    make_node: MakeNode,
    start_source: StartSource,
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    node, source = await running(make_node, start_source, recorder)
    path = node.directory / "dev" / "nvidia2"
    descriptor = await source._threads.first.call(lambda: os.open(path, os.O_RDONLY))
    source.release()
    await until(lambda: str(path) in str([record.__dict__ for record in caplog.records]))
    assert DriverReleased not in kinds(recorder)
    await source._threads.first.call(lambda: os.close(descriptor))
    await recorder.first(DriverReleased)
