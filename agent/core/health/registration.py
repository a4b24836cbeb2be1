"""How a resource stands with the kubelet: one small state machine for each resource.

Invariants: a new generation begins only in _begin. Answers of older generations, and of one that was
given up, change nothing. The old stream and server are ended before each registration
(by the owner of RegisterResource), because the kubelet drops the new one when the old one ends
later. A registration under way hears the same signs as one that was made: a kubelet may take ten seconds
to answer, and one that was replaced meanwhile never answers. The two clocks: after "connection refused"
the agent retries every 50 ms for 10 s, then every second; an answered error and a lost stream are tried
again after 0.1 s, doubling to 10 s. Which of two kubelet sockets is the newer one follows from the order
of the facts, never from their file times.
"""

from typing import Final, assert_never

import msgspec

from agent.model.facts import (
    ListWritten,
    OwnSocketLost,
    Registered,
    RegisterSent,
    RegistrationFailed,
    RegistrationFailure,
    SocketFreed,
    WatchersChanged,
)
from agent.model.ids import DeviceId, SocketIdentity
from agent.model.policy import MILLISECOND_NS, SECOND_NS, Policy
from agent.model.snapshot import RegistrationPhase
from agent.model.structs import replace

UNREACHABLE_NS: Final = 50 * MILLISECOND_NS
UNREACHABLE_SLOW_NS: Final = SECOND_NS
UNREACHABLE_FAST_FOR_NS: Final = 10 * SECOND_NS
REJECTED_FIRST_NS: Final = 100 * MILLISECOND_NS
REJECTED_CAP_NS: Final = 10 * SECOND_NS
SETTLED_NS: Final = 10 * SECOND_NS
"""A registration that lived so long ended for a new reason; its failures no longer add up."""

COUNT_SETTLE_NS: Final = SECOND_NS
"""How long the kubelet may take to have what it was sent."""
MISCOUNTS: Final = 2
"""So many answers in a row, all after the newest list, are a lasting difference."""

NO_SOCKET: Final = "The kubelet's socket does not exist yet"
WAIT_FOR_PROBES: Final = "The first health probes are still running"
STREAM_ENDED: Final = "The kubelet ended the ListAndWatch stream"
NO_STREAM: Final = "The kubelet accepted the registration but opened no ListAndWatch stream"
LIST_OVERDUE: Final = "The newest device list was not sent"
MISCOUNTED: Final = "The kubelet does not have the devices that it was sent"
SOCKET_LOST: Final = "The plugin's socket file was deleted or replaced"


class Registration(msgspec.Struct, frozen=True):
    """One resource's standing."""

    since_ns: int
    """When it was last registered or, until then, when it ceased to be (or began)."""
    phase: RegistrationPhase = RegistrationPhase.WAITING
    generation: int = 0
    attempts: int = 0
    """Answered errors and lost streams in a row."""
    unreachable_since_ns: int | None = None
    retry_at_ns: int | None = None
    kubelet: SocketIdentity | None = None
    """The kubelet socket of the last try."""
    pre_start: bool = False
    """Whether the kubelet calls PreStartContainer before each container; fixed at the registration."""
    socket: SocketIdentity | None = None
    """Our socket file, from the moment Register was sent."""
    streams: int | None = None
    """ListAndWatch streams of this generation that are open; None: there was none yet."""
    sent: frozenset[DeviceId] | None = None
    """The healthy devices of the newest list that was written; None: there was none yet."""
    sent_ns: int = 0
    counted: bool | None = None
    """Whether the kubelet had those at its newest count since; None: it was not asked since."""
    miscounts: int = 0
    """Counts in a row at which it had others."""
    miscount: str = ""
    """What it had instead, from the time that lasted until a count agrees."""
    message: str = NO_SOCKET
    failure: RegistrationFailure | None = None

    @property
    def registered(self) -> bool:
        """Whether the kubelet has accepted the current generation."""
        return self.phase is RegistrationPhase.REGISTERED

    @property
    def waits_for_probes(self) -> bool:
        """Whether there is a kubelet, and only the first probes are still to come."""
        return self.phase is RegistrationPhase.WAITING and self.message == WAIT_FOR_PROBES


RegistrationFact = (
    RegisterSent
    | Registered
    | RegistrationFailed
    | WatchersChanged
    | OwnSocketLost
    | SocketFreed
    | ListWritten
)


