"""Reads how much memory of a GPU is used, and which processes NVML lists on it.

Invariants: everything here blocks and runs on the GPU's own thread, after the readings of a poll passed. A
list that the driver does not support is unsupported, one with impossible records is unreliable (see
core.usage.process_list); neither claims anything. What failed this time is not emitted this time.

Cost of a poll: four calls, of which those for processes make two each where there are any.
"""

from typing import Final

from agent.core.usage.process_list import believed
from agent.model.usage import GpuMemory, MemoryUser
from agent.sources.nvml.library import Handle
from agent.sources.nvml.optional_calls import OptionalCalls
from agent.sources.nvml.readings import Readings

PID_MAX: Final = 4_194_304
"""The largest pid of any kernel. Source: linux include/linux/threads.h (PID_MAX_LIMIT)."""

MAX_USERS: Final = 4_096
"""Processes on one GPU; a list with more is not used, because those cut off would seem absent."""


class MemoryReader:
    """Reads the memory of one GPU from poll to poll."""

    def __init__(self, readings: Readings, ask: OptionalCalls, *, max_users: int = MAX_USERS) -> None:
        self._readings = readings
        self._max_users = max_users
        self._ask = ask

    def read(self, handle: Handle, *, total_bytes: int | None) -> GpuMemory | None:
        """Return the memory and its users; None: it could not be read this time.

        Raises NvmlError for a finding.
        """
        readings, ask = self._readings, self._ask
        used_bytes = ask(handle, readings.memory_used)
        users: list[MemoryUser] = []
        for calls in (
            (readings.compute_processes, readings.compute_processes_old),
            (readings.graphics_processes, readings.graphics_processes_old),
            (readings.mps_processes, readings.mps_processes_old),
        ):
            listed = ask(handle, *calls)
            if listed is not None:
                users += listed
            elif ask.may_answer(*calls):
                # Processes that could not be listed this time are not absent.
                return None
            elif calls[0] == readings.compute_processes:
                return GpuMemory(used_bytes, total_bytes, process_info="unsupported")
        if len(users) > self._max_users:
            return GpuMemory(used_bytes, total_bytes, process_info="unreliable")
        found, info = believed(users, total_bytes=total_bytes, pid_max=PID_MAX)
        return GpuMemory(used_bytes, total_bytes, found, info)
