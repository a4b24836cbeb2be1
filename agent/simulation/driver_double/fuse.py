"""A folder of files served in the kernel's own FUSE protocol, with no library: what device doubles stand on.

Opens, reads and ioctls of a file can be held, so that the caller stays in uninterruptible sleep as in
a driver that hangs, or answered late. What else the files do is up to ``Files``.

Guarantees:

1. The mount is in no directory of the machine: it is detached as soon as it is made, and reached through
   a descriptor of the process that serves it. However that process ends, nothing stays mounted, every
   call fails, and no caller stays held.
2. A stat of a file is always answered.
3. A file's inode number is the number given for it.

Needs root (CAP_SYS_ADMIN) and /dev/fuse. Only ``hold``, ``slow``, ``release`` and ``held`` may be called from
another thread than the one that serves. Source: linux/fuse.h, protocol 7; fuse(4).
"""

import ctypes
import errno
import os
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from agent.errors import SourceError

FUSE_DEVICE: Final = "/dev/fuse"
MAX_HELD: Final = 4_096
"""Calls that wait for a release at a time; one more is answered, lest the memory grow without end."""


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
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    INTERRUPT = 36
    IOCTL = 39
    BATCH_FORGET = 42
    LSEEK = 46


_WITHOUT_ANSWER: Final = frozenset({_Opcode.FORGET, _Opcode.BATCH_FORGET, _Opcode.INTERRUPT})
_MAY_HANG: Final = frozenset({_Opcode.OPEN, _Opcode.READ, _Opcode.IOCTL})
_FOR_EVER: Final = -1

_MAJOR, _MINOR = 7, 36
_ROOT: Final = 1
_REQUEST_BYTES: Final = 1 << 17
_VALID_S: Final = 3600
_OPEN_FLAGS: Final = 1 << 0 | 1 << 5
"""FOPEN_DIRECT_IO: every read comes here, none is answered from a cache. FOPEN_NOFLUSH: a close does not
wait for an answer, so the serving process itself may close a file of the folder."""
_DETACH: Final = 2
"""Source: umount2(2), MNT_DETACH."""

_HEADER: Final = struct.Struct("=IIQQIIIHH")
_ANSWER: Final = struct.Struct("=IiQ")
_ATTRIBUTES: Final = struct.Struct("=QQQQQQIIIIIIIIII")
_ENTRY: Final = struct.Struct("=QQQQII")
_INIT_ANSWER: Final = struct.Struct("=IIIIHHIIHHI28x")
_OPENED: Final = struct.Struct("=QII")
_IOCTL: Final = struct.Struct("=QIIQII")
_IOCTL_ANSWER: Final = struct.Struct("=iIII")
_DIRECTORY_ENTRY: Final = struct.Struct("=QQII")
_STATFS_BYTES: Final = 80


class Ioctl(NamedTuple):
    """One ioctl call."""

    number: int
    """What ``FuseFolder.answer`` needs, where the answer comes later."""
    file: int
    """As ``opened`` named it."""
    thread: int
    """Thread id of the caller."""
    command: int
    argument: int
    """The caller's third argument; its memory, where it is an address."""
    data: bytes
    """How many bytes are copied in, from the command's size bits."""


class IoctlAnswer(NamedTuple):
    """What an ioctl answers: data for the caller's struct, and an errno or 0."""

    data: bytes = b""
    error: int = 0


class Files(Protocol):
    """What happens to the files. Each method may raise OSError, which is what the caller gets."""

    def opened(self, inode: int, thread: int) -> int:
        """Return a number for a new open file."""

    def ioctl(self, call: Ioctl) -> IoctlAnswer | None:
        """Return the answer, or None: it is given to ``FuseFolder.answer`` later."""

    def sought(self, file: int, thread: int) -> None:
        """Handle lseek(SEEK_DATA), which identifies for the serving process which file a descriptor is."""

    def released(self, file: int) -> None:
        """Handle that no process holds the open file any more."""


class _Request(NamedTuple):
    number: int
    opcode: int
    inode: int
    thread: int
    body: bytes


class _Held(NamedTuple):
    request: _Request
    due_ns: int
    """When it is answered, by CLOCK_MONOTONIC; _FOR_EVER: when it is released."""


