"""What the benchmarks print, and the errors of a wrong call or a failed measurement."""

import json
from collections.abc import AsyncGenerator

import pytest

from tests.bench.__main__ import main
from tests.bench.figures import Absent, Effort, Figure, Measurement, MeasurementError, as_text, quantile


async def _measured(_effort: Effort) -> AsyncGenerator[Figure, None]:
    """Read
    the clock.
    """
    yield Figure("S1.p50", 1.5, "ms", 1)
    yield Figure("S1.rate", 100_000, "1/s", 100_000, at_least=True)


async def _not_measured(_effort: Effort) -> AsyncGenerator[Figure, None]:
    yield Figure("S2.p50", 1, "ms", 1)
    raise ExceptionGroup("beside", [MeasurementError("the agent did not answer")])


async def _partly_measured(_effort: Effort) -> AsyncGenerator[Figure | Absent, None]:
    yield Absent("S3.core", "clang is not installed")
    yield Figure("S3.off", 87.5, "ns", None)


GOOD = Measurement("S1", "what can be measured", _measured)
BAD = Measurement("S2", "what cannot", _not_measured)
PARTLY = Measurement("S3", "what can in part", _partly_measured)


def figures(output: str) -> list[str]:
    return [line for line in output.splitlines() if not line.startswith("#")]


def test_a_figure_is_one_line_of_seven_words() -> None:
    assert as_text(Figure("S4.p50", 312.25, "ms", 250)).split() == [
        "S4.p50",
        "312.250",
        "ms",
        "-",
        "-",
        "250",
        "missed",
    ]
    beside = Figure("S4.p50", 312.25, "ms", 1.5, yardstick=250)
    assert as_text(beside).split() == ["S4.p50", "312.250", "ms", "250", "1.249", "1.500", "kept"]
    assert as_text(Figure("S4.p50", 250, "ms", 250)).split()[-1] == "kept"


def test_where_more_is_better_less_is_missed() -> None:
    assert Figure("S10.rate", 99_999, "1/s", 100_000, at_least=True).verdict == "missed"
    assert Figure("S10.rate", 100_000, "1/s", 100_000, at_least=True).verdict == "kept"


def test_beside_a_yardstick_the_target_is_of_the_ratio() -> None:
    assert Figure("S6.rate", 89, "1/s", 0.9, at_least=True, yardstick=100).verdict == "missed"
    assert Figure("S6.rate", 90, "1/s", 0.9, at_least=True, yardstick=100).verdict == "kept"


def test_a_missed_figure_is_a_result_and_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"], [GOOD]) == 0
    output = capsys.readouterr()
    lines = [json.loads(line) for line in output.out.splitlines()]
    rest = {"yardstick": None, "ratio": None, "method": "Read the clock."}
    assert lines == [
        {"name": "S1.p50", "value": 1.5, "unit": "ms", "target": 1, "verdict": "missed", **rest},
        {"name": "S1.rate", "value": 100_000, "unit": "1/s", "target": 100_000, "verdict": "kept", **rest},
    ]
    assert "1 of 2 targets were missed: S1.p50" in output.err


def test_how_a_figure_is_measured_stands_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], [GOOD]) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first == "# S1, what can be measured: Read the clock."
    assert second.startswith("S1.p50 ")


def test_what_could_not_be_measured_is_named_and_the_others_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], [BAD, GOOD]) == 1
    output = capsys.readouterr()
    assert "S2 could not be measured: the agent did not answer" in output.err
    assert [line.split()[0] for line in figures(output.out)] == ["S2.p50", "S1.p50", "S1.rate"]


def test_a_figure_that_is_absent_is_named_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([], [PARTLY]) == 1
    output = capsys.readouterr()
    assert "S3.core could not be measured: clang is not installed" in output.err
    assert [line.split() for line in figures(output.out)] == [["S3.off", "87.500", "ns", "-", "-", "-", "-"]]


def test_only_the_chosen_ones_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "s1"], [BAD, GOOD]) == 0
    assert "S2" not in capsys.readouterr().out


@pytest.mark.parametrize("names", ["S99", "S1,S99", "", ","])
def test_an_unknown_name_is_a_usage_error(names: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", names], [GOOD])
    assert ended.value.code == 2
    assert "choose from S1" in capsys.readouterr().err


def test_a_quantile_is_one_of_the_values() -> None:
    assert [quantile([3, 1, 2, 4], fraction) for fraction in (0.5, 0.75, 0.99, 1)] == [2, 3, 4, 4]
    assert quantile(range(1, 201), 0.99) == 198
    with pytest.raises(MeasurementError):
        quantile([], 0.5)
