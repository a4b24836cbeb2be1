"""Keeps what must outlive the process in a file: sick stays sick over a restart.

Guarantees:

1. The file is always an old or a new state, never a mix: it is written beside its place, synced and
   renamed, and the directory is synced. A checksum over the exact bytes finds what the disk did.
2. Nothing is written or synced in the loop's thread; a slow disk delays only newer states of the
   file, of which the newest wins.
3. Times are of CLOCK_MONOTONIC and so belong to one boot, whose id is in the file. Under another
   boot id every ``since`` is zero, what a reboot cures is gone, and so are the GPUs, because hardware
   may have been changed; holds and what only a person clears are kept and wait for their GPU.
4. A file that is damaged, or of another version, is put aside with one line in the log; what was
   in it is derived anew, and until then the GPUs are unknown and so offered as Unhealthy.

The format is described by the ``_Stored…`` records below and by nothing else: a name changed in the
model does not change the file. Fields are only ever added, with a default.
"""

import asyncio
import contextlib
import hashlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec

from agent.bus import Latest
from agent.files import write
from agent.log import fields
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
from agent.model.snapshot import Durable, Snapshot
from agent.model.usage import Certainty
from agent.threads import in_daemon_thread

VERSION: Final = 1

MAX_BYTES: Final = 4 * 1024 * 1024
"""A state of 16 GPUs with 7 MIG devices each and every condition there is has some 200 KiB."""

MIN_INTERVAL_S: Final = 0.5
"""Between two writes; the first change is written at once, and so is a condition that is not in the file:
a process that dies with the device it watches must not forget it."""

RETRY_FIRST_S: Final = 1.0
RETRY_CAP_S: Final = 60.0

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
    memory_bytes: int
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
    owner: Literal["pod", "host"]
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


class _Envelope(msgspec.Struct):
    version: int
    sha256: str
    state: msgspec.Raw


class _UnusableError(Exception):
    """The file says nothing that can be used; says why."""


def load(path: str, *, boot_id: str) -> Durable | None:
    """Return what was kept, or None where there is nothing that can be used."""
    try:
        raw = _read(path)
        if raw is None:
            return None
        stored = _decoded(raw)
    except _UnusableError as error:
        _log.error("Put an unusable state file aside", extra=fields(path=path, detail=str(error)))
        _put_aside(path)
        return None
    return _restored(stored, is_same_boot=stored.boot_id == boot_id and bool(boot_id))


def _read(path: str) -> bytes | None:
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _UnusableError(f"could not be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise _UnusableError(f"is over {MAX_BYTES} bytes")
    return raw


def _decoded(raw: bytes) -> _StoredState:
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
        body = bytes(envelope.state)
        if envelope.version != VERSION:
            raise _UnusableError(f"is of version {envelope.version}, and this agent reads {VERSION}")
        if hashlib.sha256(body).hexdigest() != envelope.sha256:
            raise _UnusableError("is damaged: the checksum does not fit")
        return msgspec.json.decode(body, type=_StoredState)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _UnusableError(f"is damaged: {error}") from None


def _put_aside(path: str) -> None:
    with contextlib.suppress(OSError):
        Path(path).replace(f"{path}.unusable")


def _restored(stored: _StoredState, *, is_same_boot: bool) -> Durable:
    holds = tuple(stored.holds)
    conditions = tuple(_conditions_of(stored.conditions))
    if not is_same_boot:
        kept = (each for each in conditions if each.recovery is Recovery.BY_HAND)
        # That a GPU is held follows from the holds.
        return Durable(
            conditions=tuple(_as_of_another_boot(each) for each in kept if each.reason is not Reason.HELD),
            holds=holds,
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
    )


def _gpu_of(stored: _StoredGpu) -> Gpu:
    return Gpu(
        uuid=GpuUuid(stored.uuid),
        index=stored.index,
        minor=stored.minor,
        name=stored.name,
        pci=stored.pci,
        memory_bytes=stored.memory_bytes,
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
                "Left out a stored condition of a kind this agent does not know",
                extra=fields(gpu_uuid=item.gpu, reason=item.reason),
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
        else msgspec.convert(asdict(condition.details), _StoredDetails),
    )


class StateFile:
    """Writes the durable part of the newest snapshot whenever it changed."""

    def __init__(self, path: str, latest: Latest[Snapshot], *, boot_id: str) -> None:
        self._path = path
        self._latest = latest
        self._boot_id = boot_id
        self._written: Durable | None = None
        self._writing = threading.Lock()
        """Held by the thread that writes: one whose task was cancelled is still at the file beside."""
        self._begun = self._newest = 0
        """Number of the newest write begun, and of the newest one a thread has taken up."""
        self.failures = 0
        """Writes that failed since the start."""
        self.trouble: str | None = None
        """Why the newest state is not in the file; None while it is."""

    async def run(self) -> None:
        """Write each change; when the disk refuses, try again with growing pauses, for ever."""
        pause_s = RETRY_FIRST_S
        version = self._latest.version
        while True:
            if self._latest.value.durable == self._written:
                version = await self._latest.wait_newer(version)
                continue
            if await self._write_newest():
                pause_s = RETRY_FIRST_S
                await self._rest()
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_CAP_S)

    async def _rest(self) -> None:
        """Wait until the next write is due."""
        try:
            async with asyncio.timeout(MIN_INTERVAL_S):
                while not self._knows_more_than_the_file():
                    await self._latest.wait_newer(self._latest.version)
        except TimeoutError:
            return

    def _knows_more_than_the_file(self) -> bool:
        written = self._written.conditions if self._written is not None else ()
        newest = self._latest.value.durable.conditions
        return newest != written and not {each.key for each in newest} <= {each.key for each in written}

    async def flush(self, timeout_s: float) -> bool:
        """Write the newest state if it is not in the file, but wait no longer than the timeout.

        Returns whether nothing is being written any more.
        """
        if self._latest.value.durable == self._written:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._write_newest()
        except TimeoutError:
            _log.warning("Left without the newest state in the file", extra=fields(path=self._path))
            return False
        return True

    async def _write_newest(self) -> bool:
        durable = self._latest.value.durable
        try:
            self._begun += 1
            await in_daemon_thread("statefile-writer", partial(self._write, durable, self._begun))
        except (OSError, RuntimeError) as error:
            self._note_failure(error)
            return False
        if self.trouble is not None:
            _log.info("Wrote the state file again", extra=fields(path=self._path))
        self._written, self.trouble = durable, None
        return True

    def _write(self, durable: Durable, number: int) -> None:
        with self._writing:
            if number < self._newest:
                return  # overtaken by a newer state while this thread was starting
            self._newest = number
            write(self._path, encoded(durable, boot_id=self._boot_id))

    def _note_failure(self, error: OSError | RuntimeError) -> None:
        detail = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self.failures += 1
        if self.trouble != detail:
            _log.error("Could not write the state file", extra=fields(path=self._path, detail=detail))
        self.trouble = detail
