"""Reads the configuration again, when asked and when the file changes.

Guarantees: a configuration with a problem changes nothing; the old one stays, why is one line in the log
and shown in health checks and status until a good one is read. What cannot take effect before the next
start is logged each time. One reload at a time; asked for meanwhile, one more follows.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from agent import log
from agent.config.settings import Settings, changes_that_need_a_restart
from agent.errors import ConfigError
from agent.runtime.imports import import_config_watch
from agent.runtime.status import RuntimeStatus
from agent.sinks.notify import Notifier
from agent.threads import in_daemon_thread

_log = logging.getLogger(__name__)


class Reload:
    """Keeps the settings in step with their file."""

    def __init__(
        self,
        settings: Settings,
        *,
        reread: Callable[[], Settings],
        validate: Callable[[Settings], tuple[str, ...]],
        apply: Callable[[Settings], Awaitable[None]],
        status: RuntimeStatus,
        notifier: Notifier,
        prove_watch: Callable[[], object],
        recheck_ns: int,
    ) -> None:
        """Begin with the settings of the start.

        ``reread`` and ``validate`` may block: the one returns new settings, the other why they do not go with
        what is known of the node. ``apply`` puts them into effect, and returns once they are: an XID of after
        READY=1 is evaluated by them.
        """
        self._started = settings
        self._warnings = settings.warnings
        self._reread = reread
        self._validate = validate
        self._apply = apply
        self._prove_watch = prove_watch
        self._recheck_ns = recheck_ns
        self._status = status
        self._notifier = notifier
        self._asked = asyncio.Event()
        self._fingerprint = settings.file_fingerprint

    def ask(self) -> None:
        """Have the configuration read again."""
        self._asked.set()

    async def run(self) -> None:
        """Reload when asked, until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            self._notifier.reloading()
            await self._reload()
            self._notifier.ready()

    async def watch(self, path: str) -> None:
        """Ask for a reload when the file changes, until cancelled."""
        watch = await in_daemon_thread("config-watch-import", import_config_watch)
        await watch(
            path,
            known=lambda: self._fingerprint,
            on_change=self.ask,
            recheck_ns=self._recheck_ns,
            prove=self._prove_watch,
        ).run()

    async def _reload(self) -> None:
        try:
            settings = await in_daemon_thread("config-reader", self._read)
        except ConfigError as error:
            self._reject(error.problems)
        except RuntimeError as error:
            self._reject((f"No thread could be started to read it: {error}",))
        else:
            await self._accept(settings)

    def _read(self) -> Settings:
        from agent.runtime.config_watch import fingerprint_of  # noqa: PLC0415 - not before a reload

        if self._started.config_file is not None:
            # Before it is read: what changes meanwhile is seen as a change.
            self._fingerprint = fingerprint_of(self._started.config_file)
        settings = self._reread()
        problems = self._validate(settings)
        if problems:
            raise ConfigError(problems)
        return settings

    async def _accept(self, settings: Settings) -> None:
        self._status.reload_trouble = None
        for warning in settings.warnings:
            if warning not in self._warnings:
                _log.warning("A setting was ignored: %(detail)s", log.about(detail=warning))
        self._warnings = settings.warnings
        waiting = tuple(changes_that_need_a_restart(self._started, settings))
        for name in waiting:
            _log.warning(
                "A changed setting takes effect at the next start: %(setting)s", log.about(setting=name)
            )
        self._status.awaiting_restart = waiting
        log.set_level(settings.log_level)
        await self._apply(settings)
        _log.info("Read the configuration again: %(path)s", log.about(path=self._started.config_file))

    def _reject(self, problems: tuple[str, ...]) -> None:
        self._status.reload_trouble = "; ".join(problems)
        _log.error("Kept the old configuration: %(problems)s", log.about(problems=list(problems)))
