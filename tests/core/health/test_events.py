"""The words that operators read: every event of a long history (history.txt)."""

import json
from pathlib import Path
from typing import cast

from agent.core.health.changes import MAX_LISTED, changes
from agent.core.health.faults import MAX_UNLISTED_XIDS, OTHER_XID
from agent.core.health.reducer import IDLE_NS
from agent.core.health.snapshot import MAX_MESSAGES
from agent.model.effects import Effect, EventKind, ExitProcess, RecordEvent, RegisterResource
from agent.model.facts import (
    DEVICE_PLUGIN,
    KUBELET,
    NVML,
    DriverCallAnswered,
    DriverCallOverdue,
    DriverUnavailable,
    FactsLost,
    HealthEventsUnsupported,
    KubeletSocketSeen,
    OwnSocketLost,
    TaskReported,
    Tick,
    WatchedDirectoryDeleted,
)
from agent.model.gpu import Gpu
from agent.model.health import Reason
from agent.model.ids import GpuUuid, ResourceName, SourceName
from agent.model.policy import Policy
from agent.model.sharing import Sharing
from agent.model.structs import replace
from tests.core.build import (
    C1B,
    DEFAULT,
    GPU,
    K1,
    K2,
    KMSG,
    MS,
    START_NS,
    U0,
    U1,
    Node,
    S,
    enumerated,
    failed,
    fields_of,
    gpu,
    healthy_node,
    mig_gpu,
    overdue,
    passed,
    ready,
    xid,
)


def lines_of(node: Node) -> list[str]:
    """One line for each effect: seconds, kind (``!`` is a warning), message, fields."""
    lines = []
    for at_ns, effect in node.effects:
        match effect:
            case RecordEvent():
                assert effect.at_ns == at_ns
                event = effect.event
                lines.append(
                    f"{seconds(at_ns)} {event.kind}{'!' if event.warning else ''}: {event.message}"
                    + "".join(f" {name}={json.dumps(value)}" for name, value in fields_of(event).items())
                )
            case RegisterResource():
                lines.append(f"{seconds(at_ns)} -> register {effect.resource} {effect.generation}")
            case _:
                lines.append(f"{seconds(at_ns)} -> {effect}")
    node.forget_effects()
    return lines


def seconds(at_ns: int) -> str:
    return f"{(at_ns - START_NS) / S:.3f}"


def history() -> list[str]:
    one = replace(gpu(0), uuid=GpuUuid("GPU-0"))
    two = replace(gpu(1), uuid=GpuUuid("GPU-1"))
    node = Node(Policy(recovery_clean_probes=1, recovery_quiet_ns=2 * S))
    node.apply(*[TaskReported(name, running=True) for name in (NVML, KUBELET, DEVICE_PLUGIN)])
    node.apply(DriverUnavailable(Reason.DRIVER_NOT_LOADED, "not loaded", unloaded=True))
    node.after(S, ready(), enumerated(one, two), passed(one.uuid), passed(two.uuid))
    node.after(S, KubeletSocketSeen(K1))
    node.fail_registration("rejected", "unsupported version")
    node.after(120 * MS)
    node.fail_registration("rejected", "unsupported version")
    node.after(250 * MS)
    node.accept()
    node.until(START_NS + 10 * S)
    node.apply(xid(79, one.uuid), xid(79, one.uuid, source=KMSG), xid(13, two.uuid), xid(7, None, gi=2, ci=1))
    node.after(S, overdue(two.uuid), failed(one.uuid, 15), overdue(one.uuid))
    node.after(S, passed(two.uuid), passed(one.uuid))
    node.after(10 * S, enumerated(replace(two, index=0)))
    node.after(S, enumerated(one, two), passed(one.uuid))
    node.after(10 * S, KubeletSocketSeen(K2))
    node.accept()
    node.after(10 * S, KubeletSocketSeen(None), OwnSocketLost(GPU, node.standing().generation))
    node.after(S, KubeletSocketSeen(K1))
    node.accept()
    node.after(20 * S)
    node.end_stream()
    node.after(S, TaskReported(KUBELET, running=False, message="inotify failed"))
    node.after(S, TaskReported(KUBELET, running=True))
    node.apply(HealthEventsUnsupported(one.uuid, "not supported"))
    node.apply(HealthEventsUnsupported(GpuUuid("GPU-9"), "not supported"))
    node.apply(FactsLost(SourceName("probe"), count=3), FactsLost(SourceName("probe"), count=4))
    node.apply(DriverCallOverdue("nvmlInit_v2", 120 * S), DriverCallAnswered("nvmlInit_v2"))
    node.apply(WatchedDirectoryDeleted("/var/lib/kubelet/device-plugins"))
    return lines_of(node)


