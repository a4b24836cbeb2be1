"""A driver double and processes on it, for the tests of both; a test is skipped where there can be none."""

import contextlib
import sys
from collections.abc import AsyncIterator

import pytest

from agent.errors import SourceError
from agent.simulation.driver_double.double import DriverDouble
from agent.simulation.driver_double.nodes import Gpu
from agent.simulation.gpu_processes.process import SimulatedProcess

VERSION = "570.148.08"
GPUS = tuple(
    Gpu(
        minor,
        f"GPU-{minor + 1:08x}-0000-4000-8000-000000000000",
        1 - minor,
        f"0000:{minor + 16:02x}:00.0",
        0x233010DE,
    )
    for minor in range(2)
)
"""The driver's own numbers of them are the other way round."""

WITHOUT_FUSE = (
    sys.executable,
    "-c",
    (
        "from agent.simulation.driver_double import __main__, fuse\n"
        "fuse.FUSE_DEVICE = '/nonexistent/fuse'\n__main__.main()"
    ),
)
"""The command of a double on a machine that cannot have it."""


@contextlib.asynccontextmanager
async def running_double(version: str = VERSION) -> AsyncIterator[DriverDouble]:
    try:
        double = await DriverDouble.start(GPUS, version=version)
    except SourceError as error:
        pytest.skip(str(error))
    async with double:
        yield double


async def start_process(
    double: DriverDouble, comm: str = "python", version: str = VERSION
) -> SimulatedProcess:
    return await SimulatedProcess.start(comm, folder=double.folder, version=version, gpus=GPUS)
