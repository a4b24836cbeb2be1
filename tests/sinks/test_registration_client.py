"""What the agent is told of a kubelet that it cannot register with."""

import pytest

from agent.sinks.plugin_socket import NotRegisteredError
from agent.sinks.registration_client import answers, connect
from tests.full_socket import full
from tests.harness import short_directory


async def test_a_kubelet_that_takes_no_more_connections_is_named() -> None:
    with short_directory() as directory, full(directory / "kubelet.sock") as path:
        with pytest.raises(NotRegisteredError, match=f"takes no connection on {path}"):
            await connect(path)
        assert not await answers(path, timeout_s=1)
