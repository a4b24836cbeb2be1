"""Device doubles that can hold whoever uses them in the kernel: files whose calls never return.

A FUSE file system, served by a thread of this process in the kernel's own protocol: no library, no package.
While a file hangs, its opens and reads are taken and not answered. A caller that is killed then stays in
uninterruptible sleep, as in a driver that hangs, and with it all that its thread holds.

Guarantees:

1. The mount is in no directory of the machine: it is taken out as soon as it is made, and reached through
   a descriptor of this process. However this process ends, nothing stays mounted and nobody stays held.
2. Looking at a file (stat) is always answered.

Needs root (CAP_SYS_ADMIN) and /dev/fuse. Source: linux/fuse.h, protocol 7; fuse(4).
"""

import ctypes
import errno
import os
import select
import stat
import struct
import tempfile
import threading
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from agent.errors import SourceError

FUSE_DEVICE: Final = "/dev/fuse"


class _Opcode(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    READ = 15
    STATFS = 17
    RELEASE = 18
    FLUSH = 25
    INIT = 26
    INTERRUPT = 36
    BATCH_FORGET = 42


_WITHOUT_ANSWER: Final = frozenset({_Opcode.FORGET, _Opcode.BATCH_FORGET, _Opcode.INTERRUPT})
_MAY_HANG: Final = frozenset({_Opcode.OPEN, _Opcode.READ})

_MAJOR, _MINOR = 7, 31
_ROOT: Final = 1
_REQUEST_BYTES: Final = 1 << 17
_VALID_S: Final = 3600
_DIRECT_IO: Final = 1
"""Every read comes here, none is answered from a cache."""
_DETACH: Final = 2
"""Source: umount2(2), MNT_DETACH."""

_HEADER: Final = struct.Struct("=IIQQIIIHH")
_ANSWER: Final = struct.Struct("=IiQ")
_ATTRIBUTES: Final = struct.Struct("=QQQQQQIIIIIIIIII")
_ENTRY: Final = struct.Struct("=QQQQII")
_INIT_ANSWER: Final = struct.Struct("=IIIIHHIIHHI28x")


class _Request(NamedTuple):
    number: int
    opcode: int
    inode: int
    body: bytes


class HangingNodes:
    """A folder of empty files, each of which answers or hangs; see the guarantees above."""

    def __init__(self, names: Iterable[str]) -> None:
        """Mount and serve; raises SourceError where that is not possible."""
        self._inodes = {name: inode for inode, name in enumerate(names, _ROOT + 1)}
        self._hanging: set[int] = set()
        self._held: list[_Request] = []
        self._changed = threading.Condition()
        try:
            self._device = os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SourceError(f"Could not open {FUSE_DEVICE}: {error.strerror}") from error
        try:
            self._folder = _mounted_nowhere(self._device)
        except OSError as error:
            os.close(self._device)
            raise SourceError(f"Could not mount a FUSE file system: {error.strerror}") from error
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, name="hanging-nodes", daemon=True)
        self._thread.start()

    def replace(self, node: Path) -> None:
        """Put the file of that name in the place of a device double, for every process with root's rights."""
        node.unlink()
        node.symlink_to(f"/proc/{os.getpid()}/fd/{self._folder}/{node.name}")

    def hang(self, name: str) -> None:
        """Answer no open and no read of a file from now on."""
        with self._changed:
            self._hanging.add(self._inodes[name])

    def release(self, name: str) -> None:
        """Answer again, also what waits since the hang began."""
        inode = self._inodes[name]
        with self._changed:
            self._hanging.discard(inode)
            released = [request for request in self._held if request.inode == inode]
            self._held = [request for request in self._held if request.inode != inode]
        for request in released:
            self._serve_one(request)

    def release_all(self) -> None:
        """Answer everything again."""
        for name in self._inodes:
            self.release(name)

    def wait_held(self, callers: int, timeout_s: float) -> bool:
        """Block until so many calls are held; false when they were not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._held) >= callers, timeout_s)

    def close(self) -> None:
        """End the file system: every call on it fails, also what is held."""
        os.eventfd_write(self._end, 1)
        self._thread.join()
        for descriptor in (self._device, self._folder, self._end):
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The protocol

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._device, select.POLLIN)
        poll.register(self._end, select.POLLIN)
        while self._end not in {descriptor for descriptor, _ in poll.poll()}:
            try:
                raw = os.read(self._device, _REQUEST_BYTES)
            except OSError as error:
                if error.errno in {errno.EINTR, errno.EAGAIN, errno.ENOENT}:
                    # Whoever asked was interrupted before the question was read.
                    continue
                return
            length, opcode, number, inode, *_ = _HEADER.unpack_from(raw)
            request = _Request(number, opcode, inode, raw[_HEADER.size : length])
            if opcode not in _WITHOUT_ANSWER and not self._holds(request):
                self._serve_one(request)

    def _holds(self, request: _Request) -> bool:
        with self._changed:
            if request.opcode not in _MAY_HANG or request.inode not in self._hanging:
                return False
            self._held.append(request)
            self._changed.notify_all()
            return True

    def _serve_one(self, request: _Request) -> None:
        data = self._answer(request)
        error = 0 if data is not None else errno.ENOENT if request.opcode == _Opcode.LOOKUP else errno.ENOSYS
        body = data or b""
        try:
            os.write(self._device, _ANSWER.pack(_ANSWER.size + len(body), -error, request.number) + body)
        except OSError:
            # Whoever asked is gone, or the file system is.
            return

    def _answer(self, request: _Request) -> bytes | None:
        """Return the body of the answer; None: there is none."""
        data: bytes | None = None
        match request.opcode:
            case _Opcode.INIT:
                _major, minor, readahead, _flags = struct.unpack_from("=IIII", request.body)
                spoken = min(minor, _MINOR)
                data = _INIT_ANSWER.pack(_MAJOR, spoken, readahead, 0, 12, 10, 1 << 16, 1, 0, 0, 0)
            case _Opcode.LOOKUP:
                found = self._inodes.get(os.fsdecode(request.body.rstrip(b"\0")))
                if found is not None:
                    data = _ENTRY.pack(found, 0, _VALID_S, _VALID_S, 0, 0) + _attributes(found)
            case _Opcode.GETATTR:
                data = struct.pack("=QII", _VALID_S, 0, 0) + _attributes(request.inode)
            case _Opcode.OPEN:
                data = struct.pack("=QII", request.inode, _DIRECT_IO, 0)
            case _Opcode.READ | _Opcode.RELEASE | _Opcode.FLUSH:
                data = b""
            case _Opcode.STATFS:
                data = bytes(80)
        return data


def _attributes(inode: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if inode == _ROOT else stat.S_IFREG | 0o666
    return _ATTRIBUTES.pack(inode, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _mounted_nowhere(device: int) -> int:
    """Return a descriptor of the root of a new FUSE mount that no path leads to."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40755,user_id=0,group_id=0,allow_other"
    with tempfile.TemporaryDirectory(prefix="gpu-agent-") as name:
        place = os.fsencode(name)
        if libc.mount(b"gpu-agent-nodes", place, b"fuse", 0, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            libc.umount2(place, _DETACH)
