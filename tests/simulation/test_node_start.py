"""What is said where a simulated node cannot be made, is stopped before, or has less than is asked for."""

import asyncio
import signal
import sys

import pytest

from agent.errors import AgentError, UsageError
from agent.simulation.directory import NodeDirectory
from agent.simulation.node import SimulatedNode
from agent.simulation.presets import load_preset
from tests.harness import ROOT, short_directory, simulated_node
from tests.sources.recorder import PATIENCE_S, until


async def test_a_directory_that_takes_no_files_is_named_in_one_sentence() -> None:
    with short_directory() as place, NodeDirectory.hold(place / "node") as directory:
        directory.library.parent.rmdir()
        directory.library.parent.touch()
        with pytest.raises(AgentError, match=rf"cannot be made in {directory.path}: File exists; choose"):
            await SimulatedNode(directory, load_preset("4x-t4")).__aenter__()


async def test_a_process_on_a_node_that_was_made_without_is_no_question_of_rights() -> None:
    async with simulated_node() as node:
        with pytest.raises(UsageError, match="made where a step starts a process"):
            await node.do("process", {"order": "start", "name": "train", "gpu": "0"})


@pytest.mark.slow
async def test_a_scenario_that_is_stopped_before_it_begins_was_not_played() -> None:
    with short_directory() as place:
        arguments = ("demo", "--scenario=cdi", "--json", f"--node-dir={place / 'node'}")
        demo = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agent", *arguments), cwd=ROOT, stderr=asyncio.subprocess.PIPE
        )
        await until((place / "node").exists)
        demo.send_signal(signal.SIGTERM)
        _, told = await asyncio.wait_for(demo.communicate(), PATIENCE_S)
        assert (demo.returncode, told) == (1, b"gpu-agent: Scenario cdi was interrupted\n")
