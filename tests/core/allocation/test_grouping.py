"""How GPUs are divided into groups, held against every division there is."""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.allocation import grouping
from agent.core.allocation.grouping import EXACT, best_group, by_strength, divide, greedy, total

Matrix = list[list[int]]


def matrix(count: int, score: Callable[[int, int], int]) -> Matrix:
    return [[0 if i == j else score(min(i, j), max(i, j)) for j in range(count)] for i in range(count)]


def of(scores: Matrix, gpus: Sequence[int]) -> Matrix:
    return [[scores[one][other] for other in gpus] for one in gpus]


def divisions(gpus: tuple[int, ...], size: int) -> Iterator[list[tuple[int, ...]]]:
    """Every division into groups of a size and at most one smaller one."""
    if not gpus:
        yield []
        return
    lengths = {min(size, len(gpus)), len(gpus) % size} - {0}
    for length in lengths:
        for others in combinations(gpus[1:], length - 1):
            group = (gpus[0], *others)
            for rest in divisions(tuple(gpu for gpu in gpus if gpu not in group), size):
                yield [group, *rest]


def value(scores: Matrix, groups: Sequence[Sequence[int]]) -> int:
    return sum(total(scores, group) for group in groups)


def oracle(scores: Matrix, size: int, required: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """The best total there is, and the group that is to be chosen, by an exhaustive search."""

    def rank(division: list[tuple[int, ...]], group: tuple[int, ...]) -> Any:
        crossing = sum(
            scores[one][other] for one in group for other in range(len(scores)) if other not in group
        )
        inner = total(scores, group)
        # Of single GPUs, which have no score, the one that breaks least.
        return (value(scores, division) if size > 1 else 0, inner, -crossing, [-gpu for gpu in group])

    candidates = [
        (rank(division, group), group)
        for division in divisions(tuple(range(len(scores))), size)
        for group in division
        if len(group) == size and set(required) <= set(group)
    ]
    (best, *_), group = max(candidates)
    return best, group


@st.composite
def questions(draw: st.DrawFn, most: int) -> tuple[Matrix, int, list[int]]:
    count = draw(st.integers(1, most))
    scores = [[0] * count for _ in range(count)]
    for one, other in combinations(range(count), 2):
        scores[one][other] = scores[other][one] = draw(st.sampled_from([0, 10, 20, 50, 110, 210, 420]))
    size = draw(st.integers(1, count))
    return scores, size, draw(st.lists(st.integers(0, count - 1), max_size=size, unique=True))


@given(questions(most=6))
def test_of_few_gpus_the_group_is_that_of_an_exhaustive_search(
    question: tuple[Matrix, int, list[int]],
) -> None:
    scores, size, required = question
    assert best_group(scores, size, required) == oracle(scores, size, required)[1]


@given(questions(most=16))
def test_a_group_has_its_size_and_all_that_is_required(question: tuple[Matrix, int, list[int]]) -> None:
    scores, size, required = question
    group = best_group(scores, size, required)
    assert len(group) == size
    assert set(required) <= set(group) <= set(range(len(scores)))
    assert list(group) == sorted(set(group))
    assert group == best_group(scores, size, required)


@given(questions(most=7))
def test_a_division_is_never_worse_than_the_greedy_one_nor_better_than_the_best(
    question: tuple[Matrix, int, list[int]],
) -> None:
    scores, size, required = question
    groups = divide(scores, size, required)
    assert sorted(gpu for group in groups for gpu in group) == list(range(len(scores)))
    assert sorted(len(group) for group in groups)[1:] == [size] * (
        len(scores) // size - (len(scores) % size == 0)
    )
    assert any(len(group) == size and set(required) <= set(group) for group in groups)
    for is_rest_first in (True, False):
        assert value(scores, groups) >= value(
            scores, greedy(scores, size, required, is_rest_first=is_rest_first)
        )
    assert value(scores, groups) >= value(scores, by_strength(scores, size, required))
    assert value(scores, groups) <= oracle(scores, size, required)[0] or size == 1


@given(questions(most=7))
def test_no_division_is_above_the_bound_and_the_loss_is_what_it_stays_below(
    question: tuple[Matrix, int, list[int]],
) -> None:
    scores, size, _ = question
    bound = grouping.Bound(scores, size)
    highest = sum(sums[-1] for sums in bound.most) - bound.least_cost
    for division in divisions(tuple(range(len(scores))), size):
        loss = bound.loss_of(division)
        assert loss >= 0
        assert 2 * value(scores, division) == highest - loss


@given(questions(most=7))
def test_a_search_without_an_end_finds_the_best_division(question: tuple[Matrix, int, list[int]]) -> None:
    scores, size, required = question
    search = grouping.Search(scores, size, grouping.Bound(scores, size), 1 << 40, nodes=1 << 40)
    found = search.better(required)
    assert found is not None
    assert any(len(group) == size and set(required) <= set(group) for group in found)
    allowed = [
        value(scores, division)
        for division in divisions(tuple(range(len(scores))), size)
        if any(len(group) == size and set(required) <= set(group) for group in division)
    ]
    assert value(scores, found) == max(allowed)
    # What is no better is not found.
    again = grouping.Search(scores, size, grouping.Bound(scores, size), search.least)
    assert again.better(required) is None


@given(questions(most=7))
def test_gpus_of_one_kind_and_no_others_are_interchangeable(question: tuple[Matrix, int, list[int]]) -> None:
    scores, _, _ = question
    found = grouping.kinds(scores)
    for one, other in combinations(range(len(scores)), 2):
        order = list(range(len(scores)))
        order[one], order[other] = other, one
        assert (of(scores, order) == scores) == (found[one] == found[other])


# Machines that are sold


def pcie(one: int, other: int) -> int:
    if one // 2 == other // 2:
        return 50
    if one // 4 == other // 4:
        return 30
    return 20 if one // 8 == other // 8 else 10


def nvswitch(one: int, other: int) -> int:
    return 1800 + pcie(one, other)


def pairs(one: int, other: int) -> int:
    return pcie(one, other) + (400 if one // 2 == other // 2 else 0)


def some_pairs(one: int, other: int) -> int:
    return pcie(one, other) + (400 if one // 2 == other // 2 and one < 8 else 0)


MACHINES = [nvswitch, pairs, some_pairs, pcie]
AVAILABLE = [
    tuple(range(16)),
    tuple(range(3, 16)),
    (0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 14, 15),
    (0, 2, 4, 6, 8, 9, 10, 11, 12),
]


def best_value(scores: Matrix, size: int) -> int:
    """The highest total, by dynamic programming over sets of GPUs."""
    known: dict[tuple[int, ...], int] = {(): 0}

    def best(gpus: tuple[int, ...]) -> int:
        if gpus not in known:
            lengths = {min(size, len(gpus)), len(gpus) % size} - {0}
            known[gpus] = max(
                total(scores, (gpus[0], *others)) + best(tuple(gpu for gpu in gpus[1:] if gpu not in others))
                for length in lengths
                for others in combinations(gpus[1:], length - 1)
            )
        return known[gpus]

    return best(tuple(range(len(scores))))


@pytest.mark.parametrize("available", AVAILABLE[2:], ids=len)
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_a_division_of_many_gpus_of_a_real_machine_is_hardly_below_the_best(
    machine: Callable[[int, int], int], available: tuple[int, ...]
) -> None:
    scores = of(matrix(16, machine), available)
    for size in (2, 4, len(available) // 2):
        assert value(scores, divide(scores, size)) >= 0.99 * best_value(scores, size)


def test_where_one_greedy_division_is_short_another_is_not() -> None:
    scores = of(matrix(16, some_pairs), (1, 2, 4, 5, 6, 8, 9, 12, 13, 14, 15))
    assert value(scores, divide(scores, 4)) == best_value(scores, 4) == 860
    single = greedy(scores, 4, (), is_rest_first=False)
    grouping.improve(scores, single, frozenset(), grouping.MAX_EXCHANGES)
    assert value(scores, single) < 860


def test_pairs_are_not_broken_where_there_are_enough_single_gpus_for_them() -> None:
    scores = of(matrix(16, some_pairs), (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14))
    together = {gpu: group for group in divide(scores, 3) for gpu in group}
    assert all(together[first] is together[first + 1] for first in (0, 2, 4, 6))


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_a_whole_machine_of_equal_parts_is_divided_into_these(
    machine: Callable[[int, int], int], size: int
) -> None:
    groups = divide(matrix(16, machine), size)
    assert sorted(groups) == [tuple(range(first, first + size)) for first in range(0, 16, size)]


@pytest.mark.parametrize("machine", [pairs, some_pairs, pcie], ids=lambda machine: machine.__name__)
@pytest.mark.parametrize("available", AVAILABLE, ids=len)
def test_a_single_gpu_is_one_whose_partner_is_in_use_if_there_is_one(
    machine: Callable[[int, int], int], available: tuple[int, ...]
) -> None:
    (chosen,) = best_group(of(matrix(16, machine), available), 1)
    alone = [gpu for gpu in available if (gpu ^ 1) not in available]
    assert available[chosen] in alone or not alone


# Bounds


def worst_case(count: int) -> Matrix:
    """Scores without any order, for which no bound is tight."""
    return matrix(count, lambda one, other: (one * 7919 + other * 104_729) % 421)


@settings(max_examples=20)
@given(st.integers(EXACT + 1, 16), st.data())
def test_the_search_ends_at_its_bound_and_the_answer_is_used_all_the_same(
    count: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(2, count - 1))
    scores = worst_case(count)
    bound = grouping.Bound(scores, size)
    search = grouping.Search(scores, size, bound, 1 << 40)
    search.better(())
    assert search.nodes >= 0
    assert len(best_group(scores, size)) == size


def test_exchanges_are_bounded() -> None:
    scores = worst_case(16)
    groups = greedy(scores, 4, (), is_rest_first=False)
    before = value(scores, groups)
    assert grouping.improve(scores, groups, frozenset(), 10) == 0
    assert value(scores, groups) >= before
    assert grouping.improve(scores, groups, frozenset(), grouping.MAX_EXCHANGES) > 0
    assert value(scores, groups) > before


def test_the_largest_node_is_answered() -> None:
    assert len(best_group(worst_case(64), 32, (1, 63))) == 32
