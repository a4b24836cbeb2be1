"""A1, bottlerocket-os/bottlerocket#4250: the kubelet's own socket is taken for a restart."""

import asyncio
import os
from pathlib import Path

import pytest

from tests.harness import GPU, accepted, agent_process, codes, nothing_more, simulated_node, wait_allocatable


def create_again(socket: Path) -> None:
    """Deliver another create event for the same inode, like a late inotify event."""
    kept = socket.with_name("kept")
    os.link(socket, kept)
    socket.unlink()
    os.link(kept, socket)
    kept.unlink()


@pytest.mark.slow
async def test_a_second_create_event_for_the_same_socket_is_no_kubelet_restart() -> None:
    async with simulated_node("4x-t4", kubelet_present=False) as node, agent_process(node):
        await asyncio.sleep(0.2)
        await node.kubelet.start()
        await node.kubelet.wait_for(lambda kubelet: accepted(kubelet) == 1, 30)
        before = node.directory.kubelet_socket.stat().st_ino
        await asyncio.sleep(0.05)
        create_again(node.directory.kubelet_socket)

        assert node.directory.kubelet_socket.stat().st_ino == before
        await nothing_more(
            node.kubelet, lambda kubelet: len(kubelet.registrations) > 1 or bool(kubelet.stream_ends), 1.5
        )
        assert (node.kubelet.capacity(GPU), node.kubelet.allocatable(GPU)) == (4, 4)


async def test_a_new_socket_is_answered_with_exactly_one_more_registration() -> None:
    async with simulated_node("4x-t4", kubelet_present=False) as node, agent_process(node) as agent:
        await asyncio.sleep(0.2)
        await node.kubelet.start()
        await wait_allocatable(node.kubelet, 4)
        own = node.directory.device_plugins / "nvidia-gpu.sock"
        await node.kubelet.restart(rejecting_s=0.2)

        await wait_allocatable(node.kubelet, 4, capacity=4)
        await nothing_more(node.kubelet, lambda kubelet: len(kubelet.registrations) > 2, 1)
        assert len(node.kubelet.registrations) == 2
        assert own.is_socket()
        assert agent.process.returncode is None


async def test_before_the_kubelet_is_there_the_agent_waits_and_preflight_names_it() -> None:
    async with simulated_node("4x-t4", kubelet_present=False) as node, agent_process(node) as agent:
        answer = await agent.wait_answer(
            "/preflight", lambda status, body: status == 503 and "kubelet_unavailable" in codes(body)
        )

        assert answer["ready"] is False
        assert agent.process.returncode is None
        assert not [line for line in agent.log if line["level"] == "error"]
