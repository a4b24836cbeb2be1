"""An agent that sees another machine than this one: launchers that give it a mount namespace of its own.

What is mounted there is seen by the agent and its loader alone, which run unchanged.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

KERNEL_SIDE = "/sys/kernel"
BCC_FOLDER = "/usr/lib/python3/dist-packages"
"""Where Debian has the module bcc, and where the loader looks first."""
MODULES, SOURCES = "/lib/modules", "/usr/src"

FAKE_BCC = """\
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
SAID = "/virtual/main.c:4:2: error: unknown type name u33"
FAILS = f"os.write(2, b'{SAID}\\n' * 1000); raise Exception('Failed to compile')"
HANGS = "time.sleep(600)"


def why_no_other_machine() -> str | None:
    """Return why no mount namespace can be made here."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("unshare", "setpriv") if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not installed"
    command = ["unshare", "--mount", "--propagation", "private", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    return tried.stderr.strip() or None


class OtherMachine:
    """What the agent sees in place of what is there."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is where what it sees is kept."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._mounts: list[str] = []
        self.without: list[str] = []
        """Capabilities that the agent does not have, as setpriv names them."""

    def show(self, path: str | Path, shown: Path) -> None:
        """Show a file or directory in the place of another of its kind."""
        self._mounts.append(f"mount --bind {shlex.quote(str(shown))} {shlex.quote(str(path))}")

    def hide(self, *paths: str) -> None:
        """Show empty directories in the place of those that are there."""
        for path in paths:
            if Path(path).is_dir():
                self.show(path, self.empty(path))

    def empty(self, path: str) -> Path:
        """Return a new directory to show in the place of one."""
        shown = self._folder / path.strip("/").replace("/", "-")
        shown.mkdir(parents=True, exist_ok=True)
        return shown

    def is_locked_down(self) -> None:
        """Let the kernel be locked down."""
        security = self.empty(f"{KERNEL_SIDE}/security")
        (security / "lockdown").write_text("none integrity [confidentiality]\n")
        self.show(f"{KERNEL_SIDE}/security", security)

    def has_release(self, release: str) -> None:
        """Let another kernel run."""
        file = self._folder / "osrelease"
        file.write_text(f"{release}\n")
        self.show("/proc/sys/kernel/osrelease", file)

    def has_headers(self, *releases: str) -> None:
        """Have the headers of these kernels and no others."""
        modules = self.empty(MODULES)
        for release in releases:
            for name in ("generated/autoconf.h", "linux/kconfig.h"):
                header = modules / release / "build" / "include" / name
                header.parent.mkdir(parents=True, exist_ok=True)
                header.touch()
        self.hide(MODULES, SOURCES)

    def has_bcc(self, does: str) -> None:
        """Have a module bcc that does something else than to compile."""
        folder = self.empty(BCC_FOLDER)
        (folder / "bcc").mkdir()
        (folder / "bcc/__init__.py").write_text(FAKE_BCC.format(does=does))
        self.show(BCC_FOLDER, folder)

    @property
    def compilations(self) -> int:
        """How often that module was asked to compile."""
        return len(self._pids("compiled"))

    @property
    def importers(self) -> list[int]:
        """The processes that imported that module."""
        return self._pids("imported")

    def _pids(self, what: str) -> list[int]:
        notes = self.empty(BCC_FOLDER) / "bcc/notes"
        lines = notes.read_text().splitlines() if notes.exists() else []
        return [int(line.split()[1]) for line in lines if line.startswith(what)]

    def launcher(self) -> tuple[str, ...]:
        """Return what is put before the agent's command line, and becomes the agent."""
        dropped = ",".join(f"-{name}" for name in self.without)
        become = f"setpriv --bounding-set={dropped} --" if dropped else ""
        script = self._folder / "launch"
        lines = ["#!/bin/sh", "set -e", *self._mounts, f'exec {become} "$@"']
        script.write_text("\n".join(lines) + "\n")
        script.chmod(0o755)
        return ("unshare", "--mount", "--propagation", "private", str(script))
