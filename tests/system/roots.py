"""Root file systems of Debian releases: made by mmdebstrap, kept between runs, never written to by a test.

A root lies in ``${XDG_CACHE_HOME:-/var/cache}/gpu-agent-test-system``, under a name made from its contents;
one of other contents takes its place. A test writes to an overlay above it, which ends with the test. Where
packages come from is this machine's own setting, read when it is needed.
"""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CERTIFICATES: Final = Path("/etc/ssl/certs/ca-certificates.crt")
PACKAGE_SOURCES: Final = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")
PROXIES: Final = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_APT_SETTINGS: Final = re.compile(r'^Acquire::(https?::.*|Check-[\w-]+|Retries) "[^"]+";$')
_UNREACHABLE: Final = re.compile(r"Could not resolve|Could not connect|Failed to fetch|Temporary failure")


class RootError(Exception):
    """A root cannot be made on this machine."""


@dataclass(frozen=True)
class Root:
    """What is to be in a root."""

    name: str
    suite: str
    variant: str
    packages: tuple[str, ...]

    @property
    def key(self) -> str:
        """What distinguishes it from a root of other contents."""
        text = "\n".join((self.suite, self.variant, *sorted(self.packages)))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def made(self) -> Path:
        """Return its directory, made anew where it is not kept. Raises RootError."""
        place = cache() / f"{self.name}-{self.key}"
        place.parent.mkdir(parents=True, exist_ok=True)
        with (cache() / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            began = time.monotonic()
            was_kept = place.exists()
            if not was_kept:
                for other in cache().glob(f"{self.name}-*"):
                    shutil.rmtree(other)
                self._make(place)
            size = mib(place)
        how = "kept" if was_kept else "made"
        report(f"{self.name}: {how} in {time.monotonic() - began:.0f} s, {size} MiB in {place}")
        return place

    def _make(self, place: Path) -> None:
        draft = place.with_name(f"{self.name}-draft")
        shutil.rmtree(draft, ignore_errors=True)
        settings = [f"--aptopt={line}" for line in (*_apt_settings(), 'Acquire::Languages "none";')]
        command = [
            "mmdebstrap",
            "--mode=root",
            f"--variant={self.variant}",
            f"--include={','.join(self.packages)}",
            *settings,
            self.suite,
            str(draft),
            *_mirrors(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(draft, ignore_errors=True)
            last = "\n".join(done.stderr.splitlines()[-5:])
            if _UNREACHABLE.search(done.stderr):
                raise RootError(f"Debian's packages cannot be reached: {last}")
            raise AssertionError(f"{' '.join(command)} failed: {last}")
        draft.rename(place)


def report(line: str) -> None:
    """Show a line, also of a passing test and from a process of pytest-xdist."""
    os.write(2, f"test-system: {line}\n".encode())


def cache() -> Path:
    """Return the directory in which roots and downloads of pip are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "/var/cache") / "gpu-agent-test-system"


def package_environment() -> dict[str, str]:
    """Return the environment in which pip finds packages inside a root as it does on this machine."""
    kept = {name: os.environ[name] for name in (*PACKAGE_SOURCES, *PROXIES) if name in os.environ}
    # Set in /usr/local/bin by Debian's shells, and by no service.
    return kept | {
        "PIP_CERT": str(CERTIFICATES),
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }


def _apt_settings() -> Sequence[str]:
    shown = subprocess.run(["apt-config", "dump", "Acquire"], capture_output=True, text=True, check=False)
    return [line for line in shown.stdout.splitlines() if _APT_SETTINGS.match(line)]


def _mirrors() -> Sequence[str]:
    """Return this machine's mirror of Debian, or nothing, so that mmdebstrap takes Debian's own."""
    shown = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = [
        line.rpartition("|")[2] for line in shown.stdout.splitlines() if line.startswith("Debian|Debian|")
    ]
    return found[:1]


def mib(place: Path) -> int:
    """Return how much a directory takes on the disk."""
    shown = subprocess.run(["du", "-sm", place], capture_output=True, text=True, check=True)
    return int(shown.stdout.split()[0])
