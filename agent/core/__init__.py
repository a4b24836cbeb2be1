"""The decisions, pure: no clock, no input or output, no logging, no asyncio.

Invariants: every function here is a function of its arguments. Time is an integer of
CLOCK_MONOTONIC nanoseconds and a parameter. Only reducer.step makes state.
"""
