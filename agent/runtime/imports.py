"""Imports that wait until they are needed; by a thread, so that the loop turns meanwhile.

What the kubelet waits for comes first. What is heavy and can wait is not imported at the start, because a
plugin that starts slowly leaves a node without GPUs for longer.
"""

import asyncio
from typing import TYPE_CHECKING, Final

from agent.bus import Latest
from agent.model.snapshot import RegistrationPhase, Snapshot

if TYPE_CHECKING:
    from agent.runtime.config_watch import ConfigWatch
    from agent.sinks.eventlog import EventLog
    from agent.sinks.evidence import EvidenceSink

REGISTRATION_WAIT_S: Final = 1.0
"""How long what is heavy to import lets the registration go first."""


async def let_registration_go_first(latest: Latest[Snapshot]) -> None:
    """Wait until a resource is registered, or so long that it may take a while."""
    version = latest.version
    try:
        async with asyncio.timeout(REGISTRATION_WAIT_S):
            while not _is_registered(latest.value):
                version = await latest.wait_newer(version)
    except TimeoutError:
        return


def _is_registered(snapshot: Snapshot) -> bool:
    return any(resource.phase is RegistrationPhase.REGISTERED for resource in snapshot.resources)


def import_plugin() -> None:
    """Import what offers devices to the kubelet."""
    import agent.sinks.cdi.sink  # noqa: PLC0415
    import agent.sinks.plugin.sink  # noqa: PLC0415
    import agent.sources.kubelet  # noqa: F401, PLC0415


def import_event_log() -> "type[EventLog]":
    """Import what keeps events on disk."""
    from agent.sinks.eventlog import EventLog  # noqa: PLC0415

    return EventLog


def import_evidence() -> "type[EvidenceSink]":
    """Import what keeps evidence."""
    from agent.sinks.evidence import EvidenceSink  # noqa: PLC0415

    return EvidenceSink


def import_config_watch() -> "type[ConfigWatch]":
    """Import what watches the configuration file."""
    from agent.runtime.config_watch import ConfigWatch  # noqa: PLC0415

    return ConfigWatch
