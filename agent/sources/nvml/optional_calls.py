"""Makes calls that a GPU or its driver may not support.

Invariants: a call that is not supported is made once. An error that means neither that nor that the GPU is
lost or to be reset is no finding: the answer is unknown this time.
"""

from collections.abc import Callable
from typing import Final, TypeVar

from agent.errors import NvmlCode, NvmlError
from agent.sources.nvml.library import FINDINGS, Handle

UNSUPPORTED_CODES: Final = frozenset(
    {
        NvmlCode.NOT_SUPPORTED,
        NvmlCode.NO_PERMISSION,
        NvmlCode.FUNCTION_NOT_FOUND,
        NvmlCode.ARGUMENT_VERSION_MISMATCH,
        NvmlCode.DEPRECATED,
    }
)
"""Codes that a repeated call would return again."""

T = TypeVar("T")


class OptionalCalls:
    """Makes the supported calls of one GPU, and remembers which are not supported."""

    def __init__(self) -> None:
        self._unsupported: set[str] = set()

    def __call__(self, handle: Handle, *calls: Callable[[Handle], T]) -> T | None:
        """Return the answer of the first supported call; None: none is supported, or it failed this time.

        Raises NvmlError for a finding.
        """
        for call in calls:
            name = call.__name__
            if name in self._unsupported:
                continue
            try:
                return call(handle)
            except NvmlError as error:
                if error.code in FINDINGS:
                    raise
                if error.code not in UNSUPPORTED_CODES:
                    return None
                self._unsupported.add(name)
        return None

    def may_answer(self, *calls: Callable[[Handle], object]) -> bool:
        """Whether one of the calls is not known to be missing."""
        return any(call.__name__ not in self._unsupported for call in calls)
