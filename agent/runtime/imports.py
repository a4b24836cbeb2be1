"""Imports that wait until they are needed; by a thread, so that the loop turns meanwhile.

What the kubelet waits for comes first. What is heavy and can wait is not imported at the start, because a
plugin that starts slowly leaves a node without GPUs for longer.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from agent.bus import Latest
from agent.model.snapshot import RegistrationPhase, Snapshot

if TYPE_CHECKING:
    from agent.runtime.config_watch import ConfigWatch
    from agent.runtime.control import Control
    from agent.sinks.eventlog import EventLog
    from agent.sinks.evidence import EvidenceSink
    from agent.sinks.http.sink import HttpSink
    from agent.sinks.statefile import StateFile

REGISTRATION_WAIT_S: Final = 1.0
"""How long heavy imports wait for the registration."""


async def wait_for_registration(latest: Latest[Snapshot]) -> None:
    """Wait until a resource is registered, at most REGISTRATION_WAIT_S."""
    await latest.wait_for(_is_registered, REGISTRATION_WAIT_S)


def _is_registered(snapshot: Snapshot) -> bool:
    return any(resource.phase is RegistrationPhase.REGISTERED for resource in snapshot.resources)


def import_plugin() -> None:
    """Import what advertises devices to the kubelet."""
    import agent.sinks.cdi.sink
    import agent.sinks.plugin.sink
    import agent.sources.kubelet  # noqa: F401


def import_event_log() -> "type[EventLog]":
    """Import what keeps events on disk."""
    from agent.sinks.eventlog import EventLog

    return EventLog


def import_evidence() -> "type[EvidenceSink]":
    """Import what keeps evidence."""
    from agent.sinks.evidence import EvidenceSink

    return EvidenceSink


def import_config_watch() -> "type[ConfigWatch]":
    """Import what watches the configuration file."""
    from agent.runtime.config_watch import ConfigWatch

    return ConfigWatch


def import_state_file() -> "type[StateFile]":
    """Import what writes the state file."""
    from agent.sinks.statefile import StateFile

    return StateFile


def import_http() -> "tuple[type[HttpSink], type[Control]]":
    """Import the HTTP server and the control socket."""
    from agent.runtime.control import Control

    with _no_certificates():
        from agent.sinks.http.sink import HttpSink

    return HttpSink, Control


@contextlib.contextmanager
def _no_certificates() -> Iterator[None]:
    """Hide the machine's certificates, which aiohttp loads for its client when it is imported.

    The agent only serves with it, and they cost 2 MiB and as much CPU as a fifth of the start. What makes
    a client needs a context of its own. Source: OpenSSL's SSL_CTX_set_default_verify_paths(3).
    """
    nowhere = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}
    before = {name: os.environ.get(name) for name in nowhere}
    os.environ.update(nowhere)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