class FuseFolder:
    """A folder of empty files by name and inode number (2 and up); see the guarantees above."""

    def __init__(self, inodes: Mapping[str, int], files: Files) -> None:
        """Mount; raises SourceError where that is not possible."""
        self._inodes = dict(inodes)
        self._files = files
        self._waits_ns: dict[int, int] = {}
        self._held: list[_Held] = []
        self._lock = threading.Lock()
        self._buffer = bytearray(_REQUEST_BYTES)
        try:
            self.device = os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise SourceError(f"Could not open {FUSE_DEVICE}: {error.strerror}") from error
        try:
            self.folder, self.file_system = _mounted_nowhere(self.device)
        except OSError as error:
            os.close(self.device)
            raise SourceError(f"Could not mount a FUSE file system: {error.strerror}") from error

    # ``device`` is the descriptor to poll, ``folder`` one of the root, ``file_system`` its kernel dev_t.

    def path(self, name: str) -> str:
        """Return where every process with root's rights finds a file while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.folder}/{name}"

    def close(self) -> None:
        """End the file system: every call on it fails, also what is held."""
        os.close(self.device)
        os.close(self.folder)

    # Whether files answer

    def hold(self, name: str) -> None:
        """Answer no open, read and ioctl of a file from now on. Raises KeyError for an unknown one."""
        self._wait(name, _FOR_EVER)

    def slow(self, name: str, latency_ns: int) -> None:
        """Answer opens, reads and ioctls of a file only after this time from now on. Raises KeyError."""
        self._wait(name, latency_ns)

    def _wait(self, name: str, latency_ns: int) -> None:
        with self._lock:
            self._waits_ns[self._inodes[name]] = latency_ns

    def release(self, name: str) -> None:
        """Answer a file's calls at once again, also what waits. Raises KeyError for an unknown one."""
        inode = self._inodes[name]
        with self._lock:
            self._waits_ns.pop(inode, None)
            released = [held.request for held in self._held if held.request.inode == inode]
            self._held = [held for held in self._held if held.request.inode != inode]
        for request in released:
            self._serve_one(request)

    @property
    def names(self) -> Iterable[str]:
        """Every file's name."""
        return self._inodes

    @property
    def held(self) -> int:
        """How many calls wait."""
        return len(self._held)

    def next_due_ns(self) -> int | None:
        """Return when a late answer is due, by CLOCK_MONOTONIC."""
        with self._lock:
            return min((held.due_ns for held in self._held if held.due_ns != _FOR_EVER), default=None)

    def answer_due(self) -> None:
        """Give the late answers whose time has come."""
        now_ns = time.monotonic_ns()
        with self._lock:
            due = [held for held in self._held if _FOR_EVER != held.due_ns <= now_ns]
            self._held = [held for held in self._held if not _FOR_EVER != held.due_ns <= now_ns]
        for held in due:
            self._serve_one(held.request)

    # The protocol

    def serve(self) -> bool:
        """Take every request that waits; false once the file system has ended."""
        while True:
            try:
                size = os.readv(self.device, [self._buffer])
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in {errno.EINTR, errno.ENOENT}:
                    # The caller was interrupted before the question was read.
                    continue
                return False
            length, opcode, number, inode, _, _, thread, *_ = _HEADER.unpack_from(self._buffer)
            body = bytes(memoryview(self._buffer)[_HEADER.size : min(size, length)])
            request = _Request(number, opcode, inode, thread, body)
            if opcode not in _WITHOUT_ANSWER and not self._holds(request):
                self._serve_one(request)

    def answer(self, number: int, answer: IoctlAnswer) -> None:
        """Answer an ioctl that was left open."""
        self._reply(number, _ioctl_body(answer), 0)

    def _holds(self, request: _Request) -> bool:
        if not self._waits_ns or request.opcode not in _MAY_HANG:
            return False
        with self._lock:
            latency_ns = self._waits_ns.get(request.inode)
            if latency_ns is None or len(self._held) >= MAX_HELD:
                return False
            due_ns = _FOR_EVER if latency_ns == _FOR_EVER else time.monotonic_ns() + latency_ns
            self._held.append(_Held(request, due_ns))
        return True

    def _serve_one(self, request: _Request) -> None:
        try:
            data = self._answer(request)
        except OSError as error:
            self._reply(request.number, b"", error.errno or errno.EIO)
        else:
            if data is not None:
                self._reply(request.number, data, 0)

    def _reply(self, number: int, body: bytes, error: int) -> None:
        try:
            os.writev(self.device, [_ANSWER.pack(_ANSWER.size + len(body), -error, number), body])
        except OSError:
            # The caller is gone, or the file system is.
            return

    def _answer(self, request: _Request) -> bytes | None:  # noqa: C901, PLR0911 (one branch each)
        """Return the body of the answer; None: it comes later."""
        body = request.body
        match request.opcode:
            case _Opcode.IOCTL:
                return self._ioctl(request)
            case _Opcode.OPEN:
                return _OPENED.pack(self._files.opened(request.inode, request.thread), _OPEN_FLAGS, 0)
            case _Opcode.RELEASE:
                self._files.released(*struct.unpack_from("=Q", body))
                return b""
            case _Opcode.LSEEK:
                file, offset = struct.unpack_from("=QQ", body)
                self._files.sought(file, request.thread)
                return struct.pack("=Q", offset)
            case _Opcode.LOOKUP:
                return self._found(os.fsdecode(body.rstrip(b"\0")))
            case _Opcode.GETATTR:
                return struct.pack("=QII", _VALID_S, 0, 0) + _attributes(request.inode)
            case _Opcode.OPENDIR:
                return _OPENED.pack(0, 0, 0)
            case _Opcode.READDIR:
                return self._listed(*struct.unpack_from("=8xQI", body))
            case _Opcode.INIT:
                _major, minor, readahead, _flags = struct.unpack_from("=IIII", body)
                spoken = min(minor, _MINOR)
                return _INIT_ANSWER.pack(_MAJOR, spoken, readahead, 0, 12, 10, 1 << 16, 1, 0, 0, 0)
            case _Opcode.READ | _Opcode.RELEASEDIR:
                return b""
            case _Opcode.STATFS:
                return bytes(_STATFS_BYTES)
            case _:
                raise OSError(errno.ENOSYS, "not served")

    def _ioctl(self, request: _Request) -> bytes | None:
        file, _flags, command, argument, in_bytes, _out = _IOCTL.unpack_from(request.body)
        if request.inode == _ROOT:
            raise OSError(errno.ENOTTY, "the folder itself accepts no commands")
        data = request.body[_IOCTL.size : _IOCTL.size + in_bytes]
        answer = self._files.ioctl(Ioctl(request.number, file, request.thread, command, argument, data))
        return None if answer is None else _ioctl_body(answer)

    def _found(self, name: str) -> bytes:
        inode = self._inodes.get(name)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, name)
        return _ENTRY.pack(inode, 0, _VALID_S, _VALID_S, 0, 0) + _attributes(inode)

    def _listed(self, offset: int, room: int) -> bytes:
        listed = b""
        for place, (name, inode) in enumerate(list(self._inodes.items())[offset:], offset + 1):
            raw = os.fsencode(name)
            entry = _DIRECTORY_ENTRY.pack(inode, place, len(raw), stat.S_IFREG >> 12) + raw
            entry += bytes(-len(entry) % 8)
            if len(listed) + len(entry) > room:
                break
            listed += entry
        return listed


