"""Finds kernel headers for bcc: the running kernel's, else any others if the kernel has BTF.

Order: the running release's build directory; the kernel's own archive (kheaders); any installed headers.
Foreign headers only provide types that user space shares with every kernel; offsets of kernel structs
come from the running kernel's BTF, and without it foreign headers would be a silent error.
"""

import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from agent.errors import ProbeLoadError
from agent.probe.kernel import Roots, release

MAX_DEPTH: Final = 8
"""How deep two halves of headers are merged; Debian's meet at arch/x86/include."""


class Headers(NamedTuple):
    """Headers to compile with."""

    release: str
    directory: str
    native: bool
    """Whether they are those of the running kernel."""


def find(roots: Roots, scratch: str) -> Headers:
    """Return headers in one directory, or raise ProbeLoadError with what is missing.

    ``scratch`` is a private directory in which they may be unpacked or merged.
    """
    running = release(roots)
    for found, native in _candidates(roots, running, scratch):
        if native or Path(roots.btf).exists():
            directory = found.parts[0] if len(found.parts) == 1 else _merged(found.parts, scratch)
            return Headers(found.release, directory, native)
        raise ProbeLoadError(
            "kernel_headers_mismatch",
            f"Kernel headers of {found.release} are installed, but {running} is running and does not "
            f"describe its own structs (BTF); install the headers of {running} (linux-headers-{running})",
        )
    raise ProbeLoadError(
        "kernel_headers_missing",
        f"No kernel headers of {running} were found under {roots.modules} and {roots.sources}; "
        f"install them (linux-headers-{running}), mount the host's, or use --probe-loader core",
    )


class _Found(NamedTuple):
    release: str
    parts: Sequence[str]
    """Directories that make up one tree."""


def _candidates(roots: Roots, running: str, scratch: str) -> Iterator[tuple[_Found, bool]]:
    if parts := _parts_in(Path(roots.modules, running)):
        yield _Found(running, parts), True
    archive = Path(roots.sys, "kernel/kheaders.tar.xz")
    if archive.exists():
        yield _Found(running, (_unpacked(archive, scratch),)), True
    for folder in sorted(_folders(roots.modules), key=_version_key, reverse=True):
        if folder.name != running and (parts := _parts_in(folder)):
            yield _Found(folder.name, parts), False
    for folder in sorted(_folders(roots.sources), key=_version_key, reverse=True):
        name = folder.name.removeprefix("linux-headers-")
        if name != folder.name and (parts := _with_common(folder)):
            yield _Found(name, parts), name == running


def _folders(root: str) -> list[Path]:
    try:
        return [entry for entry in Path(root).iterdir() if entry.is_dir()]
    except OSError:
        return []


def _version_key(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", folder.name)]


def _parts_in(folder: Path) -> tuple[str, ...]:
    """Return the tree of /lib/modules/RELEASE: build, and source where that is another directory."""
    build, source = folder / "build", folder / "source"
    if not _is_tree(build):
        return ()
    if _is_tree(source) and source.resolve() != build.resolve():
        return str(build), str(source)
    return _with_common(build.resolve())


def _with_common(folder: Path) -> tuple[str, ...]:
    """Return a directory of headers and the one that its flavours share, as Debian splits them."""
    if not _is_tree(folder):
        return ()
    flavourless = re.sub(r"-[^-]+$", "-common", folder.name)
    common = folder.with_name(flavourless)
    if folder.name.endswith("-common"):
        return ()
    if _is_tree(common) and common != folder:
        return str(folder), str(common)
    return (str(folder),) if (folder / "include/linux/kconfig.h").exists() else ()


def _is_tree(folder: Path) -> bool:
    return (folder / "include").is_dir()


def _unpacked(archive: Path, scratch: str) -> str:
    target = os.path.join(scratch, "kheaders")  # noqa: PTH118 - a string is wanted
    try:
        with tarfile.open(archive, "r:xz") as headers:
            headers.extractall(target, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise ProbeLoadError(
            "kernel_headers_missing",
            f"The kernel's own headers ({archive}) could not be unpacked: {error}; "
            "install the package of headers (linux-headers) or use --probe-loader core",
        ) from error
    return target


def _merged(parts: Sequence[str], scratch: str) -> str:
    target = Path(scratch, "headers")
    try:
        target.mkdir()
    except FileExistsError:  # merged for the tier that was tried before
        return str(target)
    _merge([Path(part) for part in parts], target, MAX_DEPTH)
    return str(target)


def _merge(trees: list[Path], target: Path, depth: int) -> None:
    """Make ``target`` show the union of the trees by symbolic links; the first tree wins."""
    names: dict[str, list[Path]] = {}
    for tree in trees:
        for entry in tree.iterdir():
            names.setdefault(entry.name, []).append(entry)
    for name, entries in names.items():
        place = target / name
        if len(entries) == 1 or depth == 0 or not all(entry.is_dir() for entry in entries):
            place.symlink_to(entries[0].resolve())
        else:
            place.mkdir()
            _merge(entries, place, depth - 1)
