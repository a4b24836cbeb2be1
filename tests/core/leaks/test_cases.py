"""Acceptance cases J1 and J2, as far as the core decides them."""

from agent.core.usage.ownership import owners
from agent.model.facts import GpuMemorySeen, PodsSeen
from agent.model.health import Health, LeakKind, Reason
from agent.model.policy import Policy
from agent.model.sharing import Sharing
from agent.model.structs import replace
from agent.model.usage import ProcessUse
from tests.core.build import DEFAULT, GPU, U0, U1, U2, U3, Node, S, fields_of, gpu, healthy_node, passed
from tests.core.use import (
    LEAKS,
    MIB,
    POD_A,
    POD_B,
    A,
    B,
    allocated,
    found,
    hold,
    memory,
    pids,
    pods,
    process,
    seen,
    user,
)

# J1: unclaimed memory, and a leftover process on a GPU that is free

J1 = replace(
    DEFAULT, leaks=replace(LEAKS, memory_held_bytes=100 * MIB, memory_held_ns=0, foreign_process_ns=0)
)
OF_J1 = (
    memory(on=U0, used=352, total=12181),
    memory(user(4242, 900), on=U1, total=12181),
    memory(on=U2, used=3, total=12181),
    memory(user(4300, 5000), on=U3, total=12181),
)


def node_of_j1(stranger: ProcessUse, *, policy: Policy = J1, also: tuple[tuple[str, str], ...] = ()) -> Node:
    node = healthy_node(*(gpu(number) for number in range(4)), policy=policy)
    node.apply(
        *OF_J1,
        allocated((devices_of(node, 3)[0], "ns1/job-b"), *also),
        pods(),
        seen(stranger, process(4300, hold(U3), pod=POD_B)),
    )
    return node


def devices_of(node: Node, number: int) -> list[str]:
    return [str(device.id) for device in node.devices() if device.index == number]


def test_j1_unclaimed_memory_and_a_leftover_process_are_two_findings() -> None:
    node = node_of_j1(process(4242, hold(U1)))
    reported = [
        (each.reason, each.gpus, each.used_bytes)
        for each in node.snapshot().findings
        if each.reason is not Reason.KUBELET_UNAVAILABLE
    ]
    assert reported == [
        (Reason.MEMORY_HELD_NO_PROCESS, (U0,), 369098752),
        (Reason.FOREIGN_PROCESS, (U1,), 943718400),
    ]
    assert not node.snapshot().ready


def test_j1_the_pid_is_in_the_condition_and_not_in_public_documents() -> None:
    node = node_of_j1(process(4242, hold(U1)))
    (condition,) = found(node, LeakKind.FOREIGN_PROCESS)
    assert pids(condition) == [4242]
    assert "4242" not in condition.message
    assert [holder.pid for holder in owners(node.snapshot())[1].holders or ()] == [4242]


def test_j1_findings_make_no_device_unhealthy() -> None:
    node = node_of_j1(process(4242, hold(U1)))
    assert set(node.health().values()) == {Health.HEALTHY}


def test_j1_a_process_whose_pod_has_a_share_of_the_gpu_is_not_foreign() -> None:
    policy = replace(J1, sharing=Sharing.of({GPU: 2}))
    share = f"{U1}::1"
    node = node_of_j1(process(4242, hold(U1), pod=POD_A), policy=policy, also=((share, "ns1/job-a"),))
    assert share in devices_of(node, 1)
    assert [each.placement.gpu for each in found(node)] == [U0]


# J2: processes that outlive their pod

J2 = replace(
    DEFAULT,
    leaks=replace(LEAKS, pod_gone_ns=30 * S, foreign_process_ns=30 * S),
    recovery_clean_probes=1,
    recovery_quiet_ns=0,
)


class Machine:
    """The setup of J2, second by second."""

    def __init__(self) -> None:
        self.node = healthy_node(gpu(0), policy=J2)
        self.processes = [
            process(501, pod=POD_A),
            process(502, pod=POD_A, state="D"),
            process(503, pod=POD_B),
            process(504),
        ]
        self.pods = {POD_A: A, POD_B: B}
        self.users = [user(501, 4000), user(502, 3000), user(503, 2500), user(504, 2000), user(505, 100)]

    def second(self) -> None:
        """Apply every fact once, then let a second pass."""
        self.node.apply(
            allocated((str(U0), "ns1/job-b")),
            PodsSeen(dict(self.pods)),
            seen(*self.processes, at_ns=self.node.now_ns),
            GpuMemorySeen(U0, memory(*self.users, total=15360).memory),
        )
        self.node.after(S)

    def seconds(self, count: int) -> None:
        for _ in range(count):
            self.second()

    def delete_pod_a(self) -> None:
        del self.pods[POD_A]

    def ends(self, *ended: int) -> None:
        self.processes = [each for each in self.processes if each.key.pid not in ended]
        self.users = [each for each in self.users if each.pid not in ended]


def machine_after(seconds: int) -> Machine:
    machine = Machine()
    machine.node.apply(seen(*machine.processes), PodsSeen(dict(machine.pods)))
    machine.delete_pod_a()
    machine.seconds(seconds)
    return machine


def test_j2_within_the_grace_there_is_no_finding() -> None:
    assert found(machine_after(29).node) == []


def test_j2_after_the_grace_a_process_that_outlived_its_pod_is_a_finding() -> None:
    machine = machine_after(31)
    (gone,) = found(machine.node, LeakKind.POD_GONE)
    assert gone.details is not None
    assert pids(gone) == [501, 502]
    assert gone.details.used_bytes == 7340032000
    assert [(each.state, each.killable) for each in gone.details.involved] == [("S", True), ("D", False)]
    assert [each.pod for each in gone.details.involved] == ["ns1/job-a", "ns1/job-a"]


def test_j2_a_process_in_no_pod_is_the_hosts() -> None:
    machine = machine_after(31)
    (foreign,) = found(machine.node, LeakKind.FOREIGN_PROCESS)
    assert foreign.details is not None
    assert [(each.pid, each.owner, each.pod) for each in foreign.details.involved] == [(504, "host", None)]


def test_j2_nothing_else_is_found() -> None:
    machine = machine_after(33)
    assert {pid for each in found(machine.node) for pid in pids(each)} == {501, 502, 504}


def test_j2_a_new_process_of_the_same_pid_is_another() -> None:
    machine = machine_after(31)
    machine.ends(501)
    machine.processes.append(process(501, pod=POD_B, start=9000))
    machine.second()
    (gone,) = found(machine.node, LeakKind.POD_GONE)
    assert pids(gone) == [502]


def test_j2_when_both_are_gone_the_finding_clears_within_two_polls() -> None:
    machine = machine_after(31)
    machine.ends(501, 502)
    for _ in range(2):
        machine.second()
        machine.node.apply(passed(U0))
    assert [each.key.reason for each in machine.node.conditions()] == [Reason.FOREIGN_PROCESS]


def test_j2_the_event_of_a_finding_names_every_process() -> None:
    machine = machine_after(31)
    events = [
        fields_of(event) for event in machine.node.events() if fields_of(event).get("finding") == "pod_gone"
    ]
    (reported,) = events
    assert [(each["pid"], each["comm"], each["contexts"]) for each in reported["processes"]] == [  # type: ignore[attr-defined]
        (501, "python3", 1),
        (502, "python3", 1),
    ]


def test_j2_the_device_stays_as_it_is() -> None:
    assert machine_after(60).node.unhealthy() == set()
