"""Operators' commands to a running agent: hold, recover, release, observe, bundle, events."""

import json
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from agent.simulation.node import SimulatedNode
from tests.harness import (
    PATIENCE_S,
    AgentProcess,
    Command,
    flags_of,
    gpu_agent,
    running,
    simulated_node,
    wait_allocatable,
)
from tests.sources.recorder import until

pytestmark = pytest.mark.slow

QUICK = {"poll": "50ms", "recovery_clean_probes": "1", "recovery_quiet": "0s"}


@pytest.fixture
async def node() -> AsyncIterator[SimulatedNode]:
    async with simulated_node() as made:
        yield made


async def command(agent: AgentProcess, *arguments: str) -> Command:
    await agent.wait_line("Listening", listener="control")
    return await gpu_agent(*arguments, "--control-socket", agent.flags["control-socket"])


async def document_of(agent: AgentProcess, *arguments: str) -> Any:
    done = await command(agent, *arguments, "-o", "json")
    return json.loads(done.out)


def evidence(agent: AgentProcess) -> list[Path]:
    return sorted(Path(agent.flags["state-dir"], "evidence").glob("*.json"))


# Hold


async def test_a_hold_outlives_the_agent_until_unhold(node: SimulatedNode) -> None:
    uuid = node.nvml.uuid(2)
    async with running(flags_of(node)) as agent:
        await wait_allocatable(node.kubelet, 4)
        done = await command(agent, "hold", "2", "--why", "noisy fan")
        assert (done.status, done.out, done.err) == (0, f"GPU 2 ({uuid}) is held: noisy fan\n", "")
        await wait_allocatable(node.kubelet, 3)
        state = Path(agent.flags["state-dir"], "state.json")
        await until(lambda: b"noisy fan" in state.read_bytes())
        agent.signal(signal.SIGKILL)
        await agent.ended()
    lists = len(node.kubelet.lists)
    async with running(flags_of(node, **QUICK)) as agent:
        await node.kubelet.wait_for(lambda kubelet: len(kubelet.lists) > lists, timeout_s=60)
        assert node.kubelet.lists[lists].unhealthy == (uuid,) or len(node.kubelet.lists[lists].unhealthy) == 4
        await wait_allocatable(node.kubelet, 3)
        devices = await command(agent, "devices")
        assert "held" in devices.out
        status = await command(agent, "status")
        assert f"Held     {uuid}: noisy fan" in status.out
        assert (await command(agent, "unhold", node.nvml.uuid(2))).status == 0
        await wait_allocatable(node.kubelet, 4)
        assert (await command(agent, "unhold", "2")).status == 2


# Recover


async def test_recover_clears_a_condition_that_only_a_person_can(node: SimulatedNode) -> None:
    async with running(flags_of(node, **QUICK)) as agent:
        await wait_allocatable(node.kubelet, 4)
        node.nvml.push_xid(1, 64)
        await wait_allocatable(node.kubelet, 3)
        done = await command(agent, "recover", "1")
        assert done.status == 0
        assert "is healthy" in done.out
        await wait_allocatable(node.kubelet, 4)


async def test_recover_shows_what_stays(node: SimulatedNode) -> None:
    async with running(flags_of(node, **QUICK)) as agent:
        await wait_allocatable(node.kubelet, 4)
        await command(agent, "hold", "1", "--why", "x")
        done = await command(agent, "recover", "1")
        assert done.status == 1
        assert "held: Held by an operator: x; a hold ends with gpu-agent unhold" in done.out


# Release


async def test_release_closes_the_driver_and_resume_opens_it(node: SimulatedNode) -> None:
    async with running(flags_of(node, **QUICK)) as agent:
        await wait_allocatable(node.kubelet, 4)
        done = await command(agent, "release", "--all", "--for", "10m")
        assert (done.status, done.out) == (0, "The driver is released: no file of it is open\n")
        await wait_allocatable(node.kubelet, 0)
        status = await command(agent, "status")
        assert "released on request" in status.out
        assert "(4 maintenance)" in status.out
        assert (await command(agent, "resume")).status == 0
        await wait_allocatable(node.kubelet, 4)


async def test_a_release_expires(node: SimulatedNode) -> None:
    async with running(flags_of(node, **QUICK)) as agent:
        await wait_allocatable(node.kubelet, 4)
        before = len(node.kubelet.lists)
        assert (await command(agent, "release", "0", "--for", "1s")).status == 0
        # The second may be over by now, so what the kubelet was sent counts.
        await node.kubelet.wait_for(
            lambda kubelet: any(len(sent.unhealthy) == 1 for sent in kubelet.lists[before:]), PATIENCE_S
        )
        await wait_allocatable(node.kubelet, 4)


async def test_a_release_outlives_the_agent(node: SimulatedNode) -> None:
    async with running(flags_of(node, **QUICK)) as agent:
        await wait_allocatable(node.kubelet, 4)
        await command(agent, "release", "--all", "--for", "10m")
        assert await agent.stop() == 0
    inits = node.nvml.calls("nvmlInitWithFlags")
    async with running(flags_of(node, **QUICK)) as agent:
        await agent.wait_registered()
        assert (await document_of(agent, "status"))["released_until"] is not None
        assert node.nvml.calls("nvmlInitWithFlags") == inits
        await command(agent, "resume")
        await wait_allocatable(node.kubelet, 4)


@pytest.mark.parametrize("arguments", [("release",), ("release", "0", "--all"), ("release", "9")])
async def test_a_release_of_nothing_is_a_mistake(node: SimulatedNode, arguments: tuple[str, ...]) -> None:
    async with running(flags_of(node)) as agent:
        await wait_allocatable(node.kubelet, 4)
        done = await command(agent, *arguments)
        assert (done.status, done.out) == (2, "")
        assert len(done.err.splitlines()) == 1


