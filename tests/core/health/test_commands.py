"""What operators ask for: hold, unhold, recover, release, resume."""

import pytest

from agent.core.health.commands import MAX_HOLDS, selectors_of
from agent.model.effects import (
    Event,
    EventKind,
    KeepEvidence,
    RecordEvent,
    ReleaseDriver,
    ResumeDriver,
)
from agent.model.facts import (
    OPERATOR,
    DeviceNodesSeen,
    DriverCallAnswered,
    DriverCallOverdue,
    DriverModuleSeen,
    DriverReleased,
    DriverUnavailable,
    Fact,
    GpuSampled,
    HoldRequested,
    RecoverRequested,
    ReleaseRequested,
    ResumeRequested,
    Tick,
    UnholdRequested,
)
from agent.model.gpu import Gpu
from agent.model.health import Condition, ConditionKey, Evidence, Health, Reason, Recovery
from agent.model.ids import GpuUuid
from agent.model.policy import Policy
from agent.model.snapshot import Finding
from agent.model.structs import replace
from tests.core.build import (
    C1B,
    GPU,
    U0,
    U1,
    U2,
    UNLOADED,
    Node,
    S,
    enumerated,
    failed,
    fields_of,
    gpu,
    healthy_node,
    overdue,
    passed,
    place,
    ready,
    registered_node,
    xid,
)
from tests.core.polls import BAD, NOTHING, bad, poll, read, reasons

Q = 60 * S
M = 60 * S

BOARD: Gpu = replace(gpu(0), serial="1650921000123")


def commands(node: Node) -> list[str]:
    return [event.message for event in node.events(EventKind.COMMAND)]


# Hold and unhold


@pytest.mark.parametrize("selector", [BOARD.uuid, BOARD.pci, BOARD.serial])
def test_a_gpu_is_held_by_uuid_serial_or_address_and_given_back_by_any_of_them(selector: str) -> None:
    for other in selectors_of(BOARD):
        node = healthy_node(BOARD, gpu(1))
        node.apply(HoldRequested(selector, "noisy fan"))
        assert node.unhealthy() == {U0}
        node.apply(UnholdRequested(other))
        assert node.unhealthy() == set()
        assert node.conditions() == []
        assert node.state.holds == {}


def test_a_hold_is_a_condition_with_its_reason() -> None:
    node = registered_node(BOARD, gpu(1))
    node.apply(HoldRequested(U0, "noisy fan"))
    assert node.conditions() == [
        Condition(
            key=ConditionKey(OPERATOR, Reason.HELD, place(U0), 0),
            evidence=Evidence.HARD,
            recovery=Recovery.BY_HAND,
            flips=True,
            message="Held by an operator: noisy fan",
            since_ns=node.now_ns,
            last_ns=node.now_ns,
            lasts=True,
        )
    ]
    assert list(node.snapshot().findings) == [Finding(Reason.HELD, "Held by an operator: noisy fan", (U0,))]
    assert node.snapshot().holds == {U0: "noisy fan"}


def test_hold_and_unhold_are_reported() -> None:
    node = healthy_node(BOARD)
    node.apply(HoldRequested(U0, "noisy fan"), UnholdRequested(BOARD.pci))
    one, other = node.events(EventKind.COMMAND)
    assert (one.message, fields_of(one)) == ("A GPU is held", {"selector": U0, "why": "noisy fan"})
    assert (other.message, fields_of(other)) == ("A GPU is held no more", {"selector": BOARD.pci})


def test_a_hold_makes_every_device_of_its_gpu_unhealthy() -> None:
    node = healthy_node(C1B, policy=Policy(mig_strategy="single"))
    node.apply(HoldRequested(U0, "x"))
    assert len(node.unhealthy()) == len(node.devices()) == 3


def test_another_reason_for_the_same_hold_is_the_new_one() -> None:
    node = healthy_node(BOARD)
    node.apply(HoldRequested(U0, "noisy fan"))
    node.after(S, HoldRequested(U0, "on loan"))
    (condition,) = node.conditions()
    assert (condition.message, condition.count) == ("Held by an operator: on loan", 1)


