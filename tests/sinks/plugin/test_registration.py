"""What the agent reports of a kubelet that it cannot register with."""

import asyncio

import pytest

from agent.sinks.plugin.registration import answers, connect, wait_unserved
from agent.sinks.plugin.socket_file import NotRegisteredError
from tests.full_socket import full
from tests.harness import short_directory
from tests.sinks.raw_http2 import PATIENCE_S


async def test_the_end_of_a_process_that_serves_a_socket_is_waited_for_over_idle_connections() -> None:
    with short_directory() as directory:
        path = directory / "nvidia-gpu.sock"
        opened, closed = [], asyncio.Event()

        async def close_when_idle(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            opened.append(writer)
            if len(opened) > 2:
                await closed.wait()
            writer.close()

        async with await asyncio.start_unix_server(close_when_idle, path) as server:
            waiting = asyncio.get_running_loop().create_task(wait_unserved(path, gap_s=0.01))
            async with asyncio.timeout(PATIENCE_S):
                while len(opened) < 3:
                    await asyncio.sleep(0.001)
                assert not waiting.done()
                server.close()
                closed.set()
                await waiting


async def test_a_kubelet_that_accepts_no_more_connections_is_named() -> None:
    with short_directory() as directory, full(directory / "kubelet.sock") as path:
        with pytest.raises(NotRegisteredError, match=f"accepts no connection on {path}"):
            await connect(path)
        assert not await answers(path, timeout_s=1)
