"""The NVML source over the simulated library, through the real pynvml."""

from agent.model.facts import DriverReady, GpuProbePassed, GpusEnumerated
from tests.sources.conftest import MakeNode, StartSource
from tests.sources.recorder import Recorder


async def test_every_gpu_is_listed_and_probed_at_start(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node("8x-a100")
    await start_source(node)
    await recorder.until(lambda: len({fact.gpu for fact in recorder.of(GpuProbePassed)}) == 8)
    listed = recorder.of(GpusEnumerated)
    assert len(listed) == 1
    assert [gpu.uuid for gpu in listed[0].gpus] == node.uuids()
    assert len(recorder.of(DriverReady)) == 1
