"""Executes the commands of operators: hold, unhold, recover, release, resume, a bundle, a dry run.

Guarantees: a command is checked as a whole before the core gets it, and is bounded. The answer comes after
the core applied it and describes the outcome, or that the core did not apply it within EXECUTED_WITHIN_S.
Which callers may give commands is not decided here: they come over the root-only control socket alone.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from agent.bus import Latest
from agent.config.values import duration_from
from agent.core.health.commands import MAX_HOLDS, selectors_of
from agent.errors import AgentError, UsageError
from agent.model.facts import (
    Fact,
    HoldRequested,
    RecoverRequested,
    ReleaseRequested,
    ResumeRequested,
    StateLossAcknowledged,
    UnholdRequested,
)
from agent.model.gpu import Gpu
from agent.model.health import Condition, Reason
from agent.model.ids import GpuUuid
from agent.model.snapshot import GpuView, Snapshot
from agent.runtime.dry_run import dry_run, with_injection
from agent.views import documents
from agent.views.documents import API_VERSION, Json, TimeOf

EXECUTED_WITHIN_S: Final = 5.0
RELEASED_WITHIN_S: Final = 45.0
"""The longest a release may wait for the driver to be closed."""

MAX_WHY: Final = 200
MAX_RELEASED: Final = 64
"""GPUs in one command; a node has 16."""
LEAST_RELEASE_NS: Final = 1_000_000_000
LONGEST_RELEASE_NS: Final = 24 * 3_600 * 1_000_000_000

Command = Mapping[str, Any]


class NotExecutedError(AgentError):
    """The core did not apply a command in time."""


class Bundle(Protocol):
    """A bundle of evidence."""

    @property
    def document(self) -> Json:
        """What is known of the GPU."""

    @property
    def path(self) -> str | None:
        """Where it is kept; None if the disk rejected it."""

    @property
    def trouble(self) -> str | None:
        """Why the disk rejected it."""


class Control:
    """Executes commands by name; see ``execute``."""

    def __init__(
        self,
        *,
        emit: Callable[[Fact], None],
        latest: Latest[Snapshot],
        make_bundle: Callable[[GpuUuid], Awaitable[Bundle | None]],
        time_of: TimeOf,
        why_not_kept: Callable[[], Awaitable[str | None]],
        executed_within_s: float = EXECUTED_WITHIN_S,
    ) -> None:
        """``why_not_kept`` writes the newest state, and returns why a restart would not know it."""
        self._emit = emit
        self._latest = latest
        self._make_bundle = make_bundle
        self._time_of = time_of
        self._why_not_kept = why_not_kept
        self._executed_within_s = executed_within_s
        self._commands: Mapping[str, Callable[[Command], Awaitable[Json]]] = {
            "hold": self._hold,
            "unhold": self._unhold,
            "recover": self._recover,
            "release": self._release,
            "resume": self._resume,
            "bundle": self._bundle,
            "allocate": self._allocate,
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The commands there are."""
        return tuple(self._commands)

    async def execute(self, name: str, command: object) -> Json:
        """Execute a command and return its outcome.

        Raises UsageError if it is wrong, and AgentError if it cannot be executed now.
        """
        if not isinstance(command, dict):
            raise UsageError("A command is a JSON object")
        return {"apiVersion": API_VERSION, "order": name, **await self._commands[name](command)}

    # Holds

    async def _hold(self, command: Command) -> Json:
        _only(command, "selector", "why", "even_if_absent")
        why = _why(command)
        snapshot = self._latest.value
        name, gpu = selector_and_gpu(_text(command, "selector"), snapshot)
        if gpu is None and not _flag(command, "even_if_absent"):
            raise UsageError(f"{name} is no GPU of this node now; hold it all the same with --even-if-absent")
        if name not in snapshot.holds and len(snapshot.holds) >= MAX_HOLDS:
            raise AgentError(f"{MAX_HOLDS} holds are kept and no more; end one with gpu-agent unhold")
        await self._apply_fact(HoldRequested(name, why), lambda now: now.holds.get(name) == why)
        message = f"{_called(self._latest.value, gpu, name)} is held: {why}"
        if gpu is None:
            message = f"{name} is not there now and will be held when it appears: {why}"
        return {
            "message": message + await self._not_kept("ends with the agent"),
            "selector": name,
            "gpu_uuid": None if gpu is None else gpu.uuid,
            "why": why,
        }

    async def _unhold(self, command: Command) -> Json:
        _only(command, "selector")
        snapshot = self._latest.value
        text = _text(command, "selector")
        name, gpu = (text, None) if text in snapshot.holds else selector_and_gpu(text, snapshot)
        names = {name} if gpu is None else {name, *selectors_of(gpu)}
        if not names & snapshot.holds.keys():
            raise UsageError(f"{_called(snapshot, gpu, name)} is not held; gpu-agent status lists what is")
        await self._apply_fact(UnholdRequested(name), lambda now: not names & now.holds.keys())
        return {
            "message": f"{_called(self._latest.value, gpu, name)} is held no more"
            + await self._not_kept("counts until a restart"),
            "selector": name,
            "gpu_uuid": None if gpu is None else gpu.uuid,
        }

    async def _not_kept(self, fate: str) -> str:
        """Return what is to be added to an answer: nothing, if a restart knows what was ordered."""
        why = await self._why_not_kept()
        return (
            "" if why is None else f" (this {fate}, since it could not be written to the state file: {why})"
        )

    # Recovery

    async def _recover(self, command: Command) -> Json:
        _only(command, "gpu", "state")
        if _flag(command, "state"):
            return await self._acknowledge_loss(command)
        gpu = known_gpu(_text(command, "gpu"), self._latest.value)
        before = {each.key: each for each in _conditions(self._latest.value, gpu)}
        version = self._latest.version
        # Where there is nothing to end, nothing changes that could be waited for.
        is_nothing = all(each.lasts for each in before.values())
        await self._apply_fact(
            RecoverRequested(gpu.uuid), lambda _: is_nothing or self._latest.version > version
        )
        staying = _conditions(self._latest.value, gpu)
        cleared = [each for key, each in before.items() if key not in {stays.key for stays in staying}]
        is_healthy = not any(each.flips for each in staying)
        return {
            "message": f"{_called(self._latest.value, gpu)} is "
            f"{'healthy' if is_healthy else 'still Unhealthy'}: conditions ended: {len(cleared)},"
            f" staying: {len(staying)}",
            "gpu_uuid": gpu.uuid,
            "well": is_healthy,
            "cleared": [documents.condition(each, self._time_of) for each in cleared],
            "staying": [
                {**documents.condition(each, self._time_of), "stays_because": _why_it_stays(each)}
                for each in staying
            ],
        }

    async def _acknowledge_loss(self, command: Command) -> Json:
        _only(command, "state")
        lost = self._latest.value.durable.lost
        if not lost:
            raise UsageError("The state is not lost, so there is nothing to acknowledge")
        await self._apply_fact(StateLossAcknowledged(), lambda now: not now.durable.lost)
        message = (
            f"The loss of the state ({lost}) is acknowledged; only conditions seen since the start count"
        )
        return {
            "message": message + await self._not_kept("counts until a restart"),
            "well": True,
            "staying": [],
        }

    # The driver

    async def _release(self, command: Command) -> Json:
        _only(command, "gpus", "for", "wait_s")
        snapshot = self._latest.value
        gpus = _gpus(command, snapshot)
        for_ns = _release_time(command)
        wait_s = _wait(command)
        await self._apply_fact(
            ReleaseRequested(gpus, for_ns),
            lambda now: now.released_until_ns is not None and gpus <= set(now.durable.released_gpus),
        )
        is_released = await self._latest.wait_for(lambda now: now.driver_released, wait_s)
        now = self._latest.value
        until_ns = now.released_until_ns
        return {
            "message": "The driver is released: no file of it is open"
            if is_released
            else "The driver is not released yet: a call is under way in it; see the agent's log",
            "driver_released": is_released,
            "gpus": sorted(now.durable.released_gpus),
            "until": None if until_ns is None else self._time_of(until_ns),
            "until_monotonic_ns": until_ns,
        }

    async def _resume(self, command: Command) -> Json:
        _only(command)
        if self._latest.value.released_until_ns is None:
            raise UsageError("The driver is not released, so there is nothing to resume")
        await self._apply_fact(ResumeRequested(), lambda now: now.released_until_ns is None)
        return {"message": "The driver is in use again; its GPUs recover after clean probes"}

    async def _bundle(self, command: Command) -> Json:
        _only(command, "gpu")
        gpu = known_gpu(_text(command, "gpu"), self._latest.value)
        made = await self._make_bundle(gpu.uuid)
        if made is None:
            raise UsageError(f"{_called(self._latest.value, gpu)} is not known any more")
        return {
            "message": made.path or f"The bundle could not be kept: {made.trouble}",
            "gpu_uuid": gpu.uuid,
            "path": made.path,
            "trouble": made.trouble,
            "bundle": made.document,
        }

    # A dry run

    async def _allocate(self, command: Command) -> Json:
        """Return what Allocate would answer; nothing is allocated."""
        _only(command, "ids", "injection", "resource")
        ids, changes = command.get("ids"), command.get("injection", {})
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
            raise UsageError('"ids" must be a list of devices')
        if not isinstance(changes, dict):
            raise UsageError('"injection" must be an object')
        resource = _text(command, "resource") if "resource" in command else None
        snapshot = with_injection(self._latest.value, changes)
        return {"response": dry_run(snapshot, ids, resource=resource)}

    # The core

    async def _apply_fact(self, fact: Fact, is_shown: Callable[[Snapshot], bool]) -> None:
        self._emit(fact)
        if not await self._latest.wait_for(is_shown, self._executed_within_s):
            raise NotExecutedError(
                f"The command was given and not applied within {self._executed_within_s:g} s; "
                "see gpu-agent status"
            )


