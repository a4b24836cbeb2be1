"""The command line: sentences, exit codes, tables, help."""

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agent
from agent import cli
from agent.commands import events as events_command
from agent.commands import render
from agent.commands.client import AgentClient, candidates, find_agent
from agent.commands.devices import device_lines
from agent.commands.status import status_lines
from agent.commands.table import all_commands
from agent.config import flags
from agent.config.options import OPTIONS
from agent.errors import AgentUnreachableError
from agent.simulation.node import SimulatedNode
from agent.threads import in_daemon_thread
from tests.harness import AgentProcess, clean_environment, flags_of, running, simulated_node
from tests.killed_runs import WITH_US

ALL_COMMANDS = tuple(all_commands())


def gpu_agent(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agent", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment() | environment,
        timeout=120,
    )


class Result:
    """Output of a command, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Invoke = Any


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Run a command in this process."""

    def run(*arguments: str) -> Result:
        code = cli.main(arguments)
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run


# Errors and exit codes


def test_without_a_command_help_is_shown_and_the_exit_code_is_2(invoke: Invoke) -> None:
    result = invoke()
    assert (result.code, result.err) == (2, "")
    assert result.out.index("Examples:") < result.out.index("On a GPU node:")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["statis"], 'gpu-agent: "statis" is no command (did you mean status?); see gpu-agent --help'),
        (["zzz"], 'gpu-agent: "zzz" is no command; see gpu-agent --help'),
        (["devices", "--outptu", "json"], 'gpu-agent: "--outptu" is no flag (did you mean --output?)'),
        (["devices", "extra"], 'gpu-agent: "extra" is not expected here; see gpu-agent devices --help'),
        (["devices", "-o", "xml"], "gpu-agent: Argument -o/--output: invalid choice: 'xml'"),
        (["events", "--since", "soon"], "gpu-agent: --since must be the number of an event, a time"),
        (["run", "--mig-strateg=none"], 'gpu-agent: "--mig-strateg" is no flag (did you mean mig-strategy?)'),
        (["run", "--poll"], "gpu-agent: --poll needs a value"),
        (["run", "now"], 'gpu-agent: "now" is not expected here; run takes flags only'),
    ],
)
def test_a_mistake_is_a_sentence_on_standard_error_and_exit_code_2(
    invoke: Invoke, arguments: list[str], sentence: str
) -> None:
    result = invoke(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith(sentence)


def test_all_mistakes_of_run_are_reported_at_once(invoke: Invoke) -> None:
    result = invoke("run", "--pol=1s", "--mig-strategy=x", "--call-deadline=y", "z")
    assert (result.code, len(result.err.splitlines())) == (2, 4)


def test_when_no_agent_answers_the_sentence_names_what_to_start(invoke: Invoke, tmp_path: Path) -> None:
    path = str(tmp_path / "control.sock")
    for command in ("status", "devices", "events"):
        result = invoke(command, "--control-socket", path)
        assert (result.code, result.out) == (2, "")
        assert result.err == (
            f"gpu-agent: No agent answers at {path}; start one with 'gpu-agent run', "
            "or a simulated node with 'gpu-agent demo'\n"
        )


def test_a_reader_that_exits_early_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "agent", "--help"]
    process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, timeout=120)
    os.close(writer)
    assert (process.returncode, process.stderr) == (1, b"")


# Help


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_help_shows_examples_first_and_fits_80_columns(invoke: Invoke, command: str) -> None:
    result = invoke(command, "--help")
    assert (result.code, result.err) == (0, "")
    assert f"gpu-agent {command}" in result.out
    assert "xamples:" in result.out
    assert max(len(line) for line in result.out.splitlines()) < 80


def test_the_help_of_run_names_every_option_and_every_variable(invoke: Invoke) -> None:
    text = "".join(invoke("run", "--help").out.split())
    for option in OPTIONS.values():
        assert f"--{option.name}" in text
        assert option.environment in text


def test_every_command_is_in_the_help(invoke: Invoke) -> None:
    text = invoke("--help").out
    assert all(re.search(rf"^  {name} +\w", text, re.MULTILINE) for name in ALL_COMMANDS)
    assert max(len(line) for line in text.splitlines()) < 80


def test_help_needs_nothing_heavy() -> None:
    code = "import sys; from agent.cli import main; main(['--help']); print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"asyncio", "aiohttp", "grpclib", "pynvml", "yaml", "argparse"} & set(names.split())


