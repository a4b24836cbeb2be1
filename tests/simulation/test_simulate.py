import argparse
import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.errors import AgentError, ConfigError, UsageError
from agent.simulation import actions, control, inject
from agent.simulation.agent_actions import state_of_agent
from agent.simulation.control import ControlServer
from agent.simulation.directory import agent_flags
from agent.simulation.node import SimulatedNode
from tests.harness import (
    agent_process,
    gpu_agent,
    running_command,
    short_directory,
    simulated_node,
    wait_allocatable,
)


@contextlib.asynccontextmanager
async def controlled(node: SimulatedNode) -> AsyncIterator[ControlServer]:
    async with ControlServer(node.directory.control_socket, node.do, node.feed) as server:
        yield server


async def ask(node: SimulatedNode, line: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(node.directory.control_socket))
    writer.write(line)
    await writer.drain()
    answer = await reader.readline()
    writer.close()
    return answer


# The table of actions


@pytest.mark.parametrize(
    ("name", "given", "done"),
    [
        ("xid", {"xid": "79", "gpu": "3"}, "XID 79 on GPU 3 (GPU-00000000-0000-4000-8000-000000000003)"),
        ("xid", {"xid": "79", "gpu": "unreadable"}, "XID 79 on a GPU with an unreadable UUID"),
        (
            "xid",
            {"xid": "48", "gpu": "GPU-00000000-0000-4000-8000-000000000001", "gi": "2", "ci": "0"},
            "XID 48 on GPU 1 (GPU-00000000-0000-4000-8000-000000000001), gi 2, ci 0",
        ),
        ("return-code", {"code": "gpu_is_lost", "gpu": "0"}, "every NVML call on GPU 0 ("),
        (
            "return_code",
            {"code": "999", "call": "nvmlDeviceGetName"},
            "nvmlDeviceGetName on every GPU answers",
        ),
        ("return-code", {"code": "clear"}, "answers as usual"),
        ("hang", {"gpu": "2"}, "NVML calls on GPU 2 ("),
        ("hang", {"scope": "driver"}, "NVML calls of the whole driver hang"),
        ("release", {}, "NVML calls answer again"),
        ("release", {"gpu": "2"}, "answer again"),
        ("remove-gpu", {"gpu": "1"}, "is gone"),
        ("add_gpu", {"gpu": "1"}, "is there"),
        ("reveal", {"gpus": "1"}, "NVML lists 1 of 4 GPUs"),
        ("driver", {"state": "unloaded"}, "The driver is unloaded"),
        ("kernel-xid", {"xid": "79", "gpu": "3"}, "The kernel log has XID 79 of GPU 3 ("),
        ("kernel_log", {"text": "NVRM: loading"}, "A record was written into the kernel log"),
        ("unbind", {"gpu": "1"}, "is bound to no driver"),
        ("unbind", {"gpu": "1", "driver": "vfio-pci"}, "is bound to vfio-pci"),
        ("bind", {"gpu": "1"}, "is bound to nvidia"),
        ("remove-node", {"name": "nvidia3"}, "/dev/nvidia3 does not exist"),
        ("add-node", {"name": "/dev/nvidiactl"}, "/dev/nvidiactl exists"),
        ("reload-module", {}, "The driver's modules were loaded anew"),
        ("recovery-action", {"action": "drain-reset", "gpu": "3"}, "The recovery action of GPU 3 ("),
        ("recovery_action", {"action": "7", "gpu": "3"}, ") is 7"),
        ("recovery-action", {"action": "unsupported", "gpu": "3"}, ") is not supported"),
        ("ecc", {"count": "2", "gpu": "1"}, "counts 2 uncorrected ECC errors (volatile, dram)"),
        ("remapped-rows", {"state": "failed", "gpu": "1"}, "Row remapping of GPU 1 ("),
        ("temperature", {"celsius": "95", "gpu": "1"}, ") has 95 C"),
        ("clock-reasons", {"reasons": "hw-slowdown, hw-thermal", "gpu": "1"}, ") are 0x48"),
        ("pcie", {"width": "8", "gpu": "1"}, "is x8, generation 3"),
        ("run-pod", {"name": "train"}, "Pod default/train "),
        ("kubelet restart", {"downtime": "10ms"}, "Kubelet fault restart (downtime 10ms)"),
        ("kubelet refuse", {"times": "2"}, "Kubelet fault refuse (times 2)"),
    ],
)
async def test_an_action_is_done_and_reported(name: str, given: dict[str, str], done: str) -> None:
    async with simulated_node("4x-t4") as node:
        answer = await node.do(name, given)

        assert done in answer
        async for line in node.feed.follow():
            if line["kind"] == "event":
                assert line["text"] == answer
                break


