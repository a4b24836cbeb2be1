"""Makes the CDI spec files what they should be: one job for a thread, from reading the driver to renaming.

Guarantees:

1. A file is an old or a new specification, never a mix, and every container runtime may read it.
2. Nothing is written that breaks the schema, or that is in the file already.
3. Files of others are read at most, and only to see whether they make a name of ours ambiguous.

Source of the last: cncf-tags/container-device-interface:pkg/cdi/cache.go, where a device that two files of
one directory name is resolved by neither.
"""

import json
import os
import stat
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from agent import files
from agent.config.settings import Cdi
from agent.core.allocation.cdi import CLASSES, Document, Hooks, left_out, qualified_names, specifications
from agent.core.allocation.cdi_schema import problems_of
from agent.core.allocation.injection import CDI_VENDOR, extra_cdi_names
from agent.sinks.cdi.device_nodes import Places
from agent.sinks.cdi.driver_files import NotFoundError, find
from agent.sinks.cdi.file_tree import FileTree, TooMuchError
from agent.sinks.cdi.records import CdiError, FileIdentity, SpecFile, SpecFiles, Wanted

MAX_FILE_BYTES: Final = 4 * 1024 * 1024
"""A specification of 16 GPUs with 7 MIG devices each has some 200 KiB."""
MAX_FOREIGN_FILES: Final = 256
MAX_FOREIGN_BYTES: Final = 1024 * 1024

FILE_MODE: Final = 0o644
DIRECTORY_MODE: Final = 0o755


class SpecDirectory:
    """Where the spec files are. The job blocks; two at once wait for one another."""

    def __init__(self, settings: Cdi, *, sys_root: str, is_in_container: bool) -> None:
        self._settings = settings
        self._sys = sys_root
        self._is_in_container = is_in_container
        self._working = threading.Lock()
        """Held by the thread that works: one whose task was cancelled is still at the files."""

    def update(self, wanted: Wanted) -> SpecFiles:
        """Read the driver's files, and write what is not in the spec files yet.

        Raises CdiError where there is no driver to describe, OSError where the disk rejects a write.
        """
        with self._working:
            return self._update(wanted)

    def _update(self, wanted: Wanted) -> SpecFiles:
        places = self._places()
        hooks, notes = self._hooks(places)
        flags = self._settings.feature_flags
        try:
            found = find(places, wanted.driver_version, [gpu.pci for gpu in wanted.gpus], flags)
        except (NotFoundError, TooMuchError) as error:
            raise CdiError(str(error)) from None
        documents = specifications(
            wanted.gpus,
            injection=wanted.injection,
            mig_strategy=wanted.mig_strategy,
            files=found,
            hooks=hooks,
            annotate_coherent="enable-coherent-annotations" in flags,
        )
        written, conflicts = self._write(documents)
        extra = extra_cdi_names(wanted.injection)
        known = {name for document in documents.values() for name in qualified_names(document)}
        return SpecFiles(
            files=written,
            absent=frozenset(extra) - known,
            conflicts=conflicts,
            left_out=left_out(
                (gpu for gpu in wanted.gpus if gpu.uuid in wanted.present),
                ids=wanted.injection.ids,
                mig_strategy=wanted.mig_strategy,
                files=found,
            ),
            notes=notes,
        )

    def _places(self) -> Places:
        settings = self._settings
        mounted = settings.driver_root_ctr_path
        if os.path.isdir(mounted):  # noqa: PTH112 - text is all that is needed
            root = mounted
        elif self._is_in_container:
            raise CdiError(
                f"the node's driver root is not mounted at {mounted}; mount it there, or set its place with"
                " --driver-root-ctr-path"
            )
        else:
            root = settings.driver_root
        return Places(
            root=root,
            host_root=settings.driver_root,
            dev=self._dev(root),
            host_dev=f"{settings.dev_root.rstrip('/')}/dev",
            sys=self._sys,
        )

    def _dev(self, root: str) -> str:
        """Return where the node's device nodes are to be seen."""
        of_settings = f"{self._settings.dev_root.rstrip('/')}/dev"
        of_driver = f"{root.rstrip('/')}/dev"
        candidates = (of_driver, of_settings) if self._is_in_container else (of_settings, of_driver)
        return next((each for each in candidates if os.path.isdir(each)), "/dev")  # noqa: PTH112

    def _hooks(self, places: Places) -> tuple[Hooks, tuple[str, ...]]:
        """Return the hooks of the program that the host has, as far as can be seen from here."""
        path, disabled = self._settings.hook_path, self._settings.disabled_hooks
        is_root_of_host = self._is_in_container and self._settings.driver_root == "/"
        tree = FileTree(places.root if is_root_of_host else "/")
        found = tree.resolve(path)
        if found is not None and tree.is_file(found, executable=True):
            return Hooks(path, disabled), ()
        if self._is_in_container and not is_root_of_host:
            # The host's own files are not visible, so the operator's settings are all there is.
            return Hooks(path, disabled), ()
        if "all" in disabled:
            return Hooks(None), ()
        note = (
            f"{path} is not there, so no hook makes the driver's libraries known to the linker in containers;"
            " install the NVIDIA container toolkit, or name its program with --nvidia-cdi-hook-path"
        )
        return Hooks(None), (note,)

    # Files

    def _write(self, documents: dict[str, Document]) -> tuple[dict[str, SpecFile], tuple[str, ...]]:
        directory = Path(self._settings.spec_dir)
        _make_directory(directory)
        written: dict[str, SpecFile] = {}
        conflicts: list[str] = []
        foreign = tuple(_foreign(directory))
        for document in documents.values():
            kind: str = document["kind"]
            names = qualified_names(document)
            for name, other in _ambiguous(kind, names, foreign):
                conflicts.append(f"{other} names {name} too")
                names -= {name}
            path = str(directory / file_name(kind))
            raw = _encoded(document)
            identity, is_new = _put(path, raw)
            written[kind] = SpecFile(path, identity, names, hash(raw), is_new)
        return written, tuple(conflicts)


