"""NVML's own events of GPUs bound and unbound: received once where supported, and never needed."""

import pytest

from agent.model.facts import (
    NVML,
    DriverCallOverdue,
    DriverUnavailable,
    GpuCallFailed,
    GpuProbePassed,
    GpuRebound,
    XidReported,
)
from agent.sources.nvml.hotplug import MAX_AT_ONCE, pci_of
from tests.sources.conftest import MakeNode, StartSource
from tests.sources.nvml.test_sampling import HOUR, TWO_A100
from tests.sources.recorder import Recorder, until
from tests.sources.simulated import all_probed, receives_every_xid

CREATE, REGISTER, WAIT, FREE = (
    "nvmlSystemEventSetCreate",
    "nvmlSystemRegisterEvents",
    "nvmlSystemEventSetWait",
    "nvmlSystemEventSetFree",
)


async def test_a_driver_without_such_events_is_called_once(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    await start_source(node)
    await recorder.at_least(4, GpuProbePassed)
    node.state.unload_driver()
    await recorder.first(DriverUnavailable)
    node.state.load_driver()
    recorder.forget()
    await recorder.at_least(4, GpuProbePassed)
    assert [node.state.calls(call) for call in (CREATE, REGISTER, WAIT, FREE)] == [1, 0, 0, 0]


@pytest.mark.parametrize("bound", [True, False])
async def test_a_gpu_that_is_bound_or_unbound_is_emitted_and_every_gpu_is_probed(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, bound: bool
) -> None:
    node = make_node(TWO_A100)
    node.state.enable_system_events()
    await start_source(node, HOUR)
    await until(lambda: node.state.calls(WAIT) > 0)
    await recorder.at_least(2, GpuProbePassed)
    recorder.forget()
    node.state.push_rebind(1, bound=bound)
    assert await recorder.first(GpuRebound) == GpuRebound(pci="0000:0f:00.0", bound=bound, source=NVML)
    await all_probed(recorder, node)


async def test_more_events_than_are_read_at_once_are_all_emitted(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node({"preset": "8x-a100", "gpus": 1})
    node.state.enable_system_events()
    await start_source(node)
    await until(lambda: node.state.calls(WAIT) > 0)
    for _ in range(MAX_AT_ONCE + 1):
        node.state.push_rebind(0, bound=False)
    node.state.push_rebind(0, bound=True)
    await recorder.first(GpuRebound, lambda fact: fact.bound)


async def test_they_are_registered_for_once_in_a_process(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    node.state.enable_system_events()
    source = await start_source(node)
    await until(lambda: node.state.calls(WAIT) > 0)
    node.state.unload_driver(code=999)
    await recorder.first(DriverUnavailable)
    node.state.load_driver()
    recorder.forget()
    await recorder.at_least(2, GpuProbePassed)
    await until(lambda: receives_every_xid(source))
    waits = node.state.calls(WAIT)
    node.state.push_xid(0, 79)
    await recorder.first(XidReported)
    assert node.state.calls(CREATE) == node.state.calls(REGISTER) == 1
    assert node.state.calls(WAIT) == waits


@pytest.mark.parametrize("code", [1, 2, 3, 4, 9, 13, 15, 16, 25, 999])
@pytest.mark.parametrize("call", [CREATE, REGISTER, WAIT])
async def test_any_error_stops_them_and_is_no_finding(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, call: str, code: int
) -> None:
    node = make_node(TWO_A100)
    node.state.enable_system_events()
    node.state.set_return(call, code)
    source = await start_source(node)
    await until(lambda: node.state.calls(call) > 0 and receives_every_xid(source))
    await recorder.at_least(4, GpuProbePassed)
    node.state.push_xid(0, 79)
    await recorder.first(XidReported)
    assert node.state.calls(call) == 1
    assert recorder.of(GpuCallFailed) == []
    assert recorder.of(DriverUnavailable) == []
    assert recorder.of(DriverCallOverdue) == []


def test_an_address_is_unpacked_as_nvml_packs_it() -> None:
    assert pci_of(0x3B00) == "0000:3b:00.0"
    assert pci_of(0x0001_C1_1F) == "0001:c1:1f.0"
