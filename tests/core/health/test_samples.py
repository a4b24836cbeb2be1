"""What readings show: each rule by its values, and what they raise, ease and restore."""

from collections.abc import Sequence
from typing import Any

import pytest

from agent.core.health.samples import (
    RECOVER_IMEX_DOMAIN,
    RECOVERY_ACTIONS,
    RULES,
    UNKNOWN,
    Verdict,
    Window,
    evaluate,
)
from agent.model.facts import NVML, GpuSampled
from agent.model.health import Condition, ConditionKey, Evidence, Reason, Recovery
from agent.model.policy import Policy
from agent.model.structs import replace
from tests.core.build import U0, U1, Node, S, enumerated, failed, gpu, healthy_node, passed, place, ready
from tests.core.polls import BAD, HEALTHY, NOTHING, bad, blind_poll, poll, read, reasons, sample

Q = 60 * S
FEW = Policy(recovery_clean_probes=3, recovery_quiet_ns=Q, slowdown_window_polls=10)

FLIPPING = {
    Reason.RECOVERY_ACTION,
    Reason.ROW_REMAP_FAILED,
    Reason.FABRIC_NOT_READY,
    Reason.FABRIC_FAILED,
}


def verdict(reason: Reason, *, slowed: Sequence[bool] = (), policy: Policy = FEW, **readings: Any) -> Verdict:
    return evaluate(sample(**readings), Window(tuple(slowed)), policy)[reason]


# Each rule by its values


def test_there_is_a_bad_reading_here_for_every_rule() -> None:
    assert BAD.keys() == RULES.keys()


@pytest.mark.parametrize("reason", RULES)
def test_a_healthy_reading_is_healthy_and_none_is_unknown(reason: Reason) -> None:
    assert evaluate(HEALTHY, Window(), FEW)[reason] is None
    assert evaluate(NOTHING, Window(), FEW)[reason] is UNKNOWN


@pytest.mark.parametrize("reason", RULES)
def test_a_bad_reading_raises_its_reason_and_no_other(reason: Reason) -> None:
    verdicts = evaluate(bad(reason), Window(), FEW)
    assert {each for each, message in verdicts.items() if isinstance(message, str)} == {reason}


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (1, "The driver asks to reset the GPU"),
        (2, "The driver asks to reboot the node"),
        (3, "The driver asks to drain P2P traffic"),
        (4, "The driver asks to drain the GPU and reset it"),
        (5, "The driver asks to recover the IMEX domain"),
        (6, "The driver asks to reset the bus"),
        (7, "The driver asks to reboot the system"),
        (8, "The driver asks to take recovery action 8"),
    ],
)
def test_the_recovery_action_is_reported_in_words(action: int, message: str) -> None:
    reason = Reason.IMEX_DOMAIN_DOWN if action == RECOVER_IMEX_DOMAIN else Reason.RECOVERY_ACTION
    assert verdict(reason, recovery_action=action) == message
    assert (action in RECOVERY_ACTIONS) == (action < 8)


