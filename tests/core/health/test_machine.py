"""The machine under the driver: the bus, device nodes, the kernel module, and what is bound anew."""

import pytest

from agent.model.facts import (
    SYSFS,
    DeviceNodesSeen,
    DriverModuleSeen,
    DriverReleased,
    Fact,
    GpuRebound,
    PciGpusSeen,
    PolicyChanged,
    RecoverRequested,
    ReleaseRequested,
)
from agent.model.gpu import Gpu
from agent.model.health import Condition, ConditionKey, Evidence, Reason, Recovery
from agent.model.ids import Placement
from agent.model.policy import DeviceListStrategy, Injection, Policy
from agent.model.snapshot import Finding
from agent.model.structs import replace
from tests.core.build import (
    AT_ONCE,
    CLEAN,
    MISMATCH,
    QUIET,
    STAYS,
    U0,
    U1,
    UNLOADED,
    Node,
    S,
    Step,
    enumerated,
    example,
    failed,
    follow_example,
    gpu,
    healthy_node,
    mig_gpu,
    passed,
    place,
    ready,
    registered_node,
    xid,
)
from tests.core.polls import blind_poll, poll, read


def missing(*paths: str) -> DeviceNodesSeen:
    return DeviceNodesSeen(paths)


def bound(number: int = 0) -> GpuRebound:
    return GpuRebound(gpu(number).pci, bound=True)


def unbound(number: int = 0) -> GpuRebound:
    return GpuRebound(gpu(number).pci, bound=False)


def recovers(node: Node) -> bool:
    """Whether clean probes and quiet time bring U0 back from here."""
    node.apply(passed(), passed(), passed())
    node.after(QUIET)
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
    node.after(QUIET)
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


# The bus


def count_findings(node: Node) -> list[Finding]:
    return [item for item in node.snapshot().findings if item.reason is Reason.GPU_COUNT_MISMATCH]


MORE = PciGpusSeen((gpu(0).pci, gpu(1).pci))


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ([], None),
        ([MORE], "The bus has 2 GPUs for the driver, NVML lists 1: not 0000:11:00.0"),
        (
            [PciGpusSeen(tuple(gpu(number).pci for number in range(3)))],
            "The bus has 3 GPUs for the driver, NVML lists 1: not 0000:11:00.0, 0000:12:00.0",
        ),
        ([MORE, enumerated(gpu(0), gpu(1))], None),
        ([PciGpusSeen(())], None),
        (
            [MORE, enumerated()],
            "The bus has 2 GPUs for the driver, NVML lists 0: not 0000:10:00.0, 0000:11:00.0",
        ),
        ([MORE, UNLOADED], None),
        ([MORE, ReleaseRequested(frozenset({U0}), 600 * S), DriverReleased()], None),
    ],
    ids=["not scanned", "one", "two", "listed again", "not on the bus", "lost", "no driver", "released"],
)
def test_a_gpu_on_the_bus_that_nvml_does_not_list_is_found_and_named(
    facts: list[Fact], message: str | None
) -> None:
    node = registered_node(gpu(0))
    node.apply(*facts)
    assert count_findings(node) == ([Finding(Reason.GPU_COUNT_MISMATCH, message)] if message else [])
    assert not (message and node.snapshot().ready)


# What the machine shows, step by step

MODULE, ANOTHER_MODULE, NO_MODULE = DriverModuleSeen(70), DriverModuleSeen(71), DriverModuleSeen(None)
MISSING, THERE = missing("/dev/nvidia0"), missing()
AGAIN: list[Step] = ["restart", ready(), enumerated(gpu(0))]
RELOAD: list[Step] = [UNLOADED, ready(), enumerated(gpu(0))]
RECOVERS: list[Step] = [*CLEAN, QUIET, set()]
BOTH = enumerated(gpu(0), gpu(1))


