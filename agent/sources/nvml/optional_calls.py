"""Makes calls that a GPU or its driver may not offer.

Invariants: what is not offered is asked for once. An error that says neither that nor that the GPU is lost or
to be reset is no finding: there is no answer this time.
"""

from collections.abc import Callable
from typing import Final, TypeVar

from agent.errors import NvmlCode, NvmlError
from agent.sources.nvml.library import FINDINGS, Handle

NOT_OFFERED: Final = frozenset(
    {
        NvmlCode.NOT_SUPPORTED,
        NvmlCode.NO_PERMISSION,
        NvmlCode.FUNCTION_NOT_FOUND,
        NvmlCode.ARGUMENT_VERSION_MISMATCH,
        NvmlCode.DEPRECATED,
    }
)
"""What will not be answered better next time."""

T = TypeVar("T")


class Asker:
    """Makes the calls of one GPU that are offered; which are not is remembered."""

    def __init__(self) -> None:
        self._not_offered: set[str] = set()

    def __call__(self, handle: Handle, *calls: Callable[[Handle], T]) -> T | None:
        """Return the answer of the first call that is offered; None: none is, or it failed this time.

        Raises NvmlError for a finding.
        """
        for call in calls:
            name = call.__name__
            if name in self._not_offered:
                continue
            try:
                return call(handle)
            except NvmlError as error:
                if error.code in FINDINGS:
                    raise
                if error.code not in NOT_OFFERED:
                    return None
                self._not_offered.add(name)
        return None

    def may_answer(self, *calls: Callable[[Handle], object]) -> bool:
        """Whether one of the calls is not known to be missing."""
        return any(call.__name__ not in self._not_offered for call in calls)