def test_unhold_ends_every_hold_of_the_gpu_and_none_of_another() -> None:
    node = healthy_node(BOARD, gpu(1))
    holds = [HoldRequested(selector, "x") for selector in (*selectors_of(BOARD), U1)]
    node.apply(*holds, UnholdRequested(U0))
    assert node.state.holds == {U1: "x"}
    assert node.unhealthy() == {U1}


def test_two_gpus_of_one_board_are_held_and_given_back_by_its_serial_together() -> None:
    node = healthy_node(BOARD, replace(gpu(1), serial=BOARD.serial))
    node.apply(HoldRequested(U0, "x"), HoldRequested(gpu(1).pci, "x"), UnholdRequested(BOARD.serial or ""))
    assert node.state.holds == {}
    node.apply(HoldRequested(BOARD.serial or "", "x"))
    assert node.unhealthy() == {U0, U1}


def test_of_two_holds_the_one_by_uuid_is_shown() -> None:
    node = healthy_node(BOARD)
    node.apply(HoldRequested(BOARD.pci, "by address"), HoldRequested(U0, "by uuid"))
    assert [item.message for item in node.conditions()] == ["Held by an operator: by uuid"]


def test_unhold_of_what_is_not_held_changes_nothing() -> None:
    node = healthy_node(BOARD)
    before = node.state
    assert node.apply(UnholdRequested(U0), UnholdRequested("0000:ff:00.0")) == ()
    assert node.state is before


def test_a_gpu_that_is_not_there_is_held_when_it_comes() -> None:
    node = healthy_node(gpu(1))
    node.apply(HoldRequested(BOARD.serial or "", "on loan"))
    assert node.unhealthy() == set()
    node.apply(enumerated(BOARD, gpu(1)), passed(U0))
    assert node.unhealthy() == {U0}


def test_a_gpu_that_is_not_there_can_be_given_back() -> None:
    node = healthy_node(gpu(1))
    node.apply(HoldRequested("0000:ff:00.0", "on loan"), UnholdRequested("0000:ff:00.0"))
    assert node.state.holds == {}


def test_a_gpu_at_a_held_address_is_held_and_one_moved_from_it_is_not() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(HoldRequested(gpu(0).pci, "bad slot"))
    moved = replace(gpu(0), pci=gpu(5).pci)
    node.apply(enumerated(moved, replace(gpu(2), pci=gpu(0).pci), gpu(1)), passed(U2))
    assert node.unhealthy() == {U2}


def test_clean_probes_and_resets_and_recover_do_not_end_a_hold() -> None:
    node = healthy_node(BOARD, policy=Policy(recovery_clean_probes=1, recovery_quiet_ns=0))
    node.apply(HoldRequested(U0, "x"), *poll(), UNLOADED, ready(), *poll(), RecoverRequested(U0), *poll())
    node.after(3600 * S, *poll())
    assert reasons(node) == {Reason.HELD}


def test_a_fault_during_a_hold_outlasts_it() -> None:
    node = healthy_node(BOARD)
    node.apply(HoldRequested(U0, "x"), xid(79), UnholdRequested(U0))
    assert reasons(node) == {Reason.XID}
    assert node.unhealthy() == {U0}


def test_a_hold_survives_a_restart() -> None:
    node = healthy_node(BOARD, gpu(1))
    node.apply(HoldRequested(BOARD.serial or "", "x"))
    again = node.restarted(after_ns=S)
    assert again.health() == {U0: Health.UNHEALTHY, U1: Health.UNKNOWN}
    again.apply(ready(), enumerated(BOARD, gpu(1)), *poll(U0), *poll(U1))
    again.after(2 * Q, *poll())
    assert again.unhealthy() == {U0}
    again.apply(UnholdRequested(U0))
    assert again.unhealthy() == set()


