"""The driver's words on an XID beside its number."""

from typing import Final, Literal

import msgspec

NvlinkSeverity = Literal["fatal", "nonfatal"]


class XidWords(msgspec.Struct, frozen=True):
    """What the text of an XID adds to its number, as far as a verdict rests on it."""

    severity: NvlinkSeverity | None = None
    """Of an NVLink 5 error (XIDs 144 to 150)."""
    unit: str = ""
    """The part of the NVLink unit that reported it: ``RLW_REMAP``."""
    sub_code: int | None = None
    reset: bool | None = None
    """Of a memory error (XIDs 94 and 95): whether the driver wants the GPU to be reset."""
    action: int | None = None
    """Of XID 154: the recovery action from now on, numbered as NVML field 230."""


NO_WORDS: Final = XidWords()