def file_name(kind: str) -> str:
    """Return the name of the file of a kind, as NVIDIA's plugin has it."""
    return kind.replace("/", "-") + ".json"


def _make_directory(directory: Path) -> None:
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        # The umask is for what no other user may read.
        directory.chmod(DIRECTORY_MODE)


def _encoded(document: Document) -> bytes:
    problems = problems_of(document)
    if problems:
        raise CdiError(f"runtimes would reject the specification of {document['kind']}: {problems[0]}")
    raw = json.dumps(document, indent=2).encode("ascii") + b"\n"
    if len(raw) > MAX_FILE_BYTES:
        raise CdiError(f"the specification of {document['kind']} has over {MAX_FILE_BYTES} bytes")
    return raw


def _put(path: str, raw: bytes) -> tuple[FileIdentity, bool]:
    """Make a file hold these bytes; returns what it is then, and whether it had to be written."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:  # noqa: PTH123 - it is open already
            status = os.fstat(descriptor)
            is_ours = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == FILE_MODE
            if is_ours and status.st_size == len(raw) and file.read(len(raw) + 1) == raw:
                return FileIdentity.of(status), False
    return FileIdentity.of(files.write(path, raw, mode=FILE_MODE)), True


def _foreign(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the spec files of others in the directory that mention our vendor, with their bytes."""
    own = {file_name(f"{CDI_VENDOR}/{kind}") for kind in CLASSES}
    found = 0
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name in own or not entry.name.endswith((".json", ".yaml")) or not entry.is_file():
                continue
            found += 1
            if found > MAX_FOREIGN_FILES:
                return
            with suppress(OSError), open(entry.path, "rb") as file:  # noqa: PTH123 - text is all that is needed
                raw = file.read(MAX_FOREIGN_BYTES)
                if CDI_VENDOR.encode() in raw:
                    yield entry.path, raw


def _ambiguous(
    kind: str, names: Collection[str], foreign: Collection[tuple[str, bytes]]
) -> Iterator[tuple[str, str]]:
    """Yield the names that another file has too, each with the file's path."""
    for path, raw in foreign:
        if kind.encode() in raw:
            words: set[Any] = set(raw.replace(b'"', b" ").replace(b",", b" ").replace(b"'", b" ").split())
            yield from ((name, path) for name in sorted(names) if name.partition("=")[2].encode() in words)