async def test_what_a_gpu_reads_is_what_it_was_made_to_read() -> None:
    async with simulated_node({"preset": "dgx-h100", "gpus": 2}) as node:
        links = node.nvml.number(1, "links")
        for name, given in (
            ("recovery-action", {"action": "reset"}),
            ("remapped-rows", {"state": "pending", "uncorrectable": "3"}),
            ("clock-reasons", {"reasons": "none"}),
            ("nvlink", {"state": "down"}),
            ("nvlink", {"state": "up", "link": "2"}),
            ("fabric", {"state": "completed", "status": "999"}),
            ("pcie", {"width": "4", "generation": "2"}),
        ):
            await node.do(name, {**given, "gpu": "1"})

        assert node.nvml.number(1, "recovery_action") == 1
        assert [node.nvml.number(1, "remapped_rows", at) for at in range(4)] == [0, 3, 1, 0]
        assert node.nvml.number(1, "clock_reasons") == 0
        ups = [node.nvml.number(1, "link_state", link) for link in range(links)]
        assert ups == [int(link == 2) for link in range(links)]
        assert (node.nvml.number(1, "fabric_state"), node.nvml.number(1, "fabric_status")) == (3, 999)
        assert (node.nvml.number(1, "pcie_width"), node.nvml.number(1, "pcie_generation")) == (4, 2)
        assert node.nvml.number(0, "recovery_action") == 0


async def test_where_no_agent_runs_that_is_reported(tmp_path: Path) -> None:
    with pytest.raises(
        AgentError, match=r"No agent answers at .*control\.sock; start one with gpu-agent run"
    ):
        await state_of_agent(tmp_path / "control.sock", 0.1)


async def test_the_agent_executes_commands_and_reports_why_it_does_not() -> None:
    async with simulated_node("4x-t4") as node, agent_process(node):
        await wait_allocatable(node.kubelet, 4, capacity=4)

        assert "is held: broken fan" in await node.do(
            "agent", {"command": "hold", "gpu": "2", "why": "broken fan"}
        )
        await wait_allocatable(node.kubelet, 3)
        assert "is held no more" in await node.do("agent", {"command": "unhold", "gpu": "2"})
        await wait_allocatable(node.kubelet, 4)
        with pytest.raises(AgentError, match="The agent rejected resume: The driver is not released"):
            await node.do("agent", {"command": "resume"})


async def test_a_killed_agent_is_gone_at_once() -> None:
    async with simulated_node("4x-t4") as node, agent_process(node) as agent:
        await wait_allocatable(node.kubelet, 4, capacity=4)

        assert f"process {agent.process.pid} was killed" in await node.do("agent", {"command": "kill"})
        assert await agent.ended() == -signal.SIGKILL


async def test_mig_is_reconfigured_by_profiles_in_nvml_and_in_the_files_of_the_driver() -> None:
    async with simulated_node({"preset": "8x-a100", "gpus": 1}) as node:
        await node.do("mig", {"gpu": "0", "devices": "1g.10gb,2g.20gb"})
        assert node.nvml.number(0, "mig_count") == 2
        instances = list((node.directory.path / "proc/driver/nvidia/capabilities/gpu0/mig").iterdir())
        assert len(instances) == 2

        with pytest.raises(UsageError, match=r"MIG of GPU 0 .* cannot be set: .*9g"):
            await node.do("mig", {"gpu": "0", "devices": "9g"})

        await node.do("mig", {"gpu": "0", "devices": "off"})
        assert node.nvml.number(0, "mig_count") == 0