def after(  # noqa: PLR0911 (a table)
    standing: Registration, fact: RegistrationFact, *, policy: Policy, now_ns: int
) -> Registration:
    """Return the standing after a fact from the plugin socket's owner, or from its directory's watcher."""
    if isinstance(fact, SocketFreed):
        return _freed(standing, fact, now_ns)
    is_given_up = standing.phase in {RegistrationPhase.WAITING, RegistrationPhase.BACKING_OFF}
    if standing.generation != fact.generation or is_given_up:
        return standing
    match fact:
        case RegisterSent():
            return replace(standing, kubelet=fact.kubelet, socket=fact.socket)
        case Registered():
            return _accepted(standing, fact, policy, now_ns)
        case RegistrationFailed() if standing.registered:
            return _lost(replace(standing, failure=fact.failure), fact.message, policy, now_ns)
        case RegistrationFailed():
            return _failed(standing, fact, policy, now_ns)
        case WatchersChanged():
            return _streams_changed(standing, fact.live, policy, now_ns)
        case ListWritten():
            return replace(standing, sent=fact.healthy, sent_ns=now_ns, counted=None, miscounts=0)
        case OwnSocketLost():
            return _lost(standing, SOCKET_LOST, policy, now_ns)
        case _:
            assert_never(fact)


def list_overdue(standing: Registration, *, policy: Policy, now_ns: int) -> Registration:
    """Return the standing after the newest list was not sent for too long."""
    return _lost(standing, LIST_OVERDUE, policy, now_ns) if standing.registered else standing


def counted(
    standing: Registration, has: frozenset[DeviceId], *, asked_ns: int, policy: Policy, now_ns: int
) -> Registration:
    """Return the standing after the kubelet was asked which healthy devices it has.

    An older kubelet that forgot the endpoint leaves the stream open, and so does one that lost a list.
    """
    sent = standing.sent
    if not standing.registered or sent is None or asked_ns < standing.sent_ns + COUNT_SETTLE_NS:
        return standing
    if has == sent:
        return replace(standing, counted=True, miscounts=0, miscount="")
    miscounts = standing.miscounts + 1
    if miscounts < MISCOUNTS:
        return replace(standing, counted=False, miscounts=miscounts)
    others = f" and {len(has - sent)} others" if has - sent else ""
    miscount = f"the kubelet has {len(has & sent)} of the {len(sent)} healthy devices it was sent{others}"
    return replace(_lost(standing, MISCOUNTED, policy, now_ns), miscount=miscount)


def advance(
    standing: Registration, *, kubelet: SocketIdentity | None, ready: bool, policy: Policy, now_ns: int
) -> Registration:
    """Return the standing after time passed or the kubelet's socket changed."""
    due_ns = due_at(standing, policy)
    is_due = due_ns is not None and now_ns >= due_ns
    match standing.phase:
        case RegistrationPhase.REGISTERING:
            is_replaced = kubelet is not None and kubelet != standing.kubelet
            return _begin(standing, kubelet, policy) if is_replaced else standing
        case RegistrationPhase.REGISTERED:
            if kubelet is not None and not _is_up_to_date(standing, kubelet, policy):
                return _begin(replace(standing, since_ns=now_ns), kubelet, policy)
            return _lost(standing, NO_STREAM, policy, now_ns) if is_due else standing
        case _ if kubelet is None:
            return _waiting(standing, NO_SOCKET)
        case RegistrationPhase.BACKING_OFF:
            return _begin(standing, kubelet, policy) if is_due or kubelet != standing.kubelet else standing
        case RegistrationPhase.WAITING:
            return _begin(standing, kubelet, policy) if ready else _waiting(standing, WAIT_FOR_PROBES)


def due_at(standing: Registration, policy: Policy) -> int | None:
    """Return when advance has something to do although nothing was seen; None: never."""
    if standing.registered and standing.streams is None:
        return standing.since_ns + policy.watch_timeout_ns
    return standing.retry_at_ns


def _waiting(standing: Registration, message: str) -> Registration:
    return replace(standing, phase=RegistrationPhase.WAITING, message=message, retry_at_ns=None, failure=None)


def _is_up_to_date(standing: Registration, kubelet: SocketIdentity, policy: Policy) -> bool:
    """Return whether this kubelet was sent what it would be sent now."""
    return (standing.kubelet, standing.pre_start) == (kubelet, policy.pre_start_check)


