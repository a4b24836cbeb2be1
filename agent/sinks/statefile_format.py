"""The state file's format: what is told of a state, as bytes, and what is made of bytes of any age.

It is described by the ``_Stored…`` records below and by nothing else: a name changed in the model does not
change the file. Fields are only ever added, with a default. A checksum over the exact bytes finds what the
disk did.
"""

import hashlib
import logging
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from agent.log import about
from agent.model.gpu import Gpu, MigDevice
from agent.model.health import (
    Condition,
    ConditionKey,
    Culprit,
    Details,
    Evidence,
    LeakKind,
    Reason,
    Recovery,
)
from agent.model.ids import ALL, GpuUuid, Placement, SourceName
from agent.model.snapshot import Durable
from agent.model.usage import Certainty

VERSION: Final = 1

_log = logging.getLogger(__name__)


class _StoredMig(msgspec.Struct, omit_defaults=True):
    uuid: str
    gi: int
    ci: int
    profile: str
    memory_bytes: int


class _StoredGpu(msgspec.Struct, omit_defaults=True):
    uuid: str
    index: int
    name: str
    pci: str
    memory_bytes: int | None
    minor: int | None = None
    compute_capability: tuple[int, int] | None = None
    numa_node: int | None = None
    serial: str | None = None
    part_number: str | None = None
    vbios: str | None = None
    inforom: str | None = None
    mig_enabled: bool = False
    mig_devices: list[_StoredMig] = []


class _StoredCulprit(msgspec.Struct, omit_defaults=True):
    pid: int
    start_ticks: int
    comm: str
    owner: Literal["pod", "host", "unknown"]
    state: str
    killable: bool
    since_ns: int
    pod: str | None = None
    contexts: int | None = None
    used_bytes: int | None = None
    role: Literal["holder", "owner"] = "holder"


class _StoredDetails(msgspec.Struct, omit_defaults=True):
    kind: str
    culprits: list[_StoredCulprit] = []
    more: int = 0
    contexts: int | None = None
    used_bytes: int | None = None
    incomplete: bool = False
    certainty: Certainty = "verified"
    critical: bool = False


class _StoredCondition(msgspec.Struct, omit_defaults=True):
    source: str
    reason: str
    gpu: str
    evidence: str
    recovery: str
    flips: bool
    message: str
    since_ns: int
    last_ns: int
    gi: int = ALL
    ci: int = ALL
    code: int = 0
    count: int = 1
    clean_probes: int = 0
    clean_since_ns: int = 0
    reset_seen: bool = False
    lasts: bool = False
    details: _StoredDetails | None = None


class _StoredState(msgspec.Struct, omit_defaults=True):
    boot_id: str
    gpus: list[_StoredGpu] = []
    conditions: list[_StoredCondition] = []
    xids: list[tuple[str, int, int]] = []
    holds: list[tuple[str, str]] = []
    released_gpus: list[str] = []
    released_until_ns: int | None = None
    module_inode: int | None = None
    kernel_log_read: int | None = None
    lost: str = ""


class _Envelope(msgspec.Struct):
    version: int
    sha256: str
    state: msgspec.Raw


class UnusableError(Exception):
    """The bytes say nothing that can be used; says why."""


def decoded(raw: bytes, *, boot_id: str) -> Durable:
    """Return the state that the bytes of a file tell, as far as it is true in this boot; or UnusableError."""
    stored = _stored_state(raw)
    return _restored(stored, is_same_boot=stored.boot_id == boot_id and bool(boot_id))


def _stored_state(raw: bytes) -> _StoredState:
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
        body = bytes(envelope.state)
        if envelope.version != VERSION:
            raise UnusableError(f"is of version {envelope.version}, and this agent reads {VERSION}")
        if hashlib.sha256(body).hexdigest() != envelope.sha256:
            raise UnusableError("is damaged: the checksum does not fit")
        return msgspec.json.decode(body, type=_StoredState)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UnusableError(f"is damaged: {error}") from None


def _restored(stored: _StoredState, *, is_same_boot: bool) -> Durable:
    holds = tuple(stored.holds)
    conditions = tuple(_conditions_of(stored.conditions))
    if not is_same_boot:
        kept = (each for each in conditions if each.recovery is Recovery.BY_HAND)
        # That a GPU is held follows from the holds.
        return Durable(
            conditions=tuple(_as_of_another_boot(each) for each in kept if each.reason is not Reason.HELD),
            holds=holds,
            lost=stored.lost,
        )
    return Durable(
        gpus=tuple(_gpu_of(gpu) for gpu in stored.gpus),
        conditions=conditions,
        xids=tuple((GpuUuid(gpu), xid, count) for gpu, xid, count in stored.xids),
        holds=holds,
        released_gpus=tuple(GpuUuid(gpu) for gpu in stored.released_gpus),
        released_until_ns=stored.released_until_ns,
        module_inode=stored.module_inode,
        kernel_log_read=stored.kernel_log_read,
        lost=stored.lost,
    )


