"""The machine under the driver: the bus, device nodes, the kernel module, and what is bound anew."""

import pytest

from agent.model.facts import (
    SYSFS,
    UEVENTS,
    DeviceNodesSeen,
    DriverModuleSeen,
    DriverReleased,
    DriverUnavailable,
    GpuRebound,
    PciGpusSeen,
    PolicyChanged,
    RecoverRequested,
    ReleaseRequested,
)
from agent.model.gpu import Gpu
from agent.model.health import Condition, ConditionKey, Evidence, Health, Reason, Recovery
from agent.model.ids import Placement, SourceName
from agent.model.policy import DeviceListStrategy, Injection, Policy
from agent.model.snapshot import Finding
from agent.model.structs import replace
from tests.core.build import (
    U0,
    U1,
    Node,
    S,
    enumerated,
    failed,
    gpu,
    healthy_node,
    mig_gpu,
    passed,
    place,
    ready,
    registered_node,
    xid,
)
from tests.core.polls import blind_poll, poll, read, reasons

Q = 60 * S
UNLOADED = DriverUnavailable(Reason.DRIVER_NOT_LOADED, "The NVIDIA driver is not loaded", unloaded=True)


def missing(*paths: str) -> DeviceNodesSeen:
    return DeviceNodesSeen(paths)


def bound(number: int = 0) -> GpuRebound:
    return GpuRebound(gpu(number).pci, bound=True)


def unbound(number: int = 0) -> GpuRebound:
    return GpuRebound(gpu(number).pci, bound=False)


def recovers(node: Node) -> bool:
    """Whether clean probes and quiet time bring U0 back from here."""
    node.apply(passed(), passed(), passed())
    node.after(Q)
    return U0 not in node.unhealthy()


# Device nodes


def test_a_gpu_whose_node_is_missing_is_unhealthy_and_no_other() -> None:
    node = healthy_node(gpu(0, minor=4), gpu(1))
    node.apply(missing("/dev/nvidia4"))
    assert node.unhealthy() == {U0}
    assert node.conditions() == [
        Condition(
            key=ConditionKey(SYSFS, Reason.DEVICE_NODE_MISSING, place(U0), 0),
            evidence=Evidence.HARD,
            recovery=Recovery.SELF_CLEARING,
            flips=True,
            message="/dev/nvidia4 does not exist",
            since_ns=node.now_ns,
            last_ns=node.now_ns,
            lasts=True,
        )
    ]


def test_without_a_control_node_no_gpu_can_be_used() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(missing("/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"))
    assert node.unhealthy() == {U0, U1}
    assert [item.message for item in node.conditions()] == [
        "/dev/nvidiactl does not exist",
        "/dev/nvidia1, /dev/nvidiactl does not exist",
    ]


def test_the_node_of_no_known_gpu_is_nobodys_trouble() -> None:
    node = healthy_node(gpu(0), replace(gpu(1), minor=None))
    node.apply(missing("/dev/nvidia7"))
    assert node.unhealthy() == set()


def test_a_gpu_found_later_whose_node_was_missing_all_along_is_unhealthy() -> None:
    node = healthy_node(gpu(0))
    node.apply(missing("/dev/nvidia1"))
    assert node.unhealthy() == set()
    node.apply(enumerated(gpu(0), gpu(1)), passed(U1))
    assert node.unhealthy() == {U1}


def test_a_gpu_whose_node_is_there_again_comes_back_by_the_rule() -> None:
    node = healthy_node(gpu(0))
    node.apply(missing("/dev/nvidia0"), passed(), passed(), passed())
    node.after(2 * Q)
    node.apply(missing(), passed(), passed())
    node.after(Q)
    assert node.unhealthy() == {U0}
    node.apply(passed())
    assert node.unhealthy() == set()


def test_another_node_that_is_missing_too_is_the_same_trouble() -> None:
    node = healthy_node(gpu(0))
    node.apply(missing("/dev/nvidia0"))
    node.after(S, missing("/dev/nvidia0", "/dev/nvidiactl"))
    (condition,) = node.conditions()
    assert (condition.count, condition.message) == (1, "/dev/nvidia0, /dev/nvidiactl does not exist")


