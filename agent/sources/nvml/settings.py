"""The deadlines and periods of the NVML source."""

from typing import Final

import msgspec

from agent.model.policy import SECOND_NS
from agent.sources.nvml.library import EVENT_WAIT, FIRST_HANDLE, INIT

MILLISECOND_NS: Final = 1_000_000

MAX_GPUS: Final = 64
"""GPUs watched on a node; today's have at most 16."""
MAX_THREADS: Final = 2 * MAX_GPUS + 2
"""One for each GPU, as many again that may be stuck on GPUs that are gone, and two for the node."""


class NvmlSettings(msgspec.Struct, frozen=True):
    """The defaults are the product's; tests and scenarios set shorter times."""

    init_deadline_ns: int = 120 * SECOND_NS
    first_handle_deadline_ns: int = 60 * SECOND_NS
    """Without persistence mode the driver initialises a GPU when its handle is first requested."""
    call_deadline_ns: int = 5 * SECOND_NS
    poll_ns: int = 10 * SECOND_NS
    """Between two health polls of a GPU, and between two counts of the GPUs."""
    slow_polls: int = 6
    """Links and fabric are read once in so many polls: once a minute by default."""
    init_retry_ns: int = SECOND_NS
    """Between the starts of two attempts to initialise NVML."""
    event_slice_ms: int = 200
    """How long the thread that receives XIDs waits at a time; it can only be stopped between two waits."""
    event_retry_ns: int = SECOND_NS
    """Between the starts of two event sets."""
    first_probe_wait_ns: int = 5 * SECOND_NS
    """How long the first list of GPUs waits for a slow one."""
    close_wait_ns: int = 2 * SECOND_NS
    """How long ``close`` waits for calls under way."""

    max_gpus: int = MAX_GPUS

    @property
    def node_deadline_ns(self) -> int:
        """How long one count of the GPUs may take, with a probe of each and of those that are new."""
        return 3 * self.call_deadline_ns + self.first_probe_wait_ns

    @property
    def max_threads(self) -> int:
        """The bound of this many GPUs, as MAX_THREADS."""
        return 2 * self.max_gpus + 2

    def deadline_ns(self, call: str) -> int:
        """Return how long a call may take; for an empty name, the shortest of all."""
        deadlines = {
            INIT: self.init_deadline_ns,
            FIRST_HANDLE: self.first_handle_deadline_ns,
            EVENT_WAIT: self.call_deadline_ns + self.event_slice_ms * MILLISECOND_NS,
        }
        if not call:
            return min(self.call_deadline_ns, *deadlines.values())
        return deadlines.get(call, self.call_deadline_ns)