def _ioctl_body(answer: IoctlAnswer) -> bytes:
    return _IOCTL_ANSWER.pack(-answer.error, 0, 0, 0) + answer.data


def _attributes(inode: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if inode == _ROOT else stat.S_IFREG | 0o666
    return _ATTRIBUTES.pack(inode, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _mounted_nowhere(device: int) -> tuple[int, int]:
    """Return a descriptor of the root of a new FUSE mount that no path leads to, and the mount's number."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40755,user_id=0,group_id=0,allow_other"
    with tempfile.TemporaryDirectory(prefix="gpu-agent-") as name:
        place = os.fsencode(name)
        if libc.mount(b"gpu-agent-nodes", place, b"fuse", 0, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        try:
            root = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            return root, _file_system(root)
        finally:
            libc.umount2(place, _DETACH)


def _file_system(root: int) -> int:
    """Return the kernel's dev_t of a mount; stat(2) would ask the process that asks. Source: proc(5)."""
    about = Path(f"/proc/self/fdinfo/{root}").read_text(encoding="ascii")
    mount = about.partition("mnt_id:")[2].split()[0]
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        number, _parent, device, *_ = line.split()
        if number == mount:
            major, minor = device.split(":")
            return int(major) << 20 | int(minor)
    raise FileNotFoundError(errno.ENOENT, "the mount is not listed")