# Observe


async def test_observe_registers_nothing_and_reports_what_it_would_have_done(
    node: SimulatedNode,
) -> None:
    async with running(flags_of(node, observe="true", **QUICK)) as agent:
        await agent.wait_line("Allocatable changed", allocatable=4)
        node.nvml.push_xid(1, 79)
        await agent.wait_line("Health would have changed", reason="xid")
        status = await document_of(agent, "status")
        assert (status["observe"], status["observed_flips"]) == (True, 1)
        assert not node.kubelet.registrations


# Evidence and events


async def test_the_first_hard_fault_saves_evidence_and_a_bundle_can_be_requested(
    node: SimulatedNode, tmp_path: Path
) -> None:
    uuid = node.nvml.uuid(1)
    async with running(flags_of(node)) as agent:
        await wait_allocatable(node.kubelet, 4)
        node.nvml.push_xid(1, 79)
        await wait_allocatable(node.kubelet, 3)
        await until(lambda: bool(evidence(agent)))
        (path,) = evidence(agent)
        assert path.name.startswith(uuid)
        await until(lambda: path.stat().st_size > 0)
        kept = json.loads(path.read_bytes())
        assert (kept["gpu"]["uuid"], kept["why"]["number"]) == (uuid, 79)

        done = await command(agent, "bundle", "1", "-o", str(tmp_path / "gpu1.json"))
        assert done.status == 0
        assert Path(done.out.strip()).name.startswith(f"asked-{uuid}")
        assert json.loads((tmp_path / "gpu1.json").read_bytes())["gpu"]["uuid"] == uuid
        every = await command(agent, "bundle", "-o", "-")
        assert len(json.loads(every.out)["bundles"]) == 4


async def test_events_from_before_the_agent_was_started_are_on_disk(node: SimulatedNode) -> None:
    began = datetime.now(UTC).isoformat()
    async with running(flags_of(node)) as agent:
        await wait_allocatable(node.kubelet, 4)
        node.nvml.push_xid(1, 79)
        await wait_allocatable(node.kubelet, 3)
        assert await agent.stop() == 0
    async with running(flags_of(node)) as agent:
        await agent.wait_registered()
        recent = await document_of(agent, "events")
        assert not [each for each in recent["events"] if each["fields"].get("code") == 79]
        for since in ("1h", began):
            every = (await document_of(agent, "events", "--since", since))["events"]
            raised = [each for each in every if each["message"] == "A condition was raised"]
            assert [each["fields"]["code"] for each in raised] == [79]
            numbers = [(each["time_monotonic_ns"], each["number"]) for each in every]
            assert numbers == sorted(set(numbers))
        log_file = str(Path(agent.flags["state-dir"], "events.jsonl"))
        read = await gpu_agent("events", "--file", log_file)
        assert " has the condition XID 79: " in read.out
        assert (await gpu_agent("events", "--file", log_file, "-w")).status == 2


async def test_an_event_log_can_be_turned_off(node: SimulatedNode) -> None:
    async with running(flags_of(node, event_log_size="0")) as agent:
        await wait_allocatable(node.kubelet, 4)
        assert (await document_of(agent, "status"))["agent"]["event_log"] is None
        assert (await command(agent, "events", "--since", "1h")).status == 0
        assert not Path(agent.flags["state-dir"], "events.jsonl").exists()


# Sources and sinks


async def test_every_source_and_sink_has_a_check_and_a_failing_one_is_named(node: SimulatedNode) -> None:
    async with running(flags_of(node, kernel_log="/nonexistent/kmsg", probe_tier="auto")) as agent:
        await wait_allocatable(node.kubelet, 4)
        await agent.wait_line("The task kernel-log could not go on", task="kernel-log")
        components = (await document_of(agent, "status"))["agent"]["parts"]
        assert {"part-engine", "part-nvml-gpu", "part-nvml-events"} <= set(components)
        assert {each for each in components if not each.startswith("part-")} == {
            "source-nvml",
            "source-kubelet",
            "source-kubelet-count",
            "source-kernel-log",
            "source-sysfs",
            "source-pods",
            "source-probe",
            "sink-http",
            "sink-device-plugin",
            "sink-statefile",
            "sink-eventlog",
            "sink-evidence",
            "sink-cdi",
        }
        status = await command(agent, "status")
        assert "Failing  source-kernel-log: The kernel log /nonexistent/kmsg does not exist" in status.out
        await wait_allocatable(node.kubelet, 4)


# Reload


async def test_a_reload_changes_which_xids_flip(node: SimulatedNode) -> None:
    path = node.directory.path / "config.yaml"
    path.write_text("agent: {xids: {79: ignore}}\n")
    async with running(flags_of(node, config_file=str(path))) as agent:
        await wait_allocatable(node.kubelet, 4)
        node.nvml.push_xid(0, 79)
        await agent.wait_line("An XID was ignored by policy", xid=79)
        new = path.with_suffix(".new")
        new.write_text("agent: {xidPolicy: catalog, observe: true}\n")
        new.rename(path)
        agent.signal(signal.SIGHUP)
        await agent.wait_line("A changed setting takes effect at the next start", setting="observe")
        await agent.wait_line("Read the configuration again")
        node.nvml.push_xid(1, 94)
        await agent.wait_line("An XID was ignored by policy", xid=94)
        node.nvml.push_xid(2, 79)
        await wait_allocatable(node.kubelet, 3)
        assert not (await document_of(agent, "status"))["observe"]
