"""Fixtures of every test: nothing blocks the event loop, and garbage is collected between tests.

Profiles of hypothesis: by default always the same examples, so that a run can be repeated.
``HYPOTHESIS_PROFILE=deep`` searches anew, ``mutation`` is for thousands of runs of the suite.
"""

import fcntl
import gc
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest
from _pytest.capture import CaptureIO
from _pytest.nodeid import coerce_node_id
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, Phase, settings

from tests.killed_runs import held

# A loaded machine is no bug: examples have no time limit, speed is measured in tests/bench.
settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("deep", settings.get_profile("default"), derandomize=False, max_examples=1_000)
settings.register_profile(
    "mutation",
    settings.get_profile("default"),
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Calls on the node's own small directories (tmpfs or local disk) that take microseconds. Everything
# else that could wait for a disk, a peer or a driver has to leave the loop's thread.
ALLOWED = (
    "os.stat",
    "os.statvfs",
    "os.unlink",
    "os.mkdir",
    "os.path.islink",
    "os.path.abspath",
    "os.readlink",
    "os.listdir",
)


# A socket's path has 107 bytes at most; the names of tests' directories and sockets take over eighty of them.
MAX_BASE_BYTES = 16

GARBAGE_AT = 50_000
"""Objects created between two collections; a few tests run in between."""


def pytest_sessionstart() -> None:
    """Collect no garbage on a thread that calls the driver; see agent.runtime.process."""
    gc.disable()


def pytest_runtest_teardown() -> None:
    """Collect it between tests instead."""
    if gc.get_count()[0] > GARBAGE_AT:
        gc.collect()


SEES_ALL_CALLS = frozenset({"gpu", "probe", "load_probe"})
"""Fixtures of tests that use a device of this machine as a GPU: they see the calls of other processes."""

PROBE_IN_COMMON = frozenset({"loader", "shared"})
"""Fixtures that cost seconds of CPU time in each process that has them."""

PORT_IN_COMMON = frozenset({"_the_port_of_a_demo"})


IN_ONE_PROCESS = "@in-one-process-"


class NamesAsGiven:
    """In the process that shows results: strip the group from the names of tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        report.nodeid = report.nodeid.partition(IN_ONE_PROCESS)[0]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Distribute parallel tests by group, and put their directories below a short path."""
    if not hasattr(config, "workerinput"):
        base = Path(tempfile.gettempdir())
        stack = ExitStack()
        config.add_cleanup(stack.close)
        run = stack.enter_context(held(base if len(str(base)) <= MAX_BASE_BYTES else Path("/tmp"), "gpu-"))
        # For this process, its parallel workers and all their children; mutmut runs pytest more than once.
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("TMPDIR", str(run))
        patch.setattr(tempfile, "tempdir", str(run))
        config.option.basetemp = config.option.basetemp or run / "t"
    if config.getoption("dist", "no") == "load":
        config.option.dist = "loadgroup"
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(NamesAsGiven())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show the reasons of skipped tests: one for hundreds of tests."""
    show_shares(terminalreporter)
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]) for report in skipped if isinstance(report.longrepr, tuple))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


def group_of(item: pytest.Item) -> str | None:
    """Return the group of a test, whose members must not run in parallel."""
    fixtures = set(getattr(item, "fixturenames", ()))
    marked = item.get_closest_marker("xdist_group")
    if marked is not None:
        return str(marked.args[0])
    if SEES_ALL_CALLS & fixtures or hasattr(getattr(item, "module", None), "stand_in"):
        return "device"
    if PROBE_IN_COMMON & fixtures:
        return "probe"
    return "port" if PORT_IN_COMMON & fixtures else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the tests of a group in one process, and start the long ones first."""
    ranks: dict[pytest.Item, int] = {}
    for item in items:
        group = group_of(item)
        if group is not None and hasattr(config, "workerinput"):
            # pytest-xdist 3.8 divides by what follows an @, but cannot write it into the names of pytest 9.2.
            item._id = coerce_node_id(f"{item.nodeid}{IN_ONE_PROCESS}{group}")
        ranks[item] = 0 if group is not None else 1 if item.get_closest_marker("slow") is not None else 2
    items.sort(key=lambda item: ranks[item])


NETWORK, KERNEL = Path("/proc/self/ns/net"), Path("/sys/kernel/btf/vmlinux")


def _is_of_a_test(record: logging.LogRecord) -> bool:
    """Return whether a record is not of grpcio, whose poller calls the loop of a test that is over."""
    return "PollerCompletionQueue" not in record.getMessage()


logging.getLogger("asyncio").addFilter(_is_of_a_test)


@contextmanager
def alone_on(shared: Path) -> Iterator[None]:
    """Wait until no other test run on this machine uses the resource of this lock file."""
    try:
        file = shared.open("rb")
    except OSError:
        # No other user sees it either.
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def _the_port_of_a_demo() -> Iterator[None]:
    """Hold the lock of the port that demos without a scenario use."""
    with alone_on(NETWORK):
        yield


@pytest.fixture(autouse=True)
def _no_calls_but_its_own(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hold the lock of the devices used as GPUs: a test would see the calls of other runs, too."""
    with alone_on(KERNEL) if group_of(request.node) == "device" else nullcontext():
        yield


@pytest.fixture
def _on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make standard output a terminal."""
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


SHARE = "share of the limit"


def show_shares(terminalreporter: pytest.TerminalReporter) -> None:
    """Show how near injected faults came to the limits of the freshness table (tests/faults)."""
    shares = [
        (value, report.nodeid.rpartition("[")[2].rstrip("]"))
        for report in terminalreporter.stats.get("passed", ())
        for name, value in report.user_properties
        if name == SHARE
    ]
    if shares:
        terminalreporter.section("time until the kubelet's count, as a share of three periods and a deadline")
    for value, part in sorted(shares, reverse=True):
        terminalreporter.write_line(f"{value}  {part}")
