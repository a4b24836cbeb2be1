"""Delays between tries: doubling, capped, with jitter that only lengthens them."""

from typing import Final

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