def _conditions(snapshot: Snapshot, gpu: Gpu) -> tuple[Condition, ...]:
    view = snapshot.view_of(gpu.uuid)
    return () if view is None else view.conditions


def _why_it_stays(condition: Condition) -> str:
    if condition.reason is Reason.HELD:
        return "a hold ends with gpu-agent unhold"
    if condition.reason is Reason.MAINTENANCE:
        return "a release ends with gpu-agent resume, and clean probes"
    if condition.lasts:
        return "its cause is still seen"
    return "it was reported again"


def _called(snapshot: Snapshot, gpu: Gpu | None, name: str = "") -> str:
    if gpu is None:
        return name
    view = snapshot.view_of(gpu.uuid)
    return gpu.uuid if view is None or view.index is None else f"GPU {view.index} ({gpu.uuid})"


# What a command holds


def _only(command: Command, *known: str) -> None:
    unknown = sorted(str(key)[:40] for key in command if key not in known)
    if unknown:
        raise UsageError(f"Unknown in this command: {', '.join(unknown[:8])}")


def _text(command: Command, name: str) -> str:
    value = command.get(name)
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f'"{name}" is missing: the name of a GPU')
    return value.strip()


def _flag(command: Command, name: str) -> bool:
    value = command.get(name, False)
    if not isinstance(value, bool):
        raise UsageError(f'"{name}" must be true or false')
    return value


