import asyncio
import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import sys
import termios
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from agent.simulation.children import MAX_LOG_BYTES, BoundedLog
from agent.simulation.table import COLUMNS, Row, Screen, draw
from tests.harness import (
    PATIENCE_S,
    ROOT,
    Command,
    gpu_agent,
    processes_with,
    running_command,
    wait_gone,
)

with_its_port = pytest.mark.usefixtures("_the_port_of_a_demo")

U = [f"GPU-00000000-0000-4000-8000-{number:012x}" for number in range(8)]


async def play(name: str, node_dir: Path) -> Command:
    return await gpu_agent("demo", f"--scenario={name}", "--json", f"--node-dir={node_dir}")


def counts(result: Command) -> list[tuple[int, int]]:
    return [(line["capacity"], line["allocatable"]) for line in result.lines]


# Scenarios


@pytest.mark.slow
async def test_a_fault_flips_exactly_its_device_and_shows_why(node_dir: Path) -> None:
    result = await play("xid-79", node_dir)

    assert result.status == 0, result.err
    assert result.err == ""
    healthy, broken = result.lines
    assert (
        healthy.items()
        >= {
            "kind": "allocatable",
            "resource": "nvidia.com/gpu",
            "capacity": 8,
            "allocatable": 8,
            "unhealthy": [],
        }.items()
    )
    assert (broken["capacity"], broken["allocatable"]) == (8, 7)
    (device,) = broken["unhealthy"]
    assert device.items() >= {"id": U[3], "gpu": 3, "reason": "xid", "evidence": "hard", "number": 79}.items()
    assert 0 <= healthy["at_ms"] < broken["at_ms"]
    assert not node_dir.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("kubelet-restart", (8, 8), (8, 7)),
        ("stream-dropped", (8, 8), (8, 8)),
        ("socket-deleted", (8, 8), (8, 8)),
        ("late-gpus", (1, 1), (4, 4)),
        ("driver-late", (4, 4), (4, 4)),
    ],
)
async def test_a_shipped_scenario_ends_by_itself_as_described(
    name: str, first: tuple[int, int], last: tuple[int, int], node_dir: Path
) -> None:
    result = await play(name, node_dir)

    assert result.status == 0, result.err
    assert counts(result)[0] == first
    assert counts(result)[-1] == last
    assert all(before != after for before, after in zip(result.lines, result.lines[1:], strict=False))
    assert not node_dir.exists()


@pytest.mark.slow
async def test_devices_of_a_stream_that_ended_have_no_invented_reason(node_dir: Path) -> None:
    result = await play("stream-dropped", node_dir)

    dropped = next(line for line in result.lines if line["allocatable"] == 0)
    assert {device["reason"] for device in dropped["unhealthy"]} == {"unknown"}


@pytest.mark.slow
async def test_a_scenario_that_fails_shows_what_was_last_seen(node_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(
        "node: 4x-t4\nsteps:\n  - expect: {allocatable: 4}\nuntil: {allocatable: 3}\ntimeout: 12s\n"
    )
    result = await play(str(path), node_dir)

    assert result.status == 1
    assert result.err == (
        "gpu-agent: Scenario wrong did not end within 12 s; it waited for nvidia.com/gpu capacity any, "
        "allocatable 3, and last seen was nvidia.com/gpu capacity 4, allocatable 4\n"
    )
    assert not node_dir.exists()


@pytest.mark.slow
async def test_an_agent_that_cannot_start_is_shown_with_its_last_words(
    node_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "no-driver.yaml"
    path.write_text("node: 4x-t4\nsteps:\n  - do: {driver: unloaded}\nuntil: {allocatable: 4}\n")
    result = await play(str(path), node_dir)

    assert result.status == 1
    assert "The agent exited unexpectedly with exit status 1; its last output:" in result.err
    assert "driver" in result.err.lower()
    assert "Traceback" not in result.err
    assert not node_dir.exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--scenario=xid79"], "There is no scenario xid79 (did you mean xid-79?)"),
        (
            ["--scenario=/nowhere.yaml"],
            "Could not read the scenario /nowhere.yaml: No such file or directory",
        ),
        (["--preset=dgx"], "--preset: there is no 'dgx'"),
    ],
)
async def test_what_was_asked_for_wrongly_is_one_sentence(
    arguments: list[str], sentence: str, node_dir: Path
) -> None:
    result = await gpu_agent("demo", *arguments, f"--node-dir={node_dir}")

    assert (result.status, result.out) == (2, "")
    assert sentence in result.err
    assert result.err.count("\n") == 1


