"""The CDI file that the unit writes, as real runtimes read it: a container is started and inspected."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest

from tests.harness import ROOT
from tests.system.conftest import Release
from tests.system.machine import PATIENCE_S, Machine, loads
from tests.system.test_unit import NODE, WITH_GPUS, Node, node

__all__ = ["node"]

GPU: Final = "GPU-00000000-0000-4000-8000-000000000003"
ROOTFS: Final = "/srv/rootfs"
HOOK: Final = "/usr/local/bin/hook"
HOOKS: Final = "/run/hooks"
INSPECT: Final = "ls -l /dev; echo ---; env; echo ---; cat /proc/self/mountinfo"
IMAGE: Final = "localhost/busybox:latest"
# The control groups of a booted root have no controllers where this machine's kernel keeps them in version 1.
# A session keyring and an overlay above an overlay are rejected in it.
CONTAINERD: Final = f"""\
version = 2
[plugins."io.containerd.grpc.v1.cri"]
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/run/cdi"]
  sandbox_image = "{IMAGE}"
  disable_cgroup = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      options = {{ NoNewKeyring = true }}
"""

Answer = dict[str, Any]
"""A container's part of an AllocateResponse, as JSON."""


def by_podman(machine: Machine, answer: Answer) -> "subprocess.CompletedProcess[str]":
    devices = " ".join(f"--device={each['name']}" for each in answer["cdiDevices"])
    return machine.run(
        "podman run --rm --rootfs --network=none --cgroups=disabled --log-driver=none"
        f" {devices} {ROOTFS} /bin/sh -c '{INSPECT}'",
        check=False,
    )


def by_containerd(machine: Machine, answer: Answer) -> "subprocess.CompletedProcess[str]":
    config = machine.path("/etc/containerd/config.toml")
    if config.read_text() != CONTAINERD:
        machine.run(
            "set -o pipefail;"
            f"tar -C {ROOTFS} -c . |"
            f' podman import -q --change \'ENTRYPOINT ["/bin/sleep", "inf"]\' - {IMAGE};'
            f"podman save -q --format=oci-archive {IMAGE} |"
            " ctr -n k8s.io images import --snapshotter=native -"
        )
        config.write_text(CONTAINERD)
        machine.run("systemctl restart containerd")
    return subprocess.run(
        [
            *(sys.executable, "-m", "tests.system.cri"),
            *(machine.path("/run/containerd/containerd.sock"), IMAGE, INSPECT),
        ],
        input=json.dumps(answer),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=PATIENCE_S * 2,
    )


@dataclass(frozen=True)
class Way:
    """How a container gets what the agent answered."""

    package: str
    strategy: str
    run: Callable[[Machine, Answer], "subprocess.CompletedProcess[str]"]

    def answer(self, machine: Machine) -> Answer:
        """Return what the kubelet would get for GPU 3, or skip where Debian has no such runtime."""
        shown = loads(machine.out(f"gpu-agent allocate --strategy={self.strategy} 3"))
        [answer] = shown["containerResponses"]
        return dict(answer)


WAYS: Final = (
    Way("podman", "cdi-cri", by_podman),
    Way("containerd", "cdi-cri", by_containerd),
    Way("containerd", "cdi-annotations", by_containerd),
)


@pytest.fixture(params=WAYS, ids=lambda way: f"{way.package} {way.strategy}")
def way(request: pytest.FixtureRequest, release: Release) -> Way:
    """One of them, of which Debian has the runtime."""
    found: Way = request.param
    if found.package not in release.runtimes:
        pytest.skip(f"{release.suite} has no {found.package} that knows CDI")
    return found


@dataclass
class Seen:
    """What is in a container."""

    devices: dict[str, tuple[int, int]]
    environment: dict[str, str]
    mounts: dict[str, str]
    hooks: list[str]


def inspected(machine: Machine, way: Way) -> Seen:
    machine.run(f"rm -f {HOOKS}")
    done = way.run(machine, way.answer(machine))
    assert done.returncode == 0, f"{done.stderr}\n{machine.journal(way.package)}"
    devices, environment, mounts = done.stdout.split("---\n")
    nodes = re.findall(r"^c\S+.* (\d+), +(\d+) .* (\S+)$", devices, re.MULTILINE)
    return Seen(
        {name: (int(major), int(minor)) for major, minor, name in nodes},
        dict(line.partition("=")[::2] for line in environment.splitlines()),
        {line.split()[4]: line.split()[5] for line in mounts.splitlines()},
        machine.out(f"cat {HOOKS}").splitlines(),
    )


@pytest.fixture
def machine_with_cdi(node: Node) -> Iterator[Machine]:
    """A node whose unit writes CDI files for devices that are there."""
    machine = node.with_gpus().machine
    # In place of the simulation's plain files, devices that a runtime can make: those of /dev/null.
    machine.run(
        f"cd {NODE}/dev;"
        " for each in nvidia[0-9]* nvidiactl nvidia-uvm* nvidia-modeset dri/card* dri/render*; do"
        ' [ -f "$each" ] && rm "$each" && mknod -m 666 "$each" c 1 3; done;'
        f"mkdir -p {ROOTFS}; cd {ROOTFS}; mkdir -p bin proc dev sys etc usr/lib run; cp /bin/busybox bin;"
        "for each in sh ls env cat sleep; do ln -sf busybox bin/$each; done;"
        f"printf '#!/bin/sh\\nread -r state || true\\necho \"$*\" >>{HOOKS}\\n' >{HOOK}; chmod 755 {HOOK}"
    )
    node.configure(
        WITH_GPUS.replace(
            "flags:\n",
            f"flags:\n  plugin: {{deviceListStrategy: [cdi-cri], nvidiaCTKPath: {HOOK}}}\n",
        )
    )
    machine.run("systemctl start kubelet gpu-agent")
    node.wait_for_gpus(8, 8)
    yield machine
    machine.run(f"rm -rf {ROOTFS} {HOOK} {HOOKS}")


def test_a_container_gets_the_gpu_it_asks_for_and_no_other(way: Way, machine_with_cdi: Machine) -> None:
    seen = inspected(machine_with_cdi, way)
    assert {name for name in seen.devices if re.fullmatch(r"nvidia\d+", name)} == {"nvidia3"}
    assert {"nvidiactl", "nvidia-uvm"} <= seen.devices.keys()
    assert seen.devices["nvidia3"] == (1, 3)
    assert seen.environment["NVIDIA_VISIBLE_DEVICES"] == "void"
    libraries = [path for path in seen.mounts if "/libcuda.so." in path]
    assert len(libraries) == 1
    assert "ro" in seen.mounts[libraries[0]].split(",")
    assert any("create-symlinks" in line for line in seen.hooks), seen.hooks
    assert any("update-ldcache" in line for line in seen.hooks), seen.hooks


def test_a_gpu_that_is_not_there_is_rejected_by_name(way: Way, machine_with_cdi: Machine) -> None:
    answer = json.loads(json.dumps(way.answer(machine_with_cdi)).replace(GPU, "GPU-none"))
    done = way.run(machine_with_cdi, answer)
    assert done.returncode != 0
    assert "GPU-none" in done.stderr