def test_holds_are_bounded_and_one_too_many_is_rejected_with_a_warning() -> None:
    node = healthy_node(gpu(0))
    for number in range(MAX_HOLDS):
        node.apply(HoldRequested(f"GPU-{number}", "x"))
    node.forget_effects()
    node.apply(HoldRequested(U0, "x"))
    ((at_ns, effect),) = node.effects
    event = Event(EventKind.COMMAND, "A hold was rejected: there are too many", fields={"selector": U0})
    assert effect == RecordEvent(event, at_ns)
    assert node.unhealthy() == set()
    node.apply(HoldRequested("GPU-7", "another reason"))
    assert (len(node.state.holds), node.state.holds["GPU-7"]) == (MAX_HOLDS, "another reason")


# Recover


def flapping_node() -> Node:
    node = healthy_node(gpu(0), gpu(1), policy=Policy(recovery_clean_probes=1, recovery_quiet_ns=0))
    for _ in range(3):
        node.apply(failed(), passed())
    return node


def test_recover_ends_every_fault_of_a_gpu_at_once_and_none_of_another() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79), xid(64), xid(54), failed(), failed(code=16), xid(79, U1))
    node.apply(read(rows_failed=True), *poll())
    node.apply(RecoverRequested(U0))
    assert node.unhealthy() == {U1}
    assert [item.placement.gpu for item in node.conditions()] == [U1]
    (event,) = node.events(EventKind.COMMAND)
    assert fields_of(event) == {"uuid": U0}


def test_recover_ends_flapping_and_counts_from_nothing() -> None:
    node = flapping_node()
    assert reasons(node) == {Reason.FLAPPING}
    node.apply(RecoverRequested(U0))
    assert node.unhealthy() == set()
    node.apply(failed(), passed(), failed(), passed())
    assert node.unhealthy() == set()
    node.apply(failed())
    assert Reason.FLAPPING in reasons(node)


def test_recover_forgets_no_fault_of_another_gpu() -> None:
    node = flapping_node()
    node.apply(failed(U1), passed(U1), failed(U1), passed(U1), RecoverRequested(U0), failed(U1))
    assert Reason.FLAPPING in reasons(node, U1)


LASTING: dict[Reason, list[Fact]] = {
    Reason.RECOVERY_ACTION: [read(recovery_action=1)],
    Reason.ROW_REMAP_FAILED: [read(rows_failed=True)],
    Reason.FABRIC_NOT_READY: [read(fabric_state=2)],
    Reason.FABRIC_FAILED: [read(fabric_status=999)],
    Reason.DEVICE_NODE_MISSING: [DeviceNodesSeen(("/dev/nvidia0",))],
    Reason.GPU_LOST: [enumerated(gpu(1))],
    Reason.HELD: [HoldRequested(U0, "x")],
    Reason.MAINTENANCE: [ReleaseRequested(frozenset({U0}), 3600 * S)],
    Reason.DRIVER_HUNG: [DriverCallOverdue("init", S)],
    Reason.NVML_TIMEOUT: [overdue()],
    Reason.DRIVER_NOT_LOADED: [UNLOADED],
    Reason.NVML_VERSION_MISMATCH: [DriverUnavailable(Reason.NVML_VERSION_MISMATCH, "mismatch")],
}


@pytest.mark.parametrize("reason", [*LASTING, *(reason for reason in BAD if reason not in LASTING)])
def test_recover_does_not_end_what_is_still_seen(reason: Reason) -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79), *(LASTING.get(reason) or [GpuSampled(U0, bad(reason))]))
    node.apply(RecoverRequested(U0))
    assert reasons(node) == {reason}
    assert (U0 in node.unhealthy()) == (reason in LASTING)


@pytest.mark.parametrize("reason", LASTING)
def test_recover_ends_at_once_what_is_no_longer_seen(reason: Reason) -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(*LASTING[reason])
    node.apply(UnholdRequested(U0), ResumeRequested(), DriverCallAnswered("init"), DeviceNodesSeen(()))
    node.apply(ready(), enumerated(gpu(0), gpu(1)), *poll(), RecoverRequested(U0))
    assert U0 not in node.unhealthy()
    assert reasons(node) == set()


