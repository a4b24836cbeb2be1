"""How much memory of a GPU is used, by which processes, and how an impossible list is handled."""

import pytest

from agent.model.facts import GpuCallFailed, GpuMemorySeen, GpuProbePassed
from agent.model.usage import GpuMemory, MemoryUser
from agent.simulation.nvml.state import GpuProcess
from agent.simulation.presets import MigDeviceSpec
from agent.sources.nvml.library import Handle
from agent.sources.nvml.memory import MemoryReader
from agent.sources.nvml.optional_calls import OptionalCalls
from agent.sources.nvml.readings import Readings
from tests.sources.conftest import MakeNode, StartSource
from tests.sources.recorder import Recorder
from tests.sources.simulated import Node

TWO_T4 = {"preset": "4x-t4", "gpus": 2}
MIB = 2**20
TOTAL = 15_360 * MIB
LISTS = tuple(
    f"nvmlDeviceGet{kind}RunningProcesses{version}"
    for kind in ("Compute", "Graphics", "MPSCompute")
    for version in ("", "_v2", "_v3")
)


async def next_memory(recorder: Recorder, node: Node, gpu: int = 0) -> GpuMemory:
    """Return the readings of a poll that starts after now."""
    recorder.forget()
    uuid = node.uuid(gpu)

    def seen() -> list[GpuMemory]:
        return [fact.memory for fact in recorder.of(GpuMemorySeen) if fact.gpu == uuid]

    # One may wait in the inbox, and one may be under way.
    await recorder.until(lambda: len(seen()) >= 3)
    return seen()[-1]


async def test_memory_and_every_kind_of_process_is_emitted(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_T4)
    node.state.set_processes(
        0,
        [
            GpuProcess(900, 300 * MIB),
            GpuProcess(800, 200 * MIB, kind="graphics"),
            GpuProcess(700, 100 * MIB, kind="mps"),
        ],
    )
    await start_source(node)
    memory = await next_memory(recorder, node)
    assert memory.users == (
        MemoryUser(700, 100 * MIB),
        MemoryUser(800, 200 * MIB),
        MemoryUser(900, 300 * MIB),
    )
    assert (memory.used_bytes, memory.process_info) == (600 * MIB, "ok")
    assert await next_memory(recorder, node, gpu=1) == GpuMemory(0, memory.total_bytes)


async def test_a_process_on_a_mig_device_is_emitted_with_its_instances(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node({"preset": "8x-a100", "gpus": 1})
    node.state.set_mig(0, [MigDeviceSpec(profile="1g.10gb", gi=7), MigDeviceSpec(profile="1g.10gb", gi=9)])
    node.state.set_processes(0, [GpuProcess(900, 300 * MIB, gi=9, ci=0)])
    await start_source(node)
    memory = await next_memory(recorder, node)
    assert memory.users == (MemoryUser(900, 300 * MIB, 9, 0),)


@pytest.mark.parametrize("pid", [4_211_081_216, 0])
async def test_a_list_that_was_read_shifted_claims_nothing(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, pid: int
) -> None:
    """Case J4, a."""
    node = make_node(TWO_T4)
    node.state.set_processes(0, [GpuProcess(pid, 31_794), GpuProcess(5, 5)])
    await start_source(node)
    memory = await next_memory(recorder, node)
    assert (memory.users, memory.process_info) == ((), "unreliable")


async def test_a_driver_without_the_call_is_unsupported_and_called_once(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    """Case J4, b."""
    node = make_node(TWO_T4)
    for name in LISTS:
        node.state.set_return(name, 13)
    await start_source(node)
    memory = await next_memory(recorder, node)
    assert (memory.used_bytes, memory.users, memory.process_info) == (0, (), "unsupported")
    asked = node.state.calls("nvmlDeviceGetComputeRunningProcesses_v3", gpu=0)
    await next_memory(recorder, node)
    assert node.state.calls("nvmlDeviceGetComputeRunningProcesses_v3", gpu=0) == asked == 1


async def test_a_driver_with_only_the_older_call_is_called_by_that(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_T4)
    node.state.set_return("nvmlDeviceGetComputeRunningProcesses_v3", 13)
    node.state.set_return("nvmlDeviceGetComputeRunningProcesses_v2", 0)
    node.state.set_processes(0, [GpuProcess(900, 300 * MIB)])
    await start_source(node)
    assert (await next_memory(recorder, node)).users == (MemoryUser(900, 300 * MIB),)


@pytest.mark.parametrize("kind", ["Compute", "Graphics", "MPSCompute"])
async def test_a_list_that_fails_this_time_is_not_emitted_and_marks_nothing(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, kind: str
) -> None:
    node = make_node(TWO_T4)
    node.state.set_return(f"nvmlDeviceGet{kind}RunningProcesses", 999, gpu=0)
    await start_source(node)
    await next_memory(recorder, node, gpu=1)
    assert [fact for fact in recorder.of(GpuMemorySeen) if fact.gpu == node.uuid(0)] == []
    assert [fact for fact in recorder.of(GpuProbePassed) if fact.gpu == node.uuid(0)] != []
    assert recorder.of(GpuCallFailed) == []
    node.state.set_return(f"nvmlDeviceGet{kind}RunningProcesses", 0, gpu=0)
    await next_memory(recorder, node)


async def test_a_gpu_that_is_lost_in_this_call_is_lost(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_T4)
    await start_source(node)
    await next_memory(recorder, node)
    node.state.set_return("nvmlDeviceGetComputeRunningProcesses", 15, gpu=0)
    failed = await recorder.first(GpuCallFailed)
    assert (failed.gpu, failed.code) == (node.uuid(0), 15)


@pytest.mark.parametrize(("count", "info"), [(3, "ok"), (4, "unreliable")])
def test_a_list_that_is_cut_claims_nothing(count: int, info: str) -> None:
    class Lists(Readings):
        def __init__(self) -> None:
            pass

        def memory_used(self, handle: object) -> int:
            return 9

        def _users(self, name: str, handle: object) -> tuple[MemoryUser, ...]:
            is_compute = "Compute" in name and "MPS" not in name
            return tuple(MemoryUser(pid, 1) for pid in range(1, count + 1)) if is_compute else ()

    memory = MemoryReader(Lists(), OptionalCalls(), max_users=3).read(Handle(0), total_bytes=99)
    assert memory is not None
    assert (len(memory.users), memory.process_info) == (count if info == "ok" else 0, info)