async def test_every_gpu_can_be_sliced_at_once_and_profiles_be_counted() -> None:
    async with simulated_node({"preset": "8x-a100", "gpus": 2}) as node:
        answer = await node.do("mig", {"gpu": "all", "devices": "3g.40gb, 2x1g.10gb"})
        assert answer == "MIG of every GPU is 3g.40gb, 1g.10gb, 1g.10gb"
        assert [node.nvml.number(number, "mig_count") for number in range(2)] == [3, 3]
        nodes = {path.name for path in (node.directory.dev / "nvidia-caps").iterdir()}
        await node.do("mig", {"gpu": "all", "devices": "7g.80gb"})
        assert [node.nvml.number(number, "mig_count") for number in range(2)] == [1, 1]
        assert len(list((node.directory.dev / "nvidia-caps").iterdir())) < len(nodes)


async def test_the_mps_daemon_shows_that_it_is_ready_by_a_file() -> None:
    async with simulated_node("4x-t4") as node:
        ready = node.directory.mps / ".ready"
        assert not ready.exists()
        await node.do("mps-daemon", {"command": "start"})
        assert ready.is_file()
        for _ in range(2):
            await node.do("mps-daemon", {"command": "stop"})
        assert not ready.exists()


async def test_the_agents_configuration_can_be_changed_only_where_it_has_one() -> None:
    async with simulated_node("4x-t4") as node:
        with pytest.raises(AgentError, match="reads no configuration file"):
            await node.do("agent-config", {"text": "version: v1"})
        node.directory.agent_config.write_text("version: v1\n")
        await node.do("agent-config", {"text": "version: v1\nflags: {}\n"})
        assert node.directory.agent_config.read_text() == "version: v1\nflags: {}\n"


@pytest.mark.parametrize("gpu", ["4", "-1", "GPU-x", "0x0", "99999999999"])
async def test_an_unknown_gpu_is_rejected_with_those_there_are(gpu: str) -> None:
    async with simulated_node("4x-t4") as node:
        with pytest.raises(UsageError, match=r"There is no GPU .* it has 0 to 3"):
            await node.do("hang", {"gpu": gpu})


async def test_mig_on_a_gpu_without_it_is_rejected() -> None:
    async with simulated_node("4x-t4") as node:
        with pytest.raises(UsageError, match="a Tesla T4, cannot do MIG"):
            await node.do("mig", {"gpu": "0", "devices": "none"})


async def test_a_removed_gpu_is_gone_from_the_bus_until_it_is_added_again() -> None:
    async with simulated_node("4x-t4") as node:
        on_bus = node.directory.path / "sys/bus/pci/devices/0000:5e:00.0"
        await node.do("remove-gpu", {"gpu": "1"})
        assert not on_bus.exists()

        await node.do("add-gpu", {"gpu": "1"})
        assert on_bus.exists()


