"""``gpu-agent config``: the effective settings, the problems of a file, the reference."""

import json
from pathlib import Path

import pytest
import yaml

from agent import cli
from agent.config.options import OPTIONS
from agent.config.reference import entries

WRONG = (
    "flags:\n  migStrategy: foo\nagent:\n  pol: 1s\nsharing: {mps: {resources: [{name: gpu, replicas: 1}]}}\n"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["config", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_show_prints_each_value_with_its_origin(
    capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("version: v1\nagent:\n  poll: 3s\n  xids: {94: ignore}\n")
    monkeypatch.setenv("MIG_STRATEGY", "mixed")
    code, out, _ = run(capsys, "show", "--config-file", str(file), "--uevents", "-o", "json")
    rows = {row["name"]: (row["value"], row["origin"]) for row in json.loads(out)["settings"]}
    assert code == 0
    assert rows["poll"] == ("3s", f"{file}:3: agent.poll")
    assert rows["mig-strategy"] == ("mixed", "MIG_STRATEGY")
    assert rows["uevents"] == ("true", "--uevents")
    assert rows["call-deadline"] == ("5s", "default")
    assert rows["agent.xids"] == ("94: ignore", f"{file}: agent.xids")
    assert set(OPTIONS) <= set(rows)


def test_what_a_file_holds_reaches_the_terminal_escaped(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    file.write_text('version: v1\n"a\\e[2J": 1\nagent: {leak: {allow: ["x\\e[2J\\r"]}}\n')
    for action in (("validate", str(file)), ("show", "--config-file", str(file))):
        _, out, err = run(capsys, *action)
        assert "\\x1b[2J" in err
        assert (out + err).replace("\n", "").isprintable()


@pytest.mark.usefixtures("_on_a_terminal")
def test_show_fits_a_terminal_and_prints_one_setting_or_all_below_a_key(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    file.write_text("sharing: {timeSlicing: {resources: [{name: gpu, replicas: 4}]}}\nagent: {poll: 7s}\n")
    _, out, _ = run(capsys, "show", f"--config-file={file}")
    assert max(map(len, out.splitlines())) <= 80
    _, out, _ = run(capsys, "show", "poll", f"--config-file={file}")
    assert out.split() == ["NAME", "VALUE", "ORIGIN", "poll", "7s", "config.yaml:2"]
    _, out, _ = run(capsys, "show", "agent.flapping", "-o", "name")
    assert out.split() == ["flapping-faults", "flapping-within"]
    _, out, _ = run(capsys, "show", "sharing", f"--config-file={file}", "-o", "yaml")
    assert yaml.safe_load(out)["settings"] == [
        {
            "name": "sharing",
            "value": "time-slicing: nvidia.com/gpu x 4",
            "origin": f"{file}:1: sharing.timeSlicing",
        }
    ]


def test_show_rejects_what_run_would_reject(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "show", "--poll=soon", "--mig-strategy=x")
    assert (code, out, len(err.splitlines())) == (2, "", 2)


def test_validate_reports_every_mistake_with_its_line(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    file.write_text(WRONG)
    code, out, err = run(capsys, "validate", str(file))
    assert (code, out) == (2, "")
    assert [line.removeprefix(f"gpu-agent: {file}:") for line in err.splitlines()] == [
        '2: flags.migStrategy must be one of none, single, mixed, and is "foo"',
        "4: agent.pol is unknown (did you mean poll?)",
        "5: sharing.mps.resources[0].replicas must be at least 2, and is 1",
    ]


@pytest.mark.parametrize("form", ["table", "wide"])
def test_show_cuts_nothing_for_a_program_that_reads_it(
    capsys: pytest.CaptureFixture[str], file: Path, form: str
) -> None:
    long = "/a/" + "long/" * 20 + "root"
    file.write_text(f"version: v1\nflags: {{nvidiaDriverRoot: {long}}}\n")
    _, out, _ = run(capsys, "show", "driver-root", f"--config-file={file}", "-o", form)
    assert out.split()[3:] == ["driver-root", long, f"{file}:2:", "flags.nvidiaDriverRoot"]


@pytest.mark.usefixtures("_on_a_terminal")
def test_the_wide_table_cuts_nothing_on_a_terminal(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    long = "/a/" + "long/" * 20 + "root"
    file.write_text(f"flags: {{nvidiaDriverRoot: {long}}}\n")
    arguments = ("show", "driver-root", f"--config-file={file}")
    _, out, _ = run(capsys, *arguments)
    assert "…" in out
    _, out, _ = run(capsys, *arguments, "-o", "wide")
    assert out.split()[3:] == ["driver-root", long, f"{file}:1:", "flags.nvidiaDriverRoot"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("-poll=7s", "show"),
        ("show", "-poll", "7s"),
        ("show", "poll", "--poll=9s", "-poll", "7s"),
        ("show", "-uevents", "poll", "-poll=7s", "-o", "table"),
    ],
)
def test_show_accepts_flags_as_run_does(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert ["poll", "7s"] in [line.split()[:2] for line in out.splitlines()]


def test_a_list_that_is_given_twice_is_concatenated(capsys: pytest.CaptureFixture[str]) -> None:
    strategies = ("-device-list-strategy=envvar", "-device-list-strategy", "cdi-cri")
    _, out, _ = run(capsys, "show", *strategies, "device-list-strategy", "-o", "json")
    assert json.loads(out)["settings"][0]["value"] == "envvar,cdi-cri"


def test_each_wrong_flag_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "show", "-pol=7s", "--migstrategy=none", "--poll")
    assert code == 2
    assert err.splitlines() == [
        "gpu-agent: --poll needs a value",
        'gpu-agent: "-pol" is no flag (did you mean --poll?); see gpu-agent config --help',
        'gpu-agent: "--migstrategy" is no flag (did you mean --mig-strategy?); see gpu-agent config --help',
    ]


def test_validate_accepts_a_valid_file_and_warns_of_ignored_keys(
    capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    file.write_text("something: 1\nsharing: {mps: {resources: [{name: gpu, replicas: 2}]}}\n")
    code, out, err = run(capsys, "validate", str(file))
    assert (code, out) == (0, f"{file} is valid\n")
    assert err.splitlines() == [
        f"gpu-agent: warning: {file}:1: something is unknown and ignored",
        f"gpu-agent: warning: {file}:2: sharing.mps needs --mps-root, MPS_ROOT or flags.mpsRoot",
    ]
    assert run(capsys, "validate", str(file), "--strict-config")[0] == 2


def test_validate_checks_the_file_alone(
    capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("flags: {migStrategy: foo}\n")
    monkeypatch.setenv("MIG_STRATEGY", "none")
    assert run(capsys, "validate", str(file))[0] == 2


def test_validate_writes_a_document_for_programs(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    file.write_text(WRONG)
    code, out, err = run(capsys, "validate", str(file), "-o", "json")
    document = json.loads(out)
    assert (code, err, document["valid"], len(document["problems"])) == (2, "", False, 3)


def test_validate_needs_an_existing_file(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    assert run(capsys, "validate") == (
        2,
        "",
        "gpu-agent: config validate needs a file; see gpu-agent config --help\n",
    )
    code, _, err = run(capsys, "validate", str(file))
    assert (code, err) == (
        2,
        f"gpu-agent: Could not read the configuration file {file}: No such file or directory\n",
    )


@pytest.mark.parametrize("name", ["poll", "--poll", "GPU_AGENT_POLL", "agent.poll"])
def test_explain_knows_every_name_of_a_setting(capsys: pytest.CaptureFixture[str], name: str) -> None:
    _, out, _ = run(capsys, "explain", "--", name)
    assert out == (
        "poll\n"
        "  Time between two polls of a GPU, or of the PCI bus\n"
        "  Takes     a time between 10ms and 10m\n"
        "  Default   10s\n"
        "  Flag      --poll\n"
        "  Variable  GPU_AGENT_POLL\n"
        "  File      agent.poll\n"
        "  Counts    at the next start\n"
    )


@pytest.mark.usefixtures("_on_a_terminal")
def test_explain_lists_everything_from_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "explain", "-o", "json")
    documents = json.loads(out)["settings"]
    assert {document["name"] for document in documents} >= set(OPTIONS)
    assert all(document["takes"] and document["help"] for document in documents)
    _, out, _ = run(capsys, "explain")
    assert len(out.splitlines()) == len(list(entries())) + 1
    assert max(map(len, out.splitlines())) <= 80


def test_explain_suggests_the_right_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "explain", "agent.pol")
    assert (code, err) == (
        2,
        'gpu-agent: "agent.pol" is no setting (did you mean agent.poll?); see gpu-agent config explain\n',
    )
