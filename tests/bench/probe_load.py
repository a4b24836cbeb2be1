"""Probes for a benchmark: loaded for real on device doubles, and why that cannot be where it cannot."""

import asyncio
import contextlib
import ctypes
import os
import shutil
import stat
import struct
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final, Literal

from agent.errors import ProbeLoadError
from agent.probe import headers, kernel, syscalls
from agent.probe.kernel import Roots
from agent.probe.loading import load
from agent.probe.probe import Probe
from agent.probe.request import BCC_PATHS, Doubles, Request
from tests.bench.figures import MeasurementError
from tests.bench.node import ROOT

Loader = Literal["core", "bcc"]
LOADERS: Final[tuple[Loader, ...]] = ("core", "bcc")

_MEMORY_MAJOR: Final = 1
_NULL_MINOR: Final = 3
DOUBLES: Final = Doubles(nvidia_major=_MEMORY_MAJOR, any_return=True)
"""A node like /dev/null counts as a GPU; it rejects the driver's commands, which counts as success."""


_OF_EVERY_PROBE: Final = b"enter_ioctl"
_PROG_GET_NEXT_ID: Final = 11
_PROG_GET_FD_BY_ID: Final = 13
_OBJ_GET_INFO_BY_FD: Final = 15
_INFO_BYTES: Final = 128
_NAME_AT: Final = 64
"""Source: linux/bpf.h, enum bpf_cmd and struct bpf_prog_info."""


def why_no_probe() -> str | None:
    """Return why no probe can be loaded here; None where one can."""
    if os.geteuid() != 0:
        return "the probe needs root"
    try:
        kernel.check(Roots())
    except ProbeLoadError as error:
        return str(error)
    return None


def other_probes() -> int:
    """Return how many probes of tier syscalls are in the kernel, of any owner."""
    found, number = 0, 0
    while (number := _program_after(number)) != 0:
        with contextlib.suppress(OSError):  # it is gone already
            found += _program_name(number) == _OF_EVERY_PROBE
    return found


def _program_after(number: int) -> int:
    """Return the number of the program that the kernel lists next; 0 at the end."""
    attributes = ctypes.create_string_buffer(struct.pack("=III", number, 0, 0), 12)
    try:
        syscalls._call(0, _PROG_GET_NEXT_ID, attributes, len(attributes))
    except FileNotFoundError:
        return 0
    return int(struct.unpack_from("=I", attributes.raw, 4)[0])


def _program_name(number: int) -> bytes:
    descriptor = syscalls.bpf(_PROG_GET_FD_BY_ID, struct.pack("=III", number, 0, 0))
    try:
        info = ctypes.create_string_buffer(_INFO_BYTES)
        syscalls.bpf(
            _OBJ_GET_INFO_BY_FD, struct.pack("=IIQ", descriptor, _INFO_BYTES, ctypes.addressof(info))
        )
    finally:
        os.close(descriptor)
    return info.raw[_NAME_AT : _NAME_AT + 16].partition(b"\0")[0]


class Tools:
    """What the benchmarks of the probe need, made in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        """Raises MeasurementError where something that all of them need is missing."""
        if why := why_no_probe():
            raise MeasurementError(why)
        self.file: Final = folder / "file"
        """A file that is not the driver's."""
        self.file.touch()
        self.node: Final = _made_node(folder / "nvidia0")
        self.program: Final = _compiled(folder)
        self._folder = folder
        self._why_not: dict[Loader, str | None] = {"core": self._why_no_core(), "bcc": self._why_no_bcc()}

    @property
    def object_path(self) -> Path:
        """The precompiled probe, of the source as it is now."""
        return self._folder / "gpu_probe.bpf.o"

    def why_not(self, loader: Loader) -> str | None:
        """Return why a loader cannot be used here; None where it can."""
        return self._why_not[loader]

    @property
    def quickest(self) -> Loader:
        """The loader for what does not depend on it; raises MeasurementError without any."""
        for loader in LOADERS:
            if self.why_not(loader) is None:
                return loader
        raise MeasurementError(str(self.why_not("core")))

    @contextlib.asynccontextmanager
    async def probe(self, loader: Loader) -> AsyncIterator[Probe]:
        """Have a probe in the kernel, of tier syscalls; on the way out it is gone, and so is its price."""
        request = Request(loader=loader, tier="syscalls", doubles=DOUBLES, object_path=str(self.object_path))
        try:
            probe = await load(request)
        except ProbeLoadError as error:
            raise MeasurementError(str(error)) from error
        try:
            yield probe
        finally:
            probe.close()
            for thread in threading.enumerate():
                if thread.name == "probe-close":
                    thread.join()

    async def run(self, *words: str | Path) -> str:
        """Run the helper program and return what it prints."""
        process = await asyncio.create_subprocess_exec(self.program, *words, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        if process.returncode != 0:
            raise MeasurementError(f"the helper program ended with {process.returncode}")
        return output.decode()

    @contextlib.contextmanager
    def holders(self, processes: int, files: int, *nodes: Path) -> Iterator[None]:
        """Have processes hold files meanwhile."""
        command: list[str | Path] = [self.program, "hold", str(processes), str(files), *nodes]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as held:
            assert held.stdin is not None
            assert held.stdout is not None
            if held.stdout.readline() != b"ready\n":
                raise MeasurementError("the processes that hold files could not be started")
            yield
            held.stdin.close()

    def _why_no_core(self) -> str | None:
        if shutil.which("clang") is None:
            return "clang is not installed"
        built = subprocess.run(
            [ROOT / ".ci/bpf", self.object_path], capture_output=True, text=True, check=False
        )
        return None if built.returncode == 0 else built.stderr.strip()

    def _why_no_bcc(self) -> str | None:
        if not any(Path(path, "bcc").is_dir() for path in BCC_PATHS):
            return "python3-bpfcc is not installed"
        scratch = self._folder / "headers"
        scratch.mkdir()
        try:
            headers.find(Roots(), str(scratch))
        except ProbeLoadError as error:
            return str(error)
        return None


def _made_node(path: Path) -> Path:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(_MEMORY_MAJOR, _NULL_MINOR))
        path.open("rb").close()
    except OSError as error:
        raise MeasurementError(f"no device double can be made in {path.parent}: {error.strerror}") from error
    return path


def _compiled(folder: Path) -> Path:
    source, program = ROOT / "tests/bench/probe_calls.c", folder / "probe_calls"
    try:
        subprocess.run(["cc", "-O2", source, "-o", program], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MeasurementError(f"the helper program could not be compiled: {error}") from error
    return program
