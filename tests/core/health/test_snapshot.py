"""What sinks see, and what makes a node not ready."""

import pytest

from agent.core.health.snapshot import MAX_MESSAGES, NEEDED_TASKS
from agent.model.facts import (
    DEVICE_PLUGIN,
    KUBELET,
    NVML,
    CdiReported,
    DriverUnavailable,
    FactsLost,
    KubeletSocketSeen,
    TaskReported,
)
from agent.model.health import Health, Reason
from agent.model.ids import SourceName
from agent.model.policy import Policy
from agent.model.snapshot import DriverView, Finding, GpuView, RegistrationPhase, TaskView
from agent.model.structs import replace
from tests.core.build import (
    GPU,
    K1,
    PLUGIN,
    U0,
    U1,
    U2,
    Node,
    S,
    enumerated,
    gpu,
    healthy_node,
    passed,
    ready,
    registered_node,
    xid,
)


def findings(node: Node) -> list[Finding]:
    return list(node.snapshot().findings)


def test_a_node_whose_devices_are_registered_and_healthy_is_ready() -> None:
    node = registered_node(gpu(0), gpu(1))
    snapshot = node.snapshot()
    assert snapshot.ready
    assert snapshot.kubelet == K1
    (resource,) = snapshot.resources
    assert (resource.name, resource.capacity, resource.allocatable) == (GPU, 2, 2)
    assert (resource.phase, resource.generation, resource.message, resource.socket, resource.since_ns) == (
        RegistrationPhase.REGISTERED,
        1,
        "",
        PLUGIN,
        node.now_ns,
    )


def test_the_driver_is_shown_with_its_versions() -> None:
    assert healthy_node(gpu(0)).snapshot().driver == DriverView(
        ready=True, driver_version="570.86.15", nvml_version="12.570.86.15", cuda_version=(12, 8)
    )


def test_before_anything_is_known_the_driver_and_the_kubelet_are_missing() -> None:
    assert findings(Node()) == [
        Finding(Reason.DRIVER_NOT_LOADED, "NVML is not initialised yet"),
        Finding(Reason.KUBELET_UNAVAILABLE, "The kubelet's socket does not exist"),
    ]


def test_a_driver_that_is_missing_is_the_root_cause_and_reported_once() -> None:
    node = registered_node(gpu(0))
    node.apply(xid(48), DriverUnavailable(Reason.DRIVER_NOT_LOADED, "not loaded", unloaded=True))
    assert findings(node) == [
        Finding(Reason.DRIVER_NOT_LOADED, "not loaded"),
        Finding(Reason.XID, "XID 48: double-bit ECC error", (U0,)),
    ]
    assert node.snapshot().driver == DriverView(
        ready=False, reason=Reason.DRIVER_NOT_LOADED, message="not loaded"
    )
    node.apply(ready())
    assert [finding.reason for finding in findings(node)] == [Reason.XID, Reason.DRIVER_NOT_LOADED]


def test_a_driver_without_gpus_is_not_ready() -> None:
    node = Node()
    node.apply(ready(), enumerated(), KubeletSocketSeen(K1))
    assert findings(node) == [Finding(Reason.NOT_ENOUGH_GPUS, "NVML lists no GPU")]


def test_gpus_that_were_there_and_are_not_listed_are_lost() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(enumerated())
    assert findings(node) == [Finding(Reason.GPU_LOST, "NVML does not list the GPU any more", (U0, U1))]


def test_gpus_are_found_together_by_reason() -> None:
    node = registered_node(gpu(0), gpu(1), gpu(2))
    node.apply(xid(48, U2), xid(79, U0), enumerated(gpu(0), gpu(2)))
    assert findings(node) == [
        Finding(Reason.XID, "XID 79: GPU has fallen off the bus", (U0,)),
        Finding(Reason.XID, "XID 48: double-bit ECC error", (U2,)),
        Finding(Reason.GPU_LOST, "NVML does not list the GPU any more", (U1,)),
    ]


def test_a_gpu_that_was_not_probed_is_unknown_and_not_ready() -> None:
    node = registered_node(gpu(0))
    node.apply(enumerated(gpu(0), gpu(1)))
    assert findings(node) == [Finding(Reason.NOT_PROBED, "Not probed yet", (U1,))]
    assert [view.health for view in node.snapshot().gpus] == [Health.HEALTHY, Health.UNKNOWN]


def test_what_flips_nothing_keeps_no_node_from_being_ready() -> None:
    node = registered_node(gpu(0))
    node.apply(xid(48))
    (condition,) = node.conditions()
    node.state = replace(node.state, conditions={condition.key: replace(condition, flips=False)})
    assert node.snapshot().ready
    assert node.snapshot().gpus[0].health is Health.HEALTHY


def test_without_a_kubelet_registration_has_only_that_finding() -> None:
    node = registered_node(gpu(0))
    node.end_stream()
    node.apply(KubeletSocketSeen(None))
    assert findings(node) == [Finding(Reason.KUBELET_UNAVAILABLE, "The kubelet's socket does not exist")]


