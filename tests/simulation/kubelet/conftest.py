"""An emulated kubelet, and a plugin registered with it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.simulation.kubelet import EmulatedKubelet
from tests.contract.reference_plugin import ReferencePlugin
from tests.simulation.kubelet.plugins import GPU, plugin_for


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[EmulatedKubelet]:
    async with EmulatedKubelet(tmp_path / "dp", tmp_path / "pr") as emulated:
        yield emulated


@pytest.fixture
async def plugin(kubelet: EmulatedKubelet) -> AsyncIterator[ReferencePlugin]:
    """A plugin that serves and is registered, with four healthy devices."""
    async with plugin_for(kubelet) as made:
        await made.register()
        await kubelet.wait_for(lambda seen: seen.allocatable(GPU) == 4)
        yield made
