"""Which function handles which fact: a handler registers itself beside its rule.

Invariants: a kind of fact has exactly one handler. A handler is pure and total: it returns the state after
the fact, the same object if nothing changed, alone or with effects that the difference of two states does
not show.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from agent.core.health.state import State
from agent.model.effects import Effect
from agent.model.facts import Fact

Applied = tuple[State, tuple[Effect, ...]]

H = TypeVar("H", bound=Callable[..., State | Applied])

_HANDLERS: Final[dict[type, Callable[[State, Any, int], State | Applied]]] = {}


def handles(*kinds: type[Fact]) -> Callable[[H], H]:
    """Register a function of state, fact and time (ns) for kinds of facts; ValueError if there is one."""

    def register(handler: H) -> H:
        for kind in kinds:
            if kind in _HANDLERS:
                raise ValueError(f"{kind.__name__} has two handlers")
            _HANDLERS[kind] = handler
        return handler

    return register


def handled() -> frozenset[type]:
    """Return the kinds of facts that have a handler."""
    return frozenset(_HANDLERS)


def apply(state: State, fact: Fact, now_ns: int) -> Applied:
    """Return the state after a fact, and its own effects; KeyError: no handler."""
    result = _HANDLERS[type(fact)](state, fact, now_ns)
    return (result, ()) if isinstance(result, State) else result
