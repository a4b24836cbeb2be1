"""The readings of a GPU in a health poll, and what a failed reading means."""

from collections.abc import Callable

import pytest

from agent.model.facts import (
    DriverUnavailable,
    GpuCallFailed,
    GpuCallOverdue,
    GpuMemorySeen,
    GpuProbePassed,
    GpuSampled,
    GpusEnumerated,
)
from agent.model.sample import GpuSample
from agent.model.structs import replace
from agent.simulation.nvml import NvmlState
from tests.sources.conftest import MakeNode, StartSource
from tests.sources.recorder import Recorder, until
from tests.sources.simulated import MS, QUICK, Node, all_probed, receives_every_xid

TWO_A100 = {"preset": "8x-a100", "gpus": 2}
TWO_T4 = {"preset": "4x-t4", "gpus": 2}

HOUR = replace(QUICK, poll_ns=3_600_000 * MS)
"""Nothing is read again unless requested."""
EACH_POLL = replace(QUICK, slow_polls=0)

READINGS = (
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetPcieReplayCounter",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkRemotePciInfo",
    "nvmlDeviceGetGpuFabricInfo",
    "nvmlDeviceGetGpuFabricInfoV",
)
UNSUPPORTED_CODES = (3, 4, 13, 25, 26)
OTHER_CODES = (1, 2, *range(5, 13), 14, *range(17, 25), *range(27, 31), 999)

HW_THERMAL_SLOWDOWN, HW_POWER_BRAKE, SW_POWER_CAP = 0x40, 0x80, 0x4


def samples(recorder: Recorder, node: Node, gpu: int) -> list[GpuSample]:
    return [fact.sample for fact in recorder.of(GpuSampled) if fact.gpu == node.uuid(gpu)]


async def next_sample(recorder: Recorder, node: Node, gpu: int = 0) -> GpuSample:
    """Return the readings of a poll that starts after now."""
    recorder.forget()
    # One may wait in the inbox, and one be under way.
    await recorder.until(lambda: len(samples(recorder, node, gpu)) >= 3)
    return samples(recorder, node, gpu)[-1]


# Readings