def _begin(standing: Registration, kubelet: SocketIdentity | None, policy: Policy) -> Registration:
    same_kubelet = kubelet == standing.kubelet
    return replace(
        standing,
        phase=RegistrationPhase.REGISTERING,
        generation=standing.generation + 1,
        attempts=standing.attempts if same_kubelet else 0,
        unreachable_since_ns=standing.unreachable_since_ns if same_kubelet else None,
        retry_at_ns=None,
        kubelet=kubelet,
        pre_start=policy.pre_start_check,
        socket=None,
        streams=None,
        sent=None,
        counted=None,
        miscounts=0,
        miscount=standing.miscount if same_kubelet else "",
        # While it is tried again, the last answer is why it is not registered.
        message=standing.message if standing.phase is RegistrationPhase.BACKING_OFF else "",
    )


def _accepted(standing: Registration, fact: Registered, policy: Policy, now_ns: int) -> Registration:
    registered = replace(
        standing,
        phase=RegistrationPhase.REGISTERED,
        since_ns=now_ns,
        unreachable_since_ns=None,
        kubelet=fact.kubelet,
        socket=fact.socket,
        message="",
        failure=None,
    )
    # The kubelet opens the stream while it still answers Register, so it can have ended by now.
    return _lost(registered, STREAM_ENDED, policy, now_ns) if standing.streams == 0 else registered


def _failed(standing: Registration, fact: RegistrationFailed, policy: Policy, now_ns: int) -> Registration:
    failed = replace(standing, failure=fact.failure, socket=None)
    if fact.failure not in {"absent", "unreachable"}:
        return _back_off(replace(failed, unreachable_since_ns=None), fact.message, policy, now_ns)
    since_ns = now_ns if standing.unreachable_since_ns is None else standing.unreachable_since_ns
    fast = now_ns - since_ns < UNREACHABLE_FAST_FOR_NS
    return replace(
        failed,
        phase=RegistrationPhase.BACKING_OFF,
        unreachable_since_ns=since_ns,
        retry_at_ns=now_ns + (UNREACHABLE_NS if fast else UNREACHABLE_SLOW_NS),
        message=fact.message,
    )


def _freed(standing: Registration, fact: SocketFreed, now_ns: int) -> Registration:
    """Return the standing after another process has left our socket's path.

    The kubelet needs a moment to miss that process, whose end would take the new registration along.
    """
    if standing.generation != fact.generation or standing.retry_at_ns is None:
        return standing
    return replace(standing, retry_at_ns=min(standing.retry_at_ns, now_ns + REJECTED_FIRST_NS))


def _streams_changed(standing: Registration, live: int, policy: Policy, now_ns: int) -> Registration:
    if standing.registered and live == 0:
        return _lost(standing, STREAM_ENDED, policy, now_ns)
    return replace(standing, streams=live)


def _lost(standing: Registration, message: str, policy: Policy, now_ns: int) -> Registration:
    """Return the standing after a registration that was accepted, or asked for, came to an end.

    The wait before the next try also lets the other signs of a kubelet restart arrive, so that
    one restart is one registration.
    """
    settled = standing.registered and now_ns - standing.since_ns >= SETTLED_NS
    ended = replace(
        standing,
        since_ns=now_ns if standing.registered else standing.since_ns,
        socket=None,
        attempts=0 if settled else standing.attempts,
    )
    return _back_off(ended, message, policy, now_ns)


def _back_off(standing: Registration, message: str, policy: Policy, now_ns: int) -> Registration:
    attempts = standing.attempts + 1
    wait_ns = delay_ns(attempts, first_ns=REJECTED_FIRST_NS, cap_ns=REJECTED_CAP_NS, seed=policy.jitter_seed)
    return replace(
        standing,
        phase=RegistrationPhase.BACKING_OFF,
        attempts=attempts,
        retry_at_ns=now_ns + wait_ns,
        message=message,
    )


JITTER_PERCENT: Final = 20


def delay_ns(attempt: int, *, first_ns: int, cap_ns: int, seed: int) -> int:
    """Return how long to wait before try ``attempt`` + 1; the first failure is attempt 1.

    The seed spreads many nodes that failed at the same moment; equal arguments give equal delays.
    """
    doublings = min(attempt - 1, 62)
    base_ns = min(first_ns << doublings, cap_ns)
    return base_ns + base_ns * (_mix(seed, attempt) % (JITTER_PERCENT + 1)) // 100


def _mix(seed: int, attempt: int) -> int:
    """Scramble two integers; the constant is Knuth's multiplicative hash (2**32 / golden ratio)."""
    return ((seed + attempt) * 2_654_435_761 & 0xFFFFFFFF) >> 16
