"""What tests with a grpcio client need."""

import asyncio
from collections.abc import Iterator

import grpc.aio
import pytest


@pytest.fixture(scope="session", autouse=True)
def _grpcio_stays_up() -> Iterator[None]:
    """Keep grpcio's poller for the session; else it is joined wherever its last channel is collected.

    It is made for a loop, and after other tests there is none in this thread.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    grpc.aio.init_grpc_aio()
    asyncio.set_event_loop(None)
    yield
    loop.close()
