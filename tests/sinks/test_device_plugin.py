"""The device-plugin sink against a client and a kubelet on another HTTP/2 stack."""

from pathlib import Path

from agent.model.facts import Registered, WatchersChanged
from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as pb
from tests.sinks.offers import GPU, node, uuid
from tests.sinks.registrar import plugin, registrar
from tests.sinks.serving import sink


async def test_a_registered_resource_is_served_and_watched(tmp_path: Path) -> None:
    async with registrar(tmp_path) as kubelet, sink(tmp_path) as served:
        served.register()
        fact = await served.wait_fact(Registered)
        assert isinstance(fact, Registered)
        assert (fact.resource, fact.generation) == (GPU, 1)
        async with plugin(tmp_path / kubelet.requests[0].endpoint) as stub:
            stream = stub.ListAndWatch(pb.Empty())
            first = await stream.read()
            assert [entry.ID for entry in first.devices] == [uuid(number) for number in range(8)]
            assert await served.wait_fact(WatchersChanged) == WatchersChanged(GPU, 1, 1)
            served.latest.publish(node(sick=[3]))
            second = await stream.read()
            assert [entry.health for entry in second.devices].count("Unhealthy") == 1
            stream.cancel()
            assert await served.wait_fact(WatchersChanged) == WatchersChanged(GPU, 1, 0)
