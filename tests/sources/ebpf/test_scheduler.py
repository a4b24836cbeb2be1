"""One thing at a time is told to the tracker, though what takes long is taken in steps."""

import asyncio
from collections.abc import Iterator

import pytest

from agent.sources.ebpf import scheduler as ebpf_turns
from agent.sources.ebpf.scheduler import Turns


def steps(told: list[str], turns: Turns, *meanwhile: str, size: int = 1) -> Iterator[None]:
    """Two steps; between them something happens."""
    told.append("first")
    for what in meanwhile:
        turns.tell(lambda what=what: told.append(what), size)  # type: ignore[misc]
    yield
    told.append("second")


async def test_what_is_told_between_steps_waits_and_keeps_its_order() -> None:
    told: list[str] = []
    turns = Turns()
    turns.tell(lambda: told.append("before"), 1)
    assert await turns.take(steps(told, turns, "one", "other")) == 0
    turns.tell(lambda: told.append("after"), 1)
    assert told == ["before", "first", "second", "one", "other", "after"]


async def test_the_loop_is_free_between_two_steps() -> None:
    told: list[str] = []
    turns = Turns()
    asyncio.get_running_loop().call_soon(told.append, "loop")
    await turns.take(steps(told, turns))
    assert told == ["first", "loop", "second"]


async def test_what_comes_while_others_wait_waits_behind_them() -> None:
    told: list[str] = []
    turns = Turns()

    def first_of_two() -> Iterator[None]:
        turns.tell(lambda: turns.tell(lambda: told.append("behind"), 1), 1)
        turns.tell(lambda: told.append("ahead"), 1)
        yield

    await turns.take(first_of_two())
    assert told == ["ahead", "behind"]


async def test_what_waits_is_bounded_and_what_has_no_room_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ebpf_turns, "MAX_WAITING", 10)
    told: list[str] = []
    turns = Turns()
    assert await turns.take(steps(told, turns, "a", "b", "c", size=4)) == 4
    assert told == ["first", "second", "a", "b"]
    assert await turns.take(steps(told, turns, "d", "e", size=5)) == 0
    assert told[-2:] == ["d", "e"]


async def test_what_comes_in_every_turn_of_the_loop_keeps_nothing_for_ever() -> None:
    turns = Turns()
    loop = asyncio.get_running_loop()
    told: list[int] = []
    storm = iter(range(1_000))

    def come() -> None:
        if (number := next(storm, None)) is not None:
            turns.tell(lambda: told.append(number), 1)
            loop.call_soon(come)

    loop.call_soon(come)
    await turns.take(iter([None] * 20))
    assert told == list(range(len(told)))
    assert len(told) < 100
    assert next(storm, None) is not None