async def test_an_action_the_node_cannot_do_now_is_rejected_in_a_sentence() -> None:
    async with simulated_node("4x-t4") as node:
        for name, given in (
            ("kubelet drop-stream", {}),
            ("delete-pod", {"name": "none"}),
            ("return-code", {"code": "15", "call": "nvmlNoSuchThing"}),
            ("reveal", {"gpus": "5"}),
            ("unbind", {"gpu": "0", "driver": "../nvidia"}),
            ("unbind", {"gpu": "0", "driver": "nvidia"}),
        ):
            with pytest.raises(AgentError):
                await node.do(name, given)


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        ("xidd", {}, "xidd is no action (did you mean xid?); known: xid, return-code, hang, "),
        ("kubelet", {}, "kubelet is no action"),
        ("kubelet restrat", {}, "kubelet restrat is no action (did you mean kubelet restart?)"),
        ("kubelet restart", {"downtime": "soon"}, "must be a duration like 2s or 500ms"),
        ("xid", {"xid": "79"}, "xid needs gpu: Position or UUID; "),
        ("xid", {"gpu": "1"}, "xid needs a value: The error's number, such as 79"),
        ("xid", {"xid": "0", "gpu": "1"}, 'xid must be a whole number between 1 and 65535, not "0"'),
        (
            "xid",
            {"xid": "1", "gpus": "1"},
            "xid has no parameter gpus (did you mean gpu?); it accepts: xid, gpu, gi, ci",
        ),
        ("hang", {"scope": "gpu"}, "hang needs either gpu or the scope driver"),
        ("return-code", {"code": "BROKEN"}, "must be an NVML return code, by number or name, or clear"),
        ("driver", {"state": "gone"}, "must be loaded or unloaded"),
        ("mig", {"gpu": "0", "devices": ","}, "must be MIG profiles"),
        ("mig", {"gpu": "0", "devices": "65x1g.10gb"}, "must be at most 64 MIG profiles"),
        ("mps-daemon", {"command": "restart"}, "must be start or stop"),
        ("agent-config", {"text": " "}, "must be the text of a configuration file"),
        ("run-pod", {"name": "a b"}, "must be a name"),
        ("recovery-action", {"action": "pray", "gpu": "1"}, "must be none, reset, reboot, drain-p2p, "),
        ("clock-reasons", {"reasons": "hw-slowdown,heat", "gpu": "1"}, "several with commas"),
        ("pcie", {"width": "3", "gpu": "1"}, "must be 1, 2, 4, 8, 16"),
        ("fabric", {"state": "ok", "gpu": "1"}, "must be not_supported, not_started, in_progress or"),
        ("agent", {"command": "die"}, "must be hold, unhold, recover, release, resume or kill"),
        ("agent", {"command": "hold", "gpu": "1"}, "agent needs why for hold"),
        ("agent", {"command": "hold", "why": "fan"}, "agent needs gpu for hold"),
        ("agent", {"command": "kill", "gpu": "1"}, "agent accepts no gpu for kill"),
        ("agent", {"command": "resume", "time": "1m"}, "agent accepts no time for resume"),
        ("agent", {"command": "release", "time": "soon"}, "must be a number with a unit"),
    ],
)
def test_a_wrong_action_is_explained(name: str, given: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        actions.parse(name, given)

    assert any(problem in each for each in caught.value.problems)


def test_every_action_has_a_help_text_of_at_most_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    inject.configure(parser)
    assert inject.main(parser.parse_args([])) == 0

    text = capsys.readouterr().out
    assert all(len(line) < 80 for line in text.splitlines())
    for name, row in actions.table().items():
        assert f"  {name}" in text
        assert row.summary


def test_the_help_of_one_action_names_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    inject.configure(parser)
    assert inject.main(parser.parse_args(["kubelet", "restart", "--help"])) == 0

    assert "--downtime TIME" in capsys.readouterr().out


# The control socket


async def test_the_control_socket_is_open_to_its_owner_alone() -> None:
    async with simulated_node("4x-t4") as node, controlled(node):
        assert node.directory.control_socket.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"{}\n",
        b"[]\n",
        b"null\n",
        b"\xff\n",
        b'{"do": 3}\n',
        b'{"do": "xid", "with": {"xid": 79}}\n',
        b"[" * 9_000 + b"\n",
    ],
)
async def test_a_request_that_is_none_is_answered_with_what_one_is(line: bytes) -> None:
    async with simulated_node("4x-t4") as node, controlled(node):
        answer = json.loads(await ask(node, line))

        assert answer["ok"] is False
        assert answer["exit"] == 2
        assert "a request is" in answer["problems"][0]


async def test_a_watcher_gets_everything_from_the_start() -> None:
    async with simulated_node("4x-t4") as node, controlled(node) as server:
        await node.do("release", {})
        async with contextlib.aclosing(control.watch(node.directory.path)) as lines:
            seen = [await anext(lines), await anext(lines)]
            assert [line["kind"] for line in seen] == ["node", "event"]
            assert [gpu["gpu"] for gpu in seen[0]["gpus"]] == [0, 1, 2, 3]
        await asyncio.wait_for(server.wait_unwatched(), 10)


# The commands


def simulate(*arguments: str) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
    return running_command("simulate", *arguments)


async def running(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 30)).decode()


async def test_simulate_shows_how_to_run_the_agent_and_ends_without_a_trace() -> None:
    with short_directory() as parent:
        place = parent / "node"
        async with simulate("--preset=4x-t4", f"--node-dir={place}") as process:
            first = await running(process)
            assert first == f"Simulated node 4x-t4 in {place}: 4 GPUs (Tesla T4)\n"
            process.send_signal(signal.SIGTERM)
            out, err = await asyncio.wait_for(process.communicate(), 30)

        assert process.returncode == 0
        assert err == b""
        for name, value in agent_flags(place).items():
            assert f"--{name}={value}" in out.decode()
        assert not place.exists()