def _why(command: Command) -> str:
    value = command.get("why")
    text = value.strip() if isinstance(value, str) else ""
    if not text or len(text) > MAX_WHY or not text.isprintable():
        raise UsageError(f"A hold needs a reason (why) of 1 to {MAX_WHY} printable characters")
    return text


def _gpus(command: Command, snapshot: Snapshot) -> frozenset[GpuUuid]:
    value = command.get("gpus")
    if value == "all":
        if not snapshot.gpus:
            raise UsageError("No GPU is known yet, so there is none to release")
        return frozenset(view.gpu.uuid for view in snapshot.gpus)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_RELEASED:
        raise UsageError(f'"gpus" must be "all" or a list of 1 to {MAX_RELEASED} GPUs')
    if not all(isinstance(each, str) for each in value):
        raise UsageError('"gpus" must hold names of GPUs')
    return frozenset(known_gpu(each.strip(), snapshot).uuid for each in value)


def _release_time(command: Command) -> int:
    value = command.get("for")
    try:
        for_ns = duration_from(value) if isinstance(value, str) else 0
    except ValueError:
        for_ns = 0
    if not LEAST_RELEASE_NS <= for_ns <= LONGEST_RELEASE_NS:
        raise UsageError('A release needs a time (for) between "1s" and "24h", such as "10m"')
    return for_ns