def test_a_long_history_is_reported_in_these_words() -> None:
    assert history() == Path(__file__).with_name("history.txt").read_text("utf-8").splitlines()


def test_the_first_registration_is_reported_in_one_line() -> None:
    node = Node()
    cards = [gpu(number) for number in range(8)]
    node.apply(KubeletSocketSeen(K1), ready(), enumerated(*cards), *(passed(each.uuid) for each in cards))
    assert node.registrations(GPU) == [START_NS]
    (line,) = [*node.events(EventKind.ALLOCATABLE), *node.events(EventKind.DEVICE)]
    assert (fields_of(line)["capacity"], fields_of(line)["allocatable"]) == (8, 8)


def test_a_fault_that_is_there_at_the_start_is_reported_with_what_is_registered() -> None:
    node = Node()
    node.apply(
        KubeletSocketSeen(K1), ready(), enumerated(gpu(0), gpu(1)), xid(79, U1), passed(U0), passed(U1)
    )
    (unhealthy,) = node.events(EventKind.DEVICE)
    assert (fields_of(unhealthy)["uuid"], fields_of(unhealthy)["reason"], unhealthy.warning) == (
        U1,
        "xid",
        True,
    )
    (line,) = node.events(EventKind.ALLOCATABLE)
    assert (fields_of(line)["capacity"], fields_of(line)["allocatable"]) == (2, 1)
    assert [each["reason"] for each in cast("list[dict[str, str]]", fields_of(line)["unhealthy"])] == ["xid"]


def test_a_fault_that_was_kept_over_a_restart_is_reported_though_nothing_answers() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(xid(79, U1))
    again = node.restarted()
    again.after(DEFAULT.first_probe_wait_ns)
    (unhealthy,) = again.events(EventKind.DEVICE)
    assert (fields_of(unhealthy)["uuid"], fields_of(unhealthy)["reason"]) == (U1, "xid")
    (line,) = again.events(EventKind.ALLOCATABLE)
    assert (fields_of(line)["capacity"], fields_of(line)["allocatable"]) == (2, 0)


def test_an_agent_that_only_observes_reports_its_devices_in_time() -> None:
    node = Node(policy=replace(DEFAULT, observe=True))
    node.apply(ready(), enumerated(gpu(0)))
    assert node.wake_at_ns == START_NS + DEFAULT.first_probe_wait_ns
    assert node.events(EventKind.ALLOCATABLE) == []
    node.after(DEFAULT.first_probe_wait_ns)
    assert len(node.events(EventKind.ALLOCATABLE)) == 1


def test_every_event_has_its_time_and_only_changes_are_reported() -> None:
    node = healthy_node(gpu(0))
    assert changes(node.state, node.state, node.now_ns) == ()
    node.after(S, xid(48))
    assert {effect.at_ns for _, effect in node.effects if isinstance(effect, RecordEvent)} == {node.now_ns}


