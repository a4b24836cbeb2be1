"""The raw readings of a GPU in one health poll."""

import msgspec


class GpuSample(msgspec.Struct, frozen=True):
    """Raw readings. None: the GPU or driver does not support it, or it could not be read this time."""

    recovery_action: int | None = None
    """NVML field 230: 0 none, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset, 5 recover the
    IMEX domain, 6 bus reset, 7 system reboot. Source: nvml.h, NVIDIA's recovery-flag document."""
    ecc_uncorrected: int | None = None
    """Uncorrected ECC errors since the driver was loaded (volatile, all memories)."""
    rows_pending: bool | None = None
    """A row remapping waits for the next reset."""
    rows_failed: bool | None = None
    """A row could not be remapped."""
    pages_pending: bool | None = None
    """A page retirement waits for the next reset (GPUs before row remapping)."""
    hw_slowed: bool | None = None
    """Clocks are held down by hardware: slowdown, thermal slowdown or power brake."""
    temperature_celsius: int | None = None
    temperature_limit_celsius: int | None = None
    """Where the GPU slows itself down."""
    links_total: int | None = None
    """NVLinks that the GPU has and the machine connects."""
    links_down: tuple[int, ...] = ()
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_replays: int | None = None
    """PCIe replays since the driver was loaded; a counter for people, no condition."""
    fabric_state: int | None = None
    """0 not supported, 1 not started, 2 in progress, 3 completed. Source: nvml.h."""
    fabric_status: int | None = None
    """NVML return code of the completed fabric registration."""