def _wait(command: Command) -> float:
    value = command.get("wait_s", 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= RELEASED_WITHIN_S:
        raise UsageError(f'"wait_s" must be between 0 and {RELEASED_WITHIN_S:g}')
    return float(value)


MAX_CHARACTERS: Final = 96
"""A UUID has 40 characters."""

_UUID: Final = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_PCI: Final = re.compile(
    r"(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{1,2}):(?P<device>[0-9a-f]{1,2})(?:\.(?P<function>[0-7]))?",
    re.IGNORECASE,
)
_SERIAL: Final = re.compile(r"[0-9A-Z]{6,32}", re.IGNORECASE)
_INDEX: Final = re.compile(r"[0-9]{1,2}")


def selector_and_gpu(text: str, snapshot: Snapshot) -> tuple[str, Gpu | None]:
    """Return the name a GPU is kept by, and the GPU if it is known.

    Raises UsageError for what is no name of any kind, or names a MIG device.
    """
    views = _matching(text, snapshot)
    if views:
        gpu = views[0].gpu
        if text == gpu.serial:
            return text, gpu
        if len(views) > 1:
            raise _several(text, views)
        return (gpu.pci if _pci(text) == gpu.pci else gpu.uuid), gpu
    if _UUID.fullmatch(text):
        return f"GPU-{text[4:].lower()}", None
    address = _pci(text)
    if address is not None:
        return address, None
    if _SERIAL.fullmatch(text):
        return text, None
    raise _unknown(text, snapshot)


def known_gpu(text: str, snapshot: Snapshot) -> Gpu:
    """Return the GPU that is meant; raises UsageError unless it is exactly one that is known."""
    views = _matching(text, snapshot)
    if not views:
        raise _unknown(text, snapshot)
    if len(views) > 1:
        raise _several(text, views)
    return views[0].gpu


def _matching(text: str, snapshot: Snapshot) -> Sequence[GpuView]:
    """Return the GPUs of a name; of several at one place, those that are there now."""
    if len(text) > MAX_CHARACTERS:
        return ()
    address = _pci(text)
    found = [
        view
        for view in snapshot.gpus
        if text.casefold() == view.gpu.uuid.casefold() or text == view.gpu.serial or address == view.gpu.pci
    ]
    if not found and _INDEX.fullmatch(text):
        return _of_index(int(text), snapshot)
    present = [view for view in found if view.present]
    return present or found


def _of_index(index: int, snapshot: Snapshot) -> Sequence[GpuView]:
    """Return the GPUs of an index, also one that had it until it was lost: callers mean that one."""
    found = [view for view in snapshot.gpus if view.gpu.index == index]
    present = {view.gpu.pci for view in found if view.present}
    return [view for view in found if view.present or view.gpu.pci not in present]


def _several(text: str, views: Sequence[GpuView]) -> UsageError:
    names = ", ".join(f"{view.gpu.uuid}{'' if view.present else ' (lost)'}" for view in views)
    return UsageError(f'"{text}" names {len(views)} GPUs; give one of {names}')


def _pci(text: str) -> str | None:
    """Return a PCI address in sysfs form: four-digit domain, lower case; None if it is none."""
    match = _PCI.fullmatch(text)
    if match is None:
        return None
    domain, bus, device = (int(match[name] or "0", 16) for name in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{device:02x}.{match['function'] or '0'}"


def _unknown(text: str, snapshot: Snapshot) -> UsageError:
    shown = text if len(text) <= 40 else f"{text[:39]}…"
    for view in snapshot.gpus:
        if text in (mig.uuid for mig in view.gpu.mig_devices):
            return UsageError(f"{shown} is a MIG device; name its GPU, {view.gpu.uuid}")
    known = "gpu-agent status -o wide lists them" if snapshot.gpus else "no GPU is known yet"
    return UsageError(f'No GPU is named "{shown}"; give its UUID, serial, PCI address or index; {known}')