def test_recover_ends_a_reading_that_is_no_longer_supported() -> None:
    node = healthy_node(gpu(0))
    node.apply(read(recovery_action=1), GpuSampled(U0, NOTHING), RecoverRequested(U0))
    assert node.unhealthy() == set()


def test_recover_does_not_end_a_slowdown_that_the_last_polls_showed() -> None:
    node = healthy_node(gpu(0), policy=Policy(slowdown_window_polls=3))
    for _ in range(3):
        node.apply(*poll(hw_slowed=True))
    node.apply(RecoverRequested(U0))
    assert reasons(node) == {Reason.THERMAL}


def test_recover_does_not_end_what_was_not_read_since_a_restart() -> None:
    node = healthy_node(gpu(0))
    node.apply(read(recovery_action=1))
    again = node.restarted()
    again.apply(ready(), enumerated(gpu(0)), RecoverRequested(U0))
    assert again.unhealthy() == {U0}


def test_recovering_a_healthy_gpu_is_reported_and_flips_nothing() -> None:
    node = healthy_node(gpu(0))
    node.apply(RecoverRequested(U0))
    assert commands(node) == ["An operator declared a GPU healthy"]
    assert [event.kind for event in node.events()] == [EventKind.COMMAND]


def test_recovering_an_unknown_gpu_changes_nothing() -> None:
    node = healthy_node(gpu(0))
    before = node.state
    assert node.apply(RecoverRequested(GpuUuid("GPU-9"))) == ()
    assert node.state is before


# Release and resume


def released(*gpus: GpuUuid, for_ns: int = 10 * M) -> ReleaseRequested:
    return ReleaseRequested(frozenset(gpus), for_ns)


def driver_commands(node: Node) -> list[tuple[int, type]]:
    return [
        (at_ns, type(effect))
        for at_ns, effect in node.effects
        if isinstance(effect, ReleaseDriver | ResumeDriver)
    ]


def test_a_release_makes_exactly_its_gpus_unhealthy_and_releases_the_driver() -> None:
    node = registered_node(gpu(0), gpu(1), gpu(2))
    node.apply(released(U0, U2))
    assert node.unhealthy() == {U0, U2}
    assert driver_commands(node) == [(node.now_ns, ReleaseDriver)]
    assert {(item.reason, item.message, item.lasts) for item in node.conditions()} == {
        (Reason.MAINTENANCE, "The driver was released on request", True)
    }
    (event,) = node.events(EventKind.COMMAND)
    assert (event.message, fields_of(event)) == ("The driver is released", {"gpus": 2, "for_ns": 10 * M})
    assert node.snapshot().released_until_ns == node.now_ns + 10 * M
    assert len(node.devices()) == 3


def test_a_release_ends_by_itself_at_the_nanosecond() -> None:
    node = registered_node(gpu(0), gpu(1))
    began_ns = node.now_ns
    node.apply(released(U0), DriverReleased())
    node.until(began_ns + 10 * M - 1)
    node.apply(Tick())
    assert driver_commands(node) == [(began_ns, ReleaseDriver)]
    assert [item.lasts for item in node.conditions()] == [True]
    node.until(began_ns + 10 * M + 1)
    assert driver_commands(node) == [(began_ns, ReleaseDriver), (began_ns + 10 * M, ResumeDriver)]
    assert [item.lasts for item in node.conditions()] == [False]
    assert node.snapshot().released_until_ns is None


def test_a_release_ends_on_request() -> None:
    node = registered_node(gpu(0))
    node.apply(released(U0), DriverReleased())
    node.after(S, ResumeRequested())
    assert [kind for _, kind in driver_commands(node)] == [ReleaseDriver, ResumeDriver]
    assert commands(node)[1:] == ["The driver is resumed on request"]
    assert [effect.at_ns for _, effect in node.effects if isinstance(effect, RecordEvent)][-1] == node.now_ns
    assert node.state.released_gpus == frozenset()


