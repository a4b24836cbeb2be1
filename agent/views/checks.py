"""The checks behind /livez and /readyz, and their answers in the form of the Kubernetes API server.

Guarantees: the cause of a failed check goes to the log and not into the answer, which is public. Liveness
never depends on a GPU: an unhealthy GPU is data, and only a fault of the agent itself fails a check.

Source of the form: kubernetes/kubernetes:staging/src/k8s.io/apiserver/pkg/server/healthz/healthz.go.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from agent.model.health import Reason
from agent.model.snapshot import RegistrationPhase, Snapshot

MAX_STEP_AGE_NS: Final = 10_000_000_000
MAX_LOOP_LAG_NS: Final = 5_000_000_000
MAX_UNREGISTERED_NS: Final = 10_000_000_000
MAX_LOG_BLOCKED_S: Final = 120.0

Run = Callable[[], Awaitable[str | None]]
"""Returns None if the check passes, else the cause."""


class Check(msgspec.Struct, frozen=True):
    """One named check."""

    name: str
    run: Run
    is_liveness: bool = False
    """Whether /livez runs it too, not /readyz alone."""


class Answer(msgspec.Struct, frozen=True):
    """The answer sent to the caller."""

    ok: bool
    body: str
    failures: tuple[tuple[str, str], ...] = ()
    """(check, cause), for the log."""
    passes: tuple[str, ...] = ()
    """The checks that were run and passed."""


def at_once(check: Callable[[], str | None]) -> Run:
    """Return a check that waits for nothing."""

    async def run() -> str | None:
        return check()

    return run


async def answer(
    endpoint: str, checks: Sequence[Check], *, verbose: bool = False, exclude: frozenset[str] = frozenset()
) -> Answer:
    """Run the checks and return the answer of an endpoint (``livez``, ``readyz``)."""
    lines: list[str] = []
    failures: list[tuple[str, str]] = []
    passes: list[str] = []
    for check in checks:
        if check.name in exclude:
            lines.append(f"[+]{check.name} excluded: ok")
            continue
        why = await check.run()
        if why is None:
            lines.append(f"[+]{check.name} ok")
            passes.append(check.name)
        else:
            lines.append(f"[-]{check.name} failed: reason withheld")
            failures.append((check.name, why))
    unknown = sorted(exclude - {check.name for check in checks})
    if unknown:
        quoted = ", ".join(f'"{name[:64]}"' for name in unknown)
        lines.append(f"warn: some health checks cannot be excluded: no matches for {quoted}")
    if failures:
        body = "\n".join([*lines, f"{endpoint} check failed\n"])
        return Answer(ok=False, body=body, failures=tuple(failures), passes=tuple(passes))
    body = "\n".join([*lines, f"{endpoint} check passed\n"]) if verbose else "ok"
    return Answer(ok=True, body=body, passes=tuple(passes))


def event_loop(*, lag_ns: int, step_age_ns: int) -> str | None:
    """Check that the event loop runs and the engine steps."""
    if lag_ns > MAX_LOOP_LAG_NS:
        return f"the event loop was {lag_ns / 1e9:.1f} s late"
    if step_age_ns > MAX_STEP_AGE_NS:
        return f"the last step was {step_age_ns / 1e9:.1f} s ago"
    return None


def kubelet_registered(snapshot: Snapshot, now_ns: int) -> str | None:
    """Check registration: an absent kubelet, or a resource without devices, is no fault of the agent."""
    if snapshot.kubelet is None:
        return None
    for resource in snapshot.resources:
        if (
            resource.devices
            and resource.phase is not RegistrationPhase.REGISTERED
            and now_ns - resource.since_ns > MAX_UNREGISTERED_NS
        ):
            return f"{resource.name} is not registered: {resource.message}"
    return None


def kubelet_counted(snapshot: Snapshot) -> str | None:
    """Check that the kubelet has the devices that it was sent."""
    for resource in snapshot.resources:
        if resource.miscount:
            return f"{resource.name}: {resource.miscount}"
    return None


def driver(snapshot: Snapshot) -> str | None:
    """Check NVML; a driver that was released on request passes."""
    if snapshot.released_until_ns is not None:
        return None
    hung = next((finding for finding in snapshot.findings if finding.reason is Reason.DRIVER_HUNG), None)
    if hung is not None:
        return f"stalled: {hung.message}"
    if snapshot.driver.ready:
        return None
    return snapshot.driver.message or "NVML is not initialised yet"


def task(snapshot: Snapshot, name: str) -> str | None:
    """Check a supervised source or sink."""
    for task_name, view in snapshot.tasks.items():
        if task_name == name and not view.running:
            return view.message or "is not running"
    return None
