"""Validates NVML's list of the processes on a GPU.

Driver 535 changed the record behind a function whose name stayed the same, so a library and a binding of
different versions read it shifted: sizes as pids, pids as sizes. Source: gpuopenanalytics/pynvml#50,
XuehaiPan/nvitop#79, NVIDIA/go-nvml#21.
"""

from collections.abc import Iterable
from typing import Final

from agent.model.usage import MemoryUser, ProcessInfo

NOT_AVAILABLE: Final = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE as an unsigned number: the memory of this process is unavailable."""


def believed(
    users: Iterable[MemoryUser], *, total_bytes: int | None, pid_max: int
) -> tuple[tuple[MemoryUser, ...], ProcessInfo]:
    """Return the users by pid, and whether the list is reliable.

    One impossible record (pid 0 or above ``pid_max``, more memory than the GPU has) shows that the whole list
    was read shifted: its other records only seem possible, so all are dropped. A process that is listed
    twice, for compute and for graphics, is one; the larger figure includes the smaller.
    """
    merged: dict[tuple[int, int, int], MemoryUser] = {}
    for user in users:
        used = None if user.used_bytes == NOT_AVAILABLE else user.used_bytes
        if not 0 < user.pid <= pid_max or not _is_possible(used, total_bytes):
            return (), "unreliable"
        key = (user.pid, user.gi, user.ci)
        known = merged.get(key)
        if known is not None and known.used_bytes is not None:
            used = max(used or 0, known.used_bytes)
        merged[key] = MemoryUser(user.pid, used, user.gi, user.ci)
    return tuple(merged[key] for key in sorted(merged)), "ok"


def _is_possible(used_bytes: int | None, total_bytes: int | None) -> bool:
    if used_bytes is None:
        return True
    return used_bytes >= 0 and (total_bytes is None or used_bytes <= total_bytes)