async def test_a_directory_of_another_user_is_left_alone(node_dir: Path) -> None:
    node_dir.mkdir()
    (node_dir / "precious").write_text("mine")

    result = await gpu_agent("demo", f"--node-dir={node_dir}")

    assert result.status == 2
    assert f"The directory {node_dir} is not empty and no simulated node of ours" in result.err
    assert (node_dir / "precious").read_text() == "mine"


# Until a signal


class Terminal:
    """A demo on a terminal of its own."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process = process
        self.master = master
        self.shown = ""

    async def wait_for(self, pattern: str) -> str:
        """Wait until something is shown, and return everything since it was last waited for."""
        async with asyncio.timeout(PATIENCE_S):
            while not re.search(pattern, self.shown, re.DOTALL):
                await self._read_more()
        shown, self.shown = self.shown, ""
        return shown

    async def _read_more(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self.master, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self.master)
        self.shown += os.read(self.master, 65_536).decode()

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def hang_up(self) -> None:
        os.close(self.master)
        self.master = -1


def _without_size(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the size of another terminal, which would be believed."""
    return {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}


@contextlib.asynccontextmanager
async def on_terminal(*arguments: str, environment: dict[str, str] | None = None) -> AsyncIterator[Terminal]:
    master, slave = pty.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", TAKES_THE_TERMINAL, sys.executable, "-m", "agent", "demo"),
        *arguments,
        cwd=ROOT,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**_without_size(os.environ), **(environment or {})},
        start_new_session=True,
    )
    os.close(slave)
    terminal = Terminal(process, master)
    try:
        yield terminal
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if terminal.master >= 0:
            os.close(terminal.master)
        # What a killed demo leaves to end by itself still writes into the node's directory.
        for argument in arguments:
            if argument.startswith("--node-dir="):
                await wait_no_process(argument.partition("=")[2])


