"""A gRPC channel over a unix socket of the kubelet, or of the agent.

Guarantees: a peer that accepts no more connections is an OSError, like a missing one. A channel is one
connection: a call after it closed is an OSError too, and reaches no other process at the same path.
"""

import errno
import os
from pathlib import Path

from grpclib.client import Channel
from grpclib.encoding.base import CodecBase
from grpclib.protocol import H2Protocol


class UnixChannel(Channel):
    """Calls the peer by the name of a host, which is the kubelet's own choice.

    grpclib would send an address the peer never had; the kubelet sends ``localhost``
    (kubernetes/kubernetes#112597).
    """

    def __init__(self, path: Path, codec: CodecBase) -> None:
        super().__init__(path=str(path), codec=codec)

    def _get_authority(self, host: str, port: int) -> str:  # noqa: ARG002 - grpclib's signature
        return "localhost"

    async def _create_connection(self) -> H2Protocol:
        if self._protocol is not None:
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        protocol = await super()._create_connection()
        # If the peer's queue is full, connect(2) fails with EAGAIN, which asyncio treats as a
        # connection in progress; the first write has failed by now.
        if protocol.processor.connection.is_closing():
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return protocol
