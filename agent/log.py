"""Logging: journald's native protocol under systemd, else lines on standard error.

Guarantees: writing a line never blocks the caller. A thread of its own writes lines for standard error from
a bounded queue; lines for the journal are datagrams sent without waiting. A full queue drops lines and counts
them. A message that repeats is rate limited. A message names its object and the reason, since ``journalctl``
shows no fields; the fields repeat them for programs:
``log.warning("GPU %(gpu)s is gone", about(gpu=index))``. Untrusted text is escaped and cut, so a record is
one line without terminal control sequences.

Sources: systemd's JOURNAL_NATIVE_PROTOCOL.md; systemd.exec(5) for $JOURNAL_STREAM.
"""

import json
import logging
import os
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from agent.core.wording import printable
from agent.counts import Count
from agent.log_sinks import MAX_LINE_BYTES, Journal, LineWriter, LogStatistics

Format = Literal["journal", "json", "text"]

MAX_LIMITED_MESSAGES: Final = 256
"""Different messages with a rate of their own."""
OWN_LINES_PER_PERIOD: Final = 200
FOREIGN_LINES_PER_PERIOD: Final = 1
"""Lines of one message in each period; libraries may log what a peer sends them."""
OWN_PERIOD_S: Final = 10.0
FOREIGN_PERIOD_S: Final = 1.0

IDENTIFIER: Final = "gpu-agent"

_PRIORITIES: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}
_RESERVED: Final = frozenset({"time", "level", "logger", "message", "exception", "suppressed"})
_JOURNAL_RESERVED: Final = frozenset(
    {"MESSAGE", "PRIORITY", "SYSLOG_IDENTIFIER", "LOGGER", "CODE_FILE", "CODE_LINE", "CODE_FUNC"}
)
_FOR_PROGRAMS: Final = frozenset({"event", "message_id"})
"""Fields that the text format omits."""
MAX_VALUE_CHARS: Final = 300
"""Characters of a value within a message; the field has all of it."""


def wall_clock() -> datetime:
    """Return the time of day, for people only; no rule depends on it."""
    return datetime.now(UTC)


def wall_time_of(at_ns: int, *, now_ns: int) -> datetime:
    """Return the time of day of a monotonic moment, by the present offset of both clocks."""
    return wall_clock() - timedelta(microseconds=(now_ns - at_ns) / 1_000)


def rfc3339(moment: datetime) -> str:
    """Return a moment in UTC with milliseconds: ``2026-11-30T10:00:00.123Z``."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def fields(**values: object) -> Mapping[str, object]:
    """Return the fields of a log line, for logging's ``extra``."""
    return {"fields": values}


class About(dict[str, object]):
    """The fields of a log line by name; as ``%(name)s`` of the message each is escaped and cut."""

    def __getitem__(self, name: str) -> object:
        """Return a value as it stands in a message."""
        value = super().__getitem__(name)
        if isinstance(value, int | float):
            return value
        if isinstance(value, list | tuple | set | frozenset):
            value = ", ".join(map(str, value))
        text = printable(str(value))
        return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"


def about(**values: object) -> About:
    """Return the fields of a log line, as the only argument behind its message."""
    return About(values)


class Log:
    """The logging that ``set_up`` installed; its owner flushes and closes it."""

    def __init__(self, sink: LineWriter | Journal, limiter: "RateLimit", log_format: Format) -> None:
        self._sink = sink
        self.limiter = limiter
        self.format = log_format

    def statistics(self) -> LogStatistics:
        """Return the counts at this moment."""
        return self._sink.statistics()

    def flush(self, timeout_s: float) -> None:
        """Wait until the lines that were queued are written, but no longer than the timeout."""
        self._sink.flush(timeout_s)

    def close(self) -> None:
        """Close the sink; nothing may be logged afterwards."""
        self._sink.close()


def set_up(log_format: Literal["auto"] | Format, level: str, *, descriptor: int = 2) -> Log:
    """Send the lines of every logger to the journal or to a descriptor; call once in a process."""
    chosen = _chosen_format(descriptor) if log_format == "auto" else log_format
    limiter = RateLimit()
    sink = Journal() if chosen == "journal" else LineWriter(descriptor)
    handler = _SinkHandler(sink, chosen)
    handler.addFilter(limiter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)
    logging.raiseExceptions = False
    return Log(sink, limiter, chosen)


def set_level(level: str) -> None:
    """Set the least severe level that is written, by its lower-case name."""
    logging.getLogger().setLevel(level.upper())
    # Libraries log what peers send at debug level; the agent's own lines are enough there.
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def _chosen_format(descriptor: int) -> Format:
    if _is_journal_stream(descriptor):
        return "journal"
    return "text" if os.isatty(descriptor) else "json"


def _is_journal_stream(descriptor: int) -> bool:
    """Return whether systemd connected the descriptor to the journal and it was not redirected since."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    if not inode:
        return False
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


class _SinkHandler(logging.Handler):
    """Renders records and writes them to the sink."""

    def __init__(self, sink: LineWriter | Journal, log_format: Format) -> None:
        super().__init__()
        self._sink = sink
        self._format = log_format

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; a value that cannot be rendered never raises into the caller."""
        try:
            self._sink.write(_RENDERERS[self._format](record))
        except (TypeError, ValueError, RecursionError):
            record.msg, record.args, record.exc_info = "Could not render a log line", (), None
            record.fields = {"logged_at": f"{record.pathname}:{record.lineno}"}
            self._sink.write(_RENDERERS[self._format](record))


