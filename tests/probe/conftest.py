"""Probes really loaded into the kernel; where that is not possible, each test is skipped with the reason."""

import asyncio
import functools
import os
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.errors import ProbeLoadError
from agent.probe import headers, kernel
from agent.probe.kernel import Roots
from agent.probe.loaded import OBJECT
from agent.probe.loading import load
from agent.probe.probe import Probe
from agent.probe.request import BCC_PATHS, Doubles, LoaderChoice, Request
from tests.probe.readings import events

REPOSITORY = Path(__file__).parents[2]
MISC_MAJOR = 10
QUIET_MINORS = (237, 232, 200, 229)
"""/dev/loop-control, /dev/kvm, /dev/net/tun, /dev/fuse: opens and closes are real, the driver's ioctls
fail, and hardly any other process uses them, unlike /dev/null. Doubles of the driver open the last one."""
MEMORY_MAJOR, NULL_MINOR = 1, 3
DOUBLES = Doubles(nvidia_major=MISC_MAJOR, any_return=True)

LoadProbe = Callable[..., Probe]


OF_THE_MACHINE = frozenset(
    {
        "bpf_not_permitted",
        "bpf_unsupported",
        "kernel_lockdown",
        "missing_capability",
        "pid_namespace",
        "tracefs_missing",
    }
)
"""Error codes of a load that the machine does not permit; any other one is a fault of the agent."""


def quicker_loader() -> LoaderChoice:
    """Return the loader for tests that only need a probe; the other one compiles for seconds."""
    return "core" if OBJECT.exists() else "auto"


@functools.cache
def why_no_probe() -> str | None:
    """Return why no probe can be loaded on this machine, from one attempt."""
    if os.geteuid() != 0:
        return "needs root"
    errors: list[ProbeLoadError] = []

    def try_once() -> None:
        try:
            kernel.check(Roots())
            asyncio.run(load(Request(loader=quicker_loader(), tier="syscalls", doubles=DOUBLES))).close()
        except ProbeLoadError as error:
            errors.append(error)

    # On a thread: a loop may run already where this is asked.
    trying = threading.Thread(target=try_once)
    trying.start()
    trying.join()
    messages = [str(error) for error in errors if error.code in OF_THE_MACHINE]
    return messages[0] if messages else None


def why_no_bcc(scratch: Path) -> str | None:
    if not any(Path(path, "bcc").is_dir() for path in BCC_PATHS):
        return "python3-bpfcc is not installed"
    try:
        headers.find(Roots(), str(scratch))
    except ProbeLoadError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def object_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The precompiled object, built from the source as it is now."""
    path = tmp_path_factory.mktemp("bpf") / "gpu_probe.bpf.o"
    if shutil.which("clang") is None:
        pytest.skip("clang is not installed")
    built = subprocess.run([REPOSITORY / ".ci/bpf", path], capture_output=True, text=True, check=False)
    if built.returncode == 2:
        pytest.skip(built.stderr.strip())
    assert built.returncode == 0, built.stderr
    return path


@pytest.fixture(scope="session", params=["bcc", "core"])
def loader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each loader, as arguments of Request."""
    if why := why_no_probe():
        pytest.skip(why)
    if request.param == "bcc":
        if why := why_no_bcc(tmp_path_factory.mktemp("headers")):
            pytest.skip(why)
        return {"loader": "bcc"}
    return {"loader": "core", "object_path": str(request.getfixturevalue("object_path"))}


@pytest.fixture
def core(object_path: Path) -> dict[str, Any]:
    """The loader that is quick, for what does not depend on it."""
    if why := why_no_probe():
        pytest.skip(why)
    return {"loader": "core", "object_path": str(object_path)}


def loaded(request: Request, **options: Any) -> Probe:
    return asyncio.run(load(request, **options))


@pytest.fixture
def load_probe() -> Iterator[LoadProbe]:
    """Load a probe of one's own, which is taken out again."""
    probes: list[Probe] = []

    def load_one(*, launcher: tuple[str, ...] = (), **arguments: Any) -> Probe:
        arguments.setdefault("doubles", DOUBLES)
        arguments.setdefault("tier", "syscalls")
        probes.append(loaded(Request(**arguments), launcher=launcher))
        return probes[-1]

    yield load_one
    for probe in probes:
        probe.close()


@pytest.fixture(scope="session")
def shared(loader: dict[str, Any]) -> Iterator[Probe]:
    """A probe that tests share; they read only rows of their own processes."""
    probe = loaded(Request(tier="syscalls", doubles=DOUBLES, **loader))
    yield probe
    probe.close()


@pytest.fixture
def probe(shared: Probe) -> Probe:
    """The shared probe, with nothing left on its ring."""
    events(shared, pid=0)
    return shared


def make_node(path: Path, major: int, minor: int) -> Path | None:
    """Make a node, or None if there is no such device or no right to make one."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        path.open("rb").close()
    except OSError:
        path.unlink(missing_ok=True)
        return None
    return path


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    for minor in QUIET_MINORS:
        if node := make_node(tmp_path / "nvidia0", MISC_MAJOR, minor):
            return node
    pytest.skip("no character device can be made here that would do for a GPU")


@pytest.fixture
def uvm(tmp_path: Path) -> Path:
    return make_node(tmp_path / "nvidia-uvm", MEMORY_MAJOR, NULL_MINOR) or pytest.skip(
        "mknod is not permitted"
    )


def device_of(node: Path) -> int:
    """Return the kernel's number of a node."""
    number = node.stat().st_rdev
    return os.major(number) << 20 | os.minor(number)
