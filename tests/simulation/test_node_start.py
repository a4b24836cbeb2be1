"""The errors where a simulated node cannot be made, is stopped before, or has less than is asked for."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agent.errors import AgentError
from agent.simulation.children import environment_of_children
from agent.simulation.directory import NodeDirectory
from agent.simulation.node import SimulatedNode
from agent.simulation.presets import load_preset
from tests.harness import ROOT, short_directory
from tests.killed_runs import WITH_US
from tests.sources.recorder import PATIENCE_S, until


async def test_a_directory_that_takes_no_files_is_named_in_one_sentence() -> None:
    with short_directory() as place, NodeDirectory.hold(place / "node") as directory:
        directory.library.parent.rmdir()
        directory.library.parent.touch()
        with pytest.raises(AgentError, match=rf"cannot be made in {directory.path}: File exists; choose"):
            await SimulatedNode(directory, load_preset("4x-t4")).__aenter__()


def test_no_program_that_lies_in_the_working_directory_is_run(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('run by mistake')", encoding="utf-8")
    command = [sys.executable, "-m", "agent", "version"]
    environment = environment_of_children(os.environ, ())
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
async def test_a_scenario_that_is_stopped_before_it_begins_was_not_played() -> None:
    with short_directory() as place:
        arguments = ("demo", "--scenario=cdi", "--json", f"--node-dir={place / 'node'}")
        demo = await asyncio.create_subprocess_exec(
            *(*WITH_US, sys.executable, "-m", "agent", *arguments), cwd=ROOT, stderr=asyncio.subprocess.PIPE
        )
        await until((place / "node").exists)
        demo.send_signal(signal.SIGTERM)
        _, reported = await asyncio.wait_for(demo.communicate(), PATIENCE_S)
        assert (demo.returncode, reported) == (1, b"gpu-agent: Scenario cdi was interrupted\n")
