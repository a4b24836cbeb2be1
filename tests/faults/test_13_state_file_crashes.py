"""Fault 13: a crash at every step of writing the state file, bit flips and truncation.

Right: an old or the new state, never a mix; what is damaged is ignored with one error.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.files import write
from agent.model.snapshot import Durable
from agent.model.structs import replace
from agent.simulation.node import SimulatedNode
from agent.sinks import statefile, statefile_format
from tests.harness import GPU, agent_process, codes, gpu_agent, simulated_node, uuids, wait_allocatable
from tests.sinks.stored_states import BOOT, U1, UNHEALTHY, gpu

OLD = Durable(gpus=(gpu(U1),))
STEPS = ("open", "write", "fsync", "close")


class CrashError(Exception):
    """Stands for the end of the process: nothing after it is done."""


class CrashingSystem:
    """The system calls of a write, of which the n-th does not happen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, at: int, error: Exception) -> None:
        self._left = at
        self._error = error
        for name in STEPS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))
        monkeypatch.setattr(Path, "replace", self._wrap(Path.replace))

    def _wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            if self._left == 0:
                raise self._error
            self._left -= 1
            return call(*arguments, **named)

        return wrapped


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "state.json")
    write(path, statefile_format.encoded(OLD, boot_id=BOOT))
    return path


