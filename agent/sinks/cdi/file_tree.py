"""Reads files below a root as a process would that has this root.

Guarantees: no symbolic link leads out of the root; one with an absolute target starts anew at the root.
The number of system calls, and how much they return, are bounded; what exceeds that raises
TooMuchError. Everything here blocks and runs in a thread.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import translate
from typing import Final

MAX_CALLS: Final = 100_000
"""System calls of one search; a usual driver takes some 1,000."""
MAX_NAMES: Final = 50_000
"""Entries of one directory."""
MAX_LINKS: Final = 40
"""Symbolic links on the way to one file, as in the kernel."""

_CLEAN: Final = re.compile(r"/(?:[A-Za-z0-9_.+@%=,~: -]+/)*[A-Za-z0-9_.+@%=,~: -]+")
"""Paths that can stand in hook arguments and environment variables without being taken for something else."""


class TooMuchError(Exception):
    """A search met more than any driver has; the message names what."""


class FileTree:
    """Files below a root. Paths are absolute and as seen from the root."""

    def __init__(self, root: str, *, max_calls: int = MAX_CALLS, max_names: int = MAX_NAMES) -> None:
        self._max_calls = max_calls
        self._max_names = max_names
        self._root = root.rstrip("/")
        self._calls = 0
        self._links: dict[str, str | None] = {}
        self._names: dict[str, tuple[str, ...]] = {}

    def resolve(self, path: str) -> str | None:
        """Return a path with no symbolic link in it; None where there is no such file.

        None too where the name is one that no driver gives a file of its own.
        """
        todo = path.split("/")[::-1]
        done: list[str] = []
        links = 0
        with suppress(OSError):
            while todo:
                part = todo.pop()
                if part == "..":
                    del done[-1:]
                if part in ("", ".", ".."):
                    continue
                target = self._target("/".join(("", *done, part)))
                if target is None:
                    done.append(part)
                    continue
                links += 1
                if links > MAX_LINKS:
                    return None
                if target.startswith("/"):
                    done = []
                todo += target.split("/")[::-1]
            resolved = "/" + "/".join(done)
            return resolved if _is_clean(resolved) else None
        return None

    def is_file(self, path: str, *, executable: bool = False) -> bool:
        """Return whether a resolved path is a regular file."""
        mode = self._mode(path)
        return stat.S_ISREG(mode) and (not executable or bool(mode & 0o111))

    def is_directory(self, path: str) -> bool:
        """Return whether a resolved path is a directory."""
        return stat.S_ISDIR(self._mode(path))

    def is_socket_or_directory(self, path: str) -> bool:
        """Return whether a resolved path is something that processes connect to."""
        mode = self._mode(path)
        return stat.S_ISSOCK(mode) or stat.S_ISDIR(mode)

    def is_trusted_directory(self, path: str) -> bool:
        """Return whether a path is itself a directory, and root's or ours, so that no other user made it."""
        self._count_call()
        with suppress(OSError):
            seen = os.lstat(self._root + path)
            return stat.S_ISDIR(seen.st_mode) and seen.st_uid in {0, os.geteuid()}
        return False

    def link_target(self, path: str) -> str | None:
        """Return the target of a symbolic link; None where it is none."""
        try:
            return self._target(path)
        except OSError:
            return None

    def names(self, directory: str) -> tuple[str, ...]:
        """Return the clean names in a resolved directory, in order; none where it cannot be read."""
        known = self._names.get(directory)
        if known is None:
            known = self._names[directory] = tuple(sorted(self._listed(directory)))
        return known

    def matching(self, directory: str, *patterns: str) -> Iterator[str]:
        """Yield the paths in a directory whose names match one of the patterns, in order."""
        resolved = self.resolve(directory)
        if resolved is not None:
            wanted = re.compile("|".join(map(translate, patterns)))
            yield from (
                f"{resolved.rstrip('/')}/{name}" for name in self.names(resolved) if wanted.match(name)
            )

    def first(self, paths: Iterable[str]) -> tuple[str, str] | None:
        """Return the first path that is a regular file, and the same resolved."""
        for path in paths:
            resolved = self.resolve(path)
            if resolved is not None and self.is_file(resolved):
                return path, resolved
        return None

    def read(self, path: str, max_bytes: int) -> bytes | None:
        """Return a regular file's bytes; None where it cannot be read or has more."""
        resolved = self.resolve(path)
        if resolved is None or not self.is_file(resolved):
            return None
        self._count_call()
        try:
            with open(self._root + resolved, "rb") as file:  # noqa: PTH123 - paths are text here
                raw = file.read(max_bytes + 1)
        except OSError:
            return None
        return raw if len(raw) <= max_bytes else None

    def _listed(self, directory: str) -> Iterator[str]:
        self._count_call()
        with suppress(OSError), os.scandir(self._root + directory) as entries:
            for number, entry in enumerate(entries):
                if number >= self._max_names:
                    raise TooMuchError(f"{self._root}{directory} has over {self._max_names} entries")
                if _is_clean(f"/{entry.name}"):
                    yield entry.name

    def _target(self, path: str) -> str | None:
        """Return the target of a symbolic link, None of anything else; raises OSError where nothing is."""
        if path not in self._links:
            self._count_call()
            where = self._root + path
            is_link = stat.S_ISLNK(os.lstat(where).st_mode)
            self._links[path] = os.readlink(where) if is_link else None  # noqa: PTH115 - paths are text here
        return self._links[path]

    def _mode(self, path: str) -> int:
        self._count_call()
        try:
            return os.lstat(self._root + path).st_mode
        except OSError:
            return 0

    def _count_call(self) -> None:
        self._calls += 1
        if self._calls > self._max_calls:
            raise TooMuchError(
                f"the search below {self._root or '/'} took over {self._max_calls} system calls"
            )


def _is_clean(path: str) -> bool:
    return path == "/" or (_CLEAN.fullmatch(path) is not None and "::" not in path)