@pytest.mark.parametrize(
    ("gpus", "policy", "then"),
    [
        # Device nodes
        example(
            "a GPU whose node is there again recovers by the rule",
            1,
            [MISSING, *CLEAN, 2 * QUIET, THERE, *CLEAN[1:], QUIET, {U0}, passed(), set()],
        ),
        example(
            "a GPU found later whose node was missing all along",
            1,
            [missing("/dev/nvidia1"), set(), BOTH, passed(U1), {U1}],
        ),
        example("nodes not read since a restart", 1, [MISSING, *AGAIN, *STAYS, THERE, *RECOVERS]),
        example("nodes not read any more", 1, [MISSING, *AGAIN, passed(), RecoverRequested(U0), set()]),
        # The kernel module
        example(
            "a module that was loaded anew is reset evidence",
            1,
            [MODULE, xid(79), MODULE, *STAYS, ANOTHER_MODULE, *RECOVERS],
        ),
        example("the first reading of the module is no evidence", 1, [xid(79), MODULE, *STAYS]),
        example("a module went and came", 1, [MODULE, xid(79), NO_MODULE, ready(), *RECOVERS]),
        example(
            "loaded anew while the agent was away", 1, [MODULE, xid(79), *AGAIN, ANOTHER_MODULE, *RECOVERS]
        ),
        example("the same module after a restart of the agent", 1, [MODULE, xid(79), *AGAIN, MODULE, *STAYS]),
        example(
            "a late reading of the module counts once and not again days later",
            1,
            [
                MODULE,
                UNLOADED,
                ready(),
                NO_MODULE,
                ANOTHER_MODULE,
                *RECOVERS,
                xid(79),
                MISMATCH,
                ready(),
                *STAYS,
            ],
        ),
        example("seen before NVML is ready", 1, [xid(79), UNLOADED, ANOTHER_MODULE, ready(), *RECOVERS]),
        # What is bound anew
        example("a GPU that was only taken from its driver was not reset", 1, [xid(79), unbound(), *STAYS]),
        example("binding a GPU anew does not end what needs a person", 1, [xid(64), bound(), *STAYS]),
        example("binding a GPU anew does not end what needs a reboot", 1, [xid(54), bound(), *STAYS]),
        example(
            "a GPU bound anew that NVML does not list stays lost",
            2,
            [enumerated(gpu(1)), bound(), *STAYS, BOTH, *RECOVERS],
        ),
        example(
            "a row of clean probes before the reset does not count",
            1,
            [xid(79), bound(), *CLEAN[1:], bound(), passed(), 2 * QUIET, passed(), {U0}, passed(), set()],
        ),
        # Readings over a reset; a driver of another version may not support the reading.
        *(
            example(
                f"{name} is not supported after the reset",
                1,
                [bad, *RELOAD, *blind_poll(), *blind_poll(), QUIET, {U0}, *blind_poll(), set()],
            )
            for name, bad in (
                ("a recovery action", read(recovery_action=1)),
                ("the state of the fabric", read(fabric_state=2)),
                ("the status of the fabric", read(fabric_status=999)),
            )
        ),
        example(
            "what is read after a reset as before lasts on",
            1,
            [
                read(recovery_action=1),
                bound(),
                *poll(recovery_action=1) * 3,
                QUIET,
                *poll(recovery_action=1),
                {U0},
            ],
        ),
        example(
            "not one probe counts between a reset and a reading that is as bad",
            1,
            [read(fabric_state=2), *RELOAD, *poll(fabric_state=2), {U0}],
            policy=AT_ONCE,
        ),
        example(
            "a reset does not break the row of what ends by itself",
            1,
            [read(fabric_state=2), *poll() * 2, bound(), *poll(), QUIET, set()],
        ),
        example(
            "a reset does not end a row remapping that failed",
            1,
            [read(rows_failed=True), bound(), *poll() * 3, QUIET, {U0}],
        ),
        example(
            "a GPU that is not listed had no clean probes in a row",
            2,
            [
                failed(),
                *CLEAN[1:],
                enumerated(gpu(1)),
                BOTH,
                passed(),
                2 * QUIET,
                passed(),
                {U0},
                passed(),
                set(),
            ],
        ),
    ],
)
def test_a_gpu_comes_back_by_what_the_machine_shows(gpus: int, policy: Policy, then: list[Step]) -> None:
    follow_example(gpus, policy, then)
