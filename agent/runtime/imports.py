"""Imports that wait until they are needed; by a thread, so that the loop turns meanwhile.

What the kubelet waits for comes first. What is heavy and can wait is not imported at the start, because a
plugin that starts slowly leaves a node without GPUs for longer.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent.runtime.config_watch import ConfigWatch
    from agent.runtime.control import Control
    from agent.runtime.report import SelfReport
    from agent.sinks.eventlog import EventLog
    from agent.sinks.evidence import EvidenceSink
    from agent.sinks.http import HttpSink
    from agent.sinks.statefile import StateFile


def import_plugin() -> None:
    """Import what offers devices to the kubelet."""
    import agent.sinks.cdi  # noqa: PLC0415
    import agent.sinks.device_plugin  # noqa: PLC0415
    import agent.sources.kubelet  # noqa: F401, PLC0415


def import_state_file() -> "type[StateFile]":
    """Import what keeps the state."""
    from agent.sinks.statefile import StateFile  # noqa: PLC0415

    return StateFile


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


def import_http() -> "tuple[type[HttpSink], type[SelfReport], type[Control]]":
    """Import what answers over HTTP."""
    from agent.runtime.control import Control  # noqa: PLC0415
    from agent.runtime.report import SelfReport  # noqa: PLC0415

    with _no_certificates():
        from agent.sinks.http import HttpSink  # noqa: PLC0415

    return HttpSink, SelfReport, Control


@contextlib.contextmanager
def _no_certificates() -> Iterator[None]:
    """Hide the machine's certificates, which aiohttp loads for its client when it is imported.

    The agent only serves with it, and they cost 2 MiB and as much CPU as a fifth of the start. Whoever makes
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
