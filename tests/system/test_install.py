"""What an install as README writes it has, beside the unit."""

import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.system.conftest import Release
from tests.system.machine import Directories, run_in

LOAD: Final = """\
import asyncio
from agent.probe.loading import load
from agent.probe.request import Request
print(asyncio.run(load(Request(loader="auto"))).loader)
"""

IN_THE_HOSTS_NAMESPACES: Final = """\
set -e
mount -t overlay -o "lowerdir=$1,upperdir=$2,workdir=$3" overlay "$4"
for each in proc sys dev; do mount --rbind "/$each" "$4/$each"; done
exec chroot "$4" /opt/gpu-agent/bin/python -c "$5"
"""


def test_it_runs_on_the_releases_own_python(release: Release, installed: Directories) -> None:
    shown = run_in(
        installed, "/opt/gpu-agent/bin/python -V; readlink -f /opt/gpu-agent/bin/python; gpu-agent version"
    )
    version, path, agent = shown.splitlines()[:3]
    assert version.startswith(f"Python {release.python}")
    assert path.startswith("/usr/bin/python3")
    assert agent.startswith("gpu-agent")


def test_neither_a_compiler_nor_a_kernel_was_installed(installed: Directories) -> None:
    names = run_in(installed, "dpkg-query -W -f '${Package}\\n'").split()
    assert [name for name in names if name in {"gcc", "clang"} or name.startswith("linux-")] == []


@pytest.mark.skipif(not Path("/sys/kernel/btf/vmlinux").exists(), reason="this kernel has no BTF")
def test_its_probe_loads_without_bcc(installed: Directories) -> None:
    # A booted root has process ids of its own, where the probe is off.
    places = [installed.lower, *(installed.scratch / name for name in ("upper", "work", "root"))]
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "--propagation=private",
            "sh",
            "-c",
            IN_THE_HOSTS_NAMESPACES,
            "sh",
            *places,
            LOAD,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("core\n", 0), done.stderr


def test_a_node_has_nothing_of_the_simulated_node(installed: Directories) -> None:
    shown = run_in(
        installed, "gpu-agent demo 2>&1 || echo $?; find /opt/gpu-agent -path '*simulation*' -o -name grpc"
    )
    sentence, code = shown.splitlines()
    assert "pip install 'gpu-agent[simulation]'" in sentence
    assert code == "2"
