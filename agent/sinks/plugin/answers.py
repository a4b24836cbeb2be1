"""What one resource answers the kubelet, from request bytes to response bytes.

Guarantees: no answer waits for a driver, another call or anything but one stat of our own CDI spec
files; only ``settle``, before it, may wait for a file that is being written. Nothing of a request gets
into an answer. An answer never names a CDI device that no spec file resolves: the container runtime
would reject such a pod with an error that does not name the cause.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.bus import Latest
from agent.core.allocation.injection import ContainerAnswer, cdi_names, uses_cdi
from agent.core.allocation.preference import prefer
from agent.core.allocation.requests import Rejection, allocate, reject_start
from agent.counts import CountBy
from agent.model.ids import ResourceName
from agent.model.policy import Injection
from agent.model.snapshot import Resource, Snapshot
from agent.sinks.plugin.wire import (
    RequestError,
    encode_allocate_response,
    encode_preferred_response,
    options,
    read_allocate_request,
    read_pre_start_request,
    read_preferred_request,
)

MAX_ERROR_CHARS: Final = 1_024
"""Of an error text; it travels in a header."""

_Request = TypeVar("_Request")

_STATUSES: Final = {
    "unknown": Status.INVALID_ARGUMENT,
    "unhealthy": Status.FAILED_PRECONDITION,
    "unsatisfiable": Status.INVALID_ARGUMENT,
    "missing": Status.FAILED_PRECONDITION,
    "malformed": Status.INVALID_ARGUMENT,
    "withdrawn": Status.FAILED_PRECONDITION,
}


class CdiSpecs(Protocol):
    """The CDI spec files that the container runtime reads."""

    @property
    def absent(self) -> frozenset[str]:
        """The CDI names that are wanted and that this node has nothing for: GDS without its module."""

    async def settle(self) -> None:
        """Wait a moment for files that are being written, if any are; longer than a pod can wait, never."""

    def missing(self, names: Sequence[str]) -> str | None:
        """Return the first of these CDI names that no spec file resolves now; None: all are resolved."""


class NoCdiSpecs:
    """Nothing writes spec files, so no name is resolved."""

    absent: frozenset[str] = frozenset()

    async def settle(self) -> None:
        """Return at once."""

    def missing(self, names: Sequence[str]) -> str | None:
        """Return the first name."""
        return next(iter(names), None)


def random_uuid() -> str:
    """Return a random UUID."""
    from uuid import uuid4  # noqa: PLC0415 - most nodes never need one, and it costs the start 4 ms

    return str(uuid4())


class Answers:
    """The answers of one resource; each is the response's bytes, or raises GRPCError."""

    rejections = CountBy(
        "plugin_rejections_total",
        "calls",
        "Calls of the kubelet that were rejected.",
        label="kind",
        values=_STATUSES,
    )

    def __init__(
        self,
        *,
        resource: ResourceName,
        latest: Latest[Snapshot],
        cdi: CdiSpecs,
        annotation_id: Callable[[], str] = random_uuid,
    ) -> None:
        self.resource: Final = resource
        self._latest = latest
        self._cdi = cdi
        self._annotation_id = annotation_id

    def advertised(self) -> Resource | None:
        """Return the resource as it is advertised now; None: not any more."""
        listed = self._latest.value.resources
        return next((each for each in listed if each.name == self.resource), None)

    def options(self) -> bytes:
        """Return what the kubelet may ask of this plugin."""
        return bytes(options(pre_start=self._latest.value.policy.pre_start_check))

    async def settle(self) -> None:
        """Wait a moment where an answer would be rejected only because a CDI spec file is being written."""
        if uses_cdi(self._latest.value.policy.injection):
            await self._cdi.settle()

    def allocated(self, request: bytes) -> bytes:
        """Return what each container gets."""
        snapshot, resource = self._latest.value, self._advertised()
        absent = self._absent(snapshot.policy.injection)
        answers: list[ContainerAnswer] = []
        for ids in self._read(read_allocate_request, request):
            key = self._annotation_id() if uses_cdi(snapshot.policy.injection) else ""
            answer = allocate(snapshot, resource, ids, annotation_id=key, absent=absent)
            if isinstance(answer, Rejection):
                raise self._error_of(answer)
            answers.append(answer)
        self._check_resolved(answers)
        return encode_allocate_response(answers)

    def preferred(self, request: bytes) -> bytes:
        """Return which of the free devices each container should get."""
        resource = self._advertised()
        choices: list[tuple[str, ...]] = []
        for wanted in self._read(read_preferred_request, request):
            choice = prefer(self._latest.value, resource, wanted.available, wanted.must_include, wanted.size)
            if isinstance(choice, Rejection):
                raise self._error_of(choice)
            choices.append(choice)
        return encode_preferred_response(choices)

    def started(self, request: bytes) -> bytes:
        """Let a container start, unless that is checked and a device is unhealthy."""
        ids = self._read(read_pre_start_request, request)
        resource = self.advertised()
        snapshot = self._latest.value
        if resource is not None and snapshot.policy.pre_start_check:
            rejection = reject_start(snapshot, resource, ids)
            if rejection is not None:
                raise self._error_of(rejection)
        return b""

    def _read(self, read: Callable[[bytes], _Request], request: bytes) -> _Request:
        try:
            return read(request)
        except RequestError as error:
            raise self._reject("malformed", f"invalid request: {error}") from None

    def _advertised(self) -> Resource:
        resource = self.advertised()
        if resource is None:
            raise self._reject(
                "withdrawn",
                f"{self.resource} is not advertised by this node any more; delete the pod so that it is"
                " scheduled again",
            )
        return resource

    def _absent(self, injection: Injection) -> frozenset[str]:
        """Return the extra CDI names that resolve to nothing here, such as GDS on a node without it."""
        return self._cdi.absent if uses_cdi(injection) else frozenset()

    def _check_resolved(self, answers: Sequence[ContainerAnswer]) -> None:
        names = [name for answer in answers for name in cdi_names(answer)]
        missing = self._cdi.missing(names) if names else None
        if missing is not None:
            raise self._reject(
                "missing",
                f"no CDI spec file on this node resolves {missing}, so the container could not be started;"
                " delete the pod so that it is allocated again; if that does not help, run gpu-agent status"
                " on the node",
            )

    def _error_of(self, rejection: Rejection) -> GRPCError:
        return self._reject(rejection.kind, rejection.message)

    def _reject(self, kind: str, message: str) -> GRPCError:
        self.rejections[kind] += 1
        return GRPCError(_STATUSES[kind], message[:MAX_ERROR_CHARS])
