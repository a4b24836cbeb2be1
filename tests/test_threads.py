"""A daemon thread that executes one call after the other."""

import asyncio
import threading

import pytest

from agent.threads import DaemonThread


async def test_one_thread_executes_all_and_returns_the_results() -> None:
    thread = DaemonThread("test-worker")
    identities = {await thread.do(threading.get_ident) for _ in range(3)}
    assert len(identities) == 1
    assert threading.get_ident() not in identities

    with pytest.raises(ZeroDivisionError):
        await thread.do(lambda: 1 // 0)
    assert await thread.do(lambda: 7) == 7
    thread.end()


async def test_calls_are_executed_in_order_also_after_a_caller_was_cancelled() -> None:
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


async def test_it_stops_after_its_queue_is_empty() -> None:
    thread = DaemonThread("test-worker")
    found: list[threading.Thread] = []
    thread.post(lambda: found.append(threading.current_thread()))
    thread.end()
    while not found or found[0].is_alive():
        await asyncio.sleep(0.001)

    assert found[0].daemon


async def test_it_stops_with_its_owner() -> None:
    thread = DaemonThread("test-worker")
    worker = await thread.do(threading.current_thread)
    del thread
    while worker.is_alive():
        await asyncio.sleep(0.001)


async def test_a_cancelled_caller_still_finds_the_result() -> None:
    thread = DaemonThread("test-worker")
    done = thread.begin(lambda: 7)
    await asyncio.wait({done})

    assert done.result() == 7


def test_no_thread_is_started_without_work() -> None:
    before = threading.active_count()
    DaemonThread("test-worker").end()

    assert threading.active_count() == before
