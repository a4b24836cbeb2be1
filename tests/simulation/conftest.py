"""A simulated NVML node to play with: its state, its library and pynvml on it."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from agent.simulation.nvml import STATE_NAME, NvmlState, NvmlStateError, install_library
from agent.simulation.presets import NodeSpec, load_preset
from tests.harness import short_directory
from tests.simulation.nvml_clients import nvml_in_process


@dataclass(frozen=True, slots=True)
class SimulatedNvml:
    state: NvmlState
    library: Path
    spec: NodeSpec


@pytest.fixture
def make_nvml(tmp_path: Path) -> Iterator[Callable[..., SimulatedNvml]]:
    made: list[NvmlState] = []

    def make(node: object = "dgx-h100") -> SimulatedNvml:
        directory = tmp_path / f"node{len(made)}"
        directory.mkdir()
        spec = load_preset(node)  # type: ignore[arg-type]
        made.append(NvmlState.create(directory / STATE_NAME, spec))
        return SimulatedNvml(made[-1], install_library(directory), spec)

    yield make
    for state in made:
        with contextlib.suppress(NvmlStateError):  # the test closed it
            state.clear_faults()
        state.close()


@pytest.fixture
def nvml(make_nvml: Callable[..., SimulatedNvml]) -> SimulatedNvml:
    """A DGX H100."""
    return make_nvml()


@pytest.fixture
def client(nvml: SimulatedNvml) -> Iterator[ModuleType]:
    """The real pynvml, initialised on that node."""
    with nvml_in_process(nvml.library) as pynvml:
        pynvml.nvmlInit()
        yield pynvml


@pytest.fixture
def node_dir() -> Iterator[Path]:
    """Where a simulated node is to be."""
    with short_directory() as parent:
        yield parent / "node"