@pytest.mark.parametrize(
    ("reason", "readings", "message"),
    [
        (
            Reason.ECC_UNCORRECTED,
            {"ecc_uncorrected": 1},
            "1 uncorrected ECC errors since the driver was loaded",
        ),
        (Reason.ROW_REMAP_PENDING, {"rows_pending": True}, "Memory is repaired at the next reset of the GPU"),
        (
            Reason.ROW_REMAP_PENDING,
            {"pages_pending": True},
            "Memory is repaired at the next reset of the GPU",
        ),
        (
            Reason.ROW_REMAP_PENDING,
            {"rows_pending": None, "pages_pending": True},
            "Memory is repaired at the next reset of the GPU",
        ),
        (Reason.ROW_REMAP_PENDING, {"rows_pending": None}, None),
        (Reason.ROW_REMAP_PENDING, {"pages_pending": None}, None),
        (
            Reason.ROW_REMAP_FAILED,
            {"rows_failed": True},
            "Memory could not be repaired: a row remapping failed",
        ),
        (Reason.NVLINK_DOWN, {"links_down": (3, 7)}, "2 of 18 NVLinks are down: 3, 7"),
        (Reason.NVLINK_DOWN, {"links_down": (3,), "links_total": None}, UNKNOWN),
        (Reason.PCIE_DEGRADED, {"pcie_width": 8}, "The PCIe link is x8 of x16"),
        (Reason.PCIE_DEGRADED, {"pcie_width": 16}, None),
        (Reason.PCIE_DEGRADED, {"pcie_width": None}, UNKNOWN),
        (Reason.PCIE_DEGRADED, {"pcie_width_max": None}, UNKNOWN),
        (
            Reason.FABRIC_NOT_READY,
            {"fabric_state": 1},
            "The NVSwitch fabric is not started, so CUDA cannot start",
        ),
        (
            Reason.FABRIC_NOT_READY,
            {"fabric_state": 2},
            "The NVSwitch fabric is in progress, so CUDA cannot start",
        ),
        (
            Reason.FABRIC_NOT_READY,
            {"fabric_state": 9},
            "The NVSwitch fabric is in state 9, so CUDA cannot start",
        ),
        (Reason.FABRIC_NOT_READY, {"fabric_state": 0}, None),
        (
            Reason.FABRIC_FAILED,
            {"fabric_status": 999},
            "The NVSwitch fabric was set up with error 999, so CUDA cannot start",
        ),
        (Reason.FABRIC_FAILED, {"fabric_state": 2, "fabric_status": 999}, None),
        (Reason.FABRIC_FAILED, {"fabric_state": 0, "fabric_status": 999}, None),
        (Reason.FABRIC_FAILED, {"fabric_state": None}, UNKNOWN),
        (Reason.FABRIC_FAILED, {"fabric_status": None}, UNKNOWN),
        (Reason.THERMAL, {"temperature_celsius": 90}, "90 C, the GPU slows down at 90 C"),
        (Reason.THERMAL, {"temperature_celsius": 89}, None),
        (Reason.THERMAL, {"temperature_celsius": 95, "hw_slowed": None}, "95 C, the GPU slows down at 90 C"),
        (Reason.THERMAL, {"hw_slowed": None}, None),
        (Reason.THERMAL, {"hw_slowed": None, "temperature_celsius": None}, UNKNOWN),
        (Reason.THERMAL, {"hw_slowed": None, "temperature_limit_celsius": None}, UNKNOWN),
        (Reason.THERMAL, {"temperature_celsius": None}, None),
    ],
)
def test_a_reading_has_its_verdict(reason: Reason, readings: dict[str, Any], message: Verdict) -> None:
    assert verdict(reason, **readings) == message


# Clocks held down, as a share of a window


@pytest.mark.parametrize(
    ("slow", "fast", "expected"),
    [
        (6, 4, "Hardware held the clocks down in 60 % of the last polls"),
        (5, 5, None),
        (10, 0, "Hardware held the clocks down in 100 % of the last polls"),
        (9, 0, UNKNOWN),
        (6, 3, UNKNOWN),
        (5, 4, None),
        (1, 1, None),
        (1, 0, UNKNOWN),
        (0, 1, None),
        (0, 0, None),
    ],
)
def test_a_slowdown_is_evaluated_over_a_whole_window(slow: int, fast: int, expected: Verdict) -> None:
    slowed = [True] * slow + [False] * fast
    assert verdict(Reason.THERMAL, slowed=slowed) == expected


def test_a_share_is_rounded_down() -> None:
    assert Window((True, True, False)).share_percent == 66
    assert Window().share_percent == 0


def test_a_window_forgets_its_oldest_polls() -> None:
    window = Window((True, False))
    assert window.with_reading(slowed=False, length=3).slowed == (True, False, False)
    assert window.with_reading(slowed=True, length=2).slowed == (False, True)
    assert window.with_reading(slowed=True, length=1).slowed == (True,)


