"""Divides GPUs into groups whose members have good connections, and picks one group.

The goal is that of NVIDIA's allocator: of all ways to divide the GPUs into groups of one size, with one
smaller group for the rest, the way with the highest total of the scores within groups; and of its groups the
best one. So a group is not made at the expense of the next request.
Source: NVIDIA/go-gpuallocator:gpuallocator/besteffort_policy.go.

Guarantees: up to EXACT GPUs the total is the highest there is, and among the ways that reach it the
group is the one with the highest score, then the one that breaks least off the GPUs that stay, then the
first. With more GPUs greedy divisions are improved by exchanges, at most MAX_EXCHANGES tried in all, and
a better one is searched for in at most MAX_NODES steps; GPUs with equal connections are interchangeable. The
outcome is never worse than a greedy one, and is the best wherever every GPU can have its best neighbours, as
in nodes that are built of equal parts.
A group of one breaks least off. Equal questions have equal answers.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from operator import add, sub
from typing import Final

EXACT: Final = 8
"""GPUs up to which every division is evaluated."""
MAX_EXCHANGES: Final = 6_000
"""Exchanges of two GPUs that are tried, in all."""
MAX_NODES: Final = 200
"""Partial groups that are tried in the search for a better division."""

Scores = Sequence[Sequence[int]]
"""The score of each pair, symmetric; not negative, and zero on the diagonal."""
Group = tuple[int, ...]


def best_group(scores: Scores, size: int, required: Sequence[int] = ()) -> Group:
    """Return ``size`` GPUs, ascending, with all of ``required`` among them.

    ``size`` is from the number of required ones to the number of GPUs.
    """
    count = len(scores)
    if size in {0, count}:
        return tuple(range(size))
    if size == 1:
        return max(((gpu,) for gpu in required or range(count)), key=lambda group: _rank(scores, group))
    if count <= EXACT:
        return _best_of_all(scores, size, frozenset(required))
    groups = divide(scores, size, required)
    whole = [group for group in groups if len(group) == size and set(required) <= set(group)]
    return max(whole, key=lambda group: _rank(scores, group))


def _rank(scores: Scores, group: Group) -> tuple[int, int, tuple[int, ...]]:
    inner = total(scores, group)
    broken = sum(sum(scores[gpu]) for gpu in group) - 2 * inner
    return inner, -broken, tuple(-gpu for gpu in group)


def total(scores: Scores, group: Sequence[int]) -> int:
    """Return the sum of the scores within a group."""
    return sum(scores[one][other] for one, other in combinations(group, 2))


# Few GPUs: every division


def _best_of_all(scores: Scores, size: int, required: frozenset[int]) -> Group:
    count = len(scores)
    inner = _inner_totals(scores)
    best = _best_totals(inner, size)
    everything = (1 << count) - 1
    groups = (group for group in combinations(range(count), size) if required <= set(group))

    def rank(group: Group) -> tuple[int, tuple[int, int, tuple[int, ...]]]:
        mask = sum(1 << gpu for gpu in group)
        return inner[mask] + best(everything & ~mask), _rank(scores, group)

    return max(groups, key=rank)


def _inner_totals(scores: Scores) -> list[int]:
    """Return the score within every set of GPUs, by the set's bits."""
    inner = [0]
    for gpu, row in enumerate(scores):
        to_gpu = [0]
        for score in row[:gpu]:
            to_gpu += [known + score for known in to_gpu]
        inner += [known + added for known, added in zip(inner, to_gpu, strict=True)]
    return inner


def _best_totals(inner: Sequence[int], size: int) -> Callable[[int], int]:
    """Return a function for the highest total of a division of a set of GPUs, by the set's bits."""
    known = {0: 0}

    def best(mask: int) -> int:
        if mask not in known:
            first = mask & -mask
            bits = [1 << bit for bit in range(mask.bit_length()) if mask >> bit & 1]
            known[mask] = max(
                inner[group] + best(mask & ~group)
                for length in {size, len(bits) % size} - {0}
                if length <= len(bits)
                for group in (first + sum(others) for others in combinations(bits[1:], length - 1))
            )
        return known[mask]

    return best


# Many GPUs: a good division, improved within bounds


def divide(scores: Scores, size: int, required: Sequence[int] = ()) -> list[Group]:
    """Return a division into groups of ``size`` and one smaller one; see the module for how good."""
    bound = Bound(scores, size)
    best: list[list[int]] = []
    best_loss = -1
    exchanges = MAX_EXCHANGES
    for groups in _starts(scores, size, required):
        exchanges = improve(scores, groups, frozenset(required), exchanges)
        loss = bound.loss_of(groups)
        if not best or loss < best_loss:
            best, best_loss = groups, loss
        if best_loss == 0:
            break
    else:
        found = Search(scores, size, bound, best_loss).better(required)
        best = best if found is None else [list(group) for group in found]
    return [tuple(sorted(group)) for group in best]


