"""Updates of the tracker run one after the other, and long ones in steps."""

import asyncio
from collections.abc import Iterator

from agent.sources.ebpf.scheduler import StepScheduler


def steps(ran: list[str], scheduler: StepScheduler, *meanwhile: str, size: int = 1) -> Iterator[None]:
    """Two steps; between them something happens."""
    ran.append("first")
    for what in meanwhile:
        scheduler.submit(lambda what=what: ran.append(what), size)  # type: ignore[misc]
    yield
    ran.append("second")


async def test_updates_between_steps_wait_and_keep_their_order() -> None:
    ran: list[str] = []
    scheduler = StepScheduler()
    scheduler.submit(lambda: ran.append("before"), 1)
    assert await scheduler.run(steps(ran, scheduler, "one", "other")) == 0
    scheduler.submit(lambda: ran.append("after"), 1)
    assert ran == ["before", "first", "second", "one", "other", "after"]


async def test_the_loop_is_free_between_two_steps() -> None:
    ran: list[str] = []
    scheduler = StepScheduler()
    asyncio.get_running_loop().call_soon(ran.append, "loop")
    await scheduler.run(steps(ran, scheduler))
    assert ran == ["first", "loop", "second"]


async def test_a_later_update_waits_behind_earlier_ones() -> None:
    ran: list[str] = []
    scheduler = StepScheduler()

    def first_of_two() -> Iterator[None]:
        scheduler.submit(lambda: scheduler.submit(lambda: ran.append("behind"), 1), 1)
        scheduler.submit(lambda: ran.append("ahead"), 1)
        yield

    await scheduler.run(first_of_two())
    assert ran == ["ahead", "behind"]


async def test_the_queue_is_bounded_and_dropped_events_are_counted() -> None:
    ran: list[str] = []
    scheduler = StepScheduler(max_waiting=10)
    assert await scheduler.run(steps(ran, scheduler, "a", "b", "c", size=4)) == 4
    assert ran == ["first", "second", "a", "b"]
    assert await scheduler.run(steps(ran, scheduler, "d", "e", size=5)) == 0
    assert ran[-2:] == ["d", "e"]


async def test_updates_in_every_turn_of_the_loop_do_not_block_it() -> None:
    scheduler = StepScheduler()
    loop = asyncio.get_running_loop()
    ran: list[int] = []
    storm = iter(range(1_000))

    def come() -> None:
        if (number := next(storm, None)) is not None:
            scheduler.submit(lambda: ran.append(number), 1)
            loop.call_soon(come)

    loop.call_soon(come)
    await scheduler.run(iter([None] * 20))
    assert ran == list(range(len(ran)))
    assert len(ran) < 100
    assert next(storm, None) is not None