def test_after_a_release_its_gpus_come_back_by_the_rule() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(released(U0), DriverReleased())
    node.apply(*poll(), *poll(), *poll())
    node.after(5 * M, ResumeRequested(), ready(), enumerated(gpu(0), gpu(1)))
    first_ns = node.now_ns
    node.apply(*poll(), *poll(), *poll())
    node.until(first_ns + Q - 1)
    node.apply(Tick())
    assert node.unhealthy() == {U0}
    node.after(1)
    assert node.unhealthy() == set()


def test_taking_back_what_was_not_released_changes_nothing() -> None:
    node = registered_node(gpu(0))
    before = node.state
    assert node.apply(ResumeRequested()) == ()
    assert node.state is before


def test_a_second_release_adds_its_gpus_and_sets_the_time_anew() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(released(U0))
    node.after(S, released(U1, for_ns=M))
    assert node.unhealthy() == {U0, U1}
    assert node.snapshot().released_until_ns == node.now_ns + M
    assert [kind for _, kind in driver_commands(node)] == [ReleaseDriver]
    assert [fields_of(event)["gpus"] for event in node.events(EventKind.COMMAND)] == [1, 2]


def test_every_release_is_taken_back_once() -> None:
    node = registered_node(gpu(0))
    for _ in range(3):
        node.apply(released(U0, for_ns=M))
        node.after(2 * M, ResumeRequested())
        node.apply(released(U0, for_ns=M), ResumeRequested(), ResumeRequested())
    assert [kind for _, kind in driver_commands(node)] == [ReleaseDriver, ResumeDriver] * 6


def test_a_gpu_found_during_a_release_of_it_becomes_unhealthy() -> None:
    node = registered_node(gpu(0))
    node.apply(released(U0, U1), enumerated(gpu(0), gpu(1)), passed(U1))
    assert node.unhealthy() == {U0, U1}


def test_a_released_driver_hangs_no_more() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(overdue(U0), overdue(U1), DriverCallOverdue("wait", S))
    node.apply(released(U0), DriverReleased())
    assert not node.state.hung
    assert node.snapshot().driver_released
    assert [item.lasts for item in node.conditions(Reason.DRIVER_HUNG)] == [False, False]


def test_the_driver_is_shown_as_released_until_nvml_is_ready_again() -> None:
    node = registered_node(gpu(0))
    node.apply(released(U0))
    assert not node.snapshot().driver_released
    node.apply(DriverReleased())
    assert node.snapshot().driver_released
    node.apply(ResumeRequested())
    assert node.snapshot().driver_released
    node.apply(ready())
    assert not node.snapshot().driver_released


def test_a_release_asked_for_again_is_not_yet_done() -> None:
    node = registered_node(gpu(0))
    node.apply(released(U0), DriverReleased(), released(U0))
    assert node.snapshot().driver_released
    node.apply(ResumeRequested(), released(U0))
    assert not node.snapshot().driver_released


def test_a_driver_reloaded_during_a_release_was_reset() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(xid(79), released(U0, U1), DriverReleased(), UNLOADED)
    node.after(M, ResumeRequested(), ready(), enumerated(gpu(0), gpu(1)))
    for _ in range(3):
        node.apply(*poll(U0), *poll(U1))
    node.after(Q)
    assert node.unhealthy() == set()


def test_a_driver_unloaded_during_a_release_of_one_gpu_makes_the_others_unhealthy_too() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(released(U0), DriverReleased(), DriverModuleSeen(70))
    assert node.unhealthy() == {U0}
    node.apply(DriverModuleSeen(None))
    assert reasons(node, U1) == {Reason.DRIVER_NOT_LOADED}
    assert node.unhealthy() == {U0, U1}
    assert {item.message for item in node.conditions(Reason.DRIVER_NOT_LOADED)} == {
        "The driver's module was unloaded while the driver was released"
    }
    before = node.state
    assert node.apply(DriverModuleSeen(None)) == ()
    assert node.state is before
    node.apply(DriverModuleSeen(71), ResumeRequested(), ready(), enumerated(gpu(0), gpu(1)))
    for _ in range(3):
        node.apply(*poll(U0), *poll(U1))
    node.after(Q)
    assert node.unhealthy() == set()


