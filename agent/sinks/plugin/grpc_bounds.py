"""What a client of the plugin server may cost, each bound by its name.

The kubelet needs one connection, one stream that stays open and a few short calls. Everything here
is far above that, and far below what would hurt the node.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec

from agent.counts import Count, CountBy
from agent.log import SUPPRESSED

MIB: Final = 2**20

REQUEST_S: Final = 10.0
"""How long a request may take to arrive."""

CLOSED_STREAMS: Final = 256
"""Closed streams a connection remembers, to distinguish a late frame from a wrong one."""

LINE_PERIOD_S: Final = 1.0
"""A peer can make the server write one log line in this time, whatever it sends."""


class Bounds(msgspec.Struct, frozen=True):
    """Limits of one server; the defaults are the product's, tests set smaller ones."""

    connections: int = 16
    """Connections at a time; more are closed as they are accepted."""
    streams: int = 32
    """Calls at a time on one connection."""
    calls: int = 64
    """Calls at a time on all connections; over that a connection keeps only its share."""
    calls_share: int = 4
    """Calls a connection may always have, however many the others have."""
    request_bytes: int = 4 * MIB
    """What all unanswered requests of one connection may hold: the ids of a list that the kubelet accepts."""
    requests_bytes: int = 6 * MIB
    """What all unanswered requests of all connections may hold."""
    frame_cost_bytes: int = 256
    """What a DATA frame counts for beside its bytes, since an empty one has a price too."""
    header_list_bytes: int = 16 * 1024
    """Decoded headers of one request (SETTINGS_MAX_HEADER_LIST_SIZE)."""
    eventless_bytes: int = 64 * 1024
    """What may arrive without completing anything: the header block of one request."""
    settings: int = 32
    """Kinds of settings a peer may send; each is remembered."""
    resets: int = 32
    """Calls a peer may cancel in a row."""
    resets_per_s: float = 4.0
    events: int = 50_000
    """Frames a connection may send in a row; after that it is slowed down, not cut."""
    events_per_s: float = 2_000.0
    read_bytes: int = 16 * 1024
    """What is read from one connection at a time."""
    portion_bytes: int = 512
    """What is parsed in one piece; a short call is not longer."""
    turn_events: int = 8
    """After so many frames of one connection the others have their turn."""
    unsent_bytes: int = 256 * 1024
    """What may wait for a peer that sends but does not read."""
    first_request_s: float = 10.0
    """How long a connection may be open before its first request."""
    idle_s: float = 60.0
    """How long a connection may be open without a call after that."""
    linger_s: float = 0.2
    """How long a peer has to read what is already written to it when the server ends."""
    backlog: int = 128
    """Connections that may wait to be accepted."""
    accept_retry_s: float = 0.1
    """How long accepting rests when the process is out of file descriptors."""


class TokenBucket(msgspec.Struct):
    """So many in a row, refilled at a steady rate."""

    burst: float
    per_s: float
    left: float
    at_s: float

    def spend(self, count: float, now_s: float) -> float:
        """Spend ``count`` and return for how many seconds it is overdrawn; zero: it is not."""
        self.left = min(self.burst, self.left + (now_s - self.at_s) * self.per_s) - count
        self.at_s = now_s
        return max(0.0, -self.left / self.per_s)


class Load:
    """What all connections of one server hold now, and what happened on them."""

    accepted = Count("plugin_connections_accepted_total", "connections", "Connections to a plugin's socket.")
    rejected = CountBy(
        "plugin_connections_rejected_total",
        "connections",
        "Connections closed at once: too many are open, or the peer's user may not connect.",
        label="reason",
        values=("full", "peer"),
    )
    accept_failures = Count(
        "plugin_accept_failures_total", "failures", "Connections that the kernel could not hand over."
    )
    requests = Count("plugin_requests_total", "requests", "Requests on a plugin's socket.")
    resets = Count("plugin_resets_total", "resets", "Calls that the peer cancelled.")
    malformed = Count("plugin_malformed_requests_total", "requests", "Requests without a method or a path.")
    calls_rejected = Count(
        "plugin_calls_rejected_total", "calls", "Calls rejected because too many were running."
    )
    cuts = CountBy(
        "plugin_connections_cut_total",
        "connections",
        "Connections ended by a bound.",
        label="bound",
        values=(
            "idle",
            "protocol_error",
            "resets",
            "incomplete",
            "request_size",
            "requests_size",
            "settings",
            "unsent",
        ),
    )

    def __init__(self) -> None:
        self.calls = 0
        """Running now."""
        self.buffered_bytes = 0
        """What unanswered requests hold now."""


class LineLimit(logging.Filter):
    """Lets one record in LINE_PERIOD_S through and adds to it how many were held back.

    For loggers whose lines a peer can cause at will. A traceback through grpclib shows nothing
    that its last line does not, and would be many lines; it is folded into one.
    """

    suppressed = SUPPRESSED

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._last_s: float | None = None
        self._held = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record may be written now."""
        now_s = self._clock()
        if self._last_s is not None and now_s - self._last_s < LINE_PERIOD_S:
            self._held += 1
            self.suppressed += 1
            return False
        self._last_s = now_s
        known = dict(getattr(record, "fields", None) or {})
        if record.exc_info and record.exc_info[1] is not None:
            known["error"] = _in_one_line(record.exc_info[1])
            record.exc_info = record.exc_text = None
        if self._held:
            known["lines_held_back"] = self._held
        record.fields = known
        self._held = 0
        return True


def _in_one_line(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    return f"{type(error).__name__}: {error}{place}"[:500]


PEER_LINES: Final = LineLimit()
"""Shared by every logger that a peer can make write."""


def limit_peer_lines() -> None:
    """Put grpclib's server log under the limit; may be called again."""
    server_log = logging.getLogger("grpclib.server")
    # Below that it logs each call that its client cancelled.
    server_log.setLevel(logging.WARNING)
    server_log.addFilter(PEER_LINES)
