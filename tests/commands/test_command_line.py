"""Generated from the command line: completions in real shells and the manual; and the page of one GPU."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agent.cli import main as cli
from agent.commands import manual
from agent.commands.describe import page as page_of
from agent.commands.parsers import described
from agent.commands.render import for_people
from agent.commands.table import all_commands
from agent.threads import in_daemon_thread
from tests.harness import PATIENCE_S, clean_environment, flags_of, running, simulated_node

SHELLS = {"bash": ("bash", "-n"), "zsh": ("zsh", "-n"), "fish": ("fish", "--no-execute")}

TRY = """\
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_gpu_agent
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script_of(shell: str, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli(["completion", shell]) == 0
    text = capsys.readouterr().out
    path.write_text(text)
    return text


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_flag_is_in_the_completion_of_each_shell(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script_of(shell, tmp_path / "script", capsys)
    listed = [each for _, each in described()]
    assert {each.command.name for each in listed} == all_commands().keys()
    for each in listed:
        assert each.command.name in text
        for flag in each.flags:
            for name in flag.names:
                assert (name if shell != "fish" else name.lstrip("-")) in text
    if shutil.which(shell):
        subprocess.run([*SHELLS[shell], tmp_path / "script"], check=True)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("de", ["devices", "demo", "describe"]),
        ("devices|--out", ["--output"]),
        ("devices|-o|", ["table", "wide", "json", "yaml", "name"]),
        ("devices|--output|=|j", ["json"]),
        ("completion|", ["bash", "zsh", "fish"]),
        ("hold|--wh", ["--why"]),
        ("hold|", [""]),
        ("run|--mig-", ["--mig-strategy"]),
        ("config|show|--mig-", ["--mig-strategy"]),
        ("config|val", ["validate"]),
        ("cdi|validate|a.y", ["a.yaml"]),
        ("run|--config-file|a", ["a.yaml"]),
        ("run|--config-file|=|a", ["a.yaml"]),
    ],
)
def test_bash_completes_what_the_command_accepts(
    words: str, completed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script_of("bash", tmp_path / "script", capsys)
    (tmp_path / "a.yaml").touch()
    done = subprocess.run(
        ["bash", "--norc", "-c", TRY, "bash", tmp_path / "script", "gpu-agent", *words.split("|")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(done.stdout.splitlines()) == sorted(completed)
    assert done.stderr == ""


def test_the_manual_is_the_committed_one_and_has_no_warnings() -> None:
    text = "\n".join(manual.page()) + "\n"
    page = Path(manual.__file__).parents[1] / "man" / "gpu-agent.1"
    assert text == page.read_text()
    for each in all_commands().values():
        assert f'\n.SS "{each.name}"\n'.replace("-", "\\-") in text
    for command in (["groff", "-man", "-ww", "-z", "-Tutf8"], ["mandoc", "-T", "lint", "-W", "warning"]):
        if shutil.which(command[0]):
            done = subprocess.run([*command, page], capture_output=True, text=True, check=False)
            assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.slow
async def test_the_page_of_a_gpu_has_everything_known_of_it() -> None:
    async with simulated_node("dgx-h100") as node, running(flags_of(node)) as agent:
        await agent.wait_registered()
        await agent.wait_line("Listening", listener="control")
        node.nvml.push_xid(3, 79)
        await agent.wait_line("Allocatable changed", allocatable=7)

        async def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "agent", "describe", *arguments]
            socket = {"GPU_AGENT_CONTROL_SOCKET": agent.flags["control-socket"]}
            return await in_daemon_thread(
                "command",
                lambda: subprocess.run(
                    command, capture_output=True, text=True, check=False, env=clean_environment() | socket
                ),
            )

        document: dict[str, Any] = {}
        async with asyncio.timeout(PATIENCE_S):
            while not document or not document["gpu"]["sample"]:
                document = json.loads((await ask("3", "-o", "json")).stdout)
        gpu = document["gpu"]
        assert [each["code"] for each in document["conditions"]] == ["xid"]
        for name in (gpu["uuid"].upper(), gpu["pci"], gpu["pci"].removeprefix("0000:"), gpu["serial"]):
            assert json.loads((await ask(name, "-o", "json")).stdout)["gpu"]["uuid"] == gpu["uuid"]
        text = (await ask("3")).stdout
        for known in (
            "GPU 3: NVIDIA H100 80GB HBM3",
            gpu["serial"],
            "next step: reset the GPU or reboot the node",
            f"nvidia.com/gpu  {gpu['uuid']}  unhealthy",
            "XID 79  1",
            f"GPU 3 ({gpu['pci']}) is unhealthy: XID 79: GPU has fallen off the bus",
            "Temperature ",
        ):
            assert known in text
        rejected = await ask("99")
        assert (rejected.returncode, rejected.stdout) == (2, "")
        assert '"99" is no GPU of this node; it has 0, 1, 2, 3, 4, 5, 6, 7' in rejected.stderr


def test_no_untrusted_text_reaches_the_terminal_of_a_page_raw() -> None:
    hostile = "x\x1b[2J\r\x9b1m"
    gpu: dict[str, Any] = dict.fromkeys(("part_number", "vbios", "inforom", "numa_node", "sample"))
    gpu |= {"uuid": "GPU-1", "pci": "0000:01:00.0", "index": 0, "serial": hostile, "model": hostile}
    gpu |= {"health": "healthy", "present": True, "memory_bytes": 1, "mig_enabled": False, "xids": {}}
    empty: dict[str, Any] = {name: [] for name in ("devices", "conditions", "owners", "events")}
    lines = page_of(for_people({"gpu": gpu, "held": {"0": hostile}, **empty}), now_ns=0)
    assert all(line.isprintable() for line in lines)
    assert os.linesep not in "".join(lines)
