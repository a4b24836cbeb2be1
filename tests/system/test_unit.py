"""The unit under a real systemd, on a node with the agent installed as README writes it.

The GPUs are simulated, the kubelet is the emulated one at the real one's place; each is a unit of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from tests.system.conftest import INSTALL, SIMULATION, readme_commands
from tests.system.machine import Machine, loads

CONFIG: Final = "/etc/gpu-agent/config.yaml"
DEVICE_PLUGINS: Final = "/var/lib/kubelet/device-plugins"
SHOWN: Final = "/run/kubelet.json"
NODE: Final = "/run/node"

UNITS: Final = {
    "kubelet": f"{SIMULATION}/python /in_root/kubelet.py {SHOWN}",
    "gpu-node": f"{SIMULATION}/gpu-agent simulate --preset dgx-h100 --node-dir {NODE} --json",
}

WITH_GPUS: Final = f"""\
version: v1
flags:
  nvidiaDriverRoot: {NODE}/driver
  nvidiaDevRoot: {NODE}
agent:
  nvmlLibrary: {NODE}/lib/libnvidia-ml.so.1
  procRoot: {NODE}/proc
  sysRoot: {NODE}/sys
  kernelLog: {NODE}/dev/kmsg
  uevents: false
"""


@dataclass
class Node:
    """A booted node; its agent is stopped and has no state yet."""

    machine: Machine

    def configure(self, text: str) -> None:
        """Write the agent's configuration."""
        self.machine.path(CONFIG).write_text(text)

    def with_gpus(self, more: str = "") -> "Node":
        """Have eight simulated GPUs."""
        self.configure(WITH_GPUS + more)
        self.machine.run("systemctl start gpu-node")
        self.machine.wait("the simulated node", self.machine.path(f"{NODE}/driver/etc/ld.so.cache").exists)
        return self

    def wait_for_gpus(self, capacity: int, allocatable: int) -> None:
        """Wait until the kubelet has so many GPUs."""

        def shown() -> bool:
            path = self.machine.path(SHOWN)
            return path.exists() and loads(path.read_text()) == [capacity, allocatable]

        self.machine.wait(f"{allocatable} of {capacity} GPUs", shown)

    def wait_active(self, *, restarts: int) -> None:
        """Wait until systemd started the agent anew so often and it is ready."""

        def is_active() -> bool:
            return self.machine.state() == "active" and int(self.machine.property("NRestarts")) >= restarts

        self.machine.wait(f"active after {restarts} restarts", is_active)

    def pid(self) -> int:
        """Return the agent's process."""
        return int(self.machine.property("MainPID"))


@pytest.fixture
def node(machine: Machine) -> Iterator[Node]:
    for name, command in UNITS.items():
        machine.path(f"/etc/systemd/system/{name}.service").write_text(
            f"[Service]\nExecStart={command}\nEnvironment=PYTHONUNBUFFERED=1\n"
        )
    sample = machine.path(CONFIG).read_text()
    machine.run("systemctl daemon-reload")
    machine.mark()
    made = Node(machine)
    yield made
    made.configure(sample)
    machine.run(
        "systemctl disable -q --now gpu-agent; systemctl stop kubelet gpu-node;"
        "systemctl reset-failed; systemctl revert gpu-agent 2>/dev/null || true;"
        f"rm -rf /var/lib/kubelet /var/lib/gpu-agent /run/cdi {SHOWN} {NODE}"
    )


# The four states of the kubelet's directory


def test_it_starts_as_readme_writes_it_where_no_kubelet_and_no_driver_ever_was(node: Node) -> None:
    machine = node.machine
    assert not machine.path("/var/lib/kubelet").exists()
    machine.run(readme_commands(INSTALL)[-1])
    assert machine.state() == "active"
    # Commands are on PATH, and answered at once.
    assert "gpu-agent" in machine.out("gpu-agent version")
    shown = machine.out("systemctl restart gpu-agent && gpu-agent status")
    assert "serving" in shown
    assert machine.out("curl -s -o /dev/null -w '%{http_code}' localhost:9470/livez") == "200"
    assert machine.out("curl -s -o /dev/null -w '%{http_code}' localhost:9470/preflight") == "503"
    assert machine.property("StatusText") == "0 GPUs, waiting for the driver"
    assert machine.property("Result") == "success"


def test_a_kubelet_that_comes_later_gets_the_gpus(node: Node) -> None:
    node.with_gpus().machine.run("systemctl start gpu-agent")
    node.machine.run("systemctl start kubelet")
    node.wait_for_gpus(8, 8)


def test_a_kubelet_that_is_there_gets_the_gpus(node: Node) -> None:
    node.with_gpus().machine.run("systemctl start kubelet gpu-agent")
    node.wait_for_gpus(8, 8)
    assert "registered" in node.machine.property("StatusText")
    assert node.machine.property("NRestarts") == "0"


