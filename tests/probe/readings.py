"""Events and counters of one process of a test."""

from agent.model.rm import ProcessCounters, RmEvent, RmEventKind, RmObject
from agent.probe.probe import Probe


def counters(probe: Probe, pid: int) -> ProcessCounters:
    (row,) = [row for row in probe.read_processes() if row.tgid == pid]
    return row


def objects(probe: Probe, pid: int) -> list[RmObject]:
    return [one for one in probe.read_objects() if one.tgid == pid]


def events(probe: Probe, pid: int) -> list[RmEvent]:
    """Take all events from the ring; the machine's other processes may use the same devices."""
    found: list[RmEvent] = []
    ring = probe.ring
    # What another CPU is about to write stops a reading, and hides what came behind it.
    while ring._consumer[0] < ring._producer[0]:
        found += [event for event in ring.read() if event.tgid == pid]
    return found


def kinds(probe: Probe, pid: int) -> list[RmEventKind]:
    return [event.kind for event in events(probe, pid)]
