"""The cell that holds the newest version: slow readers skip versions, but never the last one."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.bus import Latest


async def test_a_reader_that_is_behind_gets_the_newest_version_at_once() -> None:
    cell = Latest("a")
    assert (cell.value, cell.version) == ("a", 0)
    for value in "bcd":
        cell.publish(value)
    assert await cell.wait_newer(0) == 3
    assert cell.value == "d"


async def test_a_reader_that_is_up_to_date_waits_for_the_next_version() -> None:
    cell = Latest("a")
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(cell.wait_newer(0))
        await asyncio.sleep(0)
        assert not waiting.done()
        cell.publish("b")
    assert waiting.result() == 1


async def test_every_reader_is_woken() -> None:
    cell = Latest(0)
    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(cell.wait_newer(0)) for _ in range(5)]
        await asyncio.sleep(0)
        cell.publish(1)
        cell.publish(2)
    assert [reader.result() for reader in readers] == [2] * 5


async def test_readers_that_serve_a_waiting_peer_are_woken_first() -> None:
    cell = Latest(0)
    order: list[str] = []

    async def others() -> None:
        await cell.wait_newer(0)
        order.append("others")

    async def first() -> None:
        await cell.wait_newer_first(0)
        order.append("list")
        await asyncio.sleep(0)
        order.append("message")

    async with asyncio.TaskGroup() as group:
        group.create_task(others())
        group.create_task(first())
        await asyncio.sleep(0)
        cell.publish(1)
    assert order == ["list", "message", "others"]


async def test_a_reader_that_gives_up_does_not_disturb_the_others() -> None:
    cell = Latest(0)
    async with asyncio.TaskGroup() as group:
        gives_up = group.create_task(cell.wait_newer(0))
        stays = group.create_task(cell.wait_newer(0))
        await asyncio.sleep(0)
        gives_up.cancel()
        await asyncio.sleep(0)
        cell.publish(1)
    assert gives_up.cancelled()
    assert stays.result() == 1


async def test_a_reader_that_wants_a_later_version_waits_for_it() -> None:
    cell = Latest(0)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(cell.wait_newer(1))
        await asyncio.sleep(0)
        cell.publish(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        cell.publish(2)
    assert waiting.result() == 2


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(0, 4))
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_a_slow_reader_skips_versions_but_sees_the_last_one(bursts: list[int], slowness: int) -> None:
    async def read(cell: Latest[int], seen: list[int]) -> None:
        version = 0
        while seen[-1] >= 0:
            version = await cell.wait_newer(version)
            seen.append(cell.value)
            for _ in range(slowness):
                await asyncio.sleep(0)

    async def main() -> None:
        cell, seen = Latest(0), [0]
        async with asyncio.TaskGroup() as group:
            group.create_task(read(cell, seen))
            for burst in bursts:
                for _ in range(burst):
                    cell.publish(cell.value + 1)
                await asyncio.sleep(0)
            cell.publish(-1)
        assert seen[-1] == -1
        assert seen[:-1] == sorted(set(seen[:-1]))
        assert len(seen) <= 2 + sum(bursts)

    asyncio.run(main())


async def test_a_value_that_is_waited_for_is_found_now_later_or_not_in_time() -> None:
    latest = Latest(1)
    assert await latest.wait_for(lambda value: value == 1, 0)
    asyncio.get_running_loop().call_later(0.01, latest.publish, 2)
    assert await latest.wait_for(lambda value: value == 2, 60)
    assert not await latest.wait_for(lambda value: value == 3, 0.01)
