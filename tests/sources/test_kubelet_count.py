"""The kubelet's own count of devices, polled from the emulated kubelet."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from agent.bus import Latest
from agent.model.components import KUBELET_COUNT
from agent.model.facts import KubeletCounted
from agent.model.ids import ComponentId, DeviceId, ResourceName
from agent.model.snapshot import RegistrationPhase, Snapshot
from agent.model.structs import replace
from agent.proofs import Proofs
from agent.simulation.kubelet import EmulatedKubelet
from agent.sources.kubelet_count import KubeletCountSource
from tests.harness import short_directory
from tests.simulation.kubelet.plugins import GPU, four, plugin_for
from tests.sinks.snapshots import node
from tests.sources.recorder import Recorder, until

SOON_NS = 10_000_000
PERIOD_NS = 30_000_000
NEVER_NS = 3_600_000_000_000


def registered(*, counted: bool | None = None) -> Snapshot:
    state = node()
    each = replace(state.resources[0], phase=RegistrationPhase.REGISTERED, counted=counted)
    return replace(state, resources=(each,))


@asynccontextmanager
async def asking(
    recorder: Recorder, socket: Path, latest: Latest[Snapshot], *, period_ns: int = PERIOD_NS
) -> AsyncIterator[Proofs]:
    proofs = Proofs(clock=time.monotonic_ns)
    source = KubeletCountSource(
        inbox=recorder.inbox,
        latest=latest,
        socket=socket,
        clock=time.monotonic_ns,
        proofs=proofs,
        period_ns=period_ns,
        soon_ns=SOON_NS,
    )
    task = asyncio.get_running_loop().create_task(source.run(), name="count")
    try:
        yield proofs
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_healthy_devices_are_counted_soon_after_a_list_was_sent_and_then_seldom(
    recorder: Recorder,
) -> None:
    with short_directory() as directory:
        async with (
            EmulatedKubelet(directory / "dp", directory / "pr") as kubelet,
            plugin_for(kubelet) as plugin,
        ):
            await plugin.register()
            await plugin.send(four("a"))
            await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 3)
            latest = Latest(node())
            async with asking(
                recorder, directory / "pr" / "kubelet.sock", latest, period_ns=NEVER_NS
            ) as proofs:
                latest.publish(registered())
                await recorder.at_least(1, KubeletCounted)
                assert ComponentId(KUBELET_COUNT) in proofs.expected()
                latest.publish(registered(counted=True))
                begun = len(recorder.of(KubeletCounted))
                latest.publish(registered(counted=False))
                await recorder.at_least(begun + 1, KubeletCounted)
            counted = recorder.of(KubeletCounted)[-1]
            assert counted.healthy == {ResourceName(GPU): frozenset(map(DeviceId, "bcd"))}


@pytest.mark.parametrize("version", [(1, 20), None])
async def test_a_kubelet_that_cannot_count_is_waited_for_with_one_line(
    recorder: Recorder, caplog: pytest.LogCaptureFixture, version: tuple[int, int] | None
) -> None:
    """None: there is no kubelet."""
    with short_directory() as directory, caplog.at_level(logging.INFO):
        present = version is not None
        async with EmulatedKubelet(
            directory / "dp", directory / "pr", version=version or (1, 36), present=present
        ) as kubelet:
            latest = Latest(registered())
            async with asking(recorder, directory / "pr" / "kubelet.sock", latest) as proofs:
                await until(lambda: "which devices it has" in caplog.text)
                assert not proofs.expected()
                if not present:
                    await kubelet.start()
                    await recorder.at_least(2, KubeletCounted)
                    assert ComponentId(KUBELET_COUNT) in proofs.expected()
        assert len([each for each in caplog.records if "which devices it has" in each.message]) == 1
        assert bool(recorder.of(KubeletCounted)) is not present


async def test_nothing_is_asked_before_anything_is_registered(recorder: Recorder) -> None:
    with short_directory() as directory:
        async with EmulatedKubelet(directory / "dp", directory / "pr"):
            latest = Latest(node())
            async with asking(recorder, directory / "pr" / "kubelet.sock", latest):
                for _ in range(20):
                    latest.publish(node())
                    await asyncio.sleep(0)
                assert not recorder.of(KubeletCounted)
                latest.publish(registered())
                await recorder.at_least(1, KubeletCounted)