def json_line(record: logging.LogRecord) -> bytes:
    """Render a record as one line of JSON."""
    entry: dict[str, object] = {
        "time": rfc3339(datetime.fromtimestamp(record.created, UTC)),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    for name, value in _fields_of(record).items():
        entry[f"field_{name}" if name in _RESERVED else name] = value
    return _cut(printable_json(entry).encode())


def printable_json(value: object, *, indent: int | None = None) -> str:
    """Return a value as JSON with letters of every language and without terminal control sequences."""
    separators = (",", ":") if indent is None else None
    text = json.dumps(value, default=str, ensure_ascii=False, separators=separators, indent=indent)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def text_line(record: logging.LogRecord) -> bytes:
    """Render a record for a person: one line, whatever the values hold."""
    moment = datetime.fromtimestamp(record.created).astimezone()
    values = {name: value for name, value in _fields_of(record).items() if name not in _FOR_PROGRAMS}
    pairs = "".join(f" {name}={_shown(value)}" for name, value in values.items())
    time_of_day = f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03d}{moment:%z}"
    line = f"{time_of_day} {record.levelname:7} {printable(record.getMessage())}{pairs}"
    return _cut(line.encode("utf-8", "backslashreplace"))


def journal_entry(record: logging.LogRecord) -> bytes:
    """Render a record in journald's native protocol, each field length-prefixed where it must be."""
    level = max((known for known in _PRIORITIES if known <= record.levelno), default=logging.DEBUG)
    entry: dict[str, object] = {
        "MESSAGE": printable(record.getMessage()),
        "PRIORITY": _PRIORITIES[level],
        "SYSLOG_IDENTIFIER": IDENTIFIER,
        "LOGGER": record.name,
        "CODE_FILE": record.pathname,
        "CODE_LINE": record.lineno,
        "CODE_FUNC": record.funcName,
    }
    for name, value in _fields_of(record).items():
        entry[_journal_name(name)] = value
    return b"".join(_journal_field(name, value) for name, value in entry.items())


def _journal_name(name: str) -> str:
    """Return a field name journald accepts: upper case, no leading underscore, at most 64 characters."""
    cleaned = "".join(char if char.isascii() and char.isalnum() else "_" for char in name).upper()
    name = cleaned.lstrip("_0123456789")[:58] or "FIELD"
    return f"FIELD_{name}" if name in _JOURNAL_RESERVED else name


def _journal_field(name: str, value: object) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    raw = text.encode("utf-8", "backslashreplace")[:MAX_LINE_BYTES]
    if b"\n" in raw:
        return name.encode() + b"\n" + struct.pack("<Q", len(raw)) + raw + b"\n"
    return name.encode() + b"=" + raw + b"\n"


def _fields_of(record: logging.LogRecord) -> dict[str, object]:
    given = record.args if isinstance(record.args, About) else getattr(record, "fields", None)
    values: dict[str, object] = dict(given.items()) if given else {}
    if record.exc_info and record.exc_info[0] is not None:
        values["traceback"] = logging.Formatter().formatException(record.exc_info)
    suppressed = getattr(record, "suppressed", 0)
    if suppressed:
        values["lines_suppressed"] = suppressed
    return values


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    if text and all(char.isprintable() and char not in ' "=' for char in text):
        return text
    return json.dumps(text)


def _cut(line: bytes) -> bytes:
    return (line if len(line) < MAX_LINE_BYTES else line[: MAX_LINE_BYTES - 4] + b"...") + b"\n"


_RENDERERS: Final = {"journal": journal_entry, "json": json_line, "text": text_line}


SUPPRESSED: Final = Count(
    "log_lines_suppressed_total", "lines", "Lines held back because the same message was logged too often."
)


class RateLimit(logging.Filter):
    """Passes each message a limited number of times in a period, and adds the rest as a count to the next."""

    suppressed = SUPPRESSED

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str], _Rate] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record may be written now."""
        is_ours = record.name == "agent" or record.name.startswith("agent.")
        limit, period_s = (
            (OWN_LINES_PER_PERIOD, OWN_PERIOD_S) if is_ours else (FOREIGN_LINES_PER_PERIOD, FOREIGN_PERIOD_S)
        )
        # A library may format values into its message: its logger is the key then.
        message = getattr(record, "limited_as", record.msg)
        key = (record.name, str(message)[:200] if is_ours else "")
        now_s = time.monotonic()
        with self._lock:
            rate = self._seen.get(key)
            if rate is None or now_s - rate.since_s >= period_s:
                record.suppressed = rate.suppressed if rate else 0
                self._remember(key, _Rate(now_s))
                return True
            rate.count += 1
            if rate.count <= limit:
                return True
            rate.suppressed += 1
            self.suppressed += 1
            return False

    def _remember(self, key: tuple[str, str], rate: "_Rate") -> None:
        self._seen[key] = rate
        self._seen.move_to_end(key)
        while len(self._seen) > MAX_LIMITED_MESSAGES:
            self._seen.popitem(last=False)


class _Rate:
    """Number of times a message was logged in its period."""

    __slots__ = ("count", "since_s", "suppressed")

    def __init__(self, since_s: float) -> None:
        self.since_s = since_s
        self.count = 1
        self.suppressed = 0
