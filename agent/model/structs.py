"""``replace`` of structs, with its keywords checked: mypy knows those of ``dataclasses.replace`` only."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataclasses import replace
else:
    from msgspec.structs import replace

__all__ = ["replace"]
