"""Pins the probe in the kernel for the next agent: its maps, programs and attachments get names in bpffs.

Guarantees: only a directory that root alone may write is used, in a file system that is bpffs; anything else
there is not touched. A set of pins is complete or ignored: its description is written last. The version in
the path identifies the layout and the programs, so that pins of another version are not read; older sets are
removed when a newer one is written. ``rm -r`` of the directory removes the probe from the kernel.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.probe import syscalls
from agent.probe.layout import INDEX, SIZES
from agent.probe.loaded import SOURCE
from agent.probe.programs import BY_NAME, MAPS

DIRECTORY: Final = "/sys/fs/bpf/gpu-agent"
ABOUT: Final = "about"
MAX_ABOUT_BYTES: Final = 16_384
_LAYOUT: Final = ("gpu_probe.h", "maps.h")
_DIGITS: Final = 12
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
_ADVICE: Final = {
    errno.EINVAL: "attachments can be kept since Linux 5.15",
    errno.EROFS: "mount it writable",
    errno.EPERM: "grant the agent CAP_BPF",
    errno.EACCES: "make it root's with mode 0700",
    errno.ENOSPC: "free room for it",
}
_KINDS: Final = {"map": "map_type", "program": "prog_type", "link": "link_type"}
"""Keys in /proc/self/fdinfo of each."""


class PinsUnusableError(Exception):
    """The probe cannot be pinned, or its pins cannot be adopted; the message has the reason."""


@dataclass(frozen=True, slots=True)
class About:
    """The description of a set."""

    reply: dict[str, Any]
    """The loader's reply."""
    modules: tuple[int, ...]
    """The driver that it was attached to, as Probe knows it."""
    sizes: tuple[int, int]
    """Bytes of the ring and rows of the table of processes."""


class Kept(NamedTuple):
    """A set that was adopted; the descriptors are in the order of the reply."""

    about: About
    descriptors: list[int]


