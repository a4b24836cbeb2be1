"""What an agent begins with: settings that this node can serve, the node's lock, the kernel's boot."""

import logging
import sys
from collections.abc import Mapping
from typing import NamedTuple

from agent import log
from agent.config.settings import Settings
from agent.errors import AlreadyRunningError
from agent.runtime.driver_watch import is_in_container
from agent.runtime.parts_off import (
    PartOff,
    parts_off,
    with_usable_state_dir,
    without_unreadable_log,
)
from agent.runtime.startup import NodeLock, boot_id_of, check_paths, check_rights

_log = logging.getLogger(__name__)


class Beginning(NamedTuple):
    """All that was found before anything runs."""

    settings: Settings
    lock: NodeLock
    """Where another agent holds it, this one is to stand by."""
    boot_id: str
    is_in_container: bool = False
    off: tuple[PartOff, ...] = ()


def begin(settings: Settings, environment: Mapping[str, str]) -> Beginning:
    """Judge the settings and ask for the lock.

    Raises AgentError, one sentence, where the agent cannot start.
    """
    for warning in settings.warnings:
        _log.warning("A setting was ignored: %(detail)s", log.about(detail=warning))
    check_paths(settings)
    in_container = is_in_container(environment)
    settings = with_usable_state_dir(settings, is_in_container=in_container)
    check_rights(settings)
    off = parts_off(settings, is_in_container=in_container)
    if off:
        _log.warning("Some parts are off: %(parts)s", log.about(parts=[str(part) for part in off]))
    lock = NodeLock(settings.lock_path)
    if not lock.try_acquire() and (settings.if_running or _default_if_running()) == "fail":
        raise AlreadyRunningError(
            f"Another agent ({lock.holder()}) runs on this node and holds {settings.lock_path}; "
            "stop it, or wait for its end with --if-running=standby"
        )
    # A part that is off is told as that; it is no source that fails for ever.
    settings = without_unreadable_log(settings)
    return Beginning(settings, lock, boot_id_of(settings.proc_root), in_container, off)


def _default_if_running() -> str:
    return "fail" if sys.stderr.isatty() else "standby"