async def wait_no_process(node_dir: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while processes_with(node_dir):
            await asyncio.sleep(0.02)


TAKES_THE_TERMINAL = """\
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.slow
@with_its_port
async def test_the_live_table_shows_a_fault_injected_from_a_second_terminal(node_dir: Path) -> None:
    async with on_terminal(f"--node-dir={node_dir}") as terminal:
        shown = await terminal.wait_for(r"capacity 8, allocatable 8 .*Ctrl-C ends the demo")
        assert "  ".join(COLUMNS[2:4]) in shown
        reported = re.search(
            rf"In a second terminal: (\S+ inject xid 79 --gpu 3 --node-dir {node_dir})",
            " ".join(plain(shown).split()),
        )
        assert reported is not None
        # As it is shown, it works.
        typed = await asyncio.create_subprocess_shell(reported[1], stdout=asyncio.subprocess.DEVNULL)
        assert await typed.wait() == 0
        shown = await terminal.wait_for(r"capacity 8, allocatable 7 .*Ctrl-C ends the demo")

        broken = [line for line in plain(shown).splitlines() if "Unhealthy" in line]
        assert {line.split()[0][-4:] for line in broken} == {"0003"}  # in every screen drawn since
        assert "xid 79" in broken[0]
        assert all(len(line) <= 80 for line in plain(shown).splitlines())


@pytest.mark.slow
@with_its_port
async def test_the_table_is_drawn_anew_when_the_terminal_changes_its_size(node_dir: Path) -> None:
    async with on_terminal("--preset=4x-t4", f"--node-dir={node_dir}") as terminal:
        await terminal.wait_for(r"allocatable 4 .*preflight.*Ctrl-C ends the demo")
        terminal.resize(30, 140)
        # At this width the ids are whole.
        await terminal.wait_for(rf"\x1b\[2J.*{U[3]}.*Ctrl-C ends the demo")


@pytest.mark.slow
@with_its_port
async def test_a_demo_beside_another_agent_takes_another_port(node_dir: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Where it is taken already, that is another one, too.
        with contextlib.suppress(OSError):
            other.bind(("127.0.0.1", 9470))
            other.listen()
        async with on_terminal("--preset=4x-t4", f"--node-dir={node_dir}") as terminal:
            shown = await terminal.wait_for(r"127\.0\.0\.1:\d+/preflight")

            assert "127.0.0.1:9470" not in shown


@pytest.mark.slow
@with_its_port
async def test_no_color_is_respected(node_dir: Path) -> None:
    arguments = ("--preset=4x-t4", f"--node-dir={node_dir}")
    async with on_terminal(*arguments, environment={"NO_COLOR": "1"}) as terminal:
        shown = await terminal.wait_for(r"allocatable 4 .*Ctrl-C ends the demo")

        assert not re.search(r"\x1b\[\d*m", shown)


@pytest.mark.slow
@with_its_port
async def test_ctrl_c_ends_everything_without_a_trace(node_dir: Path) -> None:
    async with on_terminal("--preset=4x-t4", f"--node-dir={node_dir}") as terminal:
        await terminal.wait_for(r"allocatable 4 ")
        os.write(terminal.master, b"\x03")
        status = await asyncio.wait_for(terminal.process.wait(), PATIENCE_S)

        assert status == 0
        assert not processes_with(str(node_dir))
        assert not node_dir.exists()


@pytest.mark.slow
@with_its_port
async def test_a_closed_terminal_ends_everything_without_a_trace(node_dir: Path) -> None:
    async with on_terminal("--preset=4x-t4", f"--node-dir={node_dir}") as terminal:
        await terminal.wait_for(r"allocatable 4 ")
        terminal.hang_up()
        await asyncio.wait_for(terminal.process.wait(), PATIENCE_S)

        assert not processes_with(str(node_dir))
        assert not node_dir.exists()


def piped(*arguments: str) -> contextlib.AbstractAsyncContextManager[asyncio.subprocess.Process]:
    return running_command("demo", "--preset=4x-t4", *arguments)


async def first_json(process: asyncio.subprocess.Process) -> dict[str, object]:
    assert process.stdout is not None
    line: dict[str, object] = json.loads(await asyncio.wait_for(process.stdout.readline(), PATIENCE_S))
    return line


@pytest.mark.slow
@with_its_port
async def test_without_a_scenario_json_lines_come_until_a_signal_and_none_after_it(node_dir: Path) -> None:
    async with piped("--json", f"--node-dir={node_dir}") as process:
        assert (await first_json(process))["allocatable"] == 4
        process.send_signal(signal.SIGTERM)
        out, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)

    assert process.returncode == 0
    assert (out, err) == (b"", b"")
    assert not node_dir.exists()


@pytest.mark.slow
@with_its_port
async def test_without_a_terminal_whole_tables_are_printed_on_each_change(node_dir: Path) -> None:
    async with piped(f"--node-dir={node_dir}") as process:
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            shown = b""
            while b"allocatable 4" not in shown:
                shown += await process.stdout.read(65_536)

    assert b"\x1b" not in shown
    assert b"ID  " in shown


@pytest.mark.slow
@with_its_port
async def test_a_demo_whose_reader_leaves_ends(node_dir: Path) -> None:
    async with piped("--json", f"--node-dir={node_dir}") as process:
        await first_json(process)
        transport = process._transport.get_pipe_transport(1)  # type: ignore[attr-defined]
        transport.close()
        result = await gpu_agent("inject", "xid", "79", "--gpu", "1", f"--node-dir={node_dir}")
        assert result.status == 0
        assert process.stderr is not None
        err = await asyncio.wait_for(process.stderr.read(), PATIENCE_S)
        assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0

    assert err == b""
    assert not node_dir.exists()


@pytest.mark.slow
@with_its_port
async def test_a_killed_demo_leaves_no_process_and_no_directory(node_dir: Path) -> None:
    async with piped("--json", f"--node-dir={node_dir}") as process:
        await first_json(process)
        process.kill()
        await process.wait()

        await wait_gone(node_dir)


@pytest.mark.slow
@pytest.mark.parametrize(("child", "name"), [("run", "agent"), ("simulate", "simulated node")])
@with_its_port
async def test_the_death_of_a_child_ends_the_demo_with_a_sentence(
    child: str, name: str, node_dir: Path
) -> None:
    async with piped("--json", f"--node-dir={node_dir}") as process:
        await first_json(process)
        (pid,) = (pid for pid, line in processes_with(str(node_dir)).items() if f"-m agent {child} " in line)
        os.kill(pid, signal.SIGKILL)
        _, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)

    assert process.returncode == 1
    assert f"gpu-agent: The {name} exited unexpectedly by signal 9" in err.decode()
    assert "Traceback" not in err.decode()
    assert not processes_with(str(node_dir))
    assert not node_dir.exists()


# What is drawn


def plain(shown: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", shown).replace("\r", "")


def screen(count: int = 8) -> Screen:
    rows = tuple(
        Row(
            f"GPU-00000000-0000-4000-8000-{n:012x}",
            "H100 80GB HBM3",
            n != 3,
            "" if n != 3 else "xid 79",
            "12:00:00",
            "",
        )
        for n in range(count)
    )
    return Screen(
        "a title " * 20, "agent", ("nvidia.com/gpu: 8",), rows, ("an event " * 20,), ("a hint " * 20,)
    )


@pytest.mark.parametrize("width", [1, 20, 40, 60, 79, 80, 200])
@pytest.mark.parametrize("height", [1, 5, 12, 40])
def test_a_screen_never_exceeds_the_screen(width: int, height: int) -> None:
    lines = draw(screen(), width=width, height=height, colour=True)

    assert len(lines) <= height
    assert all(len(plain(line)) <= width for line in lines)


def test_at_80_columns_every_device_is_distinct() -> None:
    rows = [line for line in draw(screen(), width=80, height=40, colour=False) if "ealthy" in line]

    assert len({line.split()[0] for line in rows}) == 8
    assert [("xid 79" in line, "Unhealthy" in line) for line in rows].count((True, True)) == 1


def test_a_small_screen_shows_the_table_before_all_else_and_the_unhealthy_first() -> None:
    whole = draw(screen(), width=40, height=10, colour=False)
    assert whole[1].split() == ["ID", "HEALTH", "REASON", "SINCE"]
    assert sum("ealthy" in line for line in whole) == 8
    smaller = draw(screen(), width=40, height=6, colour=False)
    assert [line.split()[1:3] for line in smaller[2:4]] == [["Unhealthy", "xid"], ["Healthy", "<none>"]]


def test_what_has_no_room_is_counted() -> None:
    lines = draw(screen(100), width=80, height=24, colour=False)

    (more,) = (line for line in lines if line.startswith("… and "))
    shown = len([line for line in lines if "ealthy" in line])
    assert more == f"… and {100 - shown} more"


def test_the_log_of_the_agent_is_bounded(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "agent.log")
    for _ in range(40):
        log.write(b"x" * (MAX_LOG_BYTES // 8))
    log.close()

    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2.3 * MAX_LOG_BYTES
