"""Debian 12 and 13, as nodes and as machines of developers."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.harness import ROOT
from tests.system.machine import Directories, Machine, booted, control_group_mounts, run_in
from tests.system.roots import Root, RootError, cache

HERE: Final = Path(__file__).parent
CHECKOUT: Final = "/checkout"
BUS: Final = ("systemd", "systemd-sysv", "dbus", "ca-certificates", "procps", "curl")


@dataclass(frozen=True)
class Release:
    """A release of Debian, and what differs in it."""

    suite: str
    python: str
    runtimes: tuple[str, ...]

    @property
    def node(self) -> Root:
        """A node before the agent is installed: systemd, and runtimes that know CDI."""
        packages = (*BUS, *self.runtimes, "busybox-static")
        return Root(f"node-{self.suite}", self.suite, "minbase", packages)

    @property
    def desk(self) -> Root:
        """A machine of a newcomer: Debian's Python and make, nothing else."""
        return Root(f"desk-{self.suite}", self.suite, "apt", ("python3", "make", "ca-certificates"))


RELEASES: Final = (
    Release("bookworm", "3.11.2", ("podman", "crun")),
    Release("trixie", "3.13", ("podman", "crun", "containerd")),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of make test-system."""
    parser.addoption("--whole-suite", action="store_true", help="all tests on each Debian's own Python")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where no root can be booted, with the reason."""
    missing = why_not()
    if missing is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=f"make test-system {missing}"))


def why_not() -> str | None:
    """Return why no root can be booted here; None: it can be tried."""
    if os.geteuid() != 0:
        return "needs root: it mounts, boots and installs in roots of its own"
    missing = [each for each in ("mmdebstrap", "systemd-nspawn", "git") if shutil.which(each) is None]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install mmdebstrap systemd-container git)"
    if not any(os.access(mount, os.W_OK) for mount in control_group_mounts()):
        return "needs control groups that it may write (a mounted cgroup2 file system)"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"needs the right to mount: {tried.stderr.strip()}" if tried.returncode else None


@pytest.fixture(
    scope="session",
    params=[
        # What happens on one release happens in one process, since it happens on one machine.
        pytest.param(each, id=each.suite, marks=pytest.mark.xdist_group(each.suite))
        for each in RELEASES
    ],
)
def release(request: pytest.FixtureRequest) -> Release:
    """A release of Debian."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This checkout as a clone has it, with the wheels that make wheel built."""
    place = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=True,
    ).stdout
    packed = subprocess.run(
        ["tar", "-C", ROOT, "--null", "--files-from=-", "--ignore-failed-read", "-c"],
        input=listed,
        capture_output=True,
        check=True,
    ).stdout
    subprocess.run(["tar", "-C", place, "-x"], input=packed, check=True)
    shutil.copytree(ROOT / "dist", place / "dist")
    return place


def kept(root: Root) -> Path:
    """Return a root's directory, or skip where it cannot be had."""
    try:
        return root.made()
    except RootError as error:
        pytest.skip(f"make test-system: {error}")


def options(checkout: Path) -> list[str]:
    """Return what a container needs to see the checkout and keep what pip downloads."""
    downloads = cache() / "pip"
    downloads.mkdir(parents=True, exist_ok=True)
    return [f"--bind={checkout}:{CHECKOUT}", f"--bind={downloads}:/root/.cache/pip"]


def readme_commands(after: str) -> list[str]:
    """Return the commands of README's first block of code after a text, as root would type them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```sh\n(.*?)```", text[text.index(after) :], re.DOTALL)
    assert block is not None
    return [line.removeprefix("sudo ") for line in block[1].splitlines()]


STORAGE: Final = """\
[storage]
driver = "vfs"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers/storage"
"""
INSTALL: Final = "On each node, in the checkout"
SIMULATION: Final = "/opt/simulation/bin"
"""The simulated node has an environment of its own: that of the agent stays as README installs it."""
INSTALL_SIMULATION: Final = (
    "python3 -m venv /opt/simulation",
    f"{SIMULATION}/pip install --require-hashes -r requirements.txt -r agent/simulation/requirements.txt",
    f"{SIMULATION}/pip install --no-deps dist/*.whl",
)


@pytest.fixture(scope="session")
def installed(release: Release, checkout: Path) -> Iterator[Directories]:
    """A node with the agent installed as README writes it, but for the last line, which needs systemd."""
    with Directories.of(kept(release.node)) as directories:
        *commands, last = readme_commands(INSTALL)
        assert last.startswith("systemctl enable")
        # A node knows which packages there are; a root that was made just now does not.
        script = "\n".join(("apt-get update -qq", *commands, *INSTALL_SIMULATION))
        run_in(directories, script, *options(checkout), cwd=CHECKOUT)
        # The kernel rejects an overlay above an overlay.
        storage = directories.written / "etc/containers/storage.conf"
        storage.parent.mkdir(exist_ok=True)
        storage.write_text(STORAGE)
        yield directories


@pytest.fixture(scope="session")
def machine(installed: Directories) -> Iterator[Machine]:
    """That node, booted."""
    seen = ("--bind-ro=/sys/kernel/tracing",) if Path("/sys/kernel/tracing/events").exists() else ()
    # The agent's own rights, which a container does not have by itself.
    rights = (
        "--capability=CAP_BPF,CAP_PERFMON,CAP_SYSLOG",
        "--system-call-filter=bpf perf_event_open @mount",
    )
    with booted(installed, f"--bind-ro={HERE / 'in_root'}:/in_root", *seen, *rights) as machine:
        yield machine


@pytest.fixture(scope="session")
def desk(release: Release, checkout: Path) -> Iterator[Directories]:
    """A newcomer's machine."""
    with Directories.of(kept(release.desk)) as directories:
        yield directories
