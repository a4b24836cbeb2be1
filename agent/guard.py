"""Attributes the failure of a callback or a thread to the supervised task it belongs to.

The supervisor runs each task as an owner. Callbacks and threads that are registered or started while an owner
runs belong to it, through any number of tasks and callbacks in between, because asyncio copies the context. A
callback that raises fails its owner; it never stops the loop and is never lost in a log.

Invariants: a callback is registered, and a thread started, through this module alone (tests/test_guard.py);
what another library registers is attributed by the loop's exception handler. Nothing here blocks.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final, Literal, ParamSpec, Protocol, TypeVar

import msgspec

from agent.log import fields

P = ParamSpec("P")
T = TypeVar("T")

Kind = Literal["task", "thread", "callback", "write"]


class Seam(Protocol):
    """Replaces what the agent runs, by kind and name; tests inject faults with it."""

    def __call__(self, kind: Kind, name: str, function: Callable[P, T], /) -> Callable[P, T]:
        """Return what to call in place of a function."""


def _no_seam(_kind: Kind, _name: str, function: Callable[P, T], /) -> Callable[P, T]:
    return function


class HasFileno(Protocol):
    """An object with a descriptor."""

    def fileno(self) -> int:
        """Return it."""


class EscapedError(Exception):
    """An error that is no Exception was raised unhandled: SystemExit, KeyboardInterrupt, ..."""


class Owner(msgspec.Struct, frozen=True):
    """A supervised task, as its callbacks and threads see it."""

    name: str
    fail: Callable[[Exception], None]
    """Fail the run of the task with this error; on the loop's thread."""
    seam: Seam = _no_seam


def _log_failure(error: Exception) -> None:
    _log.error("Something that belongs to no task failed: %r", error, exc_info=error)


_log = logging.getLogger(__name__)

NO_SEAM: Final[Seam] = _no_seam
NO_OWNER: Final = Owner("agent", _log_failure)
_owner: ContextVar[Owner] = ContextVar("owner", default=NO_OWNER)


class EndedError(Exception):
    """A task returned that must run without end."""


async def run_forever(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a task within that of the current owner.

    Raises EndedError if it returns, so that the other tasks of its group do not continue without it.
    """
    await owner().seam("task", name, run)()
    raise EndedError(f"{name} finished unexpectedly")


def owner() -> Owner:
    """Return the current owner."""
    return _owner.get()


def own(by: Owner) -> None:
    """Make an owner the owner of everything registered or started from here on in this context."""
    _owner.set(by)


def as_exception(error: BaseException) -> Exception:
    """Return an error as one that ``except Exception`` handles."""
    return error if isinstance(error, Exception) else EscapedError(f"{type(error).__name__}: {error}")


def guarded(
    name: str, callback: Callable[P, object], *, on_failure: Callable[[], object] = lambda: None
) -> Callable[P, None]:
    """Return a callback whose failure is that of the current owner; ``on_failure`` is called first."""
    by = owner()
    wrapped = by.seam("callback", name, callback)

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            wrapped(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - it is the owner's failure
            _log.error(
                "The callback %s of %s failed: %r",
                name,
                by.name,
                error,
                exc_info=error,
                extra=fields(task=by.name),
            )
            on_failure()
            by.fail(as_exception(error))

    return run


def add_reader(
    name: str, descriptor: "int | HasFileno", callback: Callable[..., object], *args: object
) -> None:
    """Run a callback on the loop whenever a descriptor is readable; remove it with ``remove_reader``.

    One that failed is removed: its unread data would call it again at once, and its owner restarts.
    """
    loop = asyncio.get_running_loop()

    def remove() -> None:
        loop.remove_reader(descriptor)

    loop.add_reader(descriptor, guarded(name, callback, on_failure=remove), *args)


def call_later(name: str, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
    """Run a callback on the loop after a delay, in seconds."""
    return asyncio.get_running_loop().call_later(delay_s, guarded(name, callback), *args)


def handle_escaped(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Attribute the error of a callback registered past this module; the loop's exception handler."""
    error = context.get("exception")
    if error is None:
        loop.default_exception_handler(context)
        return
    thing: Any = context.get("task") or context.get("future") or context.get("handle")
    # A handle has no public access to its context before Python 3.12.
    within = thing.get_context() if hasattr(thing, "get_context") else getattr(thing, "_context", None)
    by = owner() if within is None else within.get(_owner, NO_OWNER)
    message = context.get("message", "a callback failed")
    _log.error("%s of %s: %r", message, by.name, error, exc_info=error, extra=fields(task=by.name))
    by.fail(as_exception(error))
