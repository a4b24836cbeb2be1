"""The event log on disk: lines of JSON in a few files, of which the oldest is dropped.

Guarantees: the newest file is the path itself, older ones are ``path.1`` and up. Events that programs can
cause at will have files and a limit of their own; the reader merges all in one order. The reader skips a line
that a crash cut off and the next writer terminates it, so it costs one event. The reader holds at most
MAX_LINE_BYTES of a line, whatever the files hold.
"""

import contextlib
import heapq
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from agent.files import write_all

FILES: Final = 4
"""Files kept, the newest one among them."""

MAX_LINE_BYTES: Final = 16 * 1024
"""An event names at most 16 devices and has some 300 bytes."""


def path_of_others(path: str) -> str:
    """Return the path of the events that programs can cause at will."""
    file = Path(path)
    return str(file.with_name(f"{file.stem}-other{file.suffix}"))


def append(path: str, lines: Sequence[bytes], *, max_bytes: int) -> int:
    """Append lines, each terminated by a newline, and return how many; the rest is for another call.

    Where a line would make the file longer than ``max_bytes``, the call rotates the files or stops.
    Raises OSError if nothing was appended.
    """
    size = _size(path)
    if size and lines and size + len(lines[0]) > max_bytes:
        _rotate(path)
        size = 0
    chunk = b""
    count = 0
    for line in lines:
        if (size or chunk) and size + len(chunk) + len(line) > max_bytes:
            break
        chunk += line
        count += 1
    _append_to(path, chunk)
    return count


def _size(path: str) -> int:
    try:
        return Path(path).lstat().st_size
    except FileNotFoundError:
        return 0


def _append_to(path: str, chunk: bytes) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            chunk = b"\n" + chunk
        try:
            write_all(descriptor, chunk)
        except OSError:
            # The next call writes the chunk again.
            os.ftruncate(descriptor, size)
            raise
        os.fdatasync(descriptor)
    finally:
        os.close(descriptor)


def _rotate(path: str) -> None:
    for number in range(FILES - 1, 0, -1):
        older = path if number == 1 else f"{path}.{number - 1}"
        with contextlib.suppress(FileNotFoundError):
            Path(older).replace(f"{path}.{number}")


def exist(path: str) -> bool:
    """Return whether any of the files exists."""
    return any(Path(each).exists() for base in (path, path_of_others(path)) for each in _paths(base))


def _paths(path: str) -> tuple[str, ...]:
    """Return the paths of the files, oldest first."""
    return (*(f"{path}.{number}" for number in range(FILES - 1, 0, -1)), path)


class NoEventsError(Exception):
    """The files hold lines, and none is an event."""


def read(path: str) -> Iterator[dict[str, Any]]:
    """Yield the events of the files, oldest first.

    Raises OSError if one cannot be read, NoEventsError if none of their lines is an event.
    """
    damaged: list[str] = []
    found = False
    for event in heapq.merge(_read(path, damaged), _read(path_of_others(path), damaged), key=_moment):
        found = True
        yield event
    if damaged and not found:
        raise NoEventsError


def _moment(event: dict[str, Any]) -> tuple[str, int]:
    number = event["number"]
    return event["time"], number if isinstance(number, int) else 0


def _read(path: str, damaged: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of one set of files, and append the paths of files with other lines to ``damaged``."""
    for each in _paths(path):
        with contextlib.suppress(FileNotFoundError):
            for event in _events_of(each):
                if event is not None:
                    yield event
                elif each not in damaged:
                    damaged.append(each)


def _events_of(path: str) -> Iterator[dict[str, Any] | None]:
    """Yield the event of each line; None: a damaged line, or a piece of one that is too long."""
    with Path(path).open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            event = None
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
            yield event if isinstance(event, dict) and _is_event(event) else None


def _is_event(event: dict[str, Any]) -> bool:
    return (
        isinstance(event.get("time"), str)
        and isinstance(event.get("time_monotonic_ns"), int)
        and isinstance(event.get("message"), str)
        and isinstance(event.get("fields"), dict)
        and {"number", "kind", "warning"} <= event.keys()
    )