def _starts(scores: Scores, size: int, required: Sequence[int]) -> Iterator[list[list[int]]]:
    yield by_strength(scores, size, required)
    # Machines have two halves, and a greedy division hardly ever begins in the second one by itself.
    far = next((gpu for gpu in range(len(scores) // 2, len(scores)) if gpu not in required), None)
    for is_rest_first in (False, True) if len(scores) % size else (False,):
        for seed in (None, far):
            yield greedy(scores, size, required, is_rest_first=is_rest_first, seed=seed)


def by_strength(scores: Scores, size: int, required: Sequence[int]) -> list[list[int]]:
    """Return a division that keeps the strongest pairs together, one pair after another."""
    forming = _Forming(scores, size, required)
    pairs = combinations(range(len(scores)), 2)
    for one, other in sorted(pairs, key=lambda pair: -scores[pair[0]][pair[1]]):
        forming.join(one, other)
    for gpu in range(len(scores)):
        if gpu not in forming.group_of:
            forming.place(gpu)
    return forming.groups


class _Forming:
    """Groups that are being filled; the first one has the required GPUs."""

    def __init__(self, scores: Scores, size: int, required: Sequence[int]) -> None:
        self._scores = scores
        self._room = [size] * (len(scores) // size) + ([len(scores) % size] if len(scores) % size else [])
        self.groups: list[list[int]] = [[] for _ in self._room]
        self.group_of: dict[int, int] = {}
        for gpu in required:
            self._put(gpu, 0)

    def join(self, one: int, other: int) -> None:
        """Put two GPUs into one group, if neither or one of them is in one and there is room."""
        ours, theirs = self.group_of.get(one), self.group_of.get(other)
        if ours is None and theirs is None:
            self.place(one, other)
        elif ours is None and theirs is not None and self._room[theirs]:
            self._put(one, theirs)
        elif theirs is None and ours is not None and self._room[ours]:
            self._put(other, ours)

    def place(self, *gpus: int) -> None:
        """Put GPUs into the group with room that they are connected to best, if there is one."""
        fitting = [number for number, room in enumerate(self._room) if room >= len(gpus)]
        if fitting:
            best = max(fitting, key=lambda number: self._connection(gpus, number))
            for gpu in gpus:
                self._put(gpu, best)

    def _connection(self, gpus: Sequence[int], number: int) -> int:
        return sum(self._scores[gpu][member] for gpu in gpus for member in self.groups[number])

    def _put(self, gpu: int, number: int) -> None:
        self.groups[number].append(gpu)
        self.group_of[gpu] = number
        self._room[number] -= 1


def greedy(
    scores: Scores, size: int, required: Sequence[int], *, is_rest_first: bool, seed: int | None = None
) -> list[list[int]]:
    """Return a division made group by group, each from the GPU that has least to lose.

    The first GPU that is chosen is ``seed``, which is none of the required ones.
    """
    lengths = [size] * (len(scores) // size)
    rest = len(scores) % size
    if rest:
        # The required ones are in the first group, which is a whole one.
        lengths.insert(min(1, len(required)) if is_rest_first else len(lengths), rest)
    left = [gpu for gpu in range(len(scores)) if gpu not in required]
    to_left = [sum(row[gpu] for gpu in left) for row in scores]
    groups: list[list[int]] = []
    for length in lengths:
        group = [] if groups else list(required)
        near = [sum(row[member] for member in group) for row in scores]
        while len(group) < length:
            # The GPU that is connected best to the group, and of equals worst to the others that are left.
            _, _, last = max([(near[gpu], -to_left[gpu], -gpu) for gpu in left])
            chosen, seed = -last if seed is None else seed, None
            left.remove(chosen)
            group.append(chosen)
            near = list(map(add, near, scores[chosen]))
            to_left = list(map(sub, to_left, scores[chosen]))
        groups.append(group)
    return groups


def improve(scores: Scores, groups: list[list[int]], fixed: frozenset[int], exchanges: int) -> int:
    """Exchange GPUs between groups while that helps; returns how many more pairs may be tried.

    ``fixed`` are GPUs of the first group, which stay there.
    """
    towards = [[sum([row[gpu] for gpu in group]) for group in groups] for row in scores]
    is_better = True
    while is_better:
        is_better = False
        for mine, theirs in combinations(range(len(groups)), 2):
            for at, one in enumerate(groups[mine]):
                if one in fixed:
                    continue
                exchanges -= len(groups[theirs])
                if exchanges < 0:
                    return 0
                row = scores[one]
                gains = [
                    towards[other][mine] - towards[other][theirs] - 2 * row[other] for other in groups[theirs]
                ]
                best = max(gains)
                if best <= towards[one][mine] - towards[one][theirs]:
                    continue
                there = gains.index(best)
                other = groups[theirs][there]
                groups[mine][at], groups[theirs][there] = other, one
                for row, sums in zip(scores, towards, strict=True):
                    moved = row[other] - row[one]
                    sums[mine] += moved
                    sums[theirs] -= moved
                is_better = True
    return exchanges


class Bound:
    """The total, counted from both ends of each pair, that no division is above.

    Every GPU of a group has at most its best neighbours in it, and those in the smaller group have
    fewer. What a group stays below that is its loss; the division without a loss is the best one.
    """

    def __init__(self, scores: Scores, size: int) -> None:
        self.size = size
        self.rest = len(scores) % size
        self.most: list[list[int]] = []
        """What each GPU can have from so many neighbours."""
        for row in scores:
            sums = [0]
            for score in sorted(row, reverse=True)[: size - 1]:
                sums.append(sums[-1] + score)
            self.most.append(sums)
        self._scores = scores
        # What it costs at least that some GPUs have to be in the smaller group.
        costs = sorted(sums[-1] - sums[self.rest - 1] for sums in self.most) if self.rest else []
        self.least_cost = sum(costs[: self.rest])

    def loss_of(self, groups: Sequence[Sequence[int]]) -> int:
        """Return how far a division stays below the bound."""
        return sum(self._loss(group) for group in groups)

    def _loss(self, group: Sequence[int]) -> int:
        allowed = self.least_cost if len(group) < self.size else 0
        return sum(self.most[gpu][-1] for gpu in group) - 2 * total(self._scores, group) - allowed


def kinds(scores: Scores) -> list[int]:
    """Return for each GPU the first one that may take its place: it is connected to all others alike."""
    first: list[int] = []
    for gpu, row in enumerate(scores):
        alike = (kind for kind in dict.fromkeys(first) if _is_alike(scores[kind], row, kind, gpu))
        first.append(next(alike, gpu))
    return first


def _is_alike(one: Sequence[int], other: Sequence[int], at: int, there: int) -> bool:
    """Whether two rows are equal but for the two GPUs that they are of, ``at`` before ``there``."""
    return (
        one[:at] == other[:at]
        and one[at + 1 : there] == other[at + 1 : there]
        and one[there + 1 :] == other[there + 1 :]
    )


class Search:
    """Searches for a division with a smaller loss, depth first, for a bounded number of steps.

    GPUs of one kind are interchangeable, so divisions that differ in that alone are tried once.
    """

    def __init__(self, scores: Scores, size: int, bound: Bound, loss: int, nodes: int = MAX_NODES) -> None:
        self._scores = scores
        self._size = size
        self._bound = bound
        self._kinds = kinds(scores)
        self.least = loss
        """The smallest loss so far."""
        self._best: list[Group] | None = None
        self.nodes = nodes
        """Partial groups that may still be tried."""
        self._seen: dict[tuple[int, ...], int] = {}
        """The smallest loss with which GPUs of these kinds were left to be divided."""

    def better(self, required: Sequence[int]) -> list[Group] | None:
        """Return the best division that was found; None: none is better."""
        left = tuple(gpu for gpu in range(len(self._scores)) if gpu not in required)
        self._divide([], left, tuple(required), 0)
        return self._best

    def _divide(self, groups: list[Group], left: Group, begun: Group, loss: int) -> None:
        """Close one more group, in each way that may still lead to a smaller loss."""
        if not left and not begun:
            self.least, self._best = loss, groups
            return
        if not begun:
            kinds_left = tuple(sorted([self._kinds[gpu] for gpu in left]))
            if self._seen.get(kinds_left, loss + 1) <= loss:
                return
            self._seen[kinds_left] = loss
        count = len(left) + len(begun)
        lengths = [self._size] if count >= self._size else []
        if count % self._size and not begun:
            lengths.append(count % self._size)
        # Groups are closed in the order of their first GPUs, so that no division is met twice.
        start = begun or left[:1]
        row = self._scores[start[0]]
        others = sorted((gpu for gpu in left if gpu not in start), key=lambda gpu: -row[gpu])
        twice = 2 * total(self._scores, start)
        for length in lengths:
            for group, inner in self._groups(start, others, length, loss, twice):
                rest = tuple([gpu for gpu in left if gpu not in group])
                self._divide([*groups, group], rest, (), loss + self._lost(group, length) - inner)

    def _groups(
        self, group: Group, others: Sequence[int], length: int, loss: int, twice: int
    ) -> Iterator[tuple[Group, int]]:
        """Yield each group of this length that holds ``group`` and may be part of a better division.

        With it comes the score within the group, counted from both ends of each pair; ``twice`` is that of
        ``group``, and ``loss`` that of the groups before it.
        """
        if loss + self._lost(group, length) - twice >= self.least:
            return
        if len(group) == length:
            yield group, twice
            return
        tried: set[int] = set()
        for place, gpu in enumerate(others[: len(others) - length + len(group) + 1], start=1):
            if self._kinds[gpu] in tried:
                continue
            if self.nodes <= 0:
                return
            self.nodes -= 1
            tried.add(self._kinds[gpu])
            row, larger = self._scores[gpu], (*group, gpu)
            inner = twice + 2 * sum([row[member] for member in group])
            if loss + self._lost(larger, length) - inner < self.least:
                yield from self._groups(larger, others[place:], length, loss, inner)

    def _lost(self, group: Group, length: int) -> int:
        """Return the most that a group's members can have, less what the missing ones can bring at most."""
        most, missing = self._bound.most, length - len(group)
        lost = sum([most[gpu][-1] - most[gpu][missing] for gpu in group])
        return lost - self._bound.least_cost if length < self._size else lost
