"""The tables as data: every XID, every reason, every delay."""

import pytest

from agent.core.health.registration import delay_ns
from agent.core.reasons import REASON_SPECS
from agent.core.xids import (
    CLASSES,
    RECOVERY_ACTION_CHANGED,
    _codes,
    branch_of,
    class_of,
    evidence_of,
    flips,
    recovery_of,
    text_of,
)
from agent.model.facts import (
    DeviceNodesSeen,
    DriverCallOverdue,
    DriverUnavailable,
    GpuSampled,
    HoldRequested,
    ReleaseRequested,
    UvmProbed,
)
from agent.model.health import Condition, Health, Reason, Recovery, Severity
from agent.model.policy import Policy, XidPolicy
from agent.model.sample import GpuSample
from agent.model.structs import replace
from agent.model.xid import NO_WORDS, XidWords
from tests.core.build import MS, U0, S, failed, gpu, healthy_node, overdue, passed, xid
from tests.core.xid_table import ACTIONS, IGNORED_BY_NVIDIAS_PLUGIN, row_of

XIDS = range(1, 201)


def test_every_xid_has_the_class_of_the_catalog() -> None:
    assert {
        code: (class_of(code).value, recovery_of(code).value, evidence_of(code).value) for code in XIDS
    } == {code: tuple(row_of(code)) for code in XIDS}


def test_under_compat_every_xid_flips_that_nvidias_plugin_flips() -> None:
    flipped = {code: condition for code in XIDS if (condition := condition_of(code)) is not None}
    assert flipped.keys() == set(XIDS) - set(IGNORED_BY_NVIDIAS_PLUGIN) - {RECOVERY_ACTION_CHANGED}
    for code, condition in flipped.items():
        assert (condition.recovery.value, condition.evidence.value) == row_of(code)[1:]
        assert (condition.key.code, condition.message) == (code, text_of(code))
        assert condition.count == 2


def condition_of(code: int) -> Condition | None:
    """What an XID that was reported twice makes of a well GPU."""
    node = healthy_node(gpu(0))
    node.apply(xid(code, count=2))
    assert node.state.xids == {U0: {code: 2}}
    conditions = node.conditions()
    assert node.health() == {U0: Health.UNHEALTHY if conditions else Health.HEALTHY}
    return conditions[0] if conditions else None


def test_the_table_has_no_row_that_the_catalog_has_not() -> None:
    assert CLASSES.keys() == ACTIONS.keys()


def test_a_list_of_codes_is_read_with_its_ranges() -> None:
    assert _codes("8 39-41 45 7-7") == (8, 39, 40, 41, 45, 7)


@pytest.mark.parametrize("code", XIDS)
def test_under_catalog_an_xid_flips_if_more_than_the_application_has_to_act(code: int) -> None:
    assert flips(code, Policy(xid_policy="catalog")) == (row_of(code)[1] != "self_clearing")


@pytest.mark.parametrize(
    ("code", "words", "driver", "xid_class"),
    [
        (145, XidWords(severity="nonfatal", unit="RLW_REMAP"), "570.86.15", "information"),
        (145, XidWords(severity="fatal", unit="RLW_REMAP"), "570.86.15", "link"),
        (145, NO_WORDS, "570.86.15", "link"),
        (74, XidWords(severity="nonfatal"), "570.86.15", "link"),
        (94, XidWords(reset=True), "535.43.02", "reset"),
        (94, XidWords(reset=False), "535.43.02", "application"),
        (95, XidWords(reset=False), "535.43.02", "reset"),
        (144, NO_WORDS, "550.40.07", "reboot"),
        (144, NO_WORDS, "560.28.03", "link"),
        (144, NO_WORDS, None, "link"),
        (139, NO_WORDS, "535.183.01", "information"),
        (139, NO_WORDS, "590.48.01", "application"),
        (154, XidWords(action=2), "590.48.01", "announcement"),
    ],
)
def test_the_class_rests_on_the_words_of_the_line_and_on_the_branch(
    code: int, words: XidWords, driver: str | None, xid_class: str
) -> None:
    assert class_of(code, words, branch_of(driver)).value == xid_class
    is_flipping = xid_class not in {"information", "application", "announcement"}
    assert flips(code, Policy(xid_policy="catalog"), words, branch_of(driver)) is is_flipping


@pytest.mark.parametrize("version", [None, "", "x.1", "\u0665", "12345.1"])
def test_a_version_without_a_branch_has_none(version: str | None) -> None:
    assert branch_of(version) is None


@pytest.mark.parametrize("policy", ["compat", "catalog"])
def test_the_override_of_a_single_xid_is_the_last_word(policy: XidPolicy) -> None:
    overridden = Policy(xid_policy=policy, xid_overrides={94: "ignore", 13: "flip"})
    for switched in (
        overridden,
        replace(overridden, xids_off=True),
        replace(overridden, xids_all=True),
    ):
        assert not flips(94, switched)
        assert flips(13, switched)
    node = healthy_node(gpu(0), policy=overridden)
    node.apply(xid(94))
    assert node.unhealthy() == set()
    node.apply(xid(13))
    assert node.unhealthy() == {U0}


