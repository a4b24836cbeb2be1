"""States as they are kept in the file."""

from agent.model.facts import NVML, PROBE
from agent.model.gpu import Gpu, MigDevice
from agent.model.health import (
    Condition,
    ConditionKey,
    Details,
    Evidence,
    InvolvedProcess,
    LeakKind,
    Reason,
    Recovery,
)
from agent.model.ids import GpuUuid, Placement
from agent.model.snapshot import Durable
from agent.model.structs import replace

BOOT, OTHER_BOOT = "11111111-1111", "22222222-2222"
U0, U1 = GpuUuid("GPU-0"), GpuUuid("GPU-1")


def gpu(uuid: GpuUuid, *, mig: bool = False) -> Gpu:
    slices = (MigDevice("MIG-1", 1, 0, "1g.5gb", 5 * 2**30), MigDevice("MIG-2", 2, 0, "1g.5gb", 5 * 2**30))
    return Gpu(
        uuid=uuid,
        index=0,
        minor=3,
        name="A100 „quoted“",
        pci="0000:3b:00.0",
        memory_bytes=2**35,
        compute_capability=(8, 0),
        numa_node=None,
        serial="123",
        mig_enabled=mig,
        mig_devices=slices if mig else (),
    )


def condition(
    uuid: GpuUuid, *, recovery: Recovery = Recovery.RESET, code: int = 79, gi: int = 1, seen: bool = True
) -> Condition:
    return Condition(
        key=ConditionKey(NVML, Reason.XID, Placement(uuid, gi, 0), code),
        evidence=Evidence.HARD,
        recovery=recovery,
        flips=True,
        message="XID 79 was reported",
        since_ns=7_000,
        last_ns=9_000,
        count=3,
        clean_probes=2,
        reset_seen=seen,
    )


UNHEALTHY = Durable(
    gpus=(gpu(U0, mig=True), gpu(U1)), conditions=(condition(U0),), xids=((U0, 79, 3), (U1, 13, 9))
)

ORDERS = replace(
    UNHEALTHY,
    gpus=(
        replace(gpu(U0), part_number="900-21010-0000-000", vbios="96.00.61.00.01", inforom="G520.0200.00.05"),
    ),
    conditions=(replace(condition(U0), lasts=True, clean_since_ns=8_000),),
    holds=((str(U0), "noisy fan"),),
    released_gpus=(U0,),
    released_until_ns=99_000,
    module_inode=7,
)

LEAK = replace(
    condition(U0, recovery=Recovery.SELF_CLEARING, code=1),
    key=ConditionKey(PROBE, Reason.CONTEXT_LEAK, Placement(U0), 1),
    evidence=Evidence.SOFT,
    details=Details(
        LeakKind.POD_GONE,
        involved=(
            InvolvedProcess(
                pid=4711,
                start_ticks=99,
                comm="train",
                owner="pod",
                pod="team-a/train-0",
                state="S",
                killable=True,
                contexts=2,
                used_bytes=2**30,
                since_ns=5_000,
            ),
            InvolvedProcess(
                pid=4712,
                start_ticks=98,
                comm="",
                owner="unknown",
                pod=None,
                state="D",
                killable=False,
                contexts=None,
                used_bytes=None,
                since_ns=5_001,
                role="owner",
            ),
        ),
        more=3,
        used_bytes=2**31,
        incomplete=True,
        certainty="unverified",
    ),
)
FINDINGS = Durable(
    gpus=(replace(gpu(U0), numa_node=1, minor=None, memory_bytes=None, compute_capability=None),),
    conditions=(LEAK, replace(LEAK, details=Details(LeakKind.CTX_GROWTH, contexts=7, critical=True))),
    kernel_log_read=1234,
    lost="/var/lib/gpu-agent/state.json is damaged",
)
