"""Reading the device instance of a GPU from the driver double."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.errors import NvmlError, SourceError
from agent.model.structs import replace
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.driver_double.nodes import Gpu
from agent.sources.nvml.device_instance import CALL, read_instance, with_instance
from agent.sources.nvml.inventory import DiscoveredGpu, ProbeResult
from agent.sources.nvml.library import Handle, Nvml
from agent.threads import in_daemon_thread
from tests.core.build import gpu
from tests.sources.nvml.test_device_call import Observer, descriptors
from tests.sources.recorder import PATIENCE_S

GPUS = tuple(
    Gpu(
        minor,
        f"GPU-{minor + 1:08x}-0000-4000-8000-000000000000",
        instance,
        f"{minor:04x}:3b:00.0",
        0x233010DE,
    )
    for minor, instance in ((0, 2), (1, 0), (4, 1))
)


@pytest.fixture(params=["515.43.04", "525.60.13", "570.148.08", "595.45.04"])
async def double(request: pytest.FixtureRequest) -> AsyncIterator[DriverDouble]:
    try:
        started = await DriverDouble.start(GPUS, version=request.param)
    except SourceError as error:
        pytest.skip(str(error))
    async with started:
        yield started


async def test_each_minor_has_the_instance_that_the_driver_gave_it(double: DriverDouble) -> None:
    before = descriptors()

    def read() -> dict[int, int | None]:
        return {minor: read_instance(Nvml(Observer()), double.folder, minor) for minor in (0, 1, 3, 4)}

    assert await in_daemon_thread("test-call", read) == {0: 2, 1: 0, 3: None, 4: 1}
    assert descriptors() == before
    books = await double.books()
    assert books.opened["nvidiactl"] == 4
    # The driver receives a close a little later.
    async with asyncio.timeout(PATIENCE_S):
        while books.released["nvidiactl"] < 4:
            books = await double.books()
    assert books.clients == ()


@pytest.mark.parametrize("node", ["none", "device", "folder"])
def test_without_a_driver_the_instance_is_unknown_and_nothing_stays_open(tmp_path: Path, node: str) -> None:
    observer, before = Observer(), descriptors()
    if node == "device":
        (tmp_path / "nvidiactl").symlink_to("/dev/null")
    elif node == "folder":
        (tmp_path / "nvidiactl").mkdir()

    assert read_instance(Nvml(observer), tmp_path, 0) is None
    assert observer.notes == [CALL, "ended"]
    assert descriptors() == before


def test_the_instance_is_read_once_for_each_gpu_that_answered(tmp_path: Path) -> None:
    observer = Observer()
    nvml = Nvml(observer)
    seen = DiscoveredGpu(gpu(0, minor=0), Handle(object()), "00000000:3b:00.0")
    failed = ProbeResult(seen, NvmlError("nvmlDeviceGetName", 15, "lost"))
    without_minor = ProbeResult(replace(seen, gpu=replace(seen.gpu, minor=None)), None)
    for result in (failed, without_minor):
        assert with_instance(result, nvml, tmp_path) is result
    assert observer.notes == []

    first = with_instance(ProbeResult(seen, None), nvml, tmp_path)
    assert with_instance(first, nvml, tmp_path) is first
    assert observer.notes == [CALL, "ended"]
