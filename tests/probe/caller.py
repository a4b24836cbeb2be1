"""A process that makes the calls a CUDA program makes, on device doubles: what the probe is to see."""

import subprocess
import sys
from typing import Self

CLIENT = 0xC1D00001
CONTEXT, CHANNEL_GROUP, DEVICE, ROOT, VASPACE = 0x9067, 0xA06C, 0x0080, 0x0041, 0x90F1
MEMORY = 0x003E
"""A class that is not tracked."""

_PRELUDE = """
import ctypes, fcntl, os, struct, sys

CLIENT, CONTEXT, GROUP, DEVICE, ROOT, MEMORY = 0xC1D00001, 0x9067, 0xA06C, 0x80, 0x41, 0x3E

def plain(fd, command, block):
    try:
        fcntl.ioctl(fd, command, block)
    except OSError:
        pass

def call(fd, number, block, kind=0x46):
    plain(fd, 3 << 30 | len(block) << 16 | kind << 8 | number, bytearray(block))

def nvos64(handle, rm_class, parent=2, client=CLIENT, status=0, params=0):
    return struct.pack("=IIIIQQIIII", client, parent, handle, rm_class, params, 0, 0, 0, status, 0)

def alloc(fd, handle, rm_class, **more):
    call(fd, 0x2B, nvos64(handle, rm_class, **more))

def free(fd, handle, client=CLIENT, status=0):
    call(fd, 0x29, struct.pack("=IIII", client, 0, handle, status))

def dup(fd, handle, source, client=CLIENT, source_client=CLIENT, status=0):
    call(fd, 0x34, struct.pack("=IIIIIII", client, 2, handle, source_client, source, 0, status))

def wait():
    print(flush=True)
    sys.stdin.readline()
"""


class Caller:
    """Runs lines of code in a process of its own, up to each ``wait()`` that they contain."""

    def __init__(self, code: str, *arguments: object, keep: tuple[int, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-ISc", _PRELUDE + code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=keep,
        )
        self.pid = self.process.pid

    def run(self) -> None:
        """Run to the next ``wait()``, or to the end."""
        assert self.process.stdout is not None
        self.process.stdout.readline()

    def resume(self) -> None:
        """Run from a ``wait()`` to the next one, or to the end."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.run()

    def __enter__(self) -> Self:
        self.run()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Run to the end."""
        self.process.communicate(timeout=60)


def ran(code: str, *arguments: object) -> int:
    """Run code to its end and return the pid it had."""
    with Caller(code, *arguments) as caller:
        return caller.pid
