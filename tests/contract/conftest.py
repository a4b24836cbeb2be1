"""The kubelet that the contract suite asks: emulated, or a real one with ``--kubelet-dir``.

pytest tests/contract --kubelet-dir /var/lib/kubelet/device-plugins [--pod-resources-dir DIR]
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.simulation.kubelet import EmulatedKubelet
from tests.contract.kubelet_under_test import EmulatedUnderTest, KubeletUnderTest, RealUnderTest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kubelet contract")
    group.addoption(
        "--kubelet-dir",
        metavar="DIR",
        help="device-plugins directory of a running kubelet to ask instead of an emulated one",
    )
    group.addoption(
        "--pod-resources-dir",
        metavar="DIR",
        help="its pod-resources directory (default: beside --kubelet-dir)",
    )


def _option(config: pytest.Config, name: str) -> str | None:
    """Return an option, also in a run of the whole suite, where this file's options are not known."""
    value: str | None = config.getoption(name, default=None)
    return value


@pytest.fixture
async def kubelet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[KubeletUnderTest]:
    """The kubelet under test; an indirect parameter is an emulated one's dial timeout in seconds."""
    directory = _option(request.config, "--kubelet-dir")
    if directory is not None:
        pods = _option(request.config, "--pod-resources-dir") or str(Path(directory).parent / "pod-resources")
        yield RealUnderTest(Path(directory), Path(pods))
        return
    dial_timeout_s: float = getattr(request, "param", 10.0)
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr", dial_timeout_s=dial_timeout_s) as emulated:
        yield EmulatedUnderTest(emulated)
