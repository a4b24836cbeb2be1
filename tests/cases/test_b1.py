"""B1 (kubernetes/kubernetes#109081): whatever a client calls the host it connects to, it is answered.

grpclib accepts all of these today; this guards against a release of it, or of h2, that does not.
"""

import asyncio
import urllib.parse
from pathlib import Path

import h2.events
import pytest

from agent.model.facts import Registered, RegistrationFailed
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from tests.sinks.raw_http2 import PATIENCE_S, RawClient, ServerSide, framed, raw_client
from tests.sinks.servers import sink
from tests.sinks.snapshots import uuid

SOCKET = "/var/lib/kubelet/device-plugins/nvidia-gpu.sock"


@pytest.mark.parametrize(
    "authority",
    ["localhost", SOCKET, urllib.parse.quote(SOCKET, safe=""), "", None],
    ids=["localhost", "path", "encoded", "empty", "absent"],
)
async def test_a_call_is_answered_whatever_its_authority(tmp_path: Path, authority: str | None) -> None:
    async with sink(tmp_path) as served:
        served.register()
        await served.wait_fact(RegistrationFailed)
        async with raw_client(served.socket) as client, asyncio.timeout(PATIENCE_S):
            options = await client.request("GetDevicePluginOptions", authority=authority)
            assert await client.wait_status(options) == "0"
            watch = await client.request("ListAndWatch", authority=authority)
            listed = pb.ListAndWatchResponse.FromString(await client.wait_message(watch))
            assert [device.ID for device in listed.devices] == [uuid(number) for number in range(8)]
            _assert_nothing_was_ended(client)


def _assert_nothing_was_ended(client: RawClient) -> None:
    ends = h2.events.StreamReset | h2.events.ConnectionTerminated
    assert not [event for event in client.seen if isinstance(event, ends)]


async def test_the_agents_own_register_call_has_the_authority_localhost(tmp_path: Path) -> None:
    async with ServerSide.listening(tmp_path / "kubelet.sock") as kubelet, sink(tmp_path) as served:
        served.register()
        async with asyncio.timeout(PATIENCE_S):
            stream_id, headers = await kubelet.wait_request()
            assert headers[b":authority"] == b"localhost"
            assert headers[b":path"] == b"/v1beta1.Registration/Register"
            await kubelet.answer(stream_id, framed(b""))
        assert isinstance(await served.wait_fact(Registered, RegistrationFailed), Registered)
