"""Q1, iovisor/bcc#3038: the probe cannot be compiled, because headers of the running kernel are missing.

The case's kernels 5.4.0-84 and 5.4.0-89 are 5.14 here: on 5.4 the probe could not run with any headers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cases.simulated_proc import SimulatedProcesses
from tests.harness import GPU, AgentProcess, agent_process, simulated_node, wait_allocatable, wait_polls
from tests.other_machine import FAILS, OtherMachine, why_no_other_machine
from tests.probe.conftest import why_no_probe

RUNNING, OTHER = "5.14.0-89-generic", "5.14.0-84-generic"
MESSAGE = "The probe is off ("
BTF = "/sys/kernel/btf"


@pytest.fixture(autouse=True)
def _possible() -> None:
    if why := why_no_other_machine() or why_no_probe():
        pytest.skip(why)


@pytest.fixture
def machine(tmp_path: Path) -> OtherMachine:
    made = OtherMachine(tmp_path)
    made.has_bcc(FAILS)
    return made


def a_no_headers(machine: OtherMachine) -> tuple[str, list[str]]:
    machine.has_release(RUNNING)
    machine.has_headers()
    return "kernel_headers_missing", [RUNNING]


def b_other_headers(machine: OtherMachine) -> tuple[str, list[str]]:
    machine.has_release(RUNNING)
    machine.has_headers(OTHER)
    machine.hide(BTF)
    return "kernel_headers_mismatch", [RUNNING, OTHER]


def c_lockdown(machine: OtherMachine) -> tuple[str, list[str]]:
    machine.is_locked_down()
    return "kernel_lockdown", ["confidentiality"]


def d_capability(machine: OtherMachine) -> tuple[str, list[str]]:
    machine.without = ["bpf", "sys_admin"]
    return "missing_capability", ["CAP_BPF"]


def e_compiler(machine: OtherMachine) -> tuple[str, list[str]]:
    machine.has_release(RUNNING)
    machine.has_headers(RUNNING)
    return "compile_failed", ["unknown type name u33"]


async def wait_disabled(agent: AgentProcess) -> dict[str, Any]:
    def is_disabled(_: int, body: Any) -> bool:
        return (body["probe"] or {}).get("state") == "disabled"

    probe: dict[str, Any] = (await agent.wait_answer("/debug/state", is_disabled))["probe"]
    return probe


@pytest.mark.parametrize(
    ("lacks", "attempts"),
    [(a_no_headers, 0), (b_other_headers, 0), (c_lockdown, 0), (d_capability, 0), (e_compiler, 1)],
)
async def test_without_the_probe_the_agent_works_and_finds_holders_by_proc(
    machine: OtherMachine, lacks: Callable[[OtherMachine], tuple[str, list[str]]], attempts: int
) -> None:
    code, named = lacks(machine)
    async with simulated_node() as node:
        SimulatedProcesses(node).add(700, 0)
        flags = {"probe_tier": "auto", "probe_loader": "bcc", "poll": "200ms", "log_level": "info"}
        async with agent_process(node, launcher=machine.launcher(), **flags) as agent:
            await wait_allocatable(node.kubelet, 4, capacity=4)

            probe = await wait_disabled(agent)
            assert probe["code"] == code
            assert [word for word in named if word not in probe["message"]] == []
            contexts = await agent.wait_answer("/v1/contexts", lambda _, body: bool(body["processes"]))
            assert [each["pid"] for each in contexts["processes"]] == [700]
            assert contexts["seen_by"] == "proc"
            assert contexts["processes"][0]["gpus"][0]["contexts"] is None

            await wait_polls(node, 10)
            assert machine.compilations == attempts
            (line,) = [line for line in agent.log if line["message"].startswith(MESSAGE)]
            assert (line["level"], line["code"]) == ("warning", code)
            assert sum("u33" in line for line in agent.text.splitlines()) <= 1
            assert (await agent.get("/healthz"))[0] == 200
            assert (await node.kubelet.run_pod("train", "ml", {"main": {GPU: 1}})).running
            assert not [line for line in agent.log if line["level"] == "error"], agent.text
            assert agent.process.returncode is None


async def test_the_output_of_the_compiler_is_there_on_request(machine: OtherMachine) -> None:
    e_compiler(machine)
    async with simulated_node() as node:
        flags = {"probe_tier": "auto", "probe_loader": "bcc", "log_level": "debug"}
        async with agent_process(node, launcher=machine.launcher(), **flags) as agent:
            line = await agent.wait_logged(
                lambda line: line["message"].startswith("Output of the probe's loader: ")
            )

            assert line["level"] == "debug"
            assert line["detail"].count("u33") > 1