def test_all_xids_or_none_can_be_made_to_flip() -> None:
    assert not any(flips(code, Policy(xids_off=True)) for code in XIDS)
    assert {code for code in XIDS if not flips(code, Policy(xids_all=True))} == {RECOVERY_ACTION_CHANGED}


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_meaning_and_a_next_step(reason: Reason) -> None:
    spec = REASON_SPECS[reason]
    assert len(spec.advice) > 10
    assert not spec.advice.endswith(".")


def test_only_critical_reasons_flip_a_device() -> None:
    raised = everything_at_once()
    assert {item.reason for item in raised} == {
        reason
        for reason, spec in REASON_SPECS.items()
        if spec.severity is Severity.CRITICAL and reason not in OF_THE_POLICY
    }
    assert all(item.flips for item in raised)


OF_THE_POLICY = {
    Reason.MIG_SINGLE_NOT_UNIFORM,
    Reason.MPS_REPLICAS_OVER_LIMIT,
    Reason.MPS_NOT_READY,
    Reason.IMEX_CHANNEL_MISSING,
    Reason.CDI_UNRESOLVABLE,
}
"""Findings, and what only a policy that wants MPS, an IMEX channel or CDI knows."""


def everything_at_once() -> list[Condition]:
    node = healthy_node(gpu(0))
    node.apply(
        xid(79),
        failed(code=15),
        failed(code=16),
        failed(code=999),
        overdue(),
        DriverCallOverdue("init", S),
        GpuSampled(U0, GpuSample(recovery_action=1, rows_failed=True, fabric_state=2)),
        GpuSampled(U0, GpuSample(fabric_state=3, fabric_status=999)),
        DeviceNodesSeen(("/dev/nvidiactl",)),
        UvmProbed("Input/output error"),
        HoldRequested(U0, "x"),
        ReleaseRequested(frozenset({U0}), S),
    )
    node.apply(DriverUnavailable(Reason.DRIVER_NOT_LOADED, "x"))
    node.apply(DriverUnavailable(Reason.NVML_VERSION_MISMATCH, "x"))
    return [*node.conditions(), *flapping()]


def flapping() -> list[Condition]:
    node = healthy_node(gpu(0), policy=Policy(recovery_clean_probes=1, recovery_quiet_ns=0))
    for _ in range(3):
        node.apply(failed(), passed())
    return node.conditions()


def test_what_the_agent_infers_from_the_driver_clears_itself() -> None:
    clearing = {reason for reason, spec in REASON_SPECS.items() if spec.recovery is Recovery.SELF_CLEARING}
    assert set(Reason) - clearing == {
        Reason.XID,
        Reason.GPU_LOST,
        Reason.RESET_REQUIRED,
        Reason.RECOVERY_ACTION,
        Reason.ECC_UNCORRECTED,
        Reason.ROW_REMAP_FAILED,
        Reason.FLAPPING,
        Reason.HELD,
        Reason.STATE_LOST,
    }


@pytest.mark.parametrize("seed", [0, 1, 7, 2**32, 2**63])
@pytest.mark.parametrize("attempt", [1, 2, 3, 7, 8, 62, 63, 64, 65, 10_000])
def test_a_delay_doubles_up_to_its_cap_and_jitter_only_lengthens_it(attempt: int, seed: int) -> None:
    base_ns = min(100 * MS * 2 ** (attempt - 1), 10 * S)
    wait_ns = delay_ns(attempt, first_ns=100 * MS, cap_ns=10 * S, seed=seed)
    assert isinstance(wait_ns, int)
    assert base_ns <= wait_ns <= base_ns * 12 // 10
    assert wait_ns == delay_ns(attempt, first_ns=100 * MS, cap_ns=10 * S, seed=seed)


def test_a_delay_that_is_never_capped_grows_for_a_whole_life() -> None:
    assert delay_ns(40, first_ns=1, cap_ns=2**80, seed=0) >= 2**39
    assert delay_ns(10**9, first_ns=1, cap_ns=2**80, seed=0) // 2**62 == 1


def test_jitter_uses_its_whole_range_and_spreads_seeds_and_tries() -> None:
    shares = [delay_ns(1, first_ns=100, cap_ns=100, seed=seed) - 100 for seed in range(1000)]
    assert set(shares) == set(range(21))
    assert max(shares.count(share) for share in range(21)) < 100
    assert len({delay_ns(attempt, first_ns=100, cap_ns=100, seed=3) for attempt in range(8, 30)}) > 8


@pytest.mark.parametrize(
    ("seed", "known"),
    [
        (42, [1180, 2340, 4480, 8880, 17760, 33600, 67200, 120_000]),
        (123_456_789, [1070, 2020, 4040, 9280, 18560, 36800, 70400, 109_000]),
    ],
)
def test_the_first_delays_of_a_node_are_known(seed: int, known: list[int]) -> None:
    assert [delay_ns(number, first_ns=1000, cap_ns=100_000, seed=seed) for number in range(1, 9)] == known
