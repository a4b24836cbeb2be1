"""The state file's format: a state as bytes, and the state in bytes of any age.

It is ``Durable`` as JSON, except that the parts of a condition's key stand beside its other fields. So a
field of those records that is renamed keeps its old name there (``msgspec.field(name=...)``), and one that is
added has a default. A checksum over the exact bytes finds what the disk did.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from agent.log import about
from agent.model.health import Condition, Reason, Recovery
from agent.model.ids import ALL
from agent.model.snapshot import Durable
from agent.model.structs import replace

VERSION: Final = 1

_log = logging.getLogger(__name__)


class _Envelope(msgspec.Struct):
    version: int
    sha256: str
    state: msgspec.Raw


class _Head(msgspec.Struct):
    """What is not as in ``Durable``."""

    boot_id: str
    conditions: list[dict[str, Any]] = []


class UnusableError(Exception):
    """The bytes hold no usable state; the message is the reason."""


def decoded(raw: bytes, *, boot_id: str) -> Durable:
    """Return the state in the bytes of a file, as far as it is true in this boot; or UnusableError."""
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
        body = bytes(envelope.state)
        if envelope.version != VERSION:
            raise UnusableError(f"is of version {envelope.version}, and this agent reads {VERSION}")
        if hashlib.sha256(body).hexdigest() != envelope.sha256:
            raise UnusableError("is damaged: the checksum does not fit")
        values = msgspec.json.decode(body, type=dict[str, Any])
        head = msgspec.convert(values, _Head)
        durable = msgspec.convert(values | {"conditions": ()}, Durable)
        conditions = tuple(_conditions_of(head.conditions))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UnusableError(f"is damaged: {error}") from None
    if head.boot_id == boot_id and boot_id:
        # Agents before wrote zero where the memory was unknown.
        gpus = tuple(replace(gpu, memory_bytes=gpu.memory_bytes or None) for gpu in durable.gpus)
        return replace(durable, gpus=gpus, conditions=conditions)
    return Durable(conditions=tuple(_after_a_reboot(conditions)), holds=durable.holds, lost=durable.lost)


def _conditions_of(stored: Iterable[Mapping[str, Any]]) -> Iterator[Condition]:
    for item in stored:
        place = {"gpu": item.get("gpu"), "gi": item.get("gi", ALL), "ci": item.get("ci", ALL)}
        key = (item.get("source"), item.get("reason"), place, item.get("code", 0))
        try:
            yield msgspec.convert({**item, "key": key}, Condition)
        except msgspec.ValidationError as error:
            if not str(error).startswith("Invalid enum value"):
                raise
            # Written by a newer agent. The GPU is unknown, so not advertised, until it was probed.
            _log.warning(
                "Discarded the stored condition %(reason)s of %(gpu_uuid)s, which this agent does not know",
                about(gpu_uuid=item.get("gpu"), reason=item.get("reason")),
            )


def _after_a_reboot(conditions: Iterable[Condition]) -> Iterator[Condition]:
    for each in conditions:
        # That a GPU is held follows from the holds.
        if each.recovery is Recovery.BY_HAND and each.reason is not Reason.HELD:
            yield replace(
                each, since_ns=0, last_ns=0, clean_probes=0, clean_since_ns=0, reset_seen=False, details=None
            )


def encoded(durable: Durable, *, boot_id: str) -> bytes:
    """Return the bytes of the file."""
    values = msgspec.to_builtins(durable)
    for condition in values["conditions"]:
        source, reason, place, code = condition.pop("key")
        condition |= {"source": source, "reason": reason, "code": code, **place}
    body = msgspec.json.encode({"boot_id": boot_id, **values})
    checksum = hashlib.sha256(body).hexdigest()
    return msgspec.json.encode(_Envelope(VERSION, checksum, msgspec.Raw(body))) + b"\n"
