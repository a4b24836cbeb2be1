"""Claims on GPUs in a process's own calls, whose parameters it can change at any time."""

from agent.core.usage.gpu_map import CONTROL
from agent.model.structs import replace
from tests.core.kernel_world import DEVICE, GPUS, SHARE, UVM, V0, V1, VASPACE, gpu_file
from tests.core.usage.test_tracker import Rig, hold_of, use_of

UNKNOWN_INSTANCES = replace(GPUS, by_instance={})


def test_a_claim_on_a_device_instance_counts_for_its_own_process_alone() -> None:
    rig = Rig(UNKNOWN_INSTANCES)
    liar = rig.world.spawn(100)
    control, uvm = rig.world.open(liar, CONTROL), rig.world.open(liar, UVM)
    for minor in (0, 1):
        rig.world.open(liar, gpu_file(minor))
    client = rig.world.client(liar, control)
    device = rig.world.alloc(liar, client, client, DEVICE, 0)
    rig.world.register(liar, uvm, client, rig.world.alloc(liar, client, device, VASPACE), V1)
    other, _ = rig.job(200, contexts=1)
    rig.world.open(other, gpu_file(1))
    usage = rig.update()
    assert use_of(usage, 200).unplaced == 1
    assert [(hold.gpu, hold.contexts) for hold in use_of(usage, 200).holds] == [(V0, 0), (V1, 0)]


def test_a_registration_of_another_processs_client_has_no_effect() -> None:
    rig = Rig(UNKNOWN_INSTANCES)
    victim, control = rig.job(100, contexts=0)
    rig.world.open(victim, gpu_file(1))
    client = rig.world.client(victim, control)
    device = rig.world.alloc(victim, client, client, DEVICE, 0)
    vaspace = rig.world.alloc(victim, client, device, VASPACE)
    rig.world.alloc(victim, client, device, SHARE)
    liar = rig.world.spawn(200)
    rig.world.register(liar, rig.world.open(liar, UVM), client, vaspace, V1)
    usage = rig.update()
    assert use_of(usage, 100).unplaced == 1
    rig.world.register(victim, rig.world.open(victim, UVM), client, vaspace, V0)
    assert hold_of(rig.update(), 100).contexts == 1


def test_contexts_are_on_no_gpu_that_the_kernel_did_not_see_open() -> None:
    rig = Rig(replace(GPUS, by_instance={0: V0, 1: V1}))
    liar, control = rig.job(100, contexts=0, minor=0)
    rig.world.context(liar, control, 1)
    usage = rig.update()
    assert hold_of(usage, 100).contexts == 1
    assert [total.gpu for total in usage.totals] == [V0]
    uvm = rig.world.open(liar, UVM)
    client = rig.world.client(liar, control)
    device = rig.world.alloc(liar, client, client, DEVICE, 5)
    rig.world.register(liar, uvm, client, rig.world.alloc(liar, client, device, VASPACE), V1)
    rig.world.alloc(liar, client, device, SHARE)
    assert [total.gpu for total in rig.update().totals] == [V0]


def test_a_process_without_any_gpu_open_has_its_contexts_nowhere() -> None:
    rig = Rig()
    liar = rig.world.spawn(100)
    rig.world.context(liar, rig.world.open(liar, CONTROL), 0)
    usage = rig.update()
    assert use_of(usage, 100).unplaced == 1
    assert usage.totals == ()


def test_a_gpu_that_was_closed_again_was_open() -> None:
    rig = Rig()
    task, control = rig.job(100, contexts=0, minor=0)
    file = rig.world.open(task, gpu_file(1))
    rig.world.context(task, control, 1)
    rig.world.close(task, file)
    assert hold_of(rig.update(), 100, V1).contexts == 1


def test_a_descriptor_received_and_closed_between_scans_shows_its_gpu() -> None:
    rig = Rig()
    sender, _ = rig.job(100)
    task, control = rig.job(200, contexts=0, minor=0)
    file = rig.world.open(sender, gpu_file(1))
    rig.world.send(task, file)
    rig.world.context(task, control, 1)
    rig.world.close(task, file)
    assert hold_of(rig.update(), 200, V1).contexts == 1


def test_claims_on_device_instances_are_bounded() -> None:
    rig = Rig(UNKNOWN_INSTANCES)
    task, control = rig.job(100, contexts=0)
    rig.world.open(task, gpu_file(1))
    uvm = rig.world.open(task, UVM)
    for instance in range(40):
        client = rig.world.client(task, control)
        device = rig.world.alloc(task, client, client, DEVICE, instance)
        rig.world.register(task, uvm, client, rig.world.alloc(task, client, device, VASPACE), V1)
    for instance in (31, 32):
        client = rig.world.client(task, control)
        rig.world.alloc(task, client, rig.world.alloc(task, client, client, DEVICE, instance), SHARE)
    use = use_of(rig.update(), 100)
    assert (hold_of(rig.update(), 100, V1).contexts, use.unplaced) == (1, 1)
