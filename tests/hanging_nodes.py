"""Device doubles that can hold their callers in the kernel: files whose calls never return.

A folder of empty files, served by a thread of this process. While a file hangs, its opens and reads are
taken and not answered. A caller that is killed then stays in uninterruptible sleep, as in a driver that
hangs, and with it all that its thread holds. Guarantees as in ``driver_double.fuse``.
"""

import errno
import os
import select
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from agent.simulation.driver_double.fuse import FuseFolder, Ioctl, IoctlAnswer

_FIRST_INODE: Final = 2
_POLL_S: Final = 0.005


class HangingNodes:
    """A folder of empty files, each of which answers or hangs."""

    def __init__(self, names: Iterable[str]) -> None:
        """Mount and serve; raises SourceError where that is not possible."""
        self._folder = FuseFolder({name: inode for inode, name in enumerate(names, _FIRST_INODE)}, _Empty())
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="hanging-nodes", daemon=True)
        self._thread.start()

    def replace(self, node: Path) -> None:
        """Put the file of that name in the place of a device double, for every process with root's rights."""
        node.unlink()
        node.symlink_to(self._folder.path(node.name))

    def hang(self, name: str) -> None:
        """Answer no open and no read of a file from now on."""
        self._folder.hold(name)

    def release(self, name: str) -> None:
        """Answer again, also what waits since the hang began."""
        self._folder.release(name)

    def release_all(self) -> None:
        """Answer everything again."""
        for name in self._folder.names:
            self._folder.release(name)

    def wait_held(self, callers: int, timeout_s: float) -> bool:
        """Block until so many calls are held; false when they were not in time."""
        until_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        while self._folder.held < callers:
            if time.monotonic_ns() >= until_ns:
                return False
            time.sleep(_POLL_S)
        return True

    def close(self) -> None:
        """End the file system: every call on it fails, also what is held."""
        os.eventfd_write(self._end, 1)
        self._thread.join()
        self._folder.close()
        os.close(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._folder.device, select.POLLIN)
        poll.register(self._end, select.POLLIN)
        while self._end not in {descriptor for descriptor, _ in poll.poll()}:
            if not self._folder.serve():
                return


class _Empty:
    """Files with nothing in them."""

    def opened(self, inode: int, thread: int) -> int:
        del thread
        return inode

    def ioctl(self, call: Ioctl) -> IoctlAnswer | None:
        raise OSError(errno.ENOTTY, f"no command {call.command:#x}")

    def sought(self, file: int, thread: int) -> None:
        """Unused here."""

    def released(self, file: int) -> None:
        """Nothing was kept."""