def mig_gpu_with_capabilities(number: int = 0) -> Gpu:
    """Two GPU instances, the second with two compute instances."""
    whole = mig_gpu(number, (1, 0, "1g.10gb"), (2, 0, "1c.2g.20gb"), (2, 1, "1c.2g.20gb"))
    minors = ((12, 13), (21, 22), (21, 23))
    slices = tuple(
        replace(mig, gi_minor=gi, ci_minor=ci)
        for mig, (gi, ci) in zip(whole.mig_devices, minors, strict=True)
    )
    return replace(whole, mig_devices=slices)


@pytest.mark.parametrize(
    ("minor", "places"),
    [(13, [(1, 0)]), (21, [(2, 0), (2, 1)]), (23, [(2, 1)]), (99, [])],
    ids=["compute instance", "GPU instance", "one of two compute instances", "of no instance"],
)
def test_the_capability_node_of_a_mig_device_is_that_devices_alone(
    minor: int, places: list[tuple[int, int]]
) -> None:
    path = f"/dev/nvidia-caps/nvidia-cap{minor}"
    node = healthy_node(mig_gpu_with_capabilities(), gpu(1))
    node.apply(missing(path))
    found = [(item.placement.gi, item.placement.ci, item.message) for item in node.conditions()]
    assert found == [(gi, ci, f"{path} does not exist") for gi, ci in places]


def test_a_capability_node_that_is_there_again_brings_its_device_back_while_another_is_missing() -> None:
    node = healthy_node(mig_gpu_with_capabilities())
    first, second = (f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (13, 22))
    node.apply(missing(first, second))
    node.after(S, missing(second))
    node.apply(passed(), passed(), passed())
    node.after(Q)
    assert [(item.placement.gi, item.lasts) for item in node.conditions()] == [(2, True)]


@pytest.mark.parametrize("strategy", ["cdi-cri", "cdi-annotations"])
def test_a_mig_device_without_a_known_node_cannot_be_given_by_cdi(strategy: DeviceListStrategy) -> None:
    known = mig_gpu_with_capabilities()
    first, *others = known.mig_devices
    card = replace(known, mig_devices=(replace(first, gi_minor=None), *others))
    policy = Policy(mig_strategy="mixed", injection=Injection(strategies=("envvar", strategy)))
    node = healthy_node(card, policy=policy)
    node.apply(missing())
    [condition] = node.conditions()
    assert (condition.reason, condition.placement) == (
        Reason.DEVICE_NODE_MISSING,
        Placement(U0, first.gi, first.ci),
    )
    assert condition.message == "the driver does not report the device node of its GPU instance"
    node.apply(enumerated(known))
    assert recovers_all(node)


def test_a_mig_device_without_a_known_node_is_given_by_the_runtime_that_makes_it() -> None:
    known = mig_gpu_with_capabilities()
    unknown = tuple(replace(mig, gi_minor=None, ci_minor=None) for mig in known.mig_devices)
    card = replace(known, mig_devices=unknown)
    node = healthy_node(card, policy=Policy(mig_strategy="mixed"))
    node.apply(missing())
    assert node.conditions() == []
    by_cdi = Injection(strategies=("cdi-cri",))
    node.apply(PolicyChanged(Policy(mig_strategy="mixed", injection=by_cdi)))
    assert len(node.conditions(Reason.DEVICE_NODE_MISSING)) == len(unknown)


def test_a_gpu_without_a_known_node_cannot_be_given_by_cdi() -> None:
    policy = Policy(injection=Injection(strategies=("cdi-cri",)))
    node = healthy_node(gpu(0), replace(gpu(1), minor=None), policy=policy)
    assert node.unhealthy() == set()
    node.apply(missing())
    assert node.unhealthy() == {U1}


def recovers_all(node: Node) -> bool:
    """Whether clean probes and quiet time end every condition."""
    recovers(node)
    return node.conditions() == []


def test_nodes_that_were_not_read_since_a_restart_are_not_there_again() -> None:
    node = healthy_node(gpu(0))
    node.apply(missing("/dev/nvidia0"))
    again = node.restarted()
    again.apply(ready(), enumerated(gpu(0)))
    assert not recovers(again)
    again.apply(missing())
    assert recovers(again)


def test_nodes_that_are_not_read_any_more_keep_no_gpu_unhealthy() -> None:
    node = healthy_node(gpu(0))
    node.apply(missing("/dev/nvidia0"))
    again = node.restarted()
    again.apply(ready(), enumerated(gpu(0)), passed(), RecoverRequested(U0))
    assert again.unhealthy() == set()


