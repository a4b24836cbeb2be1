"""Where the components of the agent put their proofs, from any thread; core.freshness evaluates them."""

import threading
from collections.abc import Callable, Iterable, Mapping

from agent.core.freshness import VOUCHERS, Expected, Terms
from agent.model.ids import ComponentId, SourceName


class Proofs:
    """The time of the newest proof of each part that has to give proofs."""

    def __init__(self, *, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._expected: dict[ComponentId, Expected] = {}

    def expect(self, component: ComponentId, terms: Terms, *, start_ns: int = 0) -> None:
        """Expect proofs of a part from now on; of one that is expected already the terms change.

        It has ``start_ns`` more for its first proof.

        To be called by what starts the part, not by the part itself: one that never begins is stale, too.
        Raises KeyError for a part that is not in the table.
        """
        VOUCHERS[component.name]
        with self._lock:
            known = self._expected.get(component)
            self._expected[component] = Expected(
                terms, self._clock() + start_ns if known is None else known.proven_ns
            )

    def prove(self, component: ComponentId) -> None:
        """Note a proof now; nothing if none is expected."""
        with self._lock:
            known = self._expected.get(component)
            if known is not None:
                self._expected[component] = known._replace(proven_ns=self._clock())

    def waive(self, component: ComponentId) -> None:
        """Expect nothing more of a part, because it has nothing to do."""
        with self._lock:
            self._expected.pop(component, None)

    def follow(self, name: SourceName, present: Iterable[str], terms: Terms) -> None:
        """Expect proofs of exactly these parts of a name."""
        wanted = {ComponentId(name, of) for of in present}
        for component in [
            component for component in self.expected() if component.name == name and component not in wanted
        ]:
            self.waive(component)
        for component in wanted:
            self.expect(component, terms)

    def expected(self) -> Mapping[ComponentId, Expected]:
        """Return every part that has to give proofs, with its newest one."""
        with self._lock:
            return dict(self._expected)