@pytest.mark.parametrize("task", [NVML, KUBELET, DEVICE_PLUGIN])
def test_a_needed_task_that_does_not_run_makes_the_node_not_ready(task: SourceName) -> None:
    node = registered_node(gpu(0))
    node.apply(TaskReported(task, running=False, message="broken"))
    assert findings(node) == [Finding(Reason.SOURCE_FAILED, f"{task} does not run: broken")]
    node.apply(TaskReported(task, running=True))
    assert node.snapshot().ready
    assert node.snapshot().tasks == {task: TaskView(running=True, failures=1, message="")}
    assert task in NEEDED_TASKS


def test_what_differs_between_gpus_is_reported_for_each_and_what_does_not_once() -> None:
    node = registered_node(gpu(0), gpu(1), gpu(2))
    node.apply(xid(79, U0), xid(48, U1), xid(79, U2))
    assert [(each.message[:7], each.gpus) for each in findings(node)] == [
        ("XID 79:", (U0, U2)),
        ("XID 48:", (U1,)),
    ]


def test_of_very_many_messages_some_are_reported_and_every_gpu_is() -> None:
    node = registered_node(*map(gpu, range(8)))
    node.apply(
        *(xid(number, gpu(place).uuid) for place, number in enumerate((48, 79, 119, 120, 62, 64, 74, 95)))
    )
    found = findings(node)
    assert len(found) == MAX_MESSAGES + 1
    assert found[-1].message.startswith("4 more, such as: XID 62")
    assert {uuid for each in found for uuid in each.gpus} == {gpu(number).uuid for number in range(8)}


def test_a_device_that_no_cdi_file_resolves_makes_the_node_not_ready() -> None:
    node = registered_node(gpu(0))
    node.apply(CdiReported("/run/cdi/a.json: Read-only file system"))
    assert findings(node) == [
        Finding(
            Reason.CDI_UNRESOLVABLE, "A container would not start: /run/cdi/a.json: Read-only file system"
        )
    ]
    assert node.snapshot().gpus[0].health is Health.HEALTHY
    node.apply(CdiReported(None))
    assert node.snapshot().ready


def test_a_task_that_is_not_needed_keeps_no_node_from_being_ready() -> None:
    node = registered_node(gpu(0))
    node.apply(TaskReported(SourceName("http"), running=False, message="port in use"))
    assert node.snapshot().ready


def test_a_gpu_is_shown_with_its_conditions_and_xids() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(xid(13), xid(48, U1), enumerated(gpu(0)))
    one, two = node.snapshot().gpus
    assert one == GpuView(gpu=gpu(0), health=Health.HEALTHY, present=True, conditions=(), xids={13: 1})
    assert (two.health, two.present, two.xids) == (Health.UNHEALTHY, False, {48: 1})
    assert registered_node(gpu(0)).snapshot().gpus[0].xids == {}
    assert [item.reason for item in two.conditions] == [Reason.XID, Reason.GPU_LOST]


def test_a_device_shows_the_conditions_that_flip_it_first_and_then_the_oldest() -> None:
    node = registered_node(gpu(0))
    node.apply(xid(48))
    node.after(S, xid(79))
    node.after(S, xid(48))
    (key, condition) = next(iter(node.state.conditions.items()))
    assert [item.key.code for item in node.devices()[0].reasons] == [48, 79]
    node.state = replace(
        node.state, conditions={**node.state.conditions, key: replace(condition, flips=False)}
    )
    node.apply(xid(62))
    assert [item.key.code for item in node.devices()[0].reasons] == [79, 62, 48]


def test_what_must_outlive_the_process_is_the_gpus_their_conditions_and_counts() -> None:
    node = registered_node(gpu(0), gpu(1))
    node.apply(xid(48, U1, count=3), xid(13))
    durable = node.snapshot().durable
    assert durable.gpus == (gpu(0), gpu(1))
    assert durable.conditions == tuple(node.conditions())
    assert set(durable.xids) == {(U1, 48, 3), (U0, 13, 1)}


def test_losses_and_policy_are_shown() -> None:
    node = registered_node(gpu(0), policy=Policy(jitter_seed=7))
    node.apply(FactsLost(SourceName("probe"), count=3))
    assert node.snapshot().facts_lost == {"probe": 3}
    assert node.snapshot().policy == Policy(jitter_seed=7)


def test_a_resource_that_was_never_registered_waits() -> None:
    node = healthy_node(gpu(0)).restarted(after_ns=S)
    (resource,) = node.snapshot().resources
    assert (resource.phase, resource.generation, resource.socket) == (RegistrationPhase.WAITING, 0, None)
    assert (resource.since_ns, resource.message) == (node.now_ns, "The kubelet's socket does not exist yet")
    node.after(S, passed())
    assert node.snapshot().resources[0] == replace(
        resource, since_ns=node.standing().since_ns, devices=node.devices()
    )