# The bus


def count_findings(node: Node) -> list[Finding]:
    return [item for item in node.snapshot().findings if item.reason is Reason.GPU_COUNT_MISMATCH]


def test_a_gpu_on_the_bus_that_nvml_does_not_list_is_found_and_named() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(PciGpusSeen((gpu(0).pci, gpu(1).pci, gpu(2).pci, gpu(3).pci)))
    assert count_findings(node) == [
        Finding(
            Reason.GPU_COUNT_MISMATCH,
            "The bus has 4 GPUs for the driver, NVML lists 2: not 0000:12:00.0, 0000:13:00.0",
        )
    ]
    assert not node.snapshot().ready
    assert node.unhealthy() == set()


def test_a_gpu_that_is_listed_again_is_no_finding() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(PciGpusSeen((gpu(0).pci, gpu(1).pci)))
    assert node.snapshot().ready
    node.apply(enumerated(gpu(1)))
    assert [item.message for item in count_findings(node)] == [
        "The bus has 2 GPUs for the driver, NVML lists 1: not 0000:10:00.0"
    ]
    node.apply(enumerated(gpu(0), gpu(1)))
    assert count_findings(node) == []


def test_a_gpu_that_nvml_lists_and_the_bus_has_not_is_no_finding() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(PciGpusSeen((gpu(0).pci,)))
    assert count_findings(node) == []


def test_before_the_bus_was_scanned_there_is_no_finding() -> None:
    assert count_findings(registered_node(gpu(0))) == []


def test_without_a_driver_no_gpus_are_expected_to_be_listed() -> None:
    node = registered_node(gpu(0))
    node.apply(PciGpusSeen((gpu(0).pci, gpu(1).pci)), UNLOADED)
    assert count_findings(node) == []


def test_while_the_driver_is_released_no_gpus_are_expected_to_be_listed() -> None:
    node = registered_node(gpu(0))
    node.apply(PciGpusSeen((gpu(0).pci, gpu(1).pci)))
    assert count_findings(node) != []
    node.apply(ReleaseRequested(frozenset({U0}), 600 * S), DriverReleased())
    assert count_findings(node) == []


# The kernel module


def test_a_module_that_was_loaded_anew_is_reset_evidence() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(DriverModuleSeen(70), xid(79), DriverModuleSeen(70))
    assert not recovers(node)
    node.apply(DriverModuleSeen(71))
    assert recovers(node)


def test_the_first_reading_of_the_module_is_no_evidence() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79), DriverModuleSeen(70))
    assert not recovers(node)


def test_a_module_that_went_and_came_is_reset_evidence_when_nvml_is_ready() -> None:
    node = healthy_node(gpu(0))
    node.apply(DriverModuleSeen(70), xid(79), DriverModuleSeen(None), ready())
    assert recovers(node)


def test_a_module_loaded_anew_while_the_agent_was_away_is_reset_evidence() -> None:
    node = healthy_node(gpu(0))
    node.apply(DriverModuleSeen(70), xid(79))
    again = node.restarted()
    again.apply(ready(), enumerated(gpu(0)), DriverModuleSeen(71))
    assert recovers(again)


def test_the_same_module_after_a_restart_of_the_agent_is_no_evidence() -> None:
    node = healthy_node(gpu(0))
    node.apply(DriverModuleSeen(70), xid(79))
    again = node.restarted()
    again.apply(ready(), enumerated(gpu(0)), DriverModuleSeen(70))
    assert not recovers(again)


def test_a_late_reading_of_the_module_counts_once_and_not_again_days_later() -> None:
    """The module was read as gone; by the time this was reported, NVML had been initialised again."""
    node = healthy_node(gpu(0))
    node.apply(DriverModuleSeen(70), UNLOADED, ready(), DriverModuleSeen(None), DriverModuleSeen(71))
    node.apply(passed(), passed(), passed())
    node.after(Q)
    assert node.unhealthy() == set()
    mismatch = DriverUnavailable(Reason.NVML_VERSION_MISMATCH, "mismatch")
    node.apply(xid(79), mismatch, ready())
    assert not recovers(node)