async def test_the_readings_of_a_poll_come_before_its_outcome(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    await start_source(node)
    await recorder.at_least(6, GpuProbePassed)
    mine = [fact for fact in recorder.facts if getattr(fact, "gpu", None) == node.uuid(0)]
    assert [type(fact) for fact in mine[:6]] == [GpuSampled, GpuMemorySeen, GpuProbePassed] * 2


async def test_a_gpu_with_links_and_row_remapping_reads_all_but_pages(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    await start_source(node)
    assert await next_sample(recorder, node) == GpuSample(
        recovery_action=0,
        ecc_uncorrected=0,
        rows_pending=False,
        rows_failed=False,
        hw_slowed=False,
        temperature_celsius=28,
        temperature_limit_celsius=89,
        links_total=12,
        pcie_width=16,
        pcie_width_max=16,
        pcie_replays=0,
    )


async def test_a_gpu_with_page_retirement_and_without_links_reads_that(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_T4)
    await start_source(node)
    sample = await next_sample(recorder, node)
    assert (sample.pages_pending, sample.rows_pending, sample.links_total) == (False, None, None)


def _ecc(state: NvmlState) -> None:
    state.set_ecc(0, 2)
    state.set_ecc(0, 3, location="sram")
    state.set_ecc(0, 40, kind="corrected")
    state.set_ecc(0, 50, counter="aggregate")


def _links(state: NvmlState) -> None:
    for link in (2, 11):
        state.set_nvlink(0, link, up=False)


CHANGES: dict[str, tuple[Callable[[NvmlState], None], dict[str, object]]] = {
    "recovery action": (lambda state: state.set_recovery_action(0, 4), {"recovery_action": 4}),
    "uncorrected errors of this driver load": (_ecc, {"ecc_uncorrected": 5}),
    "rows": (
        lambda state: state.set_remapped_rows(0, pending=True, failed=True),
        {"rows_pending": True, "rows_failed": True},
    ),
    "pages": (lambda state: state.set_pages_pending(0, pending=True), {"pages_pending": True}),
    "heat": (lambda state: state.set_clock_reasons(0, HW_THERMAL_SLOWDOWN), {"hw_slowed": True}),
    "power": (lambda state: state.set_clock_reasons(0, HW_POWER_BRAKE | 1), {"hw_slowed": True}),
    "a power cap, which is software": (
        lambda state: state.set_clock_reasons(0, SW_POWER_CAP),
        {"hw_slowed": False},
    ),
    "temperature": (lambda state: state.set_temperature(0, 93), {"temperature_celsius": 93}),
    "link width": (lambda state: state.set_pcie(0, generation=4, width=8), {"pcie_width": 8}),
    "replays": (lambda state: state.set_pcie_replays(0, 7), {"pcie_replays": 7}),
    "links": (_links, {"links_total": 12, "links_down": (2, 11)}),
    "fabric": (
        lambda state: state.set_fabric(0, "completed", status=999),
        {"fabric_state": 3, "fabric_status": 999},
    ),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_is_read_and_only_of_its_gpu(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, change: str
) -> None:
    node = make_node(TWO_A100)
    # Every reading is supported from the start: an unsupported one is read only once.
    node.state.set_pages_pending(0, pending=False)
    node.state.set_fabric(0, "completed")
    await start_source(node, EACH_POLL)
    before, other = await next_sample(recorder, node), await next_sample(recorder, node, 1)
    make, expected = CHANGES[change]
    make(node.state)
    assert await next_sample(recorder, node) == replace(before, **expected)  # type: ignore[arg-type]
    assert await next_sample(recorder, node, 1) == other


@pytest.mark.parametrize(
    ("new", "code", "old"),
    [
        ("nvmlDeviceGetCurrentClocksEventReasons", 13, "nvmlDeviceGetCurrentClocksThrottleReasons"),
        ("nvmlDeviceGetGpuFabricInfoV", 13, "nvmlDeviceGetGpuFabricInfo"),
        ("nvmlDeviceGetGpuFabricInfoV", 25, "nvmlDeviceGetGpuFabricInfo"),
    ],
)
async def test_an_older_driver_is_called_by_the_older_name(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, new: str, code: int, old: str
) -> None:
    node = make_node({"preset": "dgx-h100", "gpus": 1})
    node.state.set_return(new, code)
    node.state.set_clock_reasons(0, HW_POWER_BRAKE)
    await start_source(node, EACH_POLL)
    sample = await next_sample(recorder, node)
    assert (sample.hw_slowed, sample.fabric_state, sample.fabric_status) == (True, 3, 0)
    assert node.state.calls(new) == 1
    assert node.state.calls(old) >= 2


# Cost


async def test_what_never_changes_is_read_once(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    await start_source(node)
    await recorder.at_least(8, GpuProbePassed)
    for call in ("nvmlDeviceGetTemperatureThreshold", "nvmlDeviceGetMaxPcieLinkWidth"):
        assert node.state.calls(call) == 2


async def test_what_is_not_supported_is_read_once_and_again_after_an_init(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_T4)
    call = "nvmlDeviceGetRemappedRows"
    await start_source(node)
    await recorder.at_least(8, GpuProbePassed)
    assert node.state.calls(call) == 2
    node.state.unload_driver()
    await recorder.first(DriverUnavailable)
    node.state.load_driver()
    recorder.forget()
    await recorder.at_least(8, GpuProbePassed)
    assert node.state.calls(call) == 4


async def test_links_and_fabric_are_read_once_in_many_polls(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node({"preset": "dgx-h100", "gpus": 1})
    await start_source(node, replace(QUICK, slow_polls=10_000))
    await next_sample(recorder, node)
    sample = await next_sample(recorder, node)
    assert (sample.links_total, sample.fabric_state) == (18, 3)
    assert node.state.calls("nvmlDeviceGetGpuFabricInfoV") == 1
    # One call past the last link finds out how many there are; the topology sample reads each once, too.
    assert node.state.calls("nvmlDeviceGetNvLinkState") == 2 * 19


@pytest.mark.parametrize("trouble", ["a link is down", "the fabric is not ready", "the fabric failed"])
async def test_links_and_fabric_are_read_in_each_poll_until_they_are_healthy(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, trouble: str
) -> None:
    node = make_node({"preset": "dgx-h100", "gpus": 1})
    match trouble:
        case "a link is down":
            node.state.set_nvlink(0, 3, up=False)
        case "the fabric is not ready":
            node.state.set_fabric(0, "in_progress")
        case _:
            node.state.set_fabric(0, "completed", status=999)
    await start_source(node, replace(QUICK, slow_polls=10_000))
    await next_sample(recorder, node)
    node.state.set_nvlink(0, 3, up=True)
    node.state.set_fabric(0, "completed")
    sample = await next_sample(recorder, node)
    assert (sample.links_down, sample.fabric_state, sample.fabric_status) == ((), 3, 0)
    calls = node.state.calls("nvmlDeviceGetGpuFabricInfoV")
    await next_sample(recorder, node)
    assert node.state.calls("nvmlDeviceGetGpuFabricInfoV") == calls


async def test_an_xid_triggers_every_reading_at_once(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    source = await start_source(node, HOUR)
    await recorder.at_least(2, GpuProbePassed)
    await until(lambda: receives_every_xid(source))
    recorder.forget()
    node.state.set_recovery_action(0, 1)
    node.state.set_nvlink(0, 5, up=False)
    node.state.push_xid(0, 119)
    fact = await recorder.first(GpuSampled)
    assert (fact.gpu, fact.sample.recovery_action, fact.sample.links_down) == (node.uuid(0), 1, (5,))
    await recorder.first(GpuProbePassed)
    assert samples(recorder, node, 1) == []


async def test_a_request_triggers_every_reading_of_every_gpu(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    source = await start_source(node, HOUR)
    await recorder.at_least(2, GpuProbePassed)
    recorder.forget()
    node.state.set_nvlink(1, 5, up=False)
    counts = node.state.calls("nvmlDeviceGetCount")
    source.request()
    await all_probed(recorder, node)
    assert samples(recorder, node, 1)[0].links_down == (5,)
    assert node.state.calls("nvmlDeviceGetCount") == counts + 1


# Which links count


async def test_links_that_lead_nowhere_do_not_count(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    for link in range(12):
        node.state.set_nvlink(0, link, up=False)
        node.state.set_number(0, "link_peer", 0, link)
    await start_source(node, EACH_POLL)
    sample = await next_sample(recorder, node)
    assert (sample.links_total, sample.links_down) == (0, ())


async def test_a_link_counts_once_it_was_up(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    for link in range(12):
        node.state.set_number(0, "link_peer", 0, link)
        node.state.set_nvlink(0, link, up=link < 4)
    await start_source(node, EACH_POLL)
    assert (await next_sample(recorder, node)).links_total == 4
    node.state.set_nvlink(0, 2, up=False)
    sample = await next_sample(recorder, node)
    assert (sample.links_total, sample.links_down) == (4, (2,))


async def test_a_link_that_the_gpu_does_not_have_is_read_once(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node({"preset": "8x-a100", "gpus": 1})
    node.state.set_number(0, "link_state", None, 7)
    await start_source(node, EACH_POLL)
    await next_sample(recorder, node)
    sample = await next_sample(recorder, node)
    assert (sample.links_total, sample.links_down) == (11, ())


@pytest.mark.parametrize(("code", "then"), [(3, (11, ())), (2, (11, ())), (999, (12, (0,)))])
async def test_a_link_that_is_down_does_not_count_while_its_peer_is_unknown(
    make_node: MakeNode,
    start_source: StartSource,
    recorder: Recorder,
    code: int,
    then: tuple[int, tuple[int, ...]],
) -> None:
    node = make_node(TWO_A100)
    node.state.set_nvlink(0, 0, up=False)
    node.state.set_return("nvmlDeviceGetNvLinkRemotePciInfo", code)
    await start_source(node, EACH_POLL)
    sample = await next_sample(recorder, node)
    assert (sample.links_total, sample.links_down) == (11, ())
    node.state.clear_return("nvmlDeviceGetNvLinkRemotePciInfo")
    sample = await next_sample(recorder, node)
    assert (sample.links_total, sample.links_down) == then


async def test_links_are_unknown_while_reading_one_of_them_fails(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    node.state.set_nvlink(0, 1, up=False)
    await start_source(node, EACH_POLL)
    assert (await next_sample(recorder, node)).links_down == (1,)
    node.state.set_return("nvmlDeviceGetNvLinkState", 999)
    sample = await next_sample(recorder, node)
    assert (sample.links_total, sample.links_down) == (None, ())
    node.state.clear_return("nvmlDeviceGetNvLinkState")
    assert (await next_sample(recorder, node)).links_down == (1,)


# Failed readings


@pytest.mark.parametrize("code", [*UNSUPPORTED_CODES, *OTHER_CODES])
async def test_a_reading_that_fails_is_unknown_and_no_finding(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, code: int
) -> None:
    node = make_node(TWO_A100)
    for call in READINGS:
        node.state.set_return(call, code, gpu=1)
    await start_source(node, EACH_POLL)
    await recorder.until(lambda: len(samples(recorder, node, 1)) >= 3)
    assert set(samples(recorder, node, 1)) == {GpuSample(temperature_celsius=28)}
    await all_probed(recorder, node)
    assert (recorder.of(GpuCallFailed), recorder.of(DriverUnavailable)) == ([], [])
    assert len(recorder.of(GpusEnumerated)) == 1


@pytest.mark.parametrize("code", UNSUPPORTED_CODES)
@pytest.mark.parametrize("call", [call for call in READINGS if "NvLink" not in call])
async def test_a_reading_with_a_code_for_unsupported_is_not_read_again(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, call: str, code: int
) -> None:
    node = make_node({"preset": "8x-a100", "gpus": 1})
    for each in READINGS:
        node.state.set_return(each, code)
    await start_source(node, EACH_POLL)
    await next_sample(recorder, node)
    await next_sample(recorder, node)
    assert node.state.calls(call) == 1


@pytest.mark.parametrize("code", [2, 17, 999])
async def test_a_reading_that_fails_is_read_once_a_poll(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, code: int
) -> None:
    node = make_node({"preset": "8x-a100", "gpus": 1})
    for call in READINGS:
        node.state.set_return(call, code)
    await start_source(node, EACH_POLL)
    await recorder.at_least(5, GpuProbePassed)
    polls = node.state.calls("nvmlDeviceGetTemperature")
    for call in READINGS:
        if "NvLink" not in call:
            assert node.state.calls(call) <= polls
    node.state.clear_faults()
    assert (await next_sample(recorder, node)).recovery_action == 0


@pytest.mark.parametrize("code", [15, 16])
@pytest.mark.parametrize("call", [call for call in READINGS if not call.endswith(("Throttle", "FabricInfo"))])
async def test_any_reading_may_find_that_a_gpu_is_lost_or_to_be_reset(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder, call: str, code: int
) -> None:
    node = make_node(TWO_A100)
    if "Throttle" in call:
        node.state.set_return("nvmlDeviceGetCurrentClocksEventReasons", 13)
    if "RemotePci" in call:
        node.state.set_nvlink(1, 0, up=False)
    node.state.set_return(call, code, gpu=1)
    await start_source(node, EACH_POLL)
    fact = await recorder.first(GpuCallFailed)
    assert (fact.gpu, fact.code) == (node.uuid(1), code)
    assert fact.call.startswith(call)
    recorder.forget()
    await recorder.at_least(2, GpuProbePassed)
    assert {fact.gpu for fact in recorder.of(GpuProbePassed)} == {node.uuid(0)}
    assert recorder.of(DriverUnavailable) == []


async def test_only_the_recovery_action_is_read_of_a_gpu_whose_calls_fail(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    node.state.set_recovery_action(1, 2)
    node.state.set_return("nvmlDeviceGetMemoryInfo", 999, gpu=1)
    await start_source(node)
    fact = await recorder.first(GpuSampled, lambda fact: fact.gpu == node.uuid(1))
    assert fact.sample == GpuSample(recovery_action=2)
    failed = await recorder.first(GpuCallFailed)
    assert recorder.facts.index(fact) < recorder.facts.index(failed)
    assert node.state.calls("nvmlDeviceGetTotalEccErrors", gpu=1) == 0


async def test_the_recovery_action_of_a_gpu_whose_calls_fail_may_find_that_it_is_to_be_reset(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    node.state.set_return("nvmlDeviceGetMemoryInfo", 999, gpu=1)
    node.state.set_return("nvmlDeviceGetFieldValues", 16, gpu=1)
    await start_source(node)
    assert (await recorder.first(GpuCallFailed)).code == 16
    assert samples(recorder, node, 1) == []


async def test_a_lost_gpu_is_not_sampled(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    node.state.set_return("nvmlDeviceGetMemoryInfo", 15, gpu=1)
    await start_source(node)
    await recorder.at_least(2, GpuCallFailed)
    assert node.state.calls("nvmlDeviceGetFieldValues", gpu=1) == 0
    assert samples(recorder, node, 1) == []


async def test_a_reading_that_hangs_is_emitted_like_any_other_call(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    await start_source(node, replace(QUICK, call_deadline_ns=150 * MS))
    await recorder.at_least(2, GpuProbePassed)
    node.state.hang(function="nvmlDeviceGetRemappedRows", gpu=1)
    overdue = await recorder.first(GpuCallOverdue)
    assert (overdue.gpu, overdue.call) == (node.uuid(1), "nvmlDeviceGetRemappedRows")
    node.state.release(function="nvmlDeviceGetRemappedRows", gpu=1)
    recorder.forget()
    await recorder.first(GpuProbePassed, lambda fact: fact.gpu == node.uuid(1))


async def test_a_gpu_without_a_readable_inforom_is_listed_without_it(
    make_node: MakeNode, start_source: StartSource, recorder: Recorder
) -> None:
    node = make_node(TWO_A100)
    node.state.set_return("nvmlDeviceGetInforomImageVersion", 14, gpu=1)
    node.state.set_return("nvmlDeviceGetSerial", 999, gpu=1)
    await start_source(node)
    good, bad = (await recorder.first(GpusEnumerated)).gpus
    assert (good.inforom, good.serial) == ("G506.0212.00.02", "1321620000000")
    assert (bad.inforom, bad.serial, bad.part_number) == (None, None, "692-2G506-0212-002")
    await until(lambda: recorder.of(GpuProbePassed) != [])
    assert recorder.of(GpuCallFailed) == []
