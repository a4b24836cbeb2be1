"""A root in use: a container that runs one command, or a booted system with systemd as its PID 1.

Guarantees: whatever ends this process ends the container; its mounts and control groups go with it. What a
test writes is in an overlay; the root below it stays as it was.
"""

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.killed_runs import held
from tests.system.roots import CERTIFICATES, package_environment

BOOT_S: Final = 120.0
PATIENCE_S: Final = 120.0
"""Longer than anything takes on a loaded machine; no test waits for it to pass."""
_POLL_S: Final = 0.05
_PR_SET_PDEATHSIG: Final = 1
_MOUNT_AND_RUN: Final = """\
set -e
mount -t overlay -o "lowerdir=$1,upperdir=$2,workdir=$3" overlay "$4"
shift 4
exec systemd-nspawn "$@"
"""


@dataclass
class Directories:
    """Where a root in use is: the root below, what is written, where both are mounted."""

    lower: Path
    scratch: Path

    @classmethod
    @contextmanager
    def of(cls, lower: Path) -> "Iterator[Directories]":
        """Make them, and remove what was written at the end."""
        # Not /tmp, which may be in memory.
        with held(Path("/var/tmp"), "gpu-agent-system-") as scratch:
            for name in ("upper", "work", "root"):
                (scratch / name).mkdir()
            yield cls(lower, scratch)

    @property
    def written(self) -> Path:
        """What was written above the root; also before a container starts."""
        return self.scratch / "upper"

    def command(self, *options: str) -> list[str]:
        """Return the command line of a container on them."""
        places = (self.lower, self.scratch / "upper", self.scratch / "work", self.scratch / "root")
        return [
            # The end of a process namespace's first process is the end of all in it.
            *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private"),
            *("sh", "-c", _MOUNT_AND_RUN, "sh"),
            *map(str, places),
            *("--quiet", "--register=no", "--keep-unit", "--console=pipe", "--private-users=no"),
            f"--directory={self.scratch / 'root'}",
            *options,
        ]


def run_in(directories: Directories, script: str, *options: str, cwd: str = "/") -> str:
    """Run a script in a container with this machine's network; returns what it printed.

    Raises AssertionError with its output where it fails.
    """
    environment = [f"--setenv={name}={value}" for name, value in package_environment().items()]
    command = directories.command(
        *("--resolv-conf=replace-host", f"--bind-ro={CERTIFICATES}", f"--chdir={cwd}"),
        *options,
        *environment,
        *("/bin/bash", "-euc", script),
    )
    with _control_groups() as groups:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=_environment(),
            preexec_fn=lambda: _belong(groups),
        )
    assert done.returncode == 0, f"{script}\nexit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass
class Machine:
    """A booted root."""

    leader: int
    """Its PID 1, as this machine numbers it."""
    _marks: dict[str, str] = field(default_factory=dict)

    def run(self, script: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a shell script in it, as root. Raises AssertionError with its output where it fails."""
        done = subprocess.run(
            ["nsenter", "-t", str(self.leader), "-a", "/bin/bash", "-euc", script],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S * 2,
            env=package_environment() | {"LC_ALL": "C.UTF-8"},
        )
        if check:
            assert done.returncode == 0, (
                f"{script}\nexit {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.journal()}"
            )
        return done

    def out(self, script: str) -> str:
        """Run a script and return what it printed."""
        return self.run(script).stdout.strip()

    def path(self, path: str) -> Path:
        """Return where a file of it is on this machine."""
        return Path(f"/proc/{self.leader}/root{path}")

    def property(self, name: str, unit: str = "gpu-agent") -> str:
        """Return a property of a unit."""
        return self.out(f"systemctl show --value --property={name} {unit}")

    def state(self, unit: str = "gpu-agent") -> str:
        """Return ``active``, ``failed``, ``activating``, ..."""
        return self.run(f"systemctl is-active {unit}", check=False).stdout.strip()

    def journal(self, unit: str = "gpu-agent") -> str:
        """Return the unit's lines since ``mark``, as a person reads them."""
        cursor = self._marks.get(unit, "")
        after = f"--after-cursor='{cursor}'" if cursor else ""
        return self.run(f"journalctl --no-pager --unit={unit} {after}", check=False).stdout

    def mark(self, unit: str = "gpu-agent") -> None:
        """Have ``journal`` begin here."""
        shown = self.run("journalctl --sync; journalctl -q -n0 --show-cursor", check=False).stdout
        self._marks[unit] = shown.rpartition("cursor: ")[2].strip()

    def wait(self, what: str, condition: Callable[[], object]) -> Any:
        """Return what a condition returns once it is true. Raises AssertionError with the journal."""
        until = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            assert time.monotonic() < until, f"never came true: {what}\n{self.state()}\n{self.journal()}"
            time.sleep(_POLL_S)
        return found

    def wait_line(self, text: str, unit: str = "gpu-agent") -> str:
        """Return the first line of the journal since ``mark`` with a text in it, once it is there."""

        def line() -> str:
            return next((each for each in self.journal(unit).splitlines() if text in each), "")

        return str(self.wait(f"{text!r} in the journal of {unit}", line))


@contextmanager
def booted(directories: Directories, *options: str) -> Iterator[Machine]:
    """Boot a root with a network of its own, and shut it down at the end."""
    log = directories.scratch / "console"
    with _control_groups() as groups, log.open("wb") as console:
        process = subprocess.Popen(
            directories.command("--boot", "--private-network", *options),
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            env=_environment(),
            preexec_fn=lambda: _belong(groups),  # noqa: PLW1509 - one thread here
        )
        try:
            machine = Machine(_leader(process, log))
            # Whatever else of the distribution's does not work in a container is none of our business.
            state = machine.run("systemctl is-system-running --wait", check=False).stdout.strip()
            assert state in {"running", "degraded"}, state
            yield machine
        finally:
            process.kill()
            process.wait()


def _leader(process: "subprocess.Popen[bytes]", log: Path) -> int:
    """Return the container's PID 1 once systemd answers in it."""
    until = time.monotonic() + BOOT_S
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError, ValueError, IndexError):
            leader = _child(_child(process.pid))
            if Path(f"/proc/{leader}/root/run/systemd/private").exists():
                return leader
        time.sleep(_POLL_S)
    raise AssertionError(f"systemd did not start: {log.read_text(errors='replace')}")


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@contextmanager
def _control_groups() -> Iterator[Sequence[Path]]:
    """Make a control group of one's own in each hierarchy that systemd uses, and remove it at the end."""
    name = f"gpu-agent-system-{os.getpid()}-{time.monotonic_ns()}"
    made = [mount / name for mount in control_group_mounts()]
    for each in made:
        each.mkdir()
    try:
        yield made
    finally:
        for each in made:
            _remove(each)


def _remove(group: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while group.exists() and time.monotonic() < until:
        for below in sorted(group.rglob("*/"), reverse=True):
            with suppress(OSError):
                below.rmdir()
        with suppress(OSError):
            group.rmdir()
        time.sleep(_POLL_S)


def control_group_mounts() -> list[Path]:
    """Return where the hierarchies are mounted of which systemd needs a part: version 2's and its own."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options):
            found.append(Path(before.split()[4]))
    return found


def _belong(groups: Sequence[Path]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for group in groups:
        (group / "cgroup.procs").write_text(str(os.getpid()))


def _environment() -> Mapping[str, str]:
    return {**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}


def loads(text: str) -> Any:
    """Return the document in a text."""
    return json.loads(text)
