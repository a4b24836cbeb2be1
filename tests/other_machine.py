"""Launchers that give an agent a mount namespace, in which it sees another machine than this one.

What is mounted there is seen by the agent and its loader alone, which run unchanged.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

KERNEL_SIDE = "/sys/kernel"
BCC_FOLDER = "/usr/lib/python3/dist-packages"
"""Where Debian has the module bcc, and the loader's first directory."""
MODULES, SOURCES = "/lib/modules", "/usr/src"

BCC_DOUBLE = """\
import os, time
def note(what):
    with open(os.path.join(os.path.dirname(__file__), "notes"), "a") as file:
        file.write(f"{{what}} {{os.getpid()}}\\n")
note("imported")
class BPF:
    TRACEPOINT = RAW_TRACEPOINT = KPROBE = TRACING = 1
    def __init__(self, text, cflags):
        note("compiled")
        {does}
"""
COMPILER_ERROR = "/virtual/main.c:4:2: error: unknown type name u33"
FAILS = f"os.write(2, b'{COMPILER_ERROR}\\n' * 1000); raise Exception('Failed to compile')"
HANGS = "time.sleep(600)"


def why_no_other_machine() -> str | None:
    """Return why no mount namespace can be created here."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("unshare", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    command = ["unshare", "--mount", "--propagation", "private", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return tried.stderr.strip() or None


class OtherMachine:
    """The files that the agent sees in place of the real ones."""

    def __init__(self, folder: Path) -> None:
        """Keep the files in ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._mounts: list[str] = []
        self.without: list[str] = []
        """Capabilities that the agent lacks, as setpriv names them."""

    def show(self, path: str | Path, shown: Path) -> None:
        """Mount a file or directory over another of its kind."""
        self._mounts.append(f"mount --bind {shlex.quote(str(shown))} {shlex.quote(str(path))}")

    def hide(self, *paths: str) -> None:
        """Mount empty directories over the real ones."""
        for path in paths:
            if Path(path).is_dir():
                self.show(path, self.empty(path))

    def empty(self, path: str) -> Path:
        """Return a new directory to mount over one."""
        shown = self._folder / path.strip("/").replace("/", "-")
        shown.mkdir(parents=True, exist_ok=True)
        return shown

    def is_locked_down(self) -> None:
        """Show a kernel in lockdown."""
        security = self.empty(f"{KERNEL_SIDE}/security")
        (security / "lockdown").write_text("none integrity [confidentiality]\n")
        self.show(f"{KERNEL_SIDE}/security", security)

    def has_release(self, release: str) -> None:
        """Show another release of the kernel."""
        file = self._folder / "osrelease"
        file.write_text(f"{release}\n")
        self.show("/proc/sys/kernel/osrelease", file)

    def has_headers(self, *releases: str) -> None:
        """Show the headers of these kernels only."""
        modules = self.empty(MODULES)
        for release in releases:
            for name in ("generated/autoconf.h", "linux/kconfig.h"):
                header = modules / release / "build" / "include" / name
                header.parent.mkdir(parents=True, exist_ok=True)
                header.touch()
        self.hide(MODULES, SOURCES)

    def has_bcc(self, does: str) -> None:
        """Replace the module bcc by one that executes this statement instead of compiling."""
        folder = self.empty(BCC_FOLDER)
        (folder / "bcc").mkdir()
        (folder / "bcc/__init__.py").write_text(BCC_DOUBLE.format(does=does))
        self.show(BCC_FOLDER, folder)

    @property
    def compilations(self) -> int:
        """Return the number of compilations by that module."""
        return len(self._pids("compiled"))

    @property
    def importers(self) -> list[int]:
        """Return the processes that imported that module."""
        return self._pids("imported")

    def _pids(self, what: str) -> list[int]:
        notes = self.empty(BCC_FOLDER) / "bcc/notes"
        lines = notes.read_text().splitlines() if notes.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(what)]

    def launcher(self) -> tuple[str, ...]:
        """Return the words to put before the agent's command line; the launcher executes the agent."""
        dropped = ",".join(f"-{name}" for name in self.without)
        become = f"setpriv --bounding-set={dropped} --" if dropped else ""
        script = self._folder / "launch"
        lines = ["#!/bin/sh", "set -e", *self._mounts, f'exec {become} "$@"']
        script.write_text("\n".join(lines) + "\n")
        script.chmod(0o755)
        return ("unshare", "--mount", "--propagation", "private", str(script))