def test_an_event_of_a_mig_device_has_its_placement() -> None:
    node = healthy_node(C1B, policy=Policy(mig_strategy="mixed"))
    node.apply(xid(48, gi=2, ci=0))
    (condition,) = node.events(EventKind.CONDITION)
    assert (fields_of(condition)["uuid"], fields_of(condition)["gi"], fields_of(condition)["ci"]) == (
        U0,
        2,
        0,
    )
    node.apply(xid(13, gi=2, ci=0), xid(48, gi=9, ci=4))
    ignored, unknown = node.events(EventKind.XID)
    assert ignored.warning is False
    assert (fields_of(ignored)["gi"], fields_of(ignored)["ci"]) == (2, 0)
    assert unknown.warning
    assert (fields_of(unknown)["gpu"], fields_of(unknown)["gi"], fields_of(unknown)["ci"]) == (0, 9, 4)
    assert {effect.at_ns for _, effect in node.effects if isinstance(effect, RecordEvent)} == {START_NS}


def test_an_event_of_a_whole_gpu_names_no_instance() -> None:
    node = healthy_node(C1B, policy=Policy(mig_strategy="mixed"))
    node.apply(xid(48), xid(13))
    assert all("gi" not in fields_of(event) for event in node.events())


def test_lists_in_events_are_bounded_and_have_the_whole_number() -> None:
    node = healthy_node(gpu(0), gpu(1), policy=Policy(sharing=Sharing.of({GPU: 400})))
    node.apply(xid(79))
    (device,) = node.events(EventKind.DEVICE)
    assert fields_of(device)["count"] == 400
    assert fields_of(device)["devices"] == [f"{U0}::{replica}" for replica in range(MAX_LISTED)]
    (allocatable,) = node.events(EventKind.ALLOCATABLE)
    assert (fields_of(allocatable)["capacity"], fields_of(allocatable)["allocatable"]) == (800, 400)
    unhealthy = fields_of(allocatable)["unhealthy"]
    assert isinstance(unhealthy, list)
    assert [entry["id"] for entry in unhealthy] == [f"{U0}::{replica}" for replica in range(MAX_LISTED)]


def test_gpus_that_come_and_go_are_listed_by_pci_address_and_bounded() -> None:
    many = [replace(gpu(number), pci=f"0000:{99 - number}:00.0", index=number) for number in range(20)][::-1]
    node = Node()
    node.apply(ready(), enumerated(*reversed(many)), enumerated(many[7]))
    added, gone = node.events(EventKind.GPUS)
    assert fields_of(added)["count"] == 20
    assert fields_of(added)["added"] == [item.uuid for item in many[:MAX_LISTED]]
    assert not added.warning
    assert fields_of(gone)["gone"] == [item.uuid for item in many if item != many[7]][:MAX_LISTED]
    assert gone.warning


def test_a_task_that_ends_before_it_ever_ran_is_reported() -> None:
    node = Node()
    node.apply(TaskReported(NVML, running=False, message="no such file"))
    (event,) = node.events(EventKind.TASK)
    assert event.warning
    assert fields_of(event) == {"task": NVML, "failures": 1, "detail": "no such file"}


def test_a_task_that_ends_again_and_again_is_reported_once_and_counted() -> None:
    node = Node()
    for _ in range(5):
        node.after(S, TaskReported(NVML, running=False, message="no such file"))
    assert len(node.events(EventKind.TASK)) == 1
    assert node.state.tasks[NVML].failures == 5
    node.apply(TaskReported(NVML, running=True))
    assert [event.message for event in node.events(EventKind.TASK)][1:] == ["A task runs again"]
    assert (node.state.tasks[NVML].running, node.state.tasks[NVML].failures) == (True, 5)
    before = node.state
    node.apply(TaskReported(NVML, running=True))
    assert node.state is before


def test_losses_are_added_up_by_source() -> None:
    node = Node()
    node.apply(
        FactsLost(SourceName("a"), count=3),
        FactsLost(SourceName("b"), count=1),
        FactsLost(SourceName("a"), count=2),
    )
    assert node.state.facts_lost == {"a": 5, "b": 1}
    assert [fields_of(event)["total"] for event in node.events(EventKind.LOSS)] == [3, 1, 5]


def test_a_driver_of_another_version_is_reported() -> None:
    node = healthy_node(gpu(0))
    node.apply(replace(ready(), driver_version="575.1"))
    (event,) = node.events()
    assert (event.kind, fields_of(event)["driver_version"]) == (EventKind.DRIVER, "575.1")
    assert node.apply(replace(ready(), driver_version="575.1")) == ()