class Pins:
    """A directory of sets, of which this version uses one."""

    def __init__(self, directory: str, *, version: str = "") -> None:
        self._directory = directory
        self._version = version or _version()
        self._set = os.path.join(directory, self._version)  # noqa: PTH118 - a string is wanted

    def adopt(self) -> Kept | None:
        """Return the set of this version; None: there is none. Raises PinsUnusableError."""
        with _translated(f"{self._directory} cannot be read"):
            self._check_directory()
            if not Path(self._set).is_dir():
                return None
        descriptors: list[int] = []
        try:
            about = self._read_about()
            for kind, name in _names(about.reply):
                with _translated(f"{kind} {name} cannot be opened"):
                    descriptors.append(syscalls.pinned(f"{self._set}/{kind}_{name}"))
                _check(kind, name, descriptors[-1])
        except PinsUnusableError:
            _close(descriptors)
            raise
        return Kept(about, descriptors)

    def older_maps(self) -> dict[str, int]:
        """Return descriptors of the maps of a set with this layout, of any programs; empty: there is none."""
        with suppress(PinsUnusableError, OSError):
            self._check_directory()
            return self._older_maps(self._version.partition("-")[0])
        return {}

    def _older_maps(self, layout: str) -> dict[str, int]:
        for folder in self._sets():
            if folder.name.partition("-")[0] != layout:
                continue
            descriptors: dict[str, int] = {}
            try:
                for name in MAPS:
                    descriptors[name] = syscalls.pinned(f"{folder}/map_{name}")
                    _check("map", name, descriptors[name])
            except (OSError, PinsUnusableError):
                _close([*descriptors.values()])
                continue
            return descriptors
        return {}

    def put(self, descriptors: Mapping[str, int], about: About) -> None:
        """Pin these instead of any earlier set; raises PinsUnusableError, and then nothing is pinned."""
        with _translated(f"{self._directory} cannot be made"):
            self._make_directory()
            self._check_directory()
        try:
            with _translated(f"{self._directory} cannot be written"):
                self.remove()
                os.mkdir(self._set, 0o700)  # noqa: PTH102
                for name, descriptor in descriptors.items():
                    syscalls.pin(descriptor, f"{self._set}/{name}")
                self._describe(about)
        except PinsUnusableError:
            with suppress(OSError):
                self.remove()
            raise

    def _describe(self, about: About) -> None:
        described = json.dumps([about.reply, about.modules, about.sizes]).encode()
        if len(described) > MAX_ABOUT_BYTES:
            raise PinsUnusableError("the description of the probe is too long")
        note = syscalls.array(MAX_ABOUT_BYTES)
        try:
            syscalls.map_update(note, INDEX.pack(0), described.ljust(MAX_ABOUT_BYTES, b"\0"))
            syscalls.pin(note, f"{self._set}/{ABOUT}")
        finally:
            os.close(note)

    def remove(self) -> None:
        """Remove the sets of every version; raises OSError."""
        for folder in self._sets():
            # The description is removed first: without it the set is ignored.
            (folder / ABOUT).unlink(missing_ok=True)
            for each in folder.iterdir():
                each.unlink()
            folder.rmdir()

    def remove_all(self) -> None:
        """Remove every set and the directory; what the agent did not create is not touched."""
        with suppress(PinsUnusableError, OSError):
            self._check_directory()
            self.remove()
            Path(self._directory).rmdir()

    def _sets(self) -> Iterator[Path]:
        with suppress(OSError):
            for folder in sorted(Path(self._directory).iterdir()):
                if folder.is_dir() and not folder.is_symlink():
                    yield folder

    def _make_directory(self) -> None:
        parent = Path(self._directory).parent
        if not syscalls.is_bpf_file_system(str(parent)):
            raise PinsUnusableError(
                f"{parent} is not the BPF file system; mount it (mount -t bpf -o mode=700 bpf {parent})"
            )
        with suppress(FileExistsError):
            os.mkdir(self._directory, 0o700)  # noqa: PTH102

    def _check_directory(self) -> None:
        """Raise unless only this user can have created the contents of the directory."""
        path = Path(self._directory)
        try:
            parent, own = path.parent.stat(), path.lstat()
        except FileNotFoundError:
            return
        is_safe_above = parent.st_uid == 0 and (
            not parent.st_mode & _OTHERS_WRITE or parent.st_mode & stat.S_ISVTX
        )
        is_own = stat.S_ISDIR(own.st_mode) and own.st_uid == os.geteuid() and not own.st_mode & _OTHERS
        if not (is_safe_above and is_own):
            raise PinsUnusableError(
                f"Other users could write {path} (mode {stat.filemode(own.st_mode)}, owner {own.st_uid}); "
                "remove it or make it root's with mode 0700"
            )
        if not syscalls.is_bpf_file_system(self._directory):
            raise PinsUnusableError(f"{path} is not in the BPF file system; choose a directory that is")

    def _read_about(self) -> About:
        with _translated("the description of the pinned probe cannot be opened"):
            note = syscalls.pinned(f"{self._set}/{ABOUT}")
        try:
            info = syscalls.map_info(note)
            if (info.key_bytes, info.value_bytes) != (INDEX.size, MAX_ABOUT_BYTES):
                raise PinsUnusableError("the description of the pinned probe has another layout")
            value = syscalls.map_lookup(note, INDEX.pack(0), MAX_ABOUT_BYTES) or b""
            reply, modules, sizes = json.loads(value.rstrip(b"\0"))
            names = {name for key in ("programs", "attached") for name in reply[key]}
            if tuple(reply["maps"]) != MAPS or not names <= BY_NAME.keys():
                raise PinsUnusableError("the pinned probe has unknown maps or programs")
            return About(reply, tuple(modules), (int(sizes[0]), int(sizes[1])))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise PinsUnusableError(f"the description of the pinned probe is damaged: {error}") from error
        finally:
            os.close(note)


def _names(reply: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from (("map", name) for name in reply["maps"])
    yield from (("program", name) for name in reply["programs"])
    yield from (("link", name) for name in reply["attached"])


def _check(kind: str, name: str, descriptor: int) -> None:
    """Raise PinsUnusableError unless a descriptor is of the kind of its name."""
    try:
        about = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise PinsUnusableError(f"{kind} {name} cannot be read: {error}") from error
    if f"{_KINDS[kind]}:" not in about:
        raise PinsUnusableError(f"the pin of {kind} {name} is something else")
    if kind == "map":
        info = syscalls.map_info(descriptor)
        if (info.key_bytes, info.value_bytes) != SIZES[name]:
            raise PinsUnusableError(f"map {name} has another layout")


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Raise PinsUnusableError for an OSError."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "until then the probe is removed when the agent exits")
        raise PinsUnusableError(f"{what}: {error.strerror}; {advice}") from error


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _version() -> str:
    """Return the version of layout and programs."""
    layout, programs = hashlib.sha256(), hashlib.sha256()
    for path in sorted(SOURCE.iterdir()):
        if path.suffix in {".c", ".h"}:
            text = path.read_bytes()
            programs.update(text)
            if path.name in _LAYOUT:
                layout.update(text)
    return f"{layout.hexdigest()[:_DIGITS]}-{programs.hexdigest()[:_DIGITS]}"
