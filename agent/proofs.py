"""Collects the proofs of the agent's components, from any thread; core.freshness evaluates them."""

import threading
from collections.abc import Callable, Iterable, Mapping

from agent.core.freshness import VOUCHERS, Expected, Terms
from agent.model.ids import ComponentId, SourceName


class Proofs:
    """The time of the newest proof of each expected component."""

    def __init__(self, *, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._expected: dict[ComponentId, Expected] = {}

    def expect(self, component: ComponentId, terms: Terms, *, start_ns: int = 0) -> None:
        """Expect proofs of a component from now on; of an expected one, change the terms.

        It has ``start_ns`` more for its first proof.

        The component's starter calls this, not the component itself: one that never starts is stale, too.
        Raises KeyError for a component that is not in the table.
        """
        VOUCHERS[component.name]
        with self._lock:
            known = self._expected.get(component)
            self._expected[component] = Expected(
                terms, self._clock() + start_ns if known is None else known.proven_ns
            )

    def prove(self, component: ComponentId) -> None:
        """Record a proof of an expected component now."""
        with self._lock:
            known = self._expected.get(component)
            if known is not None:
                self._expected[component] = known._replace(proven_ns=self._clock())

    def waive(self, component: ComponentId) -> None:
        """Expect no more proofs of a component, because it has nothing to do."""
        with self._lock:
            self._expected.pop(component, None)

    def follow(self, name: SourceName, present: Iterable[str], terms: Terms) -> None:
        """Expect proofs of exactly these components of a name."""
        wanted = {ComponentId(name, of) for of in present}
        for component in [
            component for component in self.expected() if component.name == name and component not in wanted
        ]:
            self.waive(component)
        for component in wanted:
            self.expect(component, terms)

    def expected(self) -> Mapping[ComponentId, Expected]:
        """Return every expected component with its newest proof."""
        with self._lock:
            return dict(self._expected)
