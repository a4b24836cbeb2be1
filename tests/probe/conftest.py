"""Probes in the kernel, loaded for real; where that cannot be, each test says why it is skipped."""

import asyncio
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.errors import ProbeLoadError
from agent.probe import headers, kernel
from agent.probe.kernel import Roots
from agent.probe.loading import load
from agent.probe.probe import Probe
from agent.probe.request import BCC_PATHS, Doubles, Request

REPOSITORY = Path(__file__).parents[2]
MEMORY_MAJOR = 1
"""Of /dev/null: opens and closes are real, every ioctl of the driver's is refused."""
MISC_MAJOR = 10
"""Of /dev/fuse, which stands for /dev/nvidia-uvm."""
DOUBLES = Doubles(nvidia_major=MEMORY_MAJOR, uvm_major=MISC_MAJOR, any_return=True)

LoadProbe = Callable[..., Probe]


def why_no_probe() -> str | None:
    if os.geteuid() != 0:
        return "needs root"
    try:
        kernel.check(Roots())
    except ProbeLoadError as error:
        return str(error)
    return None


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
    """A probe that tests share; what they look at is of their own processes."""
    probe = loaded(Request(tier="syscalls", doubles=DOUBLES, **loader))
    yield probe
    probe.close()


@pytest.fixture
def probe(shared: Probe) -> Probe:
    """The shared probe, with nothing left on its ring."""
    while shared.ring.read():
        pass
    return shared


def make_node(path: Path, major: int, minor: int) -> Path:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        path.open("rb").close()
    except OSError as error:
        pytest.skip(f"a character device cannot be made here: {error}")
    return path


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    return make_node(tmp_path / "nvidia0", MEMORY_MAJOR, 3)


@pytest.fixture
def uvm(tmp_path: Path) -> Path:
    return make_node(tmp_path / "nvidia-uvm", MISC_MAJOR, 229)
