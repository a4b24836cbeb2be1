"""The explanations are those of the tables that the agent uses."""

import json

import pytest

from agent import cli
from agent.core.reasons import REASON_SPECS
from agent.core.xids import CLASSES
from agent.model.health import Reason


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(("explain", *arguments)) == 0
    return capsys.readouterr().out


def test_every_reason_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(explained(capsys, "-o", "json"))["reasons"]
    assert [row["code"] for row in rows] == [reason.value for reason in REASON_SPECS]
    assert {row["code"] for row in rows} == {reason.value for reason in Reason}
    assert all(row["says"] and row["advice"] for row in rows)


def test_every_xid_of_the_catalog_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(explained(capsys, "--xids", "-o", "json"))["xids"]
    assert [row["xid"] for row in rows] == sorted(CLASSES)
    by_xid = {row["xid"]: row for row in rows}
    assert (by_xid[94]["compat"], by_xid[94]["catalog"]) == ("flips", "ignored")
    (unless,) = by_xid[145]["unless"]
    assert unless.startswith("information if the line has nonfatal (")
    assert by_xid[144]["unless"][0].startswith("reboot if the driver is older than 555")
    assert {"gpu_lost", "nvlink_down"} <= set(by_xid[74]["witnesses"])
    assert by_xid[13]["witnesses"] == by_xid[13]["unless"] == []
    assert (by_xid[79]["compat"], by_xid[79]["catalog"]) == ("flips", "flips")


@pytest.mark.usefixtures("_on_a_terminal")
@pytest.mark.parametrize("arguments", [(), ("--xids",)])
def test_a_table_fits_a_terminal(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    lines = explained(capsys, *arguments).splitlines()
    assert max(map(len, lines)) <= 80
    wide = explained(capsys, *arguments, "-o", "wide").splitlines()
    assert "ADVICE" in wide[0]
    assert len(wide) == len(lines)


@pytest.mark.parametrize("what", ["79", "xid79", "XID 79", "xid-79"])
def test_an_xid_may_be_written_in_any_form(capsys: pytest.CaptureFixture[str], what: str) -> None:
    text = explained(capsys, what)
    assert "name:      GPU has fallen off the bus" in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_xid_may_be_two_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert explained(capsys, "xid", "79") == explained(capsys, "79")


def test_an_xid_that_is_not_in_the_catalog_is_one_for_support(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(explained(capsys, "999", "-o", "json"))["class"] == "support"


def test_names_alone_are_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert explained(capsys, "-o", "name").split() == [reason.value for reason in REASON_SPECS]
    assert explained(capsys, "gpu_lost", "-o", "name") == "gpu_lost\n"


def test_a_misspelt_code_is_reported_with_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(("explain", "gpulost")) == 2
    assert capsys.readouterr().err == (
        'gpu-agent: "gpulost" is no reason code (did you mean gpu_lost?); see gpu-agent explain\n'
    )
