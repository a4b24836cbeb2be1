"""Where the components of the agent put their proofs, from any thread; core.freshness evaluates them."""

import threading
from collections.abc import Callable, Iterable, Mapping

from agent.core.freshness import VOUCHERS, Expected, Terms
from agent.model.ids import Part, SourceName


class Proofs:
    """The time of the newest proof of each part that has to give proofs."""

    def __init__(self, *, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._expected: dict[Part, Expected] = {}

    def expect(self, part: Part, terms: Terms, *, start_ns: int = 0) -> None:
        """Expect proofs of a part from now on; of one that is expected already the terms change.

        It has ``start_ns`` more for its first proof.

        To be called by what starts the part, not by the part itself: one that never begins is stale, too.
        Raises KeyError for a part that is not in the table.
        """
        VOUCHERS[part.name]
        with self._lock:
            known = self._expected.get(part)
            self._expected[part] = Expected(
                terms, self._clock() + start_ns if known is None else known.proven_ns
            )

    def prove(self, part: Part) -> None:
        """Note a proof now; nothing if none is expected."""
        with self._lock:
            known = self._expected.get(part)
            if known is not None:
                self._expected[part] = known._replace(proven_ns=self._clock())

    def waive(self, part: Part) -> None:
        """Expect nothing more of a part, because it has nothing to do."""
        with self._lock:
            self._expected.pop(part, None)

    def follow(self, name: SourceName, present: Iterable[str], terms: Terms) -> None:
        """Expect proofs of exactly these parts of a name."""
        wanted = {Part(name, of) for of in present}
        for part in [part for part in self.expected() if part.name == name and part not in wanted]:
            self.waive(part)
        for part in wanted:
            self.expect(part, terms)

    def expected(self) -> Mapping[Part, Expected]:
        """Return every part that has to give proofs, with its newest one."""
        with self._lock:
            return dict(self._expected)
