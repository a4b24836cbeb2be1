"""The whole agent on a simulated node: start, signals, bugs, reload, shutdown."""

import asyncio
import json
import signal
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent.commands.client import AgentClient
from agent.simulation.node import SimulatedNode
from agent.threads import in_daemon_thread
from tests.harness import (
    GPU,
    AgentProcess,
    flags_of,
    running,
    short_directory,
    simulated_node,
    wait_allocatable,
)
from tests.sources.recorder import until

pytestmark = pytest.mark.slow


@pytest.fixture
async def node() -> AsyncIterator[SimulatedNode]:
    async with simulated_node() as made:
        yield made


async def ask(agent: AgentProcess, target: str) -> Any:
    """Return the answer of the control socket, once it exists."""
    path = agent.flags["control-socket"]
    await agent.wait_line("Listening", listener="control")
    return await in_daemon_thread("client", lambda: AgentClient(path).get(target))


async def readiness(agent: AgentProcess) -> str:
    line = await agent.wait_line("Listening", listener="http")
    host, _, port = line["address"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /readyz?verbose HTTP/1.0\r\n\r\n")
    raw = await reader.read()
    writer.close()
    return raw.decode()


# Start


async def test_an_agent_advertises_the_gpus_to_the_kubelet(node: SimulatedNode) -> None:
    async with running(flags_of(node, probe_tier="auto")) as agent:
        await agent.wait_registered()
        await wait_allocatable(node.kubelet, 4)
        document = await ask(agent, "/v1/devices")
        assert [device["health"] for device in document["devices"]] == ["healthy"] * 4
        assert "[+]grpc-socket ok" in await readiness(agent)
        assert await agent.stop() == 0


async def test_http_comes_after_the_registration(node: SimulatedNode) -> None:
    async with running(flags_of(node)) as agent:
        await agent.wait_line("Listening", listener="http")
        messages = agent.events
        assert messages.index("Registered with the kubelet") < next(
            n for n, line in enumerate(messages) if line.startswith("Listening on ")
        )


async def test_the_agent_waits_for_the_kubelet() -> None:
    async with simulated_node(kubelet_present=False) as node, running(flags_of(node)) as agent:
        await agent.wait_line("NVML lists other GPUs")
        document = await ask(agent, "/preflight")
        assert [reason["code"] for reason in document["reasons"]] == ["kubelet_unavailable"]
        await node.kubelet.start()
        await wait_allocatable(node.kubelet, 4)
        assert len(node.kubelet.registrations) == 1


async def test_without_a_driver_the_agent_exits_with_one_sentence(node: SimulatedNode) -> None:
    flags = flags_of(node, nvml_library="/nonexistent/libnvidia-ml.so.1")
    async with running(flags) as agent:
        assert await agent.ended() == 1
        (sentence,) = agent.sentences
        assert sentence.startswith("gpu-agent: No NVIDIA driver library was found at /nonexistent/")
        assert sentence.endswith("; or wait for the driver with --fail-on-init-error=false")


async def test_the_agent_waits_for_a_missing_driver_if_configured(node: SimulatedNode) -> None:
    node.nvml.unload_driver()
    async with running(flags_of(node, fail_on_init_error="false", init_retry="50ms")) as agent:
        await agent.wait_line("NVML is not available")
        document = await ask(agent, "/preflight")
        assert [reason["code"] for reason in document["reasons"]] == ["driver_not_loaded"]
        assert "[-]source-nvml failed" in await readiness(agent)
        node.nvml.load_driver()
        await wait_allocatable(node.kubelet, 4)
        assert agent.sentences == []


async def test_the_agent_exits_if_the_driver_does_not_answer_in_time(node: SimulatedNode) -> None:
    node.nvml.hang(function="nvmlInitWithFlags")
    async with running(flags_of(node, init_deadline="100ms")) as agent:
        assert await agent.ended() == 1
        assert "did not answer within 0.1 s" in agent.sentences[0]


async def test_the_agent_waits_for_the_first_gpu(node: SimulatedNode) -> None:
    for gpu in range(node.nvml.gpus):
        node.nvml.hide_gpu(gpu)
    async with running(flags_of(node, poll="50ms")) as agent:
        await agent.wait_line("NVML was initialised")
        node.nvml.reveal_gpu(0)
        await wait_allocatable(node.kubelet, 1)


@pytest.mark.parametrize(
    ("flag", "value", "sentence"),
    [
        (
            "kubelet-socket",
            "kubelet.sock",
            "--kubelet-socket kubelet.sock is relative; give an absolute path",
        ),
        ("kubelet-socket", "/" + "x" * 110, "is 111 bytes long"),
        ("kubelet-socket", "/etc/passwd", "--kubelet-socket /etc/passwd is not a socket"),
        ("config-file", "/nonexistent.yaml", "Could not read the configuration file /nonexistent.yaml"),
        ("mig-strategy", "both", "--mig-strategy must be one of none, single, mixed"),
        ("pol", "5s", '"--pol" is no flag (did you mean poll?)'),
    ],
)
async def test_a_mistake_of_the_operator_is_one_sentence_and_exit_code_2(
    node: SimulatedNode, flag: str, value: str, sentence: str
) -> None:
    async with running(flags_of(node) | {flag: value}) as agent:
        assert await agent.ended() == 2
        (line,) = agent.sentences
        assert sentence in line
        assert agent.log == []


async def test_a_port_in_use_never_stops_the_plugin(node: SimulatedNode) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with running(flags_of(node, http_listen=address)) as agent:
            await wait_allocatable(node.kubelet, 4)
            line = await agent.wait_line(f"Could not listen on {address}: ")
            assert line["detail"] == "Address already in use"
            assert await agent.stop() == 0


# Health over restarts


async def test_an_unhealthy_gpu_stays_unhealthy_over_a_restart(node: SimulatedNode) -> None:
    uuid = node.nvml.uuid(2)
    async with running(flags_of(node)) as agent:
        await wait_allocatable(node.kubelet, 4)
        node.nvml.push_xid(2, 79)
        await wait_allocatable(node.kubelet, 3)
        state = Path(node.directory.agent_flags()["state-dir"], "state.json")
        await until(lambda: state.exists() and b'"code":79' in state.read_bytes())
        agent.signal(signal.SIGKILL)
        await agent.ended()
    before = len(node.kubelet.lists)
    async with running(flags_of(node)) as agent:
        await node.kubelet.wait_for(lambda kubelet: len(kubelet.lists) > before, timeout_s=60)
        assert node.kubelet.lists[before].unhealthy == (uuid,)
        [restored] = (await agent.wait_line("Devices are Unhealthy as the agent before knew them"))[
            "conditions"
        ]
        assert restored.startswith(f"{uuid}: xid: ")


# Signals


async def test_sigterm_exits_with_0_and_removes_the_sockets(node: SimulatedNode) -> None:
    async with running(flags_of(node, probe_tier="auto")) as agent:
        await agent.wait_line("Listening", listener="control")
        assert await agent.stop() == 0
        sockets = [path for path in node.directory.path.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
        names = {path.name for path in sockets}
        # The last is of the driver's own daemon.
        assert names <= {"kubelet.sock", "control.sock", "kmsg", "socket"}
        assert not Path(agent.flags["control-socket"]).exists()
        assert not (node.directory.device_plugins / "nvidia-gpu.sock").exists()
        assert agent.sentences == []


async def test_streams_close_cleanly_and_no_device_is_reported_unhealthy(node: SimulatedNode) -> None:
    async with running(flags_of(node)) as agent:
        await wait_allocatable(node.kubelet, 4)
        sent = len(node.kubelet.lists)
        assert await agent.stop() == 0
        await node.kubelet.wait_for(lambda kubelet: bool(kubelet.stream_ends), timeout_s=60)
        assert len(node.kubelet.lists) == sent


async def test_sigint_is_as_sigterm(node: SimulatedNode) -> None:
    async with running(flags_of(node)) as agent:
        await agent.wait_registered()
        agent.signal(signal.SIGINT)
        assert await agent.ended() == 0


async def test_the_agent_exits_in_time_although_a_call_hangs_in_the_driver(node: SimulatedNode) -> None:
    async with running(flags_of(node, call_deadline="1s", poll="50ms")) as agent:
        await agent.wait_registered()
        node.nvml.hang(gpu=1)
        await wait_allocatable(node.kubelet, 3)
        async with asyncio.timeout(30):
            assert await agent.stop() == 0
        assert "Left while a call hangs in the driver" in agent.events


async def test_a_second_signal_exits_at_once(node: SimulatedNode) -> None:
    async with running(flags_of(node, probe_tier="auto"), prelude=NEVER_DRAINS) as agent:
        await agent.wait_registered()
        agent.signal(signal.SIGTERM)
        await agent.wait_line("Stopping")
        agent.signal(signal.SIGTERM)
        assert await agent.ended() == 128 + signal.SIGTERM


async def test_a_shutdown_that_hangs_is_cut_off(node: SimulatedNode) -> None:
    async with running(flags_of(node, probe_tier="auto"), prelude=NEVER_DRAINS + IMPATIENT) as agent:
        await agent.wait_registered()
        assert await agent.stop() == 1
        assert any(line.startswith("The agent did not stop within ") for line in agent.events)


NEVER_DRAINS = """
import asyncio
import agent.sinks.plugin.sink as plugin
async def drain(self, grace_s): await asyncio.Event().wait()
plugin.DevicePlugin.drain = drain
"""
IMPATIENT = """
import agent.runtime.process
agent.runtime.process.STOP_WITHIN_S = 0.2
"""


async def test_sigusr2_writes_the_stacks_of_tasks_and_threads(node: SimulatedNode) -> None:
    async with running(flags_of(node)) as agent:
        await agent.wait_registered()
        agent.signal(signal.SIGUSR2)
        task = await agent.wait_line("Stack of the task engine run", task="engine run")
        thread = await agent.wait_line("Stack of the thread MainThread", thread="MainThread")
        # A task that runs at that moment has no frame of its own: its thread shows it.
        assert "engine.py" in task["stack"] + thread["stack"]
        assert await agent.stop() == 0


async def test_sigpipe_and_a_closed_standard_error_are_harmless(node: SimulatedNode) -> None:
    async with running(flags_of(node)) as agent:
        await wait_allocatable(node.kubelet, 4)
        agent.signal(signal.SIGPIPE)
        node.nvml.push_xid(0, 79)
        await wait_allocatable(node.kubelet, 3)


# Bugs


@pytest.mark.parametrize(
    ("bug", "sentence"),
    [
        ("agent.runtime.status.LAG_PERIOD_S = None", "The task loop lag failed: TypeError"),
        (
            "import agent.engine; agent.engine.step = None",
            "The task engine failed 5 times within 60 s, last with: TypeError",
        ),
        (
            "import agent.sinks.plugin.sink as plugin; plugin.DevicePlugin.run = None",
            "The task device-plugin failed 5 times within 60 s, last with: TypeError",
        ),
    ],
)
async def test_a_bug_shuts_the_agent_down_in_order_with_one_sentence(
    node: SimulatedNode, bug: str, sentence: str
) -> None:
    async with running(flags_of(node), prelude=f"import agent.app\n{bug}\n") as agent:
        assert await agent.ended() == 1
        (line,) = agent.sentences
        assert line.startswith(f"gpu-agent: {sentence}")
        assert any(line.startswith("Stopping: ") for line in agent.events)
        assert not Path(agent.flags["control-socket"]).exists()


async def test_a_bug_in_a_sink_that_is_not_critical_makes_no_gpu_unhealthy(node: SimulatedNode) -> None:
    bug = "import agent.sinks.http.sink as http\nhttp.HttpSink.run = None\n"
    async with running(flags_of(node), prelude=bug) as agent:
        await agent.wait_line("The task http failed", task="http", count=2)
        await wait_allocatable(node.kubelet, 4)
        assert await agent.stop() == 0


# Reload


async def test_a_reload_changes_what_is_advertised(node: SimulatedNode) -> None:
    path = node.directory.path / "config.yaml"
    path.write_text("version: v1\n")
    async with running(flags_of(node, config_file=str(path))) as agent:
        await wait_allocatable(node.kubelet, 4)
        path.write_text("sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}\n")
        agent.signal(signal.SIGHUP)
        await wait_allocatable(node.kubelet, 12)


async def test_a_reload_changes_mig_strategy_sharing_and_what_a_container_gets() -> None:
    mig = {"enabled": True, "devices": [{"profile": "1g.10gb"}, {"profile": "1g.10gb"}]}
    async with simulated_node({"preset": "8x-a100", "gpus": [{"mig": mig}, {}]}) as node:
        path = node.directory.path / "config.yaml"
        path.write_text("flags: {migStrategy: none}\n")
        async with running(flags_of(node, config_file=str(path))) as agent:
            await wait_allocatable(node.kubelet, 2)
            path.write_text(
                "flags: {migStrategy: mixed, plugin: {deviceListStrategy: volume-mounts}}\n"
                "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: gpu, replicas: 3}]}}\n"
            )
            agent.signal(signal.SIGHUP)
            await wait_allocatable(node.kubelet, 2, resource="nvidia.com/mig-1g.10gb")
            await wait_allocatable(node.kubelet, 3, resource="nvidia.com/gpu.shared")
            await wait_allocatable(node.kubelet, 0)
            pod = await node.kubelet.run_pod("job", "ns1", {"main": {"nvidia.com/gpu.shared": 1}})
            assert pod.containers["main"].envs == {
                "NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"
            }


async def test_a_file_with_a_mistake_changes_nothing_and_is_reported(node: SimulatedNode) -> None:
    path = node.directory.path / "config.yaml"
    path.write_text("version: v1\n")
    async with running(flags_of(node, config_file=str(path))) as agent:
        await wait_allocatable(node.kubelet, 4)
        path.write_text("agent: {pol: 1s}\nflags: {migStrategy: x}\n")
        agent.signal(signal.SIGHUP)
        line = await agent.wait_line("Kept the old configuration")
        assert len(line["problems"]) == 2
        assert "[-]config failed: reason withheld" in await readiness(agent)
        path.write_text("agent: {poll: 7s}\n")
        agent.signal(signal.SIGHUP)
        await agent.wait_line("A changed setting takes effect at the next start", setting="poll")
        await agent.wait_line("Read the configuration again")
        assert "[+]config ok" in await readiness(agent)
        assert node.kubelet.allocatable(GPU) == 4


async def test_the_state_directory_keeps_the_agents_id(node: SimulatedNode) -> None:
    async with running(flags_of(node)) as agent:
        await agent.wait_registered()
        assert Path(agent.flags["state-dir"], "lock").read_text() == f"{agent.pid}\n"


# Without a node


async def test_without_any_driver_or_kubelet_the_agent_waits_quietly() -> None:
    with short_directory() as directory:
        flags = {
            "kubelet-socket": f"{directory}/device-plugins/kubelet.sock",
            "nvml-library": f"{directory}/libnvidia-ml.so.1",
            "state-dir": f"{directory}/state",
            "control-socket": f"{directory}/control.sock",
            "http-listen": "127.0.0.1:0",
            "fail-on-init-error": "false",
            "init-retry": "20ms",
            "log-format": "json",
        }
        async with running(flags) as agent:
            document = await ask(agent, "/preflight")
            assert document["reasons"][0]["code"] == "driver_not_loaded"
            assert await agent.stop() == 0
            assert [line for line in agent.events if line.startswith("NVML")] == ["NVML is not available"]
            assert json.dumps(agent.sentences) == "[]"
