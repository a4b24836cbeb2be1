"""The demo and the tests on Debian's own Python, as on the machine of a newcomer or a developer."""

import json
import time
from pathlib import Path
from typing import Final

import pytest

from tests.system.conftest import CHECKOUT, Release, options
from tests.system.machine import Directories, run_in
from tests.system.roots import mib, report

COPY: Final = "/root/gpu-agent"
"""A checkout of the release's own, since what is built in it is."""
CAN_DIFFER: Final = (
    "tests/simulation/kubelet tests/contract tests/sinks/plugin/test_grpc_server.py tests/sinks/test_http.py "
    "tests/test_threads.py tests/test_app.py tests/bus tests/runtime"
)
"""What rests on how a version of Python does sockets, threads, garbage and signals."""
PACKAGES: Final = "dpkg-query -W -f '${Package}\\n'"


@pytest.fixture(scope="session")
def newcomer(desk: Directories, checkout: Path) -> Directories:
    run_in(desk, f"cp -a {CHECKOUT} {COPY}; rm -rf {COPY}/dist", *options(checkout))
    return desk


def packages(desk: Directories) -> set[str]:
    return set(run_in(desk, PACKAGES).split())


def no_kernel(names: set[str]) -> bool:
    return not [name for name in names if name.startswith(("linux-image", "initramfs", "systemd-boot"))]


def test_make_demo_plays_a_scenario_and_installs_little(
    release: Release, newcomer: Directories, checkout: Path
) -> None:
    before, began = packages(newcomer), time.monotonic()
    shown = run_in(
        newcomer,
        'make demo ARGS="--scenario xid-79 --json"; .venv/bin/python -V',
        *options(checkout),
        cwd=COPY,
    )
    took_s = time.monotonic() - began
    *lines, version = shown.splitlines()
    assert version.startswith(f"Python {release.python}")
    story = [json.loads(line) for line in lines if '"allocatable"' in line]
    assert [line["allocatable"] for line in story] == [8, 7]
    assert story[-1]["unhealthy"][0]["reason"] == "xid"
    after = packages(newcomer)
    assert no_kernel(after)
    assert not after & {"clang", "python3-bpfcc", "libbpf-dev"}
    report(
        f"{release.suite}: make demo: {len(after - before)} packages, "
        f"{mib(newcomer.written)} MiB with the virtual environment, {took_s:.0f} s"
    )
    assert len(after - before) < 60


def test_the_tests_pass_on_the_releases_own_python_and_no_kernel_is_installed(
    release: Release,
    newcomer: Directories,
    checkout: Path,
    request: pytest.FixtureRequest,
) -> None:
    chosen = "" if request.config.getoption("--whole-suite") else CAN_DIFFER
    before, began = packages(newcomer), time.monotonic()
    run_in(newcomer, "make setup", *options(checkout), cwd=COPY)
    set_up_s = time.monotonic() - began
    after = packages(newcomer)
    assert no_kernel(after)
    shown = run_in(
        newcomer,
        f"make test JOBS=2 ARGS='-q {chosen}'; .venv/bin/python -V",
        *options(checkout),
        cwd=COPY,
    )
    *lines, version = shown.splitlines()
    assert version.startswith(f"Python {release.python}")
    report(
        f"{release.suite}: make setup: {len(after - before)} packages more, "
        f"{mib(newcomer.written)} MiB with the demo's, {set_up_s:.0f} s; on {version}: {lines[-1]}"
    )
