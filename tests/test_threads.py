"""A daemon thread that does one thing after the other."""

import asyncio
import threading

import pytest

from agent.threads import DaemonThread


async def test_one_thread_does_it_all_and_returns_what_came_of_it() -> None:
    thread = DaemonThread("test-worker")
    identities = {await thread.do(threading.get_ident) for _ in range(3)}
    assert len(identities) == 1
    assert threading.get_ident() not in identities

    with pytest.raises(ZeroDivisionError):
        await thread.do(lambda: 1 // 0)
    assert await thread.do(lambda: 7) == 7
    thread.end()


async def test_things_are_done_in_order_also_after_somebody_stopped_waiting() -> None:
    thread, go = DaemonThread("test-worker"), threading.Event()
    done: list[str] = []

    def first() -> None:
        go.wait()
        done.append("first")

    waiting = asyncio.get_running_loop().create_task(thread.do(first))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    thread.post(lambda: done.append("second"))
    go.set()
    await thread.do(lambda: done.append("third"))
    thread.end()

    assert done == ["first", "second", "third"]


async def test_it_ends_after_what_it_has_to_do() -> None:
    thread = DaemonThread("test-worker")
    found: list[threading.Thread] = []
    thread.post(lambda: found.append(threading.current_thread()))
    thread.end()
    while not found or found[0].is_alive():
        await asyncio.sleep(0.001)

    assert found[0].daemon


async def test_it_ends_with_its_owner() -> None:
    thread = DaemonThread("test-worker")
    worker = await thread.do(threading.current_thread)
    del thread
    while worker.is_alive():
        await asyncio.sleep(0.001)


async def test_who_stopped_waiting_finds_what_came_of_it() -> None:
    thread = DaemonThread("test-worker")
    done = thread.begin(lambda: 7)
    await asyncio.wait({done})

    assert done.result() == 7


def test_none_is_started_for_nothing() -> None:
    before = threading.active_count()
    DaemonThread("test-worker").end()

    assert threading.active_count() == before