def _gpu_of(stored: _StoredGpu) -> Gpu:
    return Gpu(
        uuid=GpuUuid(stored.uuid),
        index=stored.index,
        minor=stored.minor,
        name=stored.name,
        pci=stored.pci,
        # Agents before wrote zero where it was unknown.
        memory_bytes=stored.memory_bytes or None,
        compute_capability=stored.compute_capability,
        numa_node=stored.numa_node,
        serial=stored.serial,
        part_number=stored.part_number,
        vbios=stored.vbios,
        inforom=stored.inforom,
        mig_enabled=stored.mig_enabled,
        mig_devices=tuple(
            MigDevice(mig.uuid, mig.gi, mig.ci, mig.profile, mig.memory_bytes) for mig in stored.mig_devices
        ),
    )


def _conditions_of(stored: list[_StoredCondition]) -> Iterator[Condition]:
    for item in stored:
        try:
            yield _condition_of(item)
        except ValueError:
            # Written by a newer agent. The GPU is unknown, so not offered, until it was probed.
            _log.warning(
                "Left out the stored condition %(reason)s of %(gpu_uuid)s, which this agent does not know",
                about(gpu_uuid=item.gpu, reason=item.reason),
            )


def _condition_of(stored: _StoredCondition) -> Condition:
    placement = Placement(GpuUuid(stored.gpu), stored.gi, stored.ci)
    return Condition(
        key=ConditionKey(SourceName(stored.source), Reason(stored.reason), placement, stored.code),
        evidence=Evidence(stored.evidence),
        recovery=Recovery(stored.recovery),
        flips=stored.flips,
        message=stored.message,
        since_ns=stored.since_ns,
        last_ns=stored.last_ns,
        count=stored.count,
        clean_probes=stored.clean_probes,
        clean_since_ns=stored.clean_since_ns,
        reset_seen=stored.reset_seen,
        lasts=stored.lasts,
        details=None if stored.details is None else _details_of(stored.details),
    )


def _details_of(stored: _StoredDetails) -> Details:
    values = msgspec.structs.asdict(stored)
    values["culprits"] = tuple(Culprit(**msgspec.structs.asdict(each)) for each in stored.culprits)
    return Details(**values | {"kind": LeakKind(stored.kind)})


def _as_of_another_boot(condition: Condition) -> Condition:
    return Condition(
        key=condition.key,
        evidence=condition.evidence,
        recovery=condition.recovery,
        flips=condition.flips,
        message=condition.message,
        since_ns=0,
        last_ns=0,
        count=condition.count,
        lasts=condition.lasts,
    )


def encoded(durable: Durable, *, boot_id: str) -> bytes:
    """Return the bytes of the file."""
    body = msgspec.json.encode(
        _StoredState(
            boot_id=boot_id,
            gpus=[_stored_gpu(gpu) for gpu in durable.gpus],
            conditions=[_stored_condition(condition) for condition in durable.conditions],
            xids=[(str(gpu), xid, count) for gpu, xid, count in durable.xids],
            holds=list(durable.holds),
            released_gpus=[str(gpu) for gpu in durable.released_gpus],
            released_until_ns=durable.released_until_ns,
            module_inode=durable.module_inode,
            kernel_log_read=durable.kernel_log_read,
            lost=durable.lost,
        )
    )
    checksum = hashlib.sha256(body).hexdigest()
    return msgspec.json.encode(_Envelope(VERSION, checksum, msgspec.Raw(body))) + b"\n"


def _stored_gpu(gpu: Gpu) -> _StoredGpu:
    return _StoredGpu(
        uuid=gpu.uuid,
        index=gpu.index,
        name=gpu.name,
        pci=gpu.pci,
        memory_bytes=gpu.memory_bytes,
        minor=gpu.minor,
        compute_capability=gpu.compute_capability,
        numa_node=gpu.numa_node,
        serial=gpu.serial,
        part_number=gpu.part_number,
        vbios=gpu.vbios,
        inforom=gpu.inforom,
        mig_enabled=gpu.mig_enabled,
        mig_devices=[
            _StoredMig(mig.uuid, mig.gi, mig.ci, mig.profile, mig.memory_bytes) for mig in gpu.mig_devices
        ],
    )


def _stored_condition(condition: Condition) -> _StoredCondition:
    return _StoredCondition(
        source=condition.key.source,
        reason=condition.reason.value,
        gpu=condition.placement.gpu,
        evidence=condition.evidence.value,
        recovery=condition.recovery.value,
        flips=condition.flips,
        message=condition.message,
        since_ns=condition.since_ns,
        last_ns=condition.last_ns,
        gi=condition.placement.gi,
        ci=condition.placement.ci,
        code=condition.key.code,
        count=condition.count,
        clean_probes=condition.clean_probes,
        clean_since_ns=condition.clean_since_ns,
        reset_seen=condition.reset_seen,
        lasts=condition.lasts,
        details=None
        if condition.details is None
        else msgspec.convert(condition.details, _StoredDetails, from_attributes=True),
    )