async def test_inject_reaches_the_node_and_reports_what_was_done() -> None:
    with short_directory() as parent:
        place = parent / "node"
        async with simulate("--preset=4x-t4", f"--node-dir={place}") as process:
            await running(process)

            done = await gpu_agent("inject", "xid", "79", "--gpu", "3", f"--node-dir={place}")
            rejected = await gpu_agent("inject", "xid", "79", "--gpu", "9", f"--node-dir={place}")
            now = await gpu_agent("inject", f"--node-dir={place}", "kubelet", "restart", "--downtime=5ms")

        assert (done.status, done.err) == (0, "")
        assert done.out == "XID 79 on GPU 3 (GPU-00000000-0000-4000-8000-000000000003)\n"
        assert rejected.status == 2
        assert rejected.err == "gpu-agent: There is no GPU 9 on the simulated node; it has 0 to 3\n"
        assert (now.status, now.out) == (0, "Kubelet fault restart (downtime 5ms)\n")


async def test_inject_without_a_node_shows_how_to_start_one() -> None:
    with short_directory() as parent:
        result = await gpu_agent("inject", "release", f"--node-dir={parent}/none")

    assert result.status == 2
    assert result.err == (
        f"gpu-agent: No simulated node runs in {parent}/none; "
        "start one with gpu-agent demo, or name its directory with --node-dir\n"
    )


async def test_inject_after_a_killed_node_reports_that_none_runs() -> None:
    with short_directory() as parent:
        async with simulate("--preset=4x-t4", f"--node-dir={parent}/node") as process:
            await running(process)
            process.kill()
            await process.wait()

        result = await gpu_agent("inject", "release", f"--node-dir={parent}/node")

    assert result.status == 2
    assert "No simulated node runs in" in result.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["xidd", "79"], "xidd is no action (did you mean xid?)"),
        (["xid", "79", "80"], 'xid accepts no "80"; it is written: xid XID --gpu GPU'),
        (["xid", "79", "--gpu"], "xid: --gpu needs a value"),
        (["xid", "79", "--xid", "80", "--gpu", "1"], "xid: --xid is given twice"),
        (["hang"], "hang needs either gpu or the scope driver"),
    ],
)
def test_inject_explains_a_wrong_command_line_before_it_asks(words: list[str], sentence: str) -> None:
    parser = argparse.ArgumentParser()
    inject.configure(parser)

    with pytest.raises(UsageError) as caught:
        inject.main(parser.parse_args(words))

    assert sentence in str(caught.value)


async def test_a_second_node_in_the_same_directory_is_rejected() -> None:
    with short_directory() as parent:
        async with simulate("--preset=4x-t4", f"--node-dir={parent}/node") as process:
            await running(process)
            result = await gpu_agent("simulate", f"--node-dir={parent}/node")

    assert result.status == 1
    assert f"A simulated node already runs in {parent}/node (process {process.pid})" in result.err


async def test_a_scenario_that_never_ends_as_expected_fails_with_what_was_last_seen(tmp_path: Path) -> None:
    path = tmp_path / "never.yaml"
    path.write_text("node: 4x-t4\nuntil: {capacity: 4, allocatable: 4}\ntimeout: 200ms\n")
    with short_directory() as parent:
        result = await gpu_agent("simulate", "--json", f"--scenario={path}", f"--node-dir={parent}/node")
        assert not (parent / "node").exists()

    assert result.status == 1
    assert result.out == ""
    assert result.err == (
        "gpu-agent: Scenario never did not end within 0.2 s; it waited for nvidia.com/gpu capacity 4, "
        "allocatable 4, and last seen was no resource: no agent has registered\n"
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--preset=dgx-h1000"], "gpu-agent: --preset: there is no 'dgx-h1000', choose from"),
        (["--scenario=xid79"], "gpu-agent: There is no scenario xid79 (did you mean xid-79?)"),
        (["--scenario=/"], "gpu-agent: The scenario / is not a regular file"),
        (["--scenario=xid-79", "--preset=4x-t4"], "not allowed with argument"),
    ],
)
async def test_wrong_arguments_are_a_sentence(arguments: list[str], sentence: str) -> None:
    with short_directory() as parent:
        result = await gpu_agent("simulate", *arguments, f"--node-dir={parent}/node")

    assert result.status == 2
    assert sentence in result.err
    assert "Traceback" not in result.err


def test_a_client_that_finds_something_else_than_a_node_reports_it() -> None:
    with short_directory() as parent, socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(parent / "control.sock"))
        with pytest.raises(control.NotRunningError):
            control.ask(parent, "release", {})