def test_a_module_that_is_seen_before_nvml_is_ready_was_still_gone() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79), UNLOADED, DriverModuleSeen(71), ready())
    assert recovers(node)


# What is bound anew


@pytest.mark.parametrize("source", [UEVENTS, SYSFS])
def test_a_gpu_that_is_bound_anew_was_reset_and_no_other(source: SourceName) -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79, U0), xid(79, U1), unbound(), replace(bound(), source=source))
    assert {item.placement.gpu: item.reset_seen for item in node.conditions()} == {U0: True, U1: False}
    assert recovers(node)
    node.apply(passed(U1), passed(U1), passed(U1))
    node.after(Q)
    assert node.unhealthy() == {U1}


def test_a_gpu_that_was_only_taken_from_its_driver_was_not_reset() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79), unbound())
    assert not recovers(node)


def test_binding_an_unknown_gpu_changes_nothing() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79))
    before = node.state
    assert node.apply(bound(5)) == ()
    assert node.state is before


@pytest.mark.parametrize("code", [64, 54])
def test_binding_a_gpu_anew_does_not_end_what_needs_a_reboot_or_a_person(code: int) -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(code), bound())
    assert not recovers(node)


def test_binding_a_healthy_gpu_anew_changes_nothing() -> None:
    node = healthy_node(gpu(0))
    before = node.state
    assert node.apply(unbound(), bound()) == ()
    assert node.state is before


def test_a_gpu_bound_anew_that_nvml_does_not_list_stays_lost() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(enumerated(gpu(1)), bound())
    assert not recovers(node)
    node.apply(enumerated(gpu(0), gpu(1)))
    assert recovers(node)


def test_a_row_of_clean_probes_before_the_reset_does_not_count() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79), bound(), passed(), passed(), bound(), passed())
    node.after(2 * Q)
    assert [item.clean_probes for item in node.conditions()] == [1]


# Readings over a reset


def test_what_was_read_before_a_reset_and_is_not_supported_after_it_keeps_no_gpu_unhealthy() -> None:
    """A driver of another version may not support the reading."""
    for bad in (read(recovery_action=1), read(fabric_state=2), read(fabric_status=999)):
        node = healthy_node(gpu(0))
        node.apply(bad, UNLOADED, ready(), enumerated(gpu(0)))
        node.apply(*blind_poll(), *blind_poll())
        node.after(Q)
        assert U0 in node.unhealthy()
        node.apply(*blind_poll())
        assert node.unhealthy() == set()


def test_what_is_read_after_a_reset_as_before_lasts_on() -> None:
    node = healthy_node(gpu(0))
    node.apply(read(recovery_action=1), bound())
    node.apply(*poll(recovery_action=1), *poll(recovery_action=1), *poll(recovery_action=1))
    node.after(Q, *poll(recovery_action=1))
    (condition,) = node.conditions()
    assert (condition.lasts, condition.reset_seen, condition.count) == (True, False, 2)
    assert node.unhealthy() == {U0}


def test_not_one_probe_counts_between_a_reset_and_a_reading_that_is_as_bad() -> None:
    node = healthy_node(
        gpu(0), policy=replace(Node().state.policy, recovery_clean_probes=1, recovery_quiet_ns=0)
    )
    node.apply(read(fabric_state=2), UNLOADED, ready(), enumerated(gpu(0)))
    node.apply(*poll(fabric_state=2))
    assert reasons(node) == {Reason.FABRIC_NOT_READY}


def test_a_reset_does_not_break_the_row_of_what_ends_by_itself() -> None:
    node = healthy_node(gpu(0))
    node.apply(read(fabric_state=2), *poll(), *poll(), bound(), *poll())
    node.after(Q)
    assert node.unhealthy() == set()


def test_a_reset_does_not_end_a_row_remapping_that_failed() -> None:
    node = healthy_node(gpu(0))
    node.apply(read(rows_failed=True), bound(), *poll(), *poll(), *poll())
    node.after(Q)
    assert node.unhealthy() == {U0}


# A GPU that is not listed


def test_a_gpu_that_is_not_listed_breaks_the_row_of_its_clean_probes() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(failed(), passed(), passed(), enumerated(gpu(1)), enumerated(gpu(0), gpu(1)), passed())
    node.after(2 * Q)
    assert {item.clean_probes for item in node.conditions()} == {1}
    assert node.health()[U1] is Health.HEALTHY