@pytest.mark.parametrize("is_at_once", [True, False], ids=["at once", "after a while"])
def test_a_directory_that_is_removed_and_made_anew_is_served_again(node: Node, *, is_at_once: bool) -> None:
    node.with_gpus().machine.run("systemctl start kubelet gpu-agent")
    node.wait_for_gpus(8, 8)
    node.machine.run(f"systemctl stop kubelet; rm -rf /var/lib/kubelet {SHOWN}")
    if not is_at_once:
        node.machine.wait_line(f"{DEVICE_PLUGINS} was deleted")
        node.wait_active(restarts=1)
    node.machine.run("systemctl start kubelet")
    node.wait_for_gpus(8, 8)
    node.wait_active(restarts=1)


def test_cdi_files_come_back_where_their_directory_was_removed(node: Node) -> None:
    file = node.machine.path("/run/cdi/k8s.device-plugin.nvidia.com-gpu.json")
    node.with_gpus()
    text = WITH_GPUS.replace("flags:\n", "flags:\n  plugin: {deviceListStrategy: [envvar, cdi-cri]}\n")
    node.configure(text)
    node.machine.run("systemctl start kubelet gpu-agent")
    node.machine.wait("the CDI file", file.exists)
    node.machine.run("rm -rf /run/cdi")
    node.machine.wait("the CDI file once more", file.exists)
    node.wait_for_gpus(8, 8)


# Ends and what follows


def test_one_that_is_killed_comes_back_and_forgets_no_fault(node: Node) -> None:
    node.with_gpus().machine.run("systemctl start kubelet gpu-agent")
    node.wait_for_gpus(8, 8)
    node.machine.run(f"{SIMULATION}/gpu-agent inject xid 79 --gpu 3 --node-dir {NODE}")
    node.wait_for_gpus(8, 7)
    node.machine.run("systemctl kill --kill-whom=main --signal=KILL gpu-agent")
    node.wait_active(restarts=1)
    node.wait_for_gpus(8, 7)
    assert "xid" in node.machine.out("gpu-agent devices")


def test_one_that_is_stuck_is_ended_by_the_watchdog(node: Node) -> None:
    node.with_gpus().machine.run(
        "cd /etc/systemd/system; mkdir -p gpu-agent.service.d;"
        "printf '[Service]\\nWatchdogSec=6\\nTimeoutAbortSec=1\\n' >gpu-agent.service.d/t.conf;"
        "systemctl daemon-reload; systemctl start kubelet gpu-agent"
    )
    node.wait_for_gpus(8, 8)
    node.machine.run("systemctl kill --kill-whom=main --signal=STOP gpu-agent")
    node.machine.wait_line("Watchdog timeout")
    node.wait_active(restarts=1)
    node.wait_for_gpus(8, 8)


def test_a_stop_leaves_nothing_and_is_no_failure(node: Node) -> None:
    node.with_gpus().machine.run("systemctl start kubelet gpu-agent")
    node.wait_for_gpus(8, 8)
    node.machine.run("systemctl stop gpu-agent")
    assert (node.machine.state(), node.machine.property("Result")) == ("inactive", "success")
    assert node.machine.out(f"ls {DEVICE_PLUGINS}").split() == ["kubelet.sock", "kubelet_internal_checkpoint"]
    assert not node.machine.path("/run/gpu-agent").exists()
    node.wait_for_gpus(8, 0)


# What an operator does and reads


def test_a_reload_takes_effect_and_one_with_a_mistake_changes_nothing(node: Node) -> None:
    node.with_gpus().machine.run("systemctl start kubelet gpu-agent")
    node.wait_for_gpus(8, 8)
    pid = node.pid()
    node.configure(WITH_GPUS + "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n")
    node.machine.run("systemctl reload gpu-agent")
    node.wait_for_gpus(16, 16)
    node.configure(WITH_GPUS + "  pol: 3s\n")
    node.machine.run("systemctl reload gpu-agent")
    node.machine.wait_line("agent.pol")
    assert (node.machine.state(), node.pid()) == ("active", pid)
    node.wait_for_gpus(16, 16)
    assert "agent.pol" in node.machine.out("gpu-agent status")


def test_the_journal_names_the_gpu_and_why_it_is_unhealthy(node: Node) -> None:
    node.with_gpus().machine.run("systemctl start kubelet gpu-agent")
    node.wait_for_gpus(8, 8)
    node.machine.run(f"{SIMULATION}/gpu-agent inject xid 79 --gpu 3 --node-dir {NODE}")
    node.wait_for_gpus(8, 7)
    assert "GPU 3 (0000:61:00.0) is unhealthy: XID 79" in node.machine.wait_line("is unhealthy")


def test_a_port_that_is_taken_keeps_no_gpu_from_the_kubelet(node: Node) -> None:
    node.with_gpus().machine.run(
        "systemd-run -q --unit=taken /opt/gpu-agent/bin/python -m http.server --bind 127.0.0.1 9470;"
        "until curl -s -o /dev/null localhost:9470; do :; done; systemctl start kubelet gpu-agent"
    )
    try:
        node.wait_for_gpus(8, 8)
        assert "serving" in node.machine.out("gpu-agent status")
    finally:
        node.machine.run("systemctl stop taken")
    node.machine.wait(
        "the port once it is free",
        lambda: node.machine.run("curl -sf localhost:9470/livez", check=False).stdout,
    )
