"""Which process is logged for its share of scans."""

import pytest

from agent.core.usage.gpu_map import GpuMap
from agent.core.usage.scan_pace import BURST
from agent.core.usage.tracker import Tracker
from agent.model.rm import RmEvent, RmEventKind
from agent.sources.ebpf.rounds import EbpfSettings
from agent.sources.ebpf.unsent import PostponedScans

SETTINGS = EbpfSettings()
PERIOD_NS, MANY = SETTINGS.logged_ns, SETTINGS.many_scans


def request_scans(tracker: Tracker, pid: int, count: int) -> None:
    """Have a process change its descriptors, as often with a scan after it."""
    for _ in range(count):
        event = RmEvent(1, 1, 0, pid, pid, 0, -1, RmEventKind.RESCAN, 0, 0, 0, 0, 0)
        tracker.handle_events([event])
        tracker.begin_scan()


def test_the_process_with_most_postponed_requests_is_logged_once_a_period(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tracker, postponed = Tracker(GpuMap({})), PostponedScans(SETTINGS)
    postponed.follow(tracker, 0)
    request_scans(tracker, 100, BURST + MANY - 1)
    postponed.follow(tracker, PERIOD_NS)
    assert caplog.text == "", "a process that does so for a moment"
    request_scans(tracker, 100, MANY)
    request_scans(tracker, 200, BURST + MANY + 1)
    postponed.follow(tracker, 2 * PERIOD_NS - 1)
    assert caplog.text == ""
    postponed.follow(tracker, 2 * PERIOD_NS)
    assert "Process 200 changes its descriptors in a loop" in caplog.text
    assert f"{MANY + 1} of its requests" in caplog.text
    caplog.clear()
    postponed.follow(tracker, 3 * PERIOD_NS)
    assert caplog.text == ""
