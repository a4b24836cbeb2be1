"""Fault 9: the probe cannot be loaded, for each of the reasons there are.

Right: the agent runs without it, and its status names the capability, package, kernel or mount that is
missing. That a loader is killed is fault 16; every code of the loader by itself is in tests/probe.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import GPU, ROOT, AgentProcess, agent_process, gpu_agent, simulated_node, wait_allocatable
from tests.other_machine import KERNEL_SIDE, OtherMachine, why_no_other_machine
from tests.probe.conftest import why_no_bcc, why_no_probe

pytestmark = pytest.mark.slow

Lacks = Callable[[OtherMachine, Path], tuple[str, str]]
"""Takes something away; returns the code, and a word of the sentence."""


@pytest.fixture(autouse=True)
def _possible() -> None:
    if why := why_no_other_machine() or why_no_probe():
        pytest.skip(why)


@pytest.fixture
def machine(tmp_path: Path) -> OtherMachine:
    return OtherMachine(tmp_path / "machine")


def no_capability(machine: OtherMachine, _: Path) -> tuple[str, str]:
    machine.without = ["perfmon", "sys_admin"]
    return "missing_capability", "CAP_PERFMON"


def an_old_kernel(machine: OtherMachine, _: Path) -> tuple[str, str]:
    machine.has_release("5.4.0-89-generic")
    return "bpf_unsupported", "needs Linux 5.8"


def no_headers(machine: OtherMachine, _: Path) -> tuple[str, str]:
    machine.has_headers()
    return "kernel_headers_missing", "linux-headers-"


def no_trace_file_system(machine: OtherMachine, _: Path) -> tuple[str, str]:
    machine.hide(f"{KERNEL_SIDE}/tracing", f"{KERNEL_SIDE}/debug")
    # With it the loader would mount one for itself.
    machine.without = ["sys_admin"]
    return "tracefs_missing", "mount -t tracefs"


def no_bcc(machine: OtherMachine, _: Path) -> tuple[str, str]:
    machine.hide("/usr/lib/python3/dist-packages")
    return "bcc_missing", "python3-bpfcc"


def a_verifier_that_rejects(machine: OtherMachine, scratch: Path) -> tuple[str, str]:
    if why := why_no_bcc(scratch):
        pytest.skip(why)
    changed = scratch / "bpf"
    shutil.copytree(ROOT / "bpf", changed)
    source = changed / "calls.h"
    text, bound = source.read_text(), "if (call.size > sizeof(block))"
    assert bound in text
    source.write_text(text.replace(bound, "if (call.size > 4096)"))
    machine.show(ROOT / "bpf", changed)
    return "verifier_refused", "verifier rejected the probe"


EVERY: tuple[Lacks, ...] = (
    no_capability,
    an_old_kernel,
    no_headers,
    no_trace_file_system,
    no_bcc,
    a_verifier_that_rejects,
)


@pytest.fixture(params=EVERY, ids=[each.__name__ for each in EVERY])
def lacking(
    request: pytest.FixtureRequest, machine: OtherMachine, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, str]:
    code_and_word: tuple[str, str] = request.param(machine, tmp_path_factory.mktemp("scratch"))
    return code_and_word


async def wait_off(agent: AgentProcess) -> dict[str, Any]:
    def is_off(_: int, body: Any) -> bool:
        return bool(body["probe"]) and body["probe"]["state"] == "disabled"

    probe: dict[str, Any] = (await agent.wait_answer("/debug/state", is_off))["probe"]
    return probe


async def test_the_agent_runs_without_the_probe_and_names_what_is_missing(
    machine: OtherMachine, lacking: tuple[str, str]
) -> None:
    code, word = lacking
    async with simulated_node() as node:
        flags = {"probe_tier": "syscalls", "probe_loader": "bcc", "poll": "200ms"}
        async with agent_process(node, launcher=machine.launcher(), **flags) as agent:
            await wait_allocatable(node.kubelet, 4, capacity=4)
            probe = await wait_off(agent)

            assert (probe["code"], probe["tier"]) == (code, "procfs")
            assert word in probe["message"]
            assert "\n" not in probe["message"]
            assert (await node.kubelet.run_pod("train", "ml", {"main": {GPU: 1}})).running
            node.nvml.push_xid(3, 79)
            await wait_allocatable(node.kubelet, 3)
            assert (await agent.get("/livez"))[0] == 200
            await agent.wait_answer("/readyz", lambda status, _: status == 200)
            assert not [line for line in agent.log if line["level"] == "error"], agent.text
            socket = f"--control-socket={node.directory.agent / 'control.sock'}"
            shown = await gpu_agent("status", socket)
            assert f"off ({code}): " in shown.out
            assert word in shown.out
            assert await agent.stop() == 0
