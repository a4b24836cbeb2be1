"""What holds for every test: nothing blocks the event loop, and garbage is collected between tests."""

import fcntl
import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from _pytest.capture import CaptureIO
from blockbuster import blockbuster_ctx
from hypothesis import settings

# A loaded machine is no bug: examples have no time limit, speed is measured in tests/bench.
settings.register_profile("repository", deadline=None)
settings.load_profile("repository")

# Calls on the node's own small directories (tmpfs or local disk) that take microseconds. Everything
# else that could wait for a disk, a peer or a driver has to leave the loop's thread.
ALLOWED = (
    "os.stat",
    "os.unlink",
    "os.mkdir",
    "os.path.islink",
    "os.path.abspath",
    "os.readlink",
    "os.listdir",
)


GARBAGE_AT = 50_000
"""Objects made since the last collection; between two of them a few tests run."""


def pytest_sessionstart() -> None:
    """Collect no garbage on a thread that calls the driver; see agent.runtime.garbage."""
    gc.disable()


def pytest_runtest_teardown() -> None:
    """Collect it between tests instead."""
    if gc.get_count()[0] > GARBAGE_AT:
        gc.collect()


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Wait until no other process of tests on this machine does the same."""
    with (Path(tempfile.gettempdir()) / f"gpu-agent-tests-{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def _one_demo_at_a_time() -> Iterator[None]:
    """They would take each other's port."""
    with alone("demo"):
        yield


@pytest.hookimpl(tryfirst=True)  # before some are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that take a device of this machine for a GPU: they see what others do with it."""
    for item in items:
        uses_it = {"gpu", "probe", "load_probe"} & set(getattr(item, "fixturenames", ()))
        if uses_it or hasattr(getattr(item, "module", None), "stand_in"):
            item.add_marker("device")


@pytest.fixture
def _on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed goes to a terminal."""
    monkeypatch.setattr(CaptureIO, "isatty", lambda _: True)


@pytest.fixture(autouse=True)
def _nothing_blocks_the_loop() -> Iterator[None]:
    with blockbuster_ctx("agent", excluded_modules=["agent.simulation"]) as detector:
        for name in ALLOWED:
            if name in detector.functions:
                detector.functions[name].deactivate()
        # The emulated kubelet's gRPC joins its poller when the last of its objects is collected, which
        # may be while the agent's code runs; the agent itself joins no thread.
        detector.functions["threading.Lock.acquire"].can_block_in("threading.py", "_wait_for_tstate_lock")
        yield