@pytest.mark.parametrize("step", range(12))
@pytest.mark.parametrize("error", [CrashError(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_crash_at_any_step_leaves_the_old_or_the_new_state(
    path: str, step: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = statefile_format.encoded(UNHEALTHY, boot_id=BOOT)
    with monkeypatch.context() as patched:
        CrashingSystem(patched, at=step, error=error)
        try:
            write(path, raw)
        except (CrashError, OSError):
            expected: tuple[Durable, ...] = (OLD, UNHEALTHY)
        else:
            expected = (UNHEALTHY,)
    assert statefile.load(path, boot_id=BOOT) in expected


def test_a_torn_write_leaves_the_old_state(path: str) -> None:
    Path(f"{path}.new").write_bytes(statefile_format.encoded(UNHEALTHY, boot_id=BOOT)[:100])
    assert statefile.load(path, boot_id=BOOT) == OLD
    write(path, statefile_format.encoded(UNHEALTHY, boot_id=BOOT))
    assert statefile.load(path, boot_id=BOOT) == UNHEALTHY


def test_no_truncation_is_taken_for_a_state(path: str) -> None:
    raw = statefile_format.encoded(UNHEALTHY, boot_id=BOOT)
    for length in range(0, len(raw) - 1, 7):
        Path(path).write_bytes(raw[:length])
        loaded = statefile.load(path, boot_id=BOOT)
        assert loaded is not None
        assert loaded == Durable(lost=loaded.lost) != Durable()


def test_no_flipped_bit_is_taken_for_another_state(path: str) -> None:
    state = replace(UNHEALTHY, gpus=UNHEALTHY.gpus[:1], xids=())
    raw = statefile_format.encoded(state, boot_id=BOOT)
    for position in range(0, len(raw) * 8, 13):
        flipped = bytearray(raw)
        flipped[position // 8] ^= 1 << (position % 8)
        Path(path).write_bytes(flipped)
        loaded = statefile.load(path, boot_id=BOOT)
        assert loaded is not None
        assert loaded == state or loaded == Durable(lost=loaded.lost) != Durable()


# A running agent


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


async def held(node: SimulatedNode) -> tuple[Path, Path]:
    """Run an agent that holds a GPU to its end; return the file and its copy."""
    async with agent_process(node) as agent:
        await wait_allocatable(node.kubelet, 4)
        await agent.wait_answer("/readyz", lambda code, _: code == 200)
        socket = node.directory.agent_flags()["control-socket"]
        done = await gpu_agent("hold", "2", "--why", "fan", "--control-socket", socket)
        assert done.status == 0, done.err
        assert await agent.stop() == 0
    file = Path(node.directory.agent_flags()["state-dir"], "state.json")
    return file, file.with_name("state.json.copy")


@pytest.mark.slow
async def test_a_state_that_is_damaged_twice_is_lost_aloud_until_it_is_acknowledged() -> None:
    async with simulated_node() as node:
        file, copy = await held(node)
        flip(file)
        async with agent_process(node) as agent:
            await wait_allocatable(node.kubelet, 3, capacity=4)
            assert await agent.stop() == 0
        flip(file)
        flip(copy)
        async with agent_process(node) as agent:
            await wait_allocatable(node.kubelet, 4)
            preflight = await agent.wait_answer("/preflight", lambda _, body: "state_lost" in codes(body))
            (reason,) = [each for each in preflight["reasons"] if each["code"] == "state_lost"]
            assert "is damaged" in reason["message"]
            await agent.wait_answer("/readyz?verbose", lambda code, body: code == 500 and "state" in body)
            socket = node.directory.agent_flags()["control-socket"]
            shown = await gpu_agent("status", "--control-socket", socket)
            assert "state_lost" in shown.out
            assert (await gpu_agent("recover", "--state", "--control-socket", socket)).status == 0
            await agent.wait_answer("/preflight", lambda code, _: code == 200)
            await agent.wait_answer("/readyz", lambda code, _: code == 200)
            rejected = await gpu_agent("recover", "--state", "--control-socket", socket)
            assert (rejected.status, "nothing to acknowledge" in rejected.err) == (2, True)


@pytest.mark.slow
async def test_a_state_that_cannot_be_read_is_retried_and_never_written_over() -> None:
    async with simulated_node() as node:
        file, copy = await held(node)
        kept = file.read_bytes()
        for each in (file, copy):
            each.unlink()
            each.mkdir()
        async with agent_process(node) as agent:
            await wait_allocatable(node.kubelet, 4)
            await agent.wait_answer("/preflight", lambda _, body: "state_lost" in codes(body))
            await agent.wait_answer("/readyz", lambda code, _: code == 500)
            assert (file.is_dir(), copy.is_dir()) == (True, True)
            for each in (file, copy):
                each.rmdir()
            file.write_bytes(kept)
            await wait_allocatable(node.kubelet, 3, capacity=4)
            await agent.wait_answer("/readyz", lambda code, _: code == 200)
            assert await agent.stop() == 0
        assert (b'"fan"' in file.read_bytes(), b'"fan"' in copy.read_bytes()) == (True, True)


@pytest.mark.slow
@pytest.mark.parametrize("is_damaged", [True, False], ids=["damaged", "unreadable"])
async def test_without_its_state_an_agent_finds_the_hard_faults_of_this_boot_again(
    *, is_damaged: bool
) -> None:
    """A lost one is not even listed; one that NVML answers for is unhealthy by what the kernel log kept."""
    lost, faulty = 1, 3
    async with simulated_node() as node:
        files = await held(node)
        await node.do("kernel-xid", {"xid": "79", "gpu": str(lost)})
        node.nvml.set_return(None, 15, gpu=lost)
        await node.do("kernel-xid", {"xid": "95", "gpu": str(faulty)})
        for each in files:
            if is_damaged:
                flip(each)
            else:
                each.unlink()
                each.mkdir()
        async with agent_process(node) as agent:
            await wait_allocatable(node.kubelet, 2)
            healthy = node.kubelet.devices(GPU).keys() - set(node.kubelet.unhealthy(GPU))
            assert healthy == set(uuids(node)) - {uuids(node)[lost], uuids(node)[faulty]}
            await agent.wait_answer("/preflight", lambda _, body: codes(body) >= {"state_lost", "xid"})
            await agent.wait_answer("/readyz", lambda code, body: code == 500 and "[-]sink-statefile" in body)
            if is_damaged:
                socket = node.directory.agent_flags()["control-socket"]
                done = await gpu_agent("recover", "--state", "--control-socket", socket)
                assert done.status == 0, done.err
            else:
                for each in files:
                    each.rmdir()
            await agent.wait_answer("/readyz", lambda code, _: code == 200)
            preflight = await agent.wait_answer("/preflight", lambda _, body: "state_lost" not in codes(body))
            assert "xid" in codes(preflight)
            assert node.kubelet.allocatable(GPU) == 2
