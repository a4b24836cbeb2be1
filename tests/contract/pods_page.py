"""What a kubelet shows at /pods on its read-only port, of the emulated one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agent.simulation.kubelet import EmulatedKubelet, PodOutcome


@asynccontextmanager
async def pods_page(kubelet: EmulatedKubelet) -> AsyncIterator[str]:
    """Serve the list of pods; yields its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"kind": "PodList", "items": [_item(pod) for pod in kubelet.pods]}).encode()
        head = f"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/pods"


def _item(pod: PodOutcome) -> dict[str, Any]:
    return {
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "status": {"phase": pod.phase, "reason": pod.reason, "message": pod.message},
    }
