"""A GPU node agent: device plugin, health and preflight in one asyncio process."""

from typing import Final

__version__: Final = "0.1.0"
