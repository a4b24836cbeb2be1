"""The vocabulary: ids, facts (past tense), effects (imperative), snapshot.

Invariants: every record is frozen and slotted, and needs nothing but the standard library.
Times are integer nanoseconds of CLOCK_MONOTONIC.
"""
