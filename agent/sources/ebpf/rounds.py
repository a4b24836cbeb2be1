"""What a round of the eBPF source does, and when the next one comes: pure, from what happened since the last.

Invariants: whatever happens is in the snapshot of the round that begins after it. A scan that was asked for
while one is under way is made once more. A loss is reported once, and never taken back by an older count.
With nothing to do there is a round in each poll, and no two begin within the gap.
"""

from typing import Final

import msgspec

from agent.core.usage.bounds import BOUNDS, Bounds
from agent.model.policy import MILLISECOND_NS, SECOND_NS
from agent.model.structs import replace

LOSS_LOGGED_NS: Final = 30 * SECOND_NS
"""Losses are logged at most once in this time; the usage snapshot has all of them."""
PAUSE_RATIO: Final = 10
"""The time from one round to the next is at least so many times the duration of the round, up to a poll."""


class EbpfSettings(msgspec.Struct, frozen=True):
    """Times of the source, in nanoseconds, and bounds."""

    poll_ns: int = SECOND_NS
    """Between two polls of what sends no event: losses, a driver that was reloaded."""
    gap_ns: int = 100 * MILLISECOND_NS
    """Between two rounds."""
    scan_ns: int = 30 * SECOND_NS
    rescan_ns: int = SECOND_NS
    """Between two scans that the same pod triggers, after the first few."""
    procfs_scan_ns: int = 10 * SECOND_NS
    """Between two scans without the probe, which cost more and are the only source then."""
    publish_ns: int = 10 * SECOND_NS
    confirm_ns: int = 50 * MILLISECOND_NS
    """Until a second scan for a file without a holder: it may be on its way to another process."""
    reload_ns: int = 60 * SECOND_NS
    """Until another try, where the probe could not be loaded for another driver."""
    max_held: int = 65_536
    """Open files that are kept from scan to scan; with more a scan is requested at once."""
    max_readings: int = 4_096
    """Processes whose status is read in one round; the others in the next."""
    max_ended: int = 4_096
    """Exited processes that are deleted from the kernel's table in one round: 40 ms."""
    max_watched: int = 1_024
    """Processes whose exit is watched, of the 4,096 descriptors that the systemd unit allows."""
    stale_call_ns: int = 60 * SECOND_NS
    """Whether a device answers that the agent has not called for so long is unknown."""
    logged_ns: int = 30 * SECOND_NS
    """Between two log lines about processes with too many events or requests: one with the most is named."""
    many_scans: int = 8
    """A process is logged from so many postponed requests for a scan on, in that time."""
    tables: Bounds = BOUNDS
    """Of the tracker."""


class Losses(msgspec.Struct, frozen=True):
    """What the kernel's counts show beyond those of the poll before."""

    lost: int
    """Events that found no room."""
    is_full: bool
    """Objects found no room in the kernel's map."""
    is_rejected: bool
    """Objects of some process were not kept."""
    is_logged: bool
    """The lost events are to be logged."""


class Rounds(msgspec.Struct, frozen=True):
    """What is to be done, and when it was done last."""

    wants_scan: bool = True
    scan_due_ns: int | None = None
    """When a scan is due that a frequent trigger requested."""
    scanned_ns: int = 0
    """When the last scan began."""
    reread_ns: int = 0
    """When every process was last marked to be read again."""
    is_stale: bool = True
    """Something happened since the last snapshot was made."""
    lost: int = 0
    unkept: int = 0
    rejected: int = 0
    loss_logged_ns: int | None = None
    reload_due_ns: int | None = None
    """When a failed load for another driver is retried."""
    published_ns: int | None = None

    def begin(self, lost: int) -> "Rounds":
        """Return the state with which an empty tracker is followed; ``lost`` events were before it."""
        return replace(
            self,
            wants_scan=True,
            scan_due_ns=None,
            is_stale=True,
            published_ns=None,
            lost=lost,
            unkept=0,
            rejected=0,
        )

    def happened(self, *, scan: bool = False, scan_by_ns: int | None = None) -> "Rounds":
        """Return the state after something happened; it may ask for a scan, now or by a time."""
        due = tuple(ns for ns in (self.scan_due_ns, scan_by_ns) if ns is not None)
        return replace(
            self, is_stale=True, wants_scan=self.wants_scan or scan, scan_due_ns=min(due, default=None)
        )

    def needs_scan(self, now_ns: int, period_ns: int) -> bool:
        """Whether this round scans."""
        is_due = self.scan_due_ns is not None and self.scan_due_ns <= now_ns
        return self.wants_scan or is_due or now_ns - self.scanned_ns >= period_ns

    def scan(self, now_ns: int, *, again: bool = False) -> "Rounds":
        """Return the state at the begin of a scan, which answers what was asked for until now.

        ``again``: of its second half, which answers nothing that was asked for meanwhile.
        """
        if again:
            return replace(self, scanned_ns=now_ns)
        return replace(self, wants_scan=False, scan_due_ns=None, scanned_ns=now_ns)

    def needs_readings(self, now_ns: int, period_ns: int) -> bool:
        """Whether this round marks every process to be read again."""
        return now_ns - self.reread_ns >= period_ns

    def reread(self, now_ns: int) -> "Rounds":
        """Return the state after every process was marked to be read again."""
        return replace(self, reread_ns=now_ns, is_stale=True)

    def snapshot(self) -> "Rounds":
        """Return the state while a snapshot is made: what happens from here on is for the next one."""
        return replace(self, is_stale=False)

    def follow(self, *, lost: int, unkept: int, rejected: int, now_ns: int) -> "tuple[Rounds, Losses]":
        """Return the state with the kernel's counts, and what they show."""
        is_lost = lost > self.lost
        is_logged = is_lost and (
            self.loss_logged_ns is None or now_ns - self.loss_logged_ns >= LOSS_LOGGED_NS
        )
        losses = Losses(
            lost=max(0, lost - self.lost),
            is_full=unkept > self.unkept,
            is_rejected=rejected > self.rejected,
            is_logged=is_logged,
        )
        followed = replace(
            self,
            lost=max(lost, self.lost),
            unkept=max(unkept, self.unkept),
            rejected=max(rejected, self.rejected),
            loss_logged_ns=now_ns if is_logged else self.loss_logged_ns,
            is_stale=self.is_stale or losses.is_full or losses.is_rejected,
        )
        return followed, losses

    def retries_load(self, now_ns: int) -> bool:
        """Whether a load that failed is due again."""
        return self.reload_due_ns is not None and now_ns >= self.reload_due_ns

    def must_publish(self, now_ns: int, settings: EbpfSettings) -> bool:
        """Whether a snapshot is due though it may be like the last one."""
        return self.published_ns is None or now_ns - self.published_ns >= settings.publish_ns

    def rest_ns(self, began_ns: int, took_ns: int, now_ns: int, settings: EbpfSettings) -> int:
        """Return for how long nothing may begin after a round, whatever happens."""
        least_ns = max(settings.gap_ns, min(settings.poll_ns, PAUSE_RATIO * took_ns))
        return max(0, began_ns + least_ns - now_ns)

    def idle_ns(self, began_ns: int, now_ns: int, settings: EbpfSettings) -> int:
        """Return for how long to wait for something to happen after that."""
        poll_at_ns = began_ns + settings.poll_ns
        return max(0, min(poll_at_ns, self.scan_due_ns or poll_at_ns) - now_ns)
