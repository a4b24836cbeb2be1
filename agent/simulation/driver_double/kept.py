"""Open files of other processes, kept alive in no descriptor table, as the driver keeps them.

REGISTER_FD makes the driver hold a reference on an open nvidiactl, which no process shows. A double can get
the file out of the caller, and put it into a message that is never read: the reference is then
the message's. Which file of the folder it is, only a call on it shows, and that call comes to the process
that serves the folder; so a thread makes it.

Needs the right to trace the caller. Source: unix(7), linux/fuse.h.
"""

import contextlib
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable

Known = Callable[[int | None], None]
"""Called with the open file of the folder that a descriptor is; None: it is none of them."""


class KeptFile:
    """A reference on an open file."""

    def __init__(self, descriptor: int) -> None:
        """Take a descriptor over; it is closed."""
        sending, self._holding = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            with sending:
                socket.send_fds(sending, [b"\0"], [descriptor])
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Release it; a second call does nothing."""
        self._holding.close()


class Asking:
    """Determines which file of the folder a descriptor is, by a call on it from a thread; see the module.

    Poll ``ready`` and call ``finish`` when it is readable. One question is asked at a time, so an answer that
    comes meanwhile is the answer to it.
    """

    def __init__(self) -> None:
        self.ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._questions: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._waiting: deque[tuple[int, Known]] = deque()
        self._answer: int | None = None
        self._thread = threading.Thread(target=self._ask, name="driver-double-ask", daemon=True)
        self._thread.start()

    def ask(self, descriptor: int, known: Known) -> None:
        """Ask what a descriptor is; ``known`` gets it, and has to close it."""
        self._waiting.append((descriptor, known))
        if len(self._waiting) == 1:
            self._questions.put(descriptor)

    def answered(self, file: int, thread: int) -> None:
        """Take a call on an open file, which is the answer where the thread made it."""
        if thread == self._thread.native_id:
            self._answer = file

    def finish(self) -> None:
        """Hand over the answer, and ask the next question."""
        os.eventfd_read(self.ready)
        _, known = self._waiting.popleft()
        found, self._answer = self._answer, None
        if self._waiting:
            self._questions.put(self._waiting[0][0])
        known(found)

    def _ask(self) -> None:
        while True:
            # Not every file can be sought in, and the folder may end first.
            with contextlib.suppress(OSError):
                os.lseek(self._questions.get(), 0, os.SEEK_DATA)
            os.eventfd_write(self.ready, 1)
