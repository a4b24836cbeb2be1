"""The programs of NVIDIA's image under their own names, as its manifests start and find them."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent import __version__
from agent.simulation.node import SimulatedNode
from tests.harness import (
    ROOT,
    AgentProcess,
    clean_environment,
    flags_of,
    simulated_node,
    started,
    wait_allocatable,
)

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def script(tmp_path: Path, name: str) -> Path:
    """A console script as an installer writes it."""
    module, _, function = SCRIPTS[name].partition(":")
    path = tmp_path / name
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        f"from {module} import {function}\nsys.exit({function}())\n"
    )
    path.chmod(0o755)
    return path


def run(tmp_path: Path, name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(script(tmp_path, name)), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment() | environment,
        timeout=60,
    )


def find_pid_to_signal(name: str) -> list[int]:
    """Find processes as NVIDIA's config-manager does: the first word of the command line is the name."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                if words[0] == name.encode():
                    found.append(int(entry.name))
    return found


@contextlib.asynccontextmanager
async def plugin(tmp_path: Path, node: SimulatedNode, **further: str) -> AsyncIterator[AgentProcess]:
    """Run nvidia-device-plugin as the chart does: no argument, everything by variables."""
    from agent.config.options import OPTIONS  # noqa: PLC0415 - as clean_environment does

    flags = flags_of(node, **further)
    environment = {OPTIONS[name].environment: value for name, value in flags.items()}
    command = (str(script(tmp_path, "nvidia-device-plugin")),)
    async with started(command, flags, environment) as agent:
        yield agent


async def test_nvidias_config_manager_finds_the_plugin_and_its_signal_is_a_reload(tmp_path: Path) -> None:
    async with simulated_node() as node:
        config = tmp_path / "config.yaml"
        config.symlink_to("/dev/null")
        async with plugin(tmp_path, node, config_file=str(config)) as agent:
            await wait_allocatable(node.kubelet, 4)
            assert agent.pid in find_pid_to_signal("nvidia-device-plugin")
            assert Path(f"/proc/{agent.pid}/comm").read_text() == "nvidia-device-p\n"

            (tmp_path / "shared").write_text(
                "sharing: {timeSlicing: {resources: [{name: gpu, replicas: 2}]}}\n"
            )
            config.unlink()
            config.symlink_to(tmp_path / "shared")
            os.kill(agent.pid, signal.SIGHUP)
            await wait_allocatable(node.kubelet, 8)
            assert await agent.stop() == 0


async def test_signals_from_the_moment_it_can_be_found_do_not_kill_it(tmp_path: Path) -> None:
    async with simulated_node() as node, plugin(tmp_path, node) as agent:

        async def signal_it() -> None:
            while True:
                if agent.pid in find_pid_to_signal("nvidia-device-plugin"):
                    os.kill(agent.pid, signal.SIGHUP)
                await asyncio.sleep(0.001)

        async with asyncio.TaskGroup() as group:
            signalling = group.create_task(signal_it())
            await wait_allocatable(node.kubelet, 4)
            signalling.cancel()
        assert await agent.stop() == 0


def test_the_name_is_shown_with_the_arguments(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from agent.runtime.process import appear_as\n"
        "assert appear_as('nvidia-device-plugin', sys.argv[1:])\n"
        "sys.stdout.buffer.write(open('/proc/self/cmdline', 'rb').read())\n"
    )
    command = [sys.executable, "-c", code, "--mig-strategy=mixed", "a b", ""]
    shown = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    assert shown.startswith(b"nvidia-device-plugin\0--mig-strategy=mixed\0a b\0\0")
    assert shown.rstrip(b"\0").split(b"\0") == [b"nvidia-device-plugin", b"--mig-strategy=mixed", b"a b"]


@pytest.mark.parametrize(
    "name", ["nvidia-device-plugin", "gpu-feature-discovery", "config-manager", "mps-control-daemon"]
)
@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_each_prints_its_version(tmp_path: Path, name: str, flag: str) -> None:
    done = run(tmp_path, name, flag)
    assert (done.returncode, done.stdout) == (0, f"{name} of gpu-agent {__version__}\n")


def test_the_plugins_help_is_that_of_run(tmp_path: Path) -> None:
    done = run(tmp_path, "nvidia-device-plugin", "--help")
    assert done.returncode == 0
    assert "--shared-devices-allocation-policy" in done.stdout