def test_so_does_one_that_was_unloaded_when_the_agent_was_replaced() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(DriverModuleSeen(70), released(U0), DriverReleased())
    again = node.restarted(after_ns=S)
    again.apply(DriverModuleSeen(None), DriverReleased())
    assert again.health() == {U0: Health.UNHEALTHY, U1: Health.UNHEALTHY}
    assert reasons(again, U1) == {Reason.DRIVER_NOT_LOADED}
    assert reasons(again, U0) == {Reason.MAINTENANCE}


def test_a_driver_unloaded_while_every_gpu_is_released_is_no_news() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(DriverModuleSeen(70), released(U0, U1), DriverReleased())
    node.apply(DriverModuleSeen(None), DriverModuleSeen(71))
    assert reasons(node, U0) == reasons(node, U1) == {Reason.MAINTENANCE}


def test_a_module_first_seen_to_be_gone_during_a_release_was_reset_when_it_is_back() -> None:
    node = registered_node(gpu(0))
    node.apply(xid(79), released(U0), DriverReleased(), DriverModuleSeen(None), DriverModuleSeen(71))
    node.apply(ResumeRequested(), ready(), enumerated(gpu(0)), *poll(), *poll(), *poll())
    node.after(Q)
    assert node.unhealthy() == set()


def test_a_module_that_is_gone_while_nvml_answers_is_nothing_yet() -> None:
    """The module was read before it was loaded; what NVML reports is newer."""
    node = registered_node(gpu(0))
    node.apply(DriverModuleSeen(None))
    assert node.unhealthy() == set()


def test_a_release_survives_a_restart_and_still_ends_at_its_time() -> None:
    node = registered_node(gpu(0), gpu(1))
    until_ns = node.now_ns + 10 * M
    node.apply(released(U0), DriverReleased())
    again = node.restarted(after_ns=M)
    assert again.snapshot().released_until_ns == until_ns
    assert again.health() == {U0: Health.UNHEALTHY, U1: Health.UNKNOWN}
    again.apply(Tick())
    again.until(until_ns + 1)
    assert driver_commands(again) == [(until_ns, ResumeDriver)]
    again.apply(ready(), enumerated(gpu(0), gpu(1)))
    for _ in range(3):
        again.apply(*poll(U0), *poll(U1))
    again.after(Q)
    assert again.unhealthy() == set()


def test_a_release_that_ended_while_no_agent_ran_ends_with_the_first_step() -> None:
    node = registered_node(gpu(0))
    node.apply(released(U0, for_ns=M))
    again = node.restarted(after_ns=2 * M)
    again.apply(Tick())
    assert [kind for _, kind in driver_commands(again)] == [ResumeDriver]
    assert [item.lasts for item in again.conditions()] == [False]


# Nothing is an order's fault


@pytest.mark.parametrize("reason", [Reason.HELD, Reason.MAINTENANCE, Reason.DRIVER_HUNG])
def test_what_is_not_a_gpus_own_fault_is_no_evidence_against_it(reason: Reason) -> None:
    node = healthy_node(gpu(0), gpu(1))
    for _ in range(5):
        node.apply(*LASTING[reason], UnholdRequested(U0), ResumeRequested(), DriverCallAnswered("init"))
        for _ in range(3):
            node.apply(*poll(U0), *poll(U1))
        node.after(Q)
    assert node.unhealthy() == set()
    assert not [effect for _, effect in node.effects if isinstance(effect, KeepEvidence)]


def test_commands_do_not_change_what_is_advertised() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(HoldRequested(U0, "x"), released(U1), RecoverRequested(U0))
    assert [str(device.id) for device in node.devices(GPU)] == [U0, U1]
    assert len(node.registrations()) == 0