def test_clocks_held_down_for_most_of_a_window_are_a_condition_until_they_are_not() -> None:
    node = healthy_node(gpu(0), policy=FEW)
    for number in range(10):
        assert reasons(node) == set()
        node.apply(*poll(hw_slowed=number >= 4))
    (condition,) = node.conditions(Reason.THERMAL)
    assert (condition.flips, condition.evidence, condition.lasts) == (False, Evidence.SOFT, True)
    assert node.unhealthy() == set()
    node.apply(*poll(hw_slowed=True))
    for _ in range(4):
        node.apply(*poll())
    assert [item.lasts for item in node.conditions()] == [True]
    node.apply(*poll())
    assert [item.lasts for item in node.conditions()] == [False]


def test_a_poll_that_cannot_read_clocks_does_not_count_in_the_window() -> None:
    node = healthy_node(gpu(0), policy=FEW)
    node.apply(*poll(hw_slowed=True), *poll(hw_slowed=None), *poll(hw_slowed=True))
    assert node.state.slowdowns[U0].slowed == (True, True)


def test_windows_of_two_gpus_are_apart() -> None:
    node = healthy_node(gpu(0), gpu(1), policy=FEW)
    for _ in range(10):
        node.apply(*poll(U0, hw_slowed=True), *poll(U1))
    assert (reasons(node, U0), reasons(node, U1)) == ({Reason.THERMAL}, set())


def test_a_slowdown_known_before_a_restart_is_not_over_after_one_more_slow_poll() -> None:
    node = healthy_node(gpu(0), policy=FEW)
    for _ in range(10):
        node.apply(*poll(hw_slowed=True))
    again = node.restarted()
    again.apply(ready(), *poll(hw_slowed=True))
    (condition,) = again.conditions()
    assert condition.lasts
    again.apply(*poll(hw_slowed=False), *poll(hw_slowed=False))
    assert [item.lasts for item in again.conditions()] == [False]


# What they raise


@pytest.mark.parametrize("reason", RULES)
def test_a_bad_reading_raises_its_condition_on_its_gpu(reason: Reason) -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(GpuSampled(U1, bad(reason)))
    (condition,) = node.conditions()
    assert condition == Condition(
        key=ConditionKey(NVML, reason, place(U1), 0),
        evidence=Evidence.SOFT if reason in {Reason.THERMAL, Reason.NVLINK_DOWN} else Evidence.HARD,
        recovery={
            Reason.RECOVERY_ACTION: Recovery.RESET,
            Reason.ECC_UNCORRECTED: Recovery.RESET,
            Reason.ROW_REMAP_FAILED: Recovery.BY_HAND,
        }.get(reason, Recovery.SELF_CLEARING),
        flips=reason in FLIPPING,
        message=condition.message,
        since_ns=node.now_ns,
        last_ns=node.now_ns,
        lasts=True,
    )
    assert node.unhealthy() == ({U1} if reason in FLIPPING else set())


@pytest.mark.parametrize("reason", RULES)
def test_a_cause_that_is_seen_again_changes_nothing(reason: Reason) -> None:
    node = healthy_node(gpu(0))
    seen = GpuSampled(U0, replace(bad(reason), hw_slowed=None))
    node.apply(seen, passed())
    before = node.state
    for _ in range(5):
        assert node.after(10 * S, seen, passed()) == ()
    assert node.state is before


def test_a_cause_that_changes_is_reported_in_its_new_words_and_is_as_old_as_before() -> None:
    node = healthy_node(gpu(0))
    node.apply(read(links_down=(3,)))
    since_ns = node.now_ns
    node.after(10 * S, read(links_down=(3, 4)))
    (condition,) = node.conditions()
    assert condition.message == "2 of 18 NVLinks are down: 3, 4"
    assert (condition.since_ns, condition.last_ns, condition.count) == (since_ns, since_ns, 1)


