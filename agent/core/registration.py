"""How a resource stands with the kubelet: one small state machine for each resource.

Invariants: a new generation begins only in _begin, and each generation is answered once. Answers
of older generations change nothing. The old stream and server are ended before each registration
(by the owner of RegisterResource), because the kubelet drops the new one when the old one ends
later. The two clocks: a refused connection is tried again every 50 ms for 10 s, then every second;
an answered error and a lost stream are tried again after 0.1 s, doubling to 10 s.
"""

from dataclasses import dataclass, replace
from typing import Final

from agent.core.backoff import delay_ns
from agent.model.facts import RegistrationFailed, RegistrationFailure
from agent.model.ids import SocketIdentity
from agent.model.policy import MILLISECOND_NS, SECOND_NS, Policy
from agent.model.snapshot import RegistrationPhase

UNREACHABLE_NS: Final = 50 * MILLISECOND_NS
UNREACHABLE_SLOW_NS: Final = SECOND_NS
UNREACHABLE_FAST_FOR_NS: Final = 10 * SECOND_NS
REJECTED_FIRST_NS: Final = 100 * MILLISECOND_NS
REJECTED_CAP_NS: Final = 10 * SECOND_NS
SETTLED_NS: Final = 10 * SECOND_NS
"""A registration that lived so long ended for a new reason; its failures no longer add up."""

NO_SOCKET: Final = "The kubelet's socket does not exist yet"
WAIT_FOR_PROBES: Final = "The first health probes are still running"
STREAM_ENDED: Final = "The kubelet ended the ListAndWatch stream"
NO_STREAM: Final = "The kubelet accepted the registration but opened no ListAndWatch stream"
SOCKET_LOST: Final = "The plugin's socket file was deleted or replaced"


@dataclass(frozen=True, slots=True)
class Registration:
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
    socket: SocketIdentity | None = None
    watched: bool = False
    message: str = NO_SOCKET
    failure: RegistrationFailure | None = None

    @property
    def registered(self) -> bool:
        """Whether the kubelet has accepted the current generation."""
        return self.phase is RegistrationPhase.REGISTERED


def advance(
    standing: Registration, *, kubelet: SocketIdentity | None, ready: bool, policy: Policy, now_ns: int
) -> Registration:
    """Return the standing after time passed or the kubelet's socket changed."""
    match standing.phase:
        case RegistrationPhase.REGISTERING:
            return standing
        case RegistrationPhase.REGISTERED:
            return _advance_registered(standing, kubelet, policy, now_ns)
        case _ if kubelet is None:
            return _waiting(standing, NO_SOCKET)
        case RegistrationPhase.BACKING_OFF:
            waits = kubelet == standing.kubelet and not _is_due(standing, now_ns)
            return standing if waits else _begin(standing, kubelet)
        case RegistrationPhase.WAITING:
            return _begin(standing, kubelet) if ready else _waiting(standing, WAIT_FOR_PROBES)


def _advance_registered(
    standing: Registration, kubelet: SocketIdentity | None, policy: Policy, now_ns: int
) -> Registration:
    if kubelet is not None and kubelet != standing.kubelet:
        return _begin(replace(standing, since_ns=now_ns, socket=None), kubelet)
    if not standing.watched and now_ns - standing.since_ns >= policy.watch_timeout_ns:
        return lost(standing, NO_STREAM, policy=policy, now_ns=now_ns)
    return standing


def _waiting(standing: Registration, message: str) -> Registration:
    return replace(standing, phase=RegistrationPhase.WAITING, message=message, retry_at_ns=None, failure=None)


def _is_due(standing: Registration, now_ns: int) -> bool:
    return standing.retry_at_ns is None or now_ns >= standing.retry_at_ns


def _begin(standing: Registration, kubelet: SocketIdentity) -> Registration:
    same_kubelet = kubelet == standing.kubelet
    return replace(
        standing,
        phase=RegistrationPhase.REGISTERING,
        generation=standing.generation + 1,
        attempts=standing.attempts if same_kubelet else 0,
        unreachable_since_ns=standing.unreachable_since_ns if same_kubelet else None,
        retry_at_ns=None,
        kubelet=kubelet,
        watched=False,
    )


def accepted(
    standing: Registration, *, kubelet: SocketIdentity, socket: SocketIdentity, now_ns: int
) -> Registration:
    """Return the standing after the kubelet accepted the current generation."""
    return replace(
        standing,
        phase=RegistrationPhase.REGISTERED,
        since_ns=now_ns,
        unreachable_since_ns=None,
        kubelet=kubelet,
        socket=socket,
        message="",
        failure=None,
    )


def failed(
    standing: Registration, failure: RegistrationFailed, *, policy: Policy, now_ns: int
) -> Registration:
    """Return the standing after the current generation was not registered."""
    if failure.failure in {"absent", "unreachable"}:
        since_ns = now_ns if standing.unreachable_since_ns is None else standing.unreachable_since_ns
        fast = now_ns - since_ns < UNREACHABLE_FAST_FOR_NS
        return replace(
            standing,
            phase=RegistrationPhase.BACKING_OFF,
            unreachable_since_ns=since_ns,
            retry_at_ns=now_ns + (UNREACHABLE_NS if fast else UNREACHABLE_SLOW_NS),
            message=failure.message,
            failure=failure.failure,
        )
    return _back_off(
        replace(standing, unreachable_since_ns=None, failure=failure.failure), failure.message, policy, now_ns
    )


def lost(standing: Registration, message: str, *, policy: Policy, now_ns: int) -> Registration:
    """Return the standing after a registration that was accepted came to an end.

    The wait before the next try also lets the other signs of a kubelet restart arrive, so that
    one restart is one registration.
    """
    settled = now_ns - standing.since_ns >= SETTLED_NS
    return _back_off(
        replace(standing, since_ns=now_ns, socket=None, attempts=0 if settled else standing.attempts),
        message,
        policy,
        now_ns,
    )


def watchers_changed(standing: Registration, live: int, *, policy: Policy, now_ns: int) -> Registration:
    """Return the standing after a ListAndWatch stream began or ended."""
    if live > 0:
        return standing if standing.watched else replace(standing, watched=True)
    return lost(standing, STREAM_ENDED, policy=policy, now_ns=now_ns) if standing.registered else standing


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


def due_at(standing: Registration, policy: Policy) -> int | None:
    """Return when advance has something to do although nothing was seen; None: never."""
    if standing.registered and not standing.watched:
        return standing.since_ns + policy.watch_timeout_ns
    return standing.retry_at_ns
