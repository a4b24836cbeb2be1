"""The simulated NVML: a libnvidia-ml.so.1 that real clients load, and the state that holds its answers.

`install_library(node)` puts the library into a node directory, `NvmlState` makes and changes the state beside
it. The library finds the state by GPU_AGENT_SIM_STATE, else as `../nvml.state` from where it was loaded.
"""

from agent.simulation.nvml.control import NvmlStateError
from agent.simulation.nvml.library import (
    SONAME,
    STATE_NAME,
    STATE_VARIABLE,
    LibraryNotBuiltError,
    install_library,
    library_path,
)
from agent.simulation.nvml.state import EventTimes, GpuProcess, NvmlState

__all__ = [
    "SONAME",
    "STATE_NAME",
    "STATE_VARIABLE",
    "EventTimes",
    "GpuProcess",
    "LibraryNotBuiltError",
    "NvmlState",
    "NvmlStateError",
    "install_library",
    "library_path",
]
