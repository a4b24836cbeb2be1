"""The simulated node's state file through the C library's control functions, typed and thread-safe.

*Guarantees*
- What is written inside one `change` appears to NVML clients together, or not at all.
- A scope is a GPU's position, or NODE for the node itself. A wrong one raises NvmlStateError and changes
  nothing.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from agent.simulation.nvml.fields import Numbers, Texts
from agent.simulation.nvml.library import control_functions

NODE = -1
UNREADABLE_GPU = 255
"""The position of an event whose device answers nothing (NODE_UNREADABLE_GPU of node.h)."""
FORCED_HANG = -1
NOT_FORCED = 0

_UNSUPPORTED = (1 << 64) - 1
_TEXT_SIZE = 128


class NvmlStateError(RuntimeError):
    """The state cannot be opened or does not know what it was asked for."""


class NodeControl:
    """An open state file; see the guarantees above."""

    def __init__(self, handle: int, path: Path) -> None:
        self.path = path
        self.lock = threading.RLock()
        self._handle: int | None = handle
        self._functions = control_functions()

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make an empty node, which clients do not see before `publish`."""
        handle = control_functions().gpusim_create(os.fsencode(path))
        if not handle:
            raise _error(f"cannot create {path}")
        return cls(handle, path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing state. Raises NvmlStateError where there is none or another version made it."""
        handle = control_functions().gpusim_open(os.fsencode(path))
        if handle:
            return cls(handle, path)
        if ctypes.get_errno() == errno.EINVAL:
            raise NvmlStateError(f"{path} is no NVML state of this version of gpu-agent: start the node anew")
        raise _error(f"cannot open {path}")

    def publish(self) -> None:
        """Put a created node in its place, at once."""
        if not self._functions.gpusim_publish(self._opened()):
            raise _error(f"cannot create {self.path}")

    def close(self) -> None:
        """Close the file; an unpublished node goes away."""
        with self.lock:
            if self._handle is not None:
                self._functions.gpusim_close(self._handle)
            self._handle = None

    def _opened(self) -> int:
        if self._handle is None:
            raise NvmlStateError(f"{self.path} is closed")
        return self._handle

    # Fields

    @contextmanager
    def change(self, scope: int) -> Iterator[None]:
        """Change one GPU or the node: inside, `write_numbers` and `write_texts` belong to it."""
        with self.lock:
            handle = self._opened()
            if not self._functions.gpusim_begin(handle, scope):
                raise _error(f"cannot change {self.path}")
            try:
                yield
            except BaseException:
                self._functions.gpusim_abandon(handle)
                raise
            self._functions.gpusim_commit(handle)

    def write_number(self, field: str, index: int, value: int | None) -> None:
        """Set one number; None makes the calls that read it answer NOT_SUPPORTED."""
        kept = _UNSUPPORTED if value is None else value
        if not self._functions.gpusim_set_number(self._opened(), field.encode(), index, kept):
            raise NvmlStateError(f"there is no number {field}[{index}]")

    def write_numbers(self, numbers: Numbers) -> None:
        """Set numbers; a sequence fills a list from its beginning."""
        for field, value in numbers.items():
            each = value if isinstance(value, Sequence) else [value]
            for index, one in enumerate(each):
                self.write_number(field, index, one)

    def write_texts(self, texts: Texts) -> None:
        """Set texts; None is the empty one, which makes the calls that read it answer NOT_SUPPORTED."""
        handle = self._opened()
        for field, value in texts.items():
            each = [value or ""] if value is None or isinstance(value, str) else value
            for index, one in enumerate(each):
                if not self._functions.gpusim_set_text(handle, field.encode(), index, one.encode()):
                    raise NvmlStateError(f"{field}[{index}]: no such text, or {one!r} is too long for it")

    def number(self, scope: int, field: str, index: int = 0) -> int:
        """Read one number."""
        value = ctypes.c_uint64()
        with self.lock:
            found = self._functions.gpusim_get_number(
                self._opened(), scope, field.encode(), index, ctypes.byref(value)
            )
        if not found:
            raise NvmlStateError(f"there is no number {field}[{index}]")
        return value.value

    def text(self, scope: int, field: str, index: int = 0) -> str:
        """Read one text."""
        value = ctypes.create_string_buffer(_TEXT_SIZE)
        with self.lock:
            found = self._functions.gpusim_get_text(
                self._opened(), scope, field.encode(), index, value, len(value)
            )
        if not found:
            raise NvmlStateError(f"there is no text {field}[{index}]")
        return value.value.decode()

    def bound(self, field: str) -> int:
        """Return how long a GPU's list may be."""
        found: int = self._functions.gpusim_count(0, field.encode())
        return found

    # Forced answers and counts

    def force(self, function: str | None, scope: int, forced: int) -> None:
        """Set what a function (None: every one) does on a GPU (NODE: on all): a code + 1, or a constant."""
        name = None if function is None else function.encode()
        with self.lock:
            if not self._functions.gpusim_force(self._opened(), name, scope, forced):
                raise NvmlStateError(f"NVML has no function {function}")

    def unforce_all(self) -> None:
        """Take back all that `force` did."""
        with self.lock:
            self._functions.gpusim_unforce_all(self._opened())

    def calls(self, function: str, scope: int) -> int:
        """Count a function's calls, of one GPU or (NODE) in all."""
        with self.lock:
            count: int = self._functions.gpusim_calls(self._opened(), function.encode(), scope)
        if count < 0:
            raise NvmlStateError(f"NVML has no function {function}")
        return count

    def counter(self, name: str) -> int:
        """Read a counter of node.h."""
        with self.lock:
            count: int = self._functions.gpusim_counter(self._opened(), name.encode())
        return count

    def activity(self) -> int:
        """Read the word that changes when a client initialises, shuts down, hangs or gets an event."""
        with self.lock:
            word: int = self._functions.gpusim_activity(self._opened())
        return word

    def wait_activity(self, seen: int, deadline_ns: int) -> bool:
        """Block until that word is another; false when the deadline (CLOCK_MONOTONIC) passed."""
        return bool(self._functions.gpusim_wait_activity(self._opened(), seen, deadline_ns))

    # Events

    def push_event(self, position: int, kind: int, data: int, gi: int, ci: int) -> int:
        """Append an event to the ring. Returns its number, counted from 0."""
        with self.lock:
            number: int = self._functions.gpusim_push_event(self._opened(), position, kind, data, gi, ci)
        if number < 0:
            raise _error("cannot report the event")
        return number

    def push_rebind(self, position: int, *, bound: bool) -> None:
        """Append an event of the system: a GPU was bound to its driver, or unbound."""
        with self.lock:
            if not self._functions.gpusim_push_rebind(self._opened(), position, int(bound)):
                raise _error("cannot report the event")

    def event_times(self, number: int) -> tuple[int, int, int]:
        """Read when an event was pushed and first returned (0: not yet), and how often it was."""
        times = (ctypes.c_uint64 * 3)()
        with self.lock:
            if not self._functions.gpusim_event_times(self._opened(), number, times):
                raise NvmlStateError(f"event {number} is not among the last ones")
        return times[0], times[1], times[2]


def _error(what: str) -> NvmlStateError:
    return NvmlStateError(f"{what}: {os.strerror(ctypes.get_errno())}")
