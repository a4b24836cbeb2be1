"""What tests with a grpcio client need."""

import grpc.aio
import pytest


@pytest.fixture(scope="session", autouse=True)
def _grpcio_stays_up() -> None:
    """Keep grpcio's poller for the session; else it is joined wherever its last channel is collected."""
    grpc.aio.init_grpc_aio()
