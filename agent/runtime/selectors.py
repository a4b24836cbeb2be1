"""Finds the GPU that somebody means: by UUID, serial, PCI address in any form, or NVML index.

Invariants: an index is only a way to say a UUID now, since it moves when a GPU is lost; what is kept is
the UUID, serial or address. What names no GPU, or several, is an error that says what would; an index that a
lost GPU had and another has now names both.
"""

import re
from collections.abc import Sequence
from typing import Final

from agent.errors import UsageError
from agent.model.gpu import Gpu
from agent.model.snapshot import GpuView, Snapshot

MAX_CHARACTERS: Final = 96
"""A UUID has 40 characters."""

_UUID: Final = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_PCI: Final = re.compile(
    r"(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{1,2}):(?P<device>[0-9a-f]{1,2})(?:\.(?P<function>[0-7]))?",
    re.IGNORECASE,
)
_SERIAL: Final = re.compile(r"[0-9A-Z]{6,32}", re.IGNORECASE)
_INDEX: Final = re.compile(r"[0-9]{1,2}")


def named(text: str, snapshot: Snapshot) -> tuple[str, Gpu | None]:
    """Return the name a GPU is kept by, and the GPU if it is known.

    Raises UsageError for what is no name of any kind, or names a MIG device.
    """
    views = _matching(text, snapshot)
    if views:
        gpu = views[0].gpu
        if text == gpu.serial:
            return text, gpu
        if len(views) > 1:
            raise _several(text, views)
        return (gpu.pci if _pci(text) == gpu.pci else gpu.uuid), gpu
    if _UUID.fullmatch(text):
        return f"GPU-{text[4:].lower()}", None
    address = _pci(text)
    if address is not None:
        return address, None
    if _SERIAL.fullmatch(text):
        return text, None
    raise _unknown(text, snapshot)


def one(text: str, snapshot: Snapshot) -> Gpu:
    """Return the GPU that is meant; raises UsageError unless it is exactly one that is known."""
    views = _matching(text, snapshot)
    if not views:
        raise _unknown(text, snapshot)
    if len(views) > 1:
        raise _several(text, views)
    return views[0].gpu


def _matching(text: str, snapshot: Snapshot) -> Sequence[GpuView]:
    """Return the GPUs of a name; of several at one place, those that are there now."""
    if len(text) > MAX_CHARACTERS:
        return ()
    address = _pci(text)
    found = [
        view
        for view in snapshot.gpus
        if text.casefold() == view.gpu.uuid.casefold() or text == view.gpu.serial or address == view.gpu.pci
    ]
    if not found and _INDEX.fullmatch(text):
        return _of_index(int(text), snapshot)
    present = [view for view in found if view.present]
    return present or found


def _of_index(index: int, snapshot: Snapshot) -> Sequence[GpuView]:
    """Return the GPUs of an index, also one that had it until it was lost: whoever read so means that one."""
    found = [view for view in snapshot.gpus if view.gpu.index == index]
    taken = {view.gpu.pci for view in found if view.present}
    return [view for view in found if view.present or view.gpu.pci not in taken]


def _several(text: str, views: Sequence[GpuView]) -> UsageError:
    names = ", ".join(f"{view.gpu.uuid}{'' if view.present else ' (lost)'}" for view in views)
    return UsageError(f'"{text}" names {len(views)} GPUs; give one of {names}')


def _pci(text: str) -> str | None:
    """Return a PCI address in sysfs form: four-digit domain, lower case; None if it is none."""
    match = _PCI.fullmatch(text)
    if match is None:
        return None
    domain, bus, device = (int(match[name] or "0", 16) for name in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.{match['function'] or '0'}"


def _unknown(text: str, snapshot: Snapshot) -> UsageError:
    shown = text if len(text) <= 40 else f"{text[:39]}…"
    for view in snapshot.gpus:
        if text in (mig.uuid for mig in view.gpu.mig_devices):
            return UsageError(f"{shown} is a MIG device; name its GPU, {view.gpu.uuid}")
    known = "gpu-agent status -o wide lists them" if snapshot.gpus else "no GPU is known yet"
    return UsageError(f'No GPU is named "{shown}"; give its UUID, serial, PCI address or index; {known}')