@pytest.mark.parametrize("reason", RULES)
def test_a_reading_that_is_none_neither_raises_nor_clears(reason: Reason) -> None:
    node = healthy_node(gpu(0))
    node.apply(*blind_poll())
    assert node.conditions() == []
    node.apply(GpuSampled(U0, bad(reason)))
    (raised,) = node.conditions()
    for _ in range(5):
        node.after(Q, *blind_poll())
    assert node.conditions() == [raised]


def test_readings_are_published_as_they_are() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(read(pcie_replays=7))
    assert [view.sample for view in node.snapshot().gpus] == [sample(pcie_replays=7), None]
    node.apply(GpuSampled(U0, NOTHING))
    assert node.snapshot().gpus[0].sample == NOTHING


# What brings a GPU back


@pytest.mark.parametrize("reason", [reason for reason in RULES if reason is not Reason.ROW_REMAP_FAILED])
def test_when_the_reading_is_healthy_again_clean_probes_and_quiet_time_end_it(reason: Reason) -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(GpuSampled(U0, bad(reason)), passed(), passed(), passed())
    node.after(3600 * S, GpuSampled(U0, bad(reason)), passed())
    assert reasons(node) == {reason}
    first_ns = node.now_ns
    node.apply(*poll(), *poll())
    node.until(first_ns + 2 * Q)
    assert reasons(node) == {reason}
    node.apply(*poll())
    assert reasons(node) == set()
    assert node.unhealthy() == set()


@pytest.mark.parametrize("reason", RULES)
def test_quiet_time_counts_from_the_first_healthy_poll(reason: Reason) -> None:
    node = healthy_node(gpu(0))
    node.apply(GpuSampled(U0, bad(reason)))
    node.after(3600 * S, *poll(), *poll(), *poll())
    first_ns = node.now_ns
    node.until(first_ns + Q - 1)
    assert reasons(node) == {reason}
    node.after(1)
    assert reasons(node) == ({reason} if reason is Reason.ROW_REMAP_FAILED else set())


@pytest.mark.parametrize("reason", RULES)
def test_a_reading_that_turns_bad_again_begins_anew(reason: Reason) -> None:
    node = healthy_node(gpu(0))
    node.apply(GpuSampled(U0, bad(reason)), *poll(), *poll())
    node.after(S, GpuSampled(U0, bad(reason)))
    (condition,) = node.conditions()
    assert (condition.count, condition.clean_probes, condition.reset_seen, condition.lasts) == (
        2,
        0,
        False,
        True,
    )
    assert (condition.since_ns, condition.last_ns) == (node.now_ns - S, node.now_ns)


def test_a_poll_that_fails_breaks_the_row_of_healthy_ones() -> None:
    node = healthy_node(gpu(0))
    node.apply(read(recovery_action=1), *poll(), *poll(), failed(code=15), *poll(), *poll())
    node.after(2 * Q)
    assert {item.reason: item.clean_probes for item in node.conditions(Reason.RECOVERY_ACTION)} == {
        Reason.RECOVERY_ACTION: 2
    }


def test_the_readings_of_one_gpu_ease_nothing_on_another() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(read(U0, recovery_action=1), read(U1, recovery_action=1))
    node.apply(*poll(U0), *poll(U0), *poll(U0))
    node.after(Q, *poll(U0))
    assert node.unhealthy() == {U1}


def test_a_restart_of_the_agent_does_not_end_what_was_read_before_it() -> None:
    for reason in RULES:
        node = healthy_node(gpu(0))
        node.apply(GpuSampled(U0, bad(reason)))
        again: Node = node.restarted(after_ns=S)
        again.apply(ready(), enumerated(gpu(0)), passed(), passed(), passed())
        again.after(2 * Q)
        assert reasons(again) == {reason}
        again.apply(*poll(), *poll(), *poll())
        again.after(Q)
        assert reasons(again) == ({reason} if reason is Reason.ROW_REMAP_FAILED else set())
