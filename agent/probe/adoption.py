"""Adopts a probe that an earlier agent pinned in the kernel, or the rows of its maps; it blocks."""

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass

from agent.errors import ProbeLoadError
from agent.log import fields
from agent.probe.pins import About, Kept, Pins, PinsUnusableError
from agent.probe.probe import Probe
from agent.probe.request import Reply, Request

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Adopted:
    """A probe that can be used as it is, or the maps of one that cannot, or neither."""

    probe: Probe | None
    maps: dict[str, int]

    def keep(self, probe: Probe, request: Request) -> None:
        """Copy the rows of the maps to a probe, and pin it for the next agent if requested."""
        try:
            if self.maps:
                probe.copy_rows_of(self.maps)
        except OSError as error:
            _log.warning(
                f"Copying the rows of the earlier probe failed: {error}",
                extra=fields(reason=str(error)),
            )
        if request.pins:
            probe.keep(Pins(request.pins))
        self.close()

    def close(self) -> None:
        """Close the maps."""
        _close(self.maps.values())


def adopt(request: Request, instead_of: Probe | None = None) -> Adopted:
    """Return the earlier agent's probe if it matches the request, else its maps; or those of another."""
    if instead_of is not None:
        return Adopted(None, {name: os.dup(descriptor) for name, descriptor in instead_of.maps.items()})
    pins = Pins(request.pins)
    try:
        kept = pins.adopt()
        if kept is not None:
            if _suits(kept.about, request):
                return Adopted(_probe(kept, request), {})
            _close(kept.descriptors)
    except PinsUnusableError as error:
        _log.warning(
            f"The probe that an earlier agent pinned is unusable: {error}; loading a new one",
            extra=fields(reason=str(error)),
        )
    return Adopted(None, pins.older_maps())


def _probe(kept: Kept, request: Request) -> Probe:
    try:
        values = kept.about.reply
        names = {name: tuple(values[name]) for name in ("maps", "programs", "attached")}
        return Probe(Reply(**{**values, **names}), kept.descriptors, request, modules=kept.about.modules)
    except (ProbeLoadError, TypeError) as error:
        _close(kept.descriptors)
        raise PinsUnusableError(str(error)) from error


def _suits(about: About, request: Request) -> bool:
    """Return whether a probe equals the one that would be loaded now."""
    return (
        request.tier in {"auto", about.reply.get("tier")}
        and request.loader in {"auto", about.reply.get("loader")}
        and about.sizes == (request.ring_bytes, request.processes)
    )


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
