"""A real character device that stands for a GPU, and a probe on it whose source is followed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.probe.loaded import OBJECT
from agent.probe.request import Request
from agent.sources.ebpf.rounds import EbpfSettings
from tests.probe.conftest import (
    DOUBLES,
    MISC_MAJOR,
    QUIET_MINORS,
    make_node,
    quicker_loader,
    why_no_bcc,
    why_no_probe,
)
from tests.probe.watcher import SETTINGS, Watcher, watching


def stand_in(folder: Path) -> Path:
    """Make the device; skips where there can be none, or no probe."""
    if why := why_no_probe():
        pytest.skip(why)
    if not OBJECT.exists() and (why := why_no_bcc(folder)):
        pytest.skip(why)
    for minor in QUIET_MINORS:
        if made := make_node(folder / "nvidia0", MISC_MAJOR, minor):
            return made
    pytest.skip("no character device can be made here that would do for a GPU")


class _NoBooks:
    """The device keeps none."""

    folder = Path()

    async def books(self) -> Any:
        raise AssertionError


@asynccontextmanager
async def watched(settings: EbpfSettings = SETTINGS, /, **request: Any) -> AsyncIterator[Watcher]:
    """Follow the probe, which is loaded with these values of a request."""
    async with watching(
        _NoBooks(), (), Request(loader=quicker_loader(), doubles=DOUBLES, **request), settings=settings
    ) as watcher:
        yield watcher
