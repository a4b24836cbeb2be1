"""How the return codes of a GPU's calls are reported."""

import pytest

from agent.model.facts import DriverUnavailable, GpuCallFailed, GpuProbePassed, GpusEnumerated
from agent.model.structs import replace
from tests.sources.conftest import MakeNode, StartSource
from tests.sources.recorder import Recorder, until
from tests.sources.simulated import MS, QUICK, all_probed, receives_every_xid

BENIGN = (3, 4, 13)
FINDINGS = (1, 2, 5, 6, 7, 8, 9, 10, 11, 12, *range(14, 31), 999)
TWO_T4 = {"preset": "4x-t4", "gpus": 2}


@pytest.mark.parametrize("code", BENIGN)
@pytest.mark.parametrize("call", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetTemperature"])
async def test_an_unavailable_answer_is_no_finding(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, call: str, code: int
) -> None:
    node = make_node(TWO_T4)
    node.state.set_return(call, code)
    await start_source(node)
    await recorder.at_least(4, GpuProbePassed)
    assert recorder.of(GpuCallFailed) == []


@pytest.mark.parametrize("code", FINDINGS)
async def test_any_other_code_is_emitted_for_that_gpu_alone(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, code: int
) -> None:
    node = make_node(TWO_T4)
    await start_source(node)
    await recorder.at_least(2, GpuProbePassed)
    node.state.set_return("nvmlDeviceGetTemperature", code, gpu=1)
    fact = await recorder.first(GpuCallFailed)
    assert (fact.gpu, fact.code, fact.call) == (node.uuid(1), code, "nvmlDeviceGetTemperature")
    assert f"(code {code})" in fact.message
    recorder.forget()
    await recorder.until(
        lambda: len(recorder.of(GpuProbePassed)) >= 3 and len(recorder.of(GpuCallFailed)) >= 2
    )
    assert {fact.gpu for fact in recorder.of(GpuProbePassed)} == {node.uuid(0)}
    assert {(fact.gpu, fact.code) for fact in recorder.of(GpuCallFailed)} == {(node.uuid(1), code)}
    assert recorder.of(DriverUnavailable) == []
    assert recorder.of(GpusEnumerated) == []
    assert node.state.inits == 1


@pytest.mark.parametrize("code", [15, 16])
async def test_every_gpu_that_is_lost_does_not_mean_that_the_driver_is(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, code: int
) -> None:
    node = make_node(TWO_T4)
    await start_source(node)
    await recorder.at_least(2, GpuProbePassed)
    for gpu in (0, 1):
        node.state.set_return(None, code, gpu=gpu)
    await recorder.until(lambda: {fact.gpu for fact in recorder.of(GpuCallFailed)} == set(node.uuids()))
    recorder.forget()
    await recorder.at_least(4, GpuCallFailed)
    assert recorder.of(DriverUnavailable) == []
    assert node.state.inits == 1


async def test_a_probe_passes_again_once_the_calls_do(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_T4)
    node.state.set_return("nvmlDeviceGetTemperature", 15, gpu=0)
    await start_source(node)
    await recorder.first(GpuCallFailed)
    node.state.clear_return("nvmlDeviceGetTemperature", gpu=0)
    await recorder.first(GpuProbePassed, lambda fact: fact.gpu == node.uuid(0))


@pytest.mark.parametrize("code", [1, 9, 18, 999])
async def test_an_unloaded_driver_is_never_emitted_as_the_fault_of_a_gpu(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, code: int
) -> None:
    node = make_node("8x-a100")
    await start_source(node)
    for _ in range(5):
        recorder.forget()
        await all_probed(recorder, node)
        node.state.unload_driver(code=code)
        await recorder.first(DriverUnavailable)
        assert recorder.of(GpuCallFailed) == []
        node.state.load_driver()


@pytest.mark.parametrize("code", [1, 9, 18, 999])
async def test_gpus_that_fail_like_a_driver_that_is_gone_are_emitted_once_another_one_answers(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, code: int
) -> None:
    node = make_node("8x-a100")
    source = await start_source(node, replace(QUICK, poll_ns=3_600_000 * MS))
    await all_probed(recorder, node)
    await until(lambda: receives_every_xid(source))
    recorder.forget()
    for gpu in (2, 5):
        node.state.set_return(None, code, gpu=gpu)
    node.state.push_xid(2, 31)
    # No probe was due; the failure of one GPU triggered probes of the others, which found the second.
    await recorder.until(
        lambda: {fact.gpu for fact in recorder.of(GpuCallFailed)} == {node.uuid(2), node.uuid(5)}
    )
    assert recorder.of(DriverUnavailable) == []
    assert {fact.gpu for fact in recorder.of(GpuProbePassed)} <= set(node.uuids()) - {
        node.uuid(2),
        node.uuid(5),
    }