def test_other_device_nodes_are_a_change_without_an_event() -> None:
    node = healthy_node(gpu(0))
    assert node.apply(replace(enumerated(gpu(0)), control_nodes=("/dev/nvidiactl",))) == ()
    assert node.snapshot().control_nodes == ("/dev/nvidiactl",)


# Bounds


def test_xids_outside_the_table_are_kept_apart_up_to_a_bound() -> None:
    node = healthy_node(gpu(0))
    for code in range(1000, 1000 + MAX_UNLISTED_XIDS + 10):
        node.apply(xid(code))
    node.apply(xid(1000), xid(79))
    counts = node.state.xids[U0]
    assert len(counts) == MAX_UNLISTED_XIDS + 2
    assert (counts[1000], counts[OTHER_XID], counts[79]) == (2, 10, 1)
    assert len(node.conditions()) == MAX_UNLISTED_XIDS + 2
    other = next(item for item in node.conditions() if item.key.code == OTHER_XID)
    assert (other.count, other.message) == (10, f"XID {1000 + MAX_UNLISTED_XIDS + 9}")
    messages = [finding.message for finding in node.snapshot().findings if finding.gpus]
    assert messages[0] == "XID 79: GPU has fallen off the bus"
    assert len(messages) == MAX_MESSAGES + 1


def test_reports_that_are_too_old_to_be_of_the_same_fault_are_forgotten() -> None:
    node = healthy_node(gpu(0))
    for code in range(1, 60):
        node.after(S, xid(code))
    assert len(node.state.recent_xids) == 3


# The state


def test_a_change_is_dated_and_what_is_no_change_is_not() -> None:
    node = healthy_node(gpu(0))
    changed_ns = node.now_ns
    node.after(S, passed())
    node.after(S, xid(13, None))
    assert node.snapshot().at_ns == changed_ns
    node.after(S, xid(13))
    assert node.snapshot().at_ns == node.now_ns


def test_the_core_asks_to_be_stepped_within_five_seconds() -> None:
    node = Node()
    node.apply(Tick())
    assert node.wake_at_ns == node.now_ns + IDLE_NS == node.now_ns + 5 * S
    node.apply(xid(13, None))
    assert node.wake_at_ns == node.now_ns + IDLE_NS


def test_a_notice_without_a_change_keeps_the_state() -> None:
    node = healthy_node(gpu(0))
    before = node.state
    (effect,) = node.apply(HealthEventsUnsupported(U0, "no"))
    assert isinstance(effect, RecordEvent)
    assert node.state is before
    assert node.apply(WatchedDirectoryDeleted("/x")) == (
        ExitProcess(1, "/x was deleted; only a new process can write the one that takes its place"),
    )
    assert node.state is before


def test_events_come_before_what_is_to_be_done() -> None:
    node = healthy_node(gpu(0), mig_gpu(1, (1, 0, "1g.10gb")), policy=Policy(mig_strategy="mixed"))
    effects: tuple[Effect, ...] = node.apply(KubeletSocketSeen(K1))
    assert [type(effect) for effect in effects] == [RecordEvent, RegisterResource, RegisterResource]
    assert {effect.resource for effect in effects if isinstance(effect, RegisterResource)} == {
        GPU,
        ResourceName("nvidia.com/mig-1g.10gb"),
    }


def test_a_gpu_whose_index_moves_is_the_same_gpu() -> None:
    three: list[Gpu] = [gpu(number) for number in range(3)]
    node = healthy_node(*three)
    ids = [device.id for device in node.devices()]
    node.apply(enumerated(replace(three[1], index=0), replace(three[2], index=1)))
    assert [device.id for device in node.devices()] == ids
    assert [device.index for device in node.devices()] == [0, 0, 1]
    assert node.unhealthy() == {U0}
    assert [str(view.gpu.uuid) for view in node.snapshot().gpus] == [str(name) for name in ids]