def test_the_plugin_rejects_what_it_cannot_do_as_nvidias_does(tmp_path: Path) -> None:
    done = run(tmp_path, "nvidia-device-plugin", DEVICE_LIST_STRATEGY="envvar,x", MIG_STRATEGY="y")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 2)


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        (
            "gpu-feature-discovery",
            ["--oneshot", "--output-file=/x", "--sleep-interval", "60s", "--node-name=n"],
            "GPU labels are not made by this version; keep NVIDIA's image for this container",
        ),
        (
            "config-manager",
            [
                "--oneshot",
                "--config-file-srcdir=/a",
                "--send-signal=false",
                "--fallback-strategies=named,single",
            ],
            (
                "this version does not choose a configuration by the node's label; keep NVIDIA's image for "
                "this container, whose choice the agent applies"
            ),
        ),
        *(
            (
                "mps-control-daemon",
                arguments,
                (
                    "the MPS control daemon is not part of this image, because its exit kills all processes "
                    "that share GPUs through it; keep NVIDIA's image for this DaemonSet, whose daemon the "
                    "agent waits for"
                ),
            )
            for arguments in ([], ["mount-shm"], ["--config-file=/config/config.yaml", "--mig-strategy=none"])
        ),
    ],
)
def test_a_program_without_its_function_fails_with_a_sentence(
    tmp_path: Path, name: str, arguments: list[str], sentence: str
) -> None:
    done = run(tmp_path, name, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{name}: {sentence}\n")
    assert '"--zzz" is no flag' in run(tmp_path, name, "--zzz").stderr
    assert run(tmp_path, name, "--help").returncode == 0


# With fewer rights than it can use

DEGRADED = """\
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 none /var/lib
mount -t tmpfs -o mode=755 none /run
mount -o remount,ro /var/lib
exec setpriv --bounding-set=-all --inh-caps=-all --ambient-caps=-all --no-new-privs "$@"
"""
"""A container as NVIDIA's static manifest asks for: no capability, no pid of the host, one directory."""


def can_unshare() -> bool:
    command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", DEGRADED, "sh", "true"]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.slow
async def test_without_any_right_the_agent_advertises_gpus_and_names_disabled_components(
    tmp_path: Path,
) -> None:
    if not can_unshare():
        pytest.skip("needs the right to make namespaces")
    from agent.config.options import OPTIONS  # noqa: PLC0415 - as clean_environment does

    async with simulated_node() as node:
        flags = flags_of(
            node, kernel_log="/nonexistent/kmsg", pod_resources_socket="/nonexistent/kubelet.sock"
        )
        for name in ("state-dir", "control-socket"):
            del flags[name]
        environment = {OPTIONS[name].environment: value for name, value in flags.items()}
        environment["KUBERNETES_SERVICE_HOST"] = "10.0.0.1"
        command = (
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("sh", "-c", DEGRADED, "sh", str(script(tmp_path, "nvidia-device-plugin"))),
        )
        async with started(command, flags, environment) as agent:
            await wait_allocatable(node.kubelet, 4)
            line = await agent.wait_line("Some components are disabled")
            assert [part.partition(":")[0] for part in line["components"]] == [
                "kernel log",
                "pods",
                "state over restarts",
            ]
            assert any("/run/gpu-agent/state is its own" in part for part in line["components"])
            uuid = node.nvml.uuid(1)
            before = len(node.kubelet.lists)
            node.nvml.push_xid(1, 79)
            await node.kubelet.wait_for(lambda kubelet: len(kubelet.lists) > before, timeout_s=60)
            assert node.kubelet.lists[before].unhealthy == (uuid,)
            await agent.wait_line("Listening", listener="control")
            entered = await asyncio.create_subprocess_exec(
                *("nsenter", "-t", str(child_of(agent.pid)), "-m", sys.executable, "-m", "agent"),
                *("status", "-o", "json"),
                env=clean_environment() | {"PYTHONPATH": str(ROOT)},
                stdout=asyncio.subprocess.PIPE,
            )
            out, _ = await entered.communicate()
            assert [part["name"] for part in json.loads(out)["agent"]["off"]] == [
                "kernel log",
                "pods",
                "state over restarts",
            ]


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