INTERRUPTED_WHILE_IMPORTING = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "agent.cli":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.{handler})
sys.meta_path.insert(0, Interrupt())
sys.argv = ["gpu-agent", "version"]
from agent.start import main
main()
"""


def test_an_interrupt_during_the_start_exits_without_output() -> None:
    code = INTERRUPTED_WHILE_IMPORTING.format(handler="default_int_handler")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    code = INTERRUPTED_WHILE_IMPORTING.format(handler="SIG_IGN")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("gpu-agent ")


# Version


def test_the_version_is_the_packages(invoke: Invoke) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert agent.__version__ == project["version"]
    assert invoke("version").out.startswith(f"gpu-agent {agent.__version__} (Python 3.")
    assert invoke("--version").out == f"gpu-agent {agent.__version__}\n"
    assert invoke("version", "-o", "name").out == f"{agent.__version__}\n"
    assert json.loads(invoke("version", "-o", "json").out)["version"] == agent.__version__
    assert invoke("version", "-o", "yaml").out.startswith("apiVersion: gpu-agent/v1\n")


# Flags as Go reads them


def parsed(*arguments: str) -> dict[str, str]:
    values, problems = flags.parse(arguments, OPTIONS.values())
    assert problems == []
    return values


def test_flags_are_read_as_go_reads_them() -> None:
    assert parsed("--mig-strategy=single", "-poll", "1s", "--nvidia-dev-root", "/d") == {
        "mig-strategy": "single",
        "poll": "1s",
        "dev-root": "/d",
    }


def test_a_switch_may_stand_alone() -> None:
    assert parsed("--pass-device-specs", "--fail-on-init-error=false") == {
        "pass-device-specs": "true",
        "fail-on-init-error": "false",
    }
    assert parsed("--fail-on-init-error", "false") == {"fail-on-init-error": "false"}


def test_the_last_value_of_a_repeated_flag_counts() -> None:
    assert parsed("--poll=1s", "--poll=2s") == {"poll": "2s"}


def test_a_value_may_be_empty_or_hold_an_equals_sign() -> None:
    assert parsed("--kubelet-socket=", "--state-dir=/a=b") == {"kubelet-socket": "", "state-dir": "/a=b"}


@given(st.lists(st.text(max_size=12) | st.sampled_from([f"--{name}" for name in OPTIONS]), max_size=6))
def test_any_arguments_yield_values_or_sentences(words: list[str]) -> None:
    values, problems = flags.parse(words, OPTIONS.values())
    assert set(values) <= set(OPTIONS)
    assert len(values) + len(problems) <= len(words)


# Tables


def device(number: int, **more: object) -> dict[str, Any]:
    return {
        "id": f"GPU-{number:08d}-0000-4000-8000-000000000000",
        "resource": "nvidia.com/gpu",
        "health": "healthy",
        "reasons": [],
        "gpu": number,
        "numa_node": None,
        "model": "NVIDIA H100 80GB HBM3",
        "pci": "0000:3b:00.0",
        **more,
    }


UNHEALTHY = {
    "health": "unhealthy",
    "reasons": [{"code": "xid", "number": 79, "message": "XID 79 was reported", "since_monotonic_ns": 1}],
}


@pytest.mark.usefixtures("_on_a_terminal")
def test_the_table_has_the_columns_people_expect() -> None:
    lines = device_lines([device(0), device(1, **UNHEALTHY)])
    assert lines[0].split() == ["GPU", "ID", "MODEL", "HEALTH", "REASON", "SINCE", "POD"]
    assert lines[1].split()[5:] == ["healthy", "<none>", "<none>", "<unknown>"]
    assert lines[2].split()[:7] == ["1", "GPU-00000001", "H100", "80GB", "HBM3", "unhealthy", "xid"]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("allocated", "pod", "shown"),
    [(None, None, "<unknown>"), (False, None, "<none>"), (True, "ml/train-0", "ml/train-0")],
)
def test_the_pod_of_a_device_is_shown_if_it_is_known(
    allocated: bool | None, pod: str | None, shown: str
) -> None:
    lines = device_lines([device(0, allocated=allocated, pod=pod)])
    assert lines[1].split()[-1] == shown


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (160, ["GPU", "ID", "MODEL", "HEALTH", "REASON", "SINCE", "POD"]),
        (80, ["GPU", "ID", "HEALTH", "REASON", "SINCE", "POD"]),
        (40, ["GPU", "ID", "HEALTH", "REASON"]),
        (24, ["GPU", "HEALTH", "REASON"]),
    ],
)
def test_a_table_is_as_wide_as_the_terminal_and_omits_the_least_important_columns(
    columns: int, titles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    model, pod = "RTX PRO 6000 Blackwell Server Edition", "a-namespace/a-pod-with-a-name"
    whole = "GPU-00000000-0000-4000-8000-000000000001"
    lines = device_lines([device(0, id=whole, model=model, allocated=True, pod=pod), device(1, **UNHEALTHY)])
    assert lines[0].split() == titles
    assert max(map(len, lines)) <= columns
    if columns == 160:
        assert (whole in lines[1], model in lines[1], pod in lines[1]) == (True, True, True)
    event = {"time": "2026-01-02T03:04:05.000Z", "kind": "driver", "message": "x" * 300, "warning": False}
    line = events_command._line({**event, "fields": {}}, render.Output.TABLE)
    assert len(line) == columns


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_that_a_program_reads_is_not_cut() -> None:
    model, pod = "RTX PRO 6000 Blackwell Server Edition", "a-namespace/" + "a-long-name-" * 8
    lines = device_lines([device(0, model=f"NVIDIA {model}", allocated=True, pod=pod)])
    assert model in lines[1]
    assert lines[1].endswith(pod)


def test_the_wide_table_shows_whole_ids_and_the_message() -> None:
    lines = device_lines([device(1, **UNHEALTHY)], is_wide=True)
    assert "GPU-00000001-0000-4000-8000-000000000000" in lines[1]
    assert lines[1].endswith("XID 79 was reported")
    assert "<unknown>" in lines[1]  # the NUMA node


def test_ids_are_cut_only_as_far_as_they_stay_unique() -> None:
    unlike = [device(0), device(1)]
    alike = [device(0, id=f"GPU-00000000-0000-4000-8000-00000000000{number}") for number in range(3)]
    shared = [device(0, id=f"GPU-00000000-0000-4000-8000-000000000001::{number}") for number in range(3)]
    assert ids_of(unlike) == ["GPU-00000000", "GPU-00000001"]
    assert ids_of(alike) == ["GPU-…00000000", "GPU-…00000001", "GPU-…00000002"]
    assert ids_of(shared) == ["GPU-00000000::0", "GPU-00000000::1", "GPU-00000000::2"]


def ids_of(devices: list[dict[str, Any]]) -> list[str]:
    return [line.split()[1] for line in device_lines(devices)[1:]]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (0, "0s"), (59, "59s"), (192, "3m12s"), (18_180, "5h3m"), (187_200, "2d4h")],
)
def test_ages_are_written_as_kubectl_does(seconds: int, text: str) -> None:
    assert render.age(seconds * 10**9) == text


def test_colour_is_only_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert render.uses_colour(Terminal())
    assert not render.uses_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not render.uses_colour(Terminal())


def test_colour_does_not_move_columns() -> None:
    line = "GPU-0  unhealthy  xid 79"
    coloured = render.colour_health(line, "unhealthy", is_coloured=True)
    assert re.sub("\x1b\\[[0-9;]*m", "", coloured) == line
    assert coloured != line


def test_the_status_shows_why_the_node_is_not_ready() -> None:
    lines = status_lines(
        {
            "agent": {"version": "1", "phase": "serving", "uptime_s": 5, "pid": 7},
            "driver": {"ready": None, "message": ""},
            "gpus": [],
            "ready": False,
            "reasons": [{"code": "gpu_lost", "message": "Gone", "advice": "reset it", "gpus": ["GPU-1"]}],
            "resources": [],
        },
        now_ns=0,
    )
    assert lines == [
        "Agent    1, serving for 5s, process 7",
        "Driver   not initialised yet",
        "GPUs     <none>",
        "Ready    no",
        "  gpu_lost: Gone",
        "    on GPU-1",
        "    reset it",
        "",
        "RESOURCE  CAPACITY  ALLOCATABLE  REGISTRATION  MESSAGE",
    ]


AGENT = {"version": "1", "phase": "serving", "uptime_s": 5, "pid": 7, "parts": {"sink-http": None}}


def document(**more: Any) -> dict[str, Any]:
    """Return the /debug/state of a healthy node."""
    return {
        "agent": AGENT,
        "driver": {"ready": True, "driver_version": "1", "nvml_version": "2", "cuda_version": "3"},
        "gpus": [
            {
                "index": 0,
                "uuid": "GPU-0",
                "pci": "0000:3b:00.0",
                "serial": None,
                "health": "unhealthy",
                "model": "H100",
            }
        ],
        "ready": True,
        "reasons": [],
        "resources": [],
        "conditions": [],
        "holds": {},
        "released_until_monotonic_ns": None,
        "driver_released": False,
        "observe": False,
        "observed_flips": 0,
        **more,
    }


def condition_of(code: str, gpu: str = "GPU-0") -> dict[str, Any]:
    return {"code": code, "gpu_uuid": gpu}


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (
            {"observe": True, "observed_flips": 3},
            "Mode     observing: nothing is registered; devices it would have set Unhealthy: 3",
        ),
        (
            {"released_until_monotonic_ns": 90 * 10**9, "driver_released": True},
            "         released on request, for 1m30s more; gpu-agent resume ends it",
        ),
        (
            {"released_until_monotonic_ns": 90 * 10**9},
            "         being released on request, for 1m30s more; gpu-agent resume ends it",
        ),
        ({"holds": {"GPU-0": "noisy fan"}}, "Held     GPU-0: noisy fan"),
        (
            {"unoffered": [{"gpu_uuid": "GPU-0", "message": "Not advertised", "detail": "1c.2g.10gb"}]},
            "         Not advertised (1c.2g.10gb)",
        ),
        (
            {
                "conditions": [
                    condition_of("held"),
                    condition_of("flapping"),
                    condition_of("flapping"),
                    condition_of("flapping", "GPU-1"),
                    condition_of("xid"),
                ]
            },
            "GPUs     1 unhealthy (1 held, 2 flapping)",
        ),
        (
            {"agent": AGENT | {"parts": {"sink-http": None, "source-pods": "stalled"}}},
            "Failing  source-pods: stalled",
        ),
    ],
)
def test_the_status_shows_deviations_from_normal(more: dict[str, Any], line: str) -> None:
    assert line not in status_lines(document(), now_ns=0)
    assert line in status_lines(document(**more), now_ns=0)


def test_the_wide_status_lists_the_names_of_each_gpu() -> None:
    lines = status_lines(document(), now_ns=0, is_wide=True)
    assert lines[-1].split() == ["0", "GPU-0", "0000:3b:00.0", "<unknown>", "unhealthy", "H100"]


# Finding an agent


def test_the_configured_socket_is_tried_else_the_nodes_else_the_simulated_nodes() -> None:
    assert candidates("/x", {"GPU_AGENT_CONTROL_SOCKET": "/y"}) == ("/x",)
    assert candidates(None, {"GPU_AGENT_CONTROL_SOCKET": "/y"}) == ("/y",)
    assert candidates(None, {"GPU_AGENT_NODE_DIR": "/n"}) == (
        "/run/gpu-agent/control.sock",
        "/n/agent/control.sock",
    )


def test_an_agent_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen()
        assert find_agent(str(path)).path == str(path)
        with pytest.raises(AgentUnreachableError, match=r"did not answer within 0.05 s"):
            AgentClient(str(path)).get("/debug/state", timeout_s=0.05)


# Asking a running agent


@pytest.fixture
async def node() -> AsyncIterator[SimulatedNode]:
    async with simulated_node() as made:
        yield made


@pytest.fixture
async def live(node: SimulatedNode) -> AsyncIterator[AgentProcess]:
    async with running(flags_of(node)) as made:
        await made.wait_line("Listening", listener="control")
        yield made


async def asked(live: AgentProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await in_daemon_thread(
        "command", lambda: gpu_agent(*arguments, GPU_AGENT_CONTROL_SOCKET=live.flags["control-socket"])
    )


@pytest.mark.slow
async def test_a_running_agent_answers_every_question(live: AgentProcess, node: SimulatedNode) -> None:
    uuids = [node.nvml.uuid(gpu) for gpu in range(4)]
    names = await asked(live, "devices", "-o", "name")
    assert (names.returncode, names.stdout.split(), names.stderr) == (0, uuids, "")
    assert len((await asked(live, "devices")).stdout.splitlines()) == 5
    document = json.loads((await asked(live, "devices", "-o", "json")).stdout)
    assert [device["id"] for device in document["devices"]] == uuids
    assert (await asked(live, "devices", "-o", "yaml")).stdout.startswith("apiVersion: gpu-agent/v1\n")
    status = (await asked(live, "status")).stdout
    assert f"serving for 0s, process {live.pid}" in re.sub(r"for \w+,", "for 0s,", status)
    assert "Ready    yes" in status
    events = (await asked(live, "events", "-o", "wide")).stdout
    assert "is registered with the kubelet" in events
    assert (await asked(live, "events", "--since", "1h", "-o", "json")).returncode == 0


async def next_event(watching: asyncio.subprocess.Process, message: str) -> Any:
    assert watching.stdout is not None
    async with asyncio.timeout(60):
        async for raw in watching.stdout:
            if json.loads(raw)["message"] == message:
                return json.loads(raw)
    raise AssertionError(f"ended without {message!r}")


@pytest.mark.slow
async def test_events_can_be_watched_over_a_restart_of_the_agent(
    live: AgentProcess, node: SimulatedNode
) -> None:
    watching = await asyncio.create_subprocess_exec(
        *(*WITH_US, sys.executable),
        *("-m", "agent", "events", "-w", "-o", "json", "--control-socket", live.flags["control-socket"]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    await next_event(watching, "Registered with the kubelet")
    node.nvml.push_xid(0, 79)
    event = await next_event(watching, "A condition was raised")
    assert event["fields"]["code"] == 79
    assert await live.stop() == 0
    async with running(live.flags):
        await next_event(watching, "Registered with the kubelet")
        watching.send_signal(signal.SIGINT)
        assert await watching.wait() == 0


@pytest.fixture(autouse=True)
def _no_agent_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_AGENT_CONTROL_SOCKET", raising=False)
