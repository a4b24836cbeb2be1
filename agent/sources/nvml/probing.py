"""When a GPU is probed, and what a probe means: pure, from the requests and results of one session.

Invariants: a request is answered by a probe that began after it. Between the polls of one GPU, and between
two probes that XIDs asked for, is the period of the one or MIN_GAP_NS. A probe that answered too late counts
for nothing but another one. A failure that all GPUs show when the driver is gone is attributed to one of them
only after the others were probed. Source: nvml.h (return codes).
"""

from collections.abc import Hashable, Iterable, Mapping
from enum import Enum, auto
from typing import Final, TypeVar

import msgspec

from agent.errors import NvmlCode, NvmlError
from agent.model.policy import MILLISECOND_NS, SECOND_NS
from agent.model.sample import GpuSample
from agent.model.structs import replace
from agent.model.usage import GpuMemory

MIN_GAP_NS: Final = SECOND_NS
"""Between two probes of a GPU that XIDs request."""

XID_PROBE_DELAY_NS: Final = 10 * MILLISECOND_NS
"""From an XID to the probe of its GPU."""

DRIVER_CODES: Final = frozenset(
    {
        NvmlCode.UNINITIALIZED,
        NvmlCode.DRIVER_NOT_LOADED,
        NvmlCode.LIB_RM_VERSION_MISMATCH,
        NvmlCode.UNKNOWN,
    }
)
"""If every GPU answers with one of these, the driver is gone, not the GPUs."""

K = TypeVar("K", bound=Hashable)


class Verdict(Enum):
    """What is to be done with the newest probe."""

    NOTHING = auto()
    """It was reported already."""
    REPORT = auto()
    AGAIN = auto()
    """It answered too late to count."""


class Probing(msgspec.Struct, frozen=True):
    """The probes of one GPU, or of an index whose GPU was not identified yet."""

    requested: int = 1
    """Number of the newest probe that was requested."""
    begun: int = 0
    """Number of the newest one that was started."""
    finished: int = 0
    """Number of the newest one that was finished."""
    began_ns: int = 0
    due_ns: int = 0
    is_soon: bool = False
    """Whether an XID asked for a probe since the newest one began."""
    is_urgent: bool = False
    """Whether the next probe is to include the slow readings."""
    reads_slow: bool = False
    """Whether the newest one does."""
    failure: NvmlError | None = None
    sample: GpuSample | None = None
    """The readings of the newest probe."""
    memory: GpuMemory | None = None
    """The processes that used its memory then."""
    is_late: bool = False
    """Whether a call of the newest probe was overdue."""
    is_blamed: bool = False
    """Whether the failure was attributed to the GPU, though it might have been the driver's."""
    is_unreported: bool = False
    """Whether the outcome of the newest probe is still to be reported."""

    def request(self, *, urgent: bool = False) -> "Probing":
        """Request a probe now."""
        return replace(self, requested=self.requested + 1, is_urgent=self.is_urgent or urgent)

    def request_soon(self, now_ns: int) -> "Probing":
        """Request a probe with every reading: an XID was reported.

        Not at once: the kubelet must learn of the XID before anything else is done about it.
        """
        soon_ns = max(self.began_ns + MIN_GAP_NS, now_ns + XID_PROBE_DELAY_NS)
        return replace(self, is_soon=True, is_urgent=True, due_ns=min(self.due_ns, soon_ns))

    def is_due(self, now_ns: int) -> bool:
        """Whether a probe is to begin."""
        return self.is_requested or now_ns >= self.due_ns

    @property
    def is_requested(self) -> bool:
        """Whether a caller waits for a probe that has not finished."""
        return self.finished < self.requested

    def begin(self, now_ns: int) -> "Probing":
        """Return the state while a probe runs that answers every request so far."""
        return replace(
            self,
            begun=self.requested,
            began_ns=now_ns,
            is_soon=False,
            is_urgent=False,
            reads_slow=self.is_urgent,
            sample=None,
            memory=None,
        )

    def with_result(
        self, failure: NvmlError | None, sample: GpuSample | None = None, memory: GpuMemory | None = None
    ) -> "Probing":
        """Return the state with what the probe found; one that failed read nothing slow."""
        is_urgent = self.is_urgent or (failure is not None and self.reads_slow)
        return replace(self, failure=failure, sample=sample, memory=memory, is_urgent=is_urgent)

    def finish(self, *, late: bool, period_ns: int) -> "Probing":
        """Return the state after the probe; the next one is due a period after this one began."""
        pause_ns = MIN_GAP_NS if self.is_soon else period_ns
        return replace(
            self,
            finished=self.begun,
            is_late=late,
            is_unreported=True,
            due_ns=self.began_ns + pause_ns,
        )

    def with_failure(self, error: NvmlError) -> "Probing":
        """Return the state after a call beside the probe failed: what the probe found does not count."""
        return replace(self, failure=error, is_unreported=True)

    @property
    def is_doubtful(self) -> bool:
        """Whether the newest probe failed as all do when the driver is gone, and that is new."""
        return self.failure is not None and self.failure.code in DRIVER_CODES and not self.is_blamed

    def reported(self) -> "tuple[Probing, Verdict]":
        """Return what to do with the newest probe, and the state once that is done."""
        if not self.is_unreported:
            return self, Verdict.NOTHING
        if self.is_late and self.failure is None:
            return replace(self.request(), is_unreported=False), Verdict.AGAIN
        is_blamed = self.failure is not None and self.failure.code in DRIVER_CODES
        return replace(self, is_unreported=False, is_blamed=is_blamed), Verdict.REPORT


class Doubts(msgspec.Struct, frozen=True):
    """The GPUs whose failure may be the driver's, until the others were probed."""

    doubted: frozenset[Hashable] = frozenset()
    since_ns: int = 0
    """Since when there is a doubt."""

    def raised(self, gpu: Hashable, now_ns: int) -> "Doubts":
        """Return the doubts with one more.

        They begin now, not when the probe did: meanwhile another GPU may have passed before the driver went.
        """
        return Doubts(self.doubted | {gpu}, self.since_ns if self.doubted else now_ns)

    def settled(self, gpu: Hashable) -> "Doubts":
        """Return the doubts without one."""
        return replace(self, doubted=self.doubted - {gpu})

    def witnesses(self, probings: Mapping[K, Probing]) -> Mapping[K, bool]:
        """Return the other GPUs to wait for, and whether each has to be asked: its newest probe is older."""
        return {
            gpu: each.began_ns < self.since_ns for gpu, each in probings.items() if gpu not in self.doubted
        }


def driver_failure(probings: Iterable[Probing]) -> NvmlError | None:
    """Return why the driver is gone: no GPU gives an answer about the GPU itself; None: it is not."""
    failures = [each.failure for each in probings]
    first = next(iter(failures), None)
    is_gone = all(failure is not None and failure.code in DRIVER_CODES for failure in failures)
    return first if is_gone else None
