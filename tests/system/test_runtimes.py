"""The CDI file that the unit writes, as real runtimes read it: a container is started and looked into."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from tests.system.conftest import Release
from tests.system.machine import Machine
from tests.system.test_unit import NODE, WITH_GPUS, Node, node

__all__ = ["node"]

GPU: Final = "GPU-00000000-0000-4000-8000-000000000003"
KIND: Final = "k8s.device-plugin.nvidia.com/gpu"
ROOTFS: Final = "/srv/rootfs"
HOOK: Final = "/usr/local/bin/hook"
HOOKS: Final = "/run/hooks"
LOOK: Final = "ls -l /dev; echo ---; env; echo ---; cat /proc/self/mountinfo; echo ---; cat /proc/self/status"
COMMANDS: Final = {
    "podman": (
        f"podman run --rm --rootfs --network=none --cgroups=disabled --log-driver=none"
        f" --device={KIND}={GPU} {ROOTFS} /bin/sh -c '{LOOK}'"
    ),
}


@dataclass
class Seen:
    """What is in a container."""

    devices: dict[str, tuple[int, int]]
    environment: dict[str, str]
    mounts: dict[str, str]
    hooks: list[str]


def look(machine: Machine, runtime: str) -> Seen:
    machine.run(f"rm -f {HOOKS}")
    devices, environment, mounts, _ = machine.out(COMMANDS[runtime]).split("---\n")
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
        "for each in sh ls env cat; do ln -sf busybox bin/$each; done;"
        f"printf '#!/bin/sh\\nread -r state || true\\necho \"$*\" >>{HOOKS}\\n' >{HOOK}; chmod 755 {HOOK}"
    )
    node.configure(
        WITH_GPUS.replace(
            "flags:\n",
            f"flags:\n  plugin: {{deviceListStrategy: [cdi-cri], nvidiaCTKPath: {HOOK}}}\n",
        )
    )
    machine.run("systemctl start kubelet gpu-agent")
    node.offers(8, 8)
    yield machine
    machine.run(f"rm -rf {ROOTFS} {HOOK} {HOOKS}")


def test_a_container_gets_the_gpu_it_asks_for_and_no_other(
    release: Release, machine_with_cdi: Machine
) -> None:
    for runtime in [each for each in COMMANDS if each in release.runtimes]:
        seen = look(machine_with_cdi, runtime)
        gpus = {name for name in seen.devices if re.fullmatch(r"nvidia\d+", name)}
        assert gpus == {"nvidia3"}, runtime
        assert {"nvidiactl", "nvidia-uvm"} <= seen.devices.keys(), runtime
        assert seen.devices["nvidia3"] == (1, 3), runtime
        assert seen.environment["NVIDIA_VISIBLE_DEVICES"] == "void", runtime
        libraries = [path for path in seen.mounts if "/libcuda.so." in path]
        assert len(libraries) == 1, runtime
        assert "ro" in seen.mounts[libraries[0]].split(","), runtime
        assert any("create-symlinks" in line for line in seen.hooks), (runtime, seen.hooks)
        assert any("update-ldcache" in line for line in seen.hooks), (runtime, seen.hooks)


def test_a_gpu_that_is_not_there_is_refused_by_name(release: Release, machine_with_cdi: Machine) -> None:
    for runtime in [each for each in COMMANDS if each in release.runtimes]:
        done = machine_with_cdi.run(COMMANDS[runtime].replace(GPU, "GPU-none"), check=False)
        assert done.returncode != 0, runtime
        assert "GPU-none" in done.stderr, runtime
