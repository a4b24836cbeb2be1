"""Types that the CDI sink and its thread share; light, as most nodes need no more of CDI."""

import os
from typing import NamedTuple

from agent.model.gpu import Gpu
from agent.model.ids import GpuUuid
from agent.model.policy import Injection, MigStrategy


class CdiError(Exception):
    """There is no specification that could be written; the message is why, in one clause."""


class Wanted(NamedTuple):
    """What the specifications are to contain; another value means to read the driver anew."""

    gpus: tuple[Gpu, ...]
    """Those that NVML lists now come first."""
    driver_version: str
    injection: Injection
    mig_strategy: MigStrategy
    present: frozenset[GpuUuid] = frozenset()
    """Those that NVML lists now: of others no container expects a device."""
    signs: tuple[str, ...] = ()
    """What is known of device nodes; a change of it is a reason to read them again."""


class FileIdentity(NamedTuple):
    """What distinguishes a file from another, or from itself after a change."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    mode: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileIdentity":
        """Return the identity of a file."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode)


class SpecFile(NamedTuple):
    """A file as it was when it was seen to be right."""

    path: str
    identity: FileIdentity
    names: frozenset[str]
    """The CDI names that runtimes resolve by it."""
    content: int
    """A hash of its bytes."""
    is_new: bool
    """Whether it had to be written."""


class SpecFiles(NamedTuple):
    """What there is after a job."""

    files: dict[str, SpecFile]
    """By kind."""
    absent: frozenset[str]
    """Names that are wanted, and that this node has nothing for."""
    conflicts: tuple[str, ...]
    """Files of others that name devices of ours, each with a name."""
    left_out: tuple[str, ...]
    """Devices of GPUs that are there and that no file names, each with why."""
    notes: tuple[str, ...]
    """What an operator may not expect."""
