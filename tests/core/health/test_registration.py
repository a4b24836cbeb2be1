"""How a resource stands with the kubelet: both clocks, restarts in every order, races."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.core.health.registration import (
    LIST_OVERDUE,
    MISCOUNTED,
    NO_SOCKET,
    NO_STREAM,
    SOCKET_LOST,
    STREAM_ENDED,
    WAIT_FOR_PROBES,
)
from agent.model.components import ENGINE, LIST_AND_WATCH
from agent.model.effects import RegisterResource
from agent.model.facts import (
    ComponentsStale,
    Fact,
    KubeletCounted,
    KubeletSocketSeen,
    ListWritten,
    OwnSocketLost,
    PolicyChanged,
    Registered,
    RegisterSent,
    RegistrationFailed,
    RegistrationFailure,
    SocketFreed,
    Tick,
    WatchersChanged,
)
from agent.model.health import Reason
from agent.model.ids import ComponentId, DeviceId, ResourceName, SocketIdentity
from agent.model.policy import Policy
from agent.model.snapshot import RegistrationPhase
from agent.model.structs import replace
from tests.core.build import (
    GPU,
    K1,
    K2,
    K3,
    MS,
    PLUGIN,
    START_NS,
    Node,
    S,
    enumerated,
    gpu,
    healthy_node,
    mig_gpu,
    passed,
    ready,
    registered_node,
)


def registering_node(policy: Policy | None = None) -> Node:
    node = healthy_node(gpu(0), policy=policy or Policy())
    node.apply(KubeletSocketSeen(K1))
    return node


# The first registration


def test_nothing_is_registered_before_the_kubelets_socket_exists() -> None:
    node = healthy_node(gpu(0))
    node.after(3600 * S)
    assert node.registrations() == []
    assert node.standing().phase is RegistrationPhase.WAITING
    assert node.standing().message == NO_SOCKET


def test_registration_waits_for_the_first_probe_of_every_gpu() -> None:
    node = Node()
    node.apply(KubeletSocketSeen(K1), ready(), enumerated(gpu(0), gpu(1)), passed(gpu(0).uuid))
    assert node.standing().phase is RegistrationPhase.WAITING
    assert node.standing().message == WAIT_FOR_PROBES
    node.after(20 * MS, passed(gpu(1).uuid))
    assert node.registrations() == [node.now_ns]


def test_registration_waits_no_longer_than_150_ms_for_first_probes() -> None:
    node = Node()
    node.apply(KubeletSocketSeen(K1), ready(), enumerated(gpu(0)))
    deadline_ns = node.now_ns + 150 * MS
    assert node.wake_at_ns == deadline_ns
    node.until(deadline_ns - 1)
    node.apply(Tick())
    assert node.registrations() == []
    node.until(deadline_ns)
    node.apply(Tick())
    assert node.registrations() == [deadline_ns]


def test_listing_the_same_gpus_again_does_not_prolong_the_wait_for_first_probes() -> None:
    node = Node()
    node.apply(KubeletSocketSeen(K1), ready(), enumerated(gpu(0)))
    deadline_ns = node.now_ns + 150 * MS
    while node.now_ns < deadline_ns:
        before = node.state
        assert node.after(50 * MS, enumerated(gpu(0))) == () or node.now_ns >= deadline_ns
        assert node.state is before or node.now_ns >= deadline_ns
    node.apply(Tick())
    assert node.registrations() == [deadline_ns]


# The two clocks


def tries(node: Node, failure: RegistrationFailure, for_ns: int) -> list[int]:
    """Answer every registration with a failure, at once; returns when each was made, from the first."""
    began_ns = node.now_ns
    answered = 0
    while node.now_ns <= began_ns + for_ns:
        generation = node.standing().generation
        if generation > answered:
            node.fail_registration(failure)
            answered = generation
        node.now_ns = node.wake_at_ns
        node.apply(Tick())
    return [at_ns - began_ns for at_ns in node.registrations() if at_ns <= began_ns + for_ns]


def waits(times: list[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise(times)]


UNREACHABLE: list[RegistrationFailure] = ["absent", "unreachable"]
ANSWERED: list[RegistrationFailure] = ["rejected", "socket_in_use", "not_served"]


@pytest.mark.parametrize("failure", UNREACHABLE)
def test_an_unreachable_kubelet_is_tried_every_50_ms_for_10_s_then_every_second(
    failure: RegistrationFailure,
) -> None:
    between = waits(tries(registering_node(), failure, 15 * S))
    assert between[:200] == [50 * MS] * 200
    assert between[200:] == [S] * 5


@pytest.mark.parametrize("failure", ANSWERED)
def test_an_answered_error_is_tried_again_after_a_tenth_of_a_second_doubling_to_ten(
    failure: RegistrationFailure,
) -> None:
    between = waits(tries(registering_node(), failure, 80 * S))
    least = [100 * MS << doublings for doublings in range(7)] + [10 * S] * 5
    assert all(low <= wait <= low * 12 // 10 for low, wait in zip(least, between, strict=False))
    assert 10 <= len(between) <= len(least)


@given(st.integers(0, 2**64))
@example(0)
def test_a_rejecting_kubelet_gets_at_most_12_tries_in_60_s_whatever_the_jitter(seed: int) -> None:
    assert len(tries(registering_node(Policy(jitter_seed=seed)), "rejected", 60 * S - 1)) <= 12


def test_different_seeds_spread_the_retries() -> None:
    spread = {
        tuple(tries(registering_node(Policy(jitter_seed=seed)), "rejected", 5 * S)) for seed in range(20)
    }
    assert len(spread) > 15


def test_a_new_kubelet_is_tried_at_once_and_the_clocks_begin_anew() -> None:
    node = registering_node()
    tries(node, "rejected", 30 * S)
    node.fail_registration("rejected")
    assert node.wake_at_ns > node.now_ns + S
    node.apply(KubeletSocketSeen(K2))
    assert node.standing().phase is RegistrationPhase.REGISTERING
    node.fail_registration("rejected")
    assert node.wake_at_ns <= node.now_ns + 120 * MS
    tries(node, "unreachable", 12 * S)
    node.fail_registration("unreachable")
    assert node.wake_at_ns == node.now_ns + S
    node.apply(KubeletSocketSeen(K3))
    node.fail_registration("unreachable")
    assert node.wake_at_ns == node.now_ns + 50 * MS


def test_a_kubelet_that_goes_away_while_backing_off_is_waited_for() -> None:
    node = registering_node()
    node.fail_registration("unreachable", "connection refused")
    assert node.standing().message == "connection refused"
    node.apply(KubeletSocketSeen(None))
    assert node.standing().phase is RegistrationPhase.WAITING
    assert node.standing().message == NO_SOCKET
    node.forget_effects()
    node.after(60 * S)
    assert node.registrations() == []


def test_while_it_is_tried_again_the_last_answer_is_why_it_is_not_registered() -> None:
    node = registering_node()
    node.fail_registration("rejected", "unsupported API version")
    node.after(200 * MS)
    assert node.standing().phase is RegistrationPhase.REGISTERING
    assert [finding.message for finding in node.snapshot().findings] == [
        "nvidia.com/gpu is not registered: unsupported API version"
    ]


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        ("absent", Reason.KUBELET_UNAVAILABLE),
        ("unreachable", Reason.KUBELET_UNAVAILABLE),
        ("rejected", Reason.REGISTRATION_REFUSED),
        ("socket_in_use", Reason.SOCKET_IN_USE),
        ("not_served", Reason.KUBELET_UNAVAILABLE),
    ],
)
def test_each_failure_is_a_finding_of_its_own(failure: RegistrationFailure, reason: Reason) -> None:
    node = registering_node()
    node.fail_registration(failure, "why")
    assert [(finding.reason, finding.message) for finding in node.snapshot().findings] == [
        (reason, "nvidia.com/gpu is not registered: why")
    ]
    node.apply(KubeletSocketSeen(None), KubeletSocketSeen(K2))
    assert [(finding.reason, finding.message) for finding in node.snapshot().findings] == [
        (Reason.KUBELET_UNAVAILABLE, "nvidia.com/gpu is not registered: registering")
    ]


# Registered, and how it ends


def test_an_accepted_registration_stays_while_the_stream_is_open() -> None:
    node = registered_node(gpu(0))
    assert node.standing().registered
    assert node.standing().socket == PLUGIN
    assert node.standing().since_ns == node.now_ns
    node.after(3600 * S)
    assert node.effects == []


def test_nothing_of_earlier_trouble_is_left_after_an_accepted_registration() -> None:
    node = registering_node()
    node.fail_registration("socket_in_use", "another plugin")
    node.after(200 * MS)
    node.accept()
    assert node.standing().message == ""
    assert node.snapshot().ready
    node.after(5 * S)
    node.end_stream()
    assert node.snapshot().findings[0].reason is Reason.KUBELET_UNAVAILABLE
    assert node.snapshot().resources[0].since_ns == node.now_ns


def test_a_second_sign_of_the_same_kubelet_socket_changes_nothing() -> None:
    """Case A1, action a."""
    node = registering_node()
    node.accept()
    node.after(50 * MS, KubeletSocketSeen(K1))
    node.after(5 * S)
    assert len(node.registrations()) == 1
    assert node.standing().registered


def test_a_replaced_kubelet_is_registered_with_once_more() -> None:
    """Case A1, action b: replaced socket, dropped stream, our socket deleted."""
    node = registering_node()
    node.accept()
    generation = node.standing().generation
    node.after(
        10 * S, KubeletSocketSeen(K2), WatchersChanged(GPU, generation, 0), OwnSocketLost(GPU, generation)
    )
    node.accept()
    node.after(60 * S)
    assert len(node.registrations()) == 2
    assert node.standing().registered
    assert node.standing().kubelet == K2


def test_a_replaced_kubelet_that_rejects_is_not_tried_again_at_once() -> None:
    node = registered_node(gpu(0))
    node.after(10 * S, KubeletSocketSeen(K2))
    (resource,) = node.snapshot().resources
    assert (resource.since_ns, resource.socket) == (node.now_ns, None)
    node.fail_registration("rejected")
    assert node.standing().phase is RegistrationPhase.BACKING_OFF
    assert node.wake_at_ns >= node.now_ns + 100 * MS


def test_a_stream_of_an_earlier_registration_is_none_of_the_next_one() -> None:
    node = registered_node(gpu(0))
    node.after(S, KubeletSocketSeen(K2), Registered(GPU, 2, K2, PLUGIN))
    node.after(11 * S)
    assert node.registrations()[-1] >= START_NS + 11 * S


def test_a_stream_that_ended_is_registered_anew_after_a_tenth_of_a_second() -> None:
    node = registered_node(gpu(0))
    node.after(3 * S)
    node.end_stream()
    assert node.standing().message == STREAM_ENDED
    assert node.standing().socket is None
    ended_ns = node.now_ns
    node.after(S)
    (again_ns,) = node.registrations()
    assert 100 * MS <= again_ns - ended_ns <= 120 * MS


def test_a_stream_that_ended_before_the_answer_is_registered_anew() -> None:
    node = registering_node()
    generation = node.standing().generation
    node.apply(WatchersChanged(GPU, generation, 1), WatchersChanged(GPU, generation, 0))
    node.apply(Registered(GPU, generation, K1, PLUGIN))
    assert not node.standing().registered
    assert node.standing().message == STREAM_ENDED
    node.after(S)
    assert len(node.registrations()) == 2


def test_a_deleted_plugin_socket_is_registered_anew() -> None:
    node = registered_node(gpu(0))
    node.after(3 * S, OwnSocketLost(GPU, node.standing().generation))
    assert node.standing().message == SOCKET_LOST
    lost_ns = node.now_ns
    node.after(S)
    (again_ns,) = node.registrations()
    assert 100 * MS <= again_ns - lost_ns <= 120 * MS


def test_a_plugin_socket_deleted_while_the_kubelet_is_asked_does_not_wait_for_its_answer() -> None:
    node = registering_node()
    node.apply(RegisterSent(GPU, 1, K1, PLUGIN))
    assert node.standing().socket == PLUGIN
    node.apply(OwnSocketLost(GPU, 1))
    assert node.standing().socket is None
    assert node.standing().message == SOCKET_LOST
    lost_ns = node.now_ns
    node.after(S)
    again_ns = node.registrations()[-1]
    assert 100 * MS <= again_ns - lost_ns <= 120 * MS


@pytest.mark.parametrize("timeout_ns", [2 * S, 10 * S])
def test_a_registration_without_a_stream_is_made_anew(timeout_ns: int) -> None:
    node = registering_node(Policy(watch_timeout_ns=timeout_ns))
    node.apply(Registered(GPU, 1, K1, PLUGIN))
    accepted_ns = node.now_ns
    node.until(accepted_ns + timeout_ns)
    assert node.standing().registered
    node.apply(Tick())
    assert node.standing().message == NO_STREAM
    node.after(200 * MS)
    assert len(node.registrations()) == 2


def test_a_kubelet_that_drops_every_stream_gets_at_most_12_tries_in_60_s() -> None:
    node = registering_node()
    began_ns = node.now_ns
    while node.now_ns < began_ns + 60 * S:
        if node.standing().phase is RegistrationPhase.REGISTERING:
            node.accept()
            node.end_stream()
        node.now_ns = node.wake_at_ns
        node.apply(Tick())
    assert len([at_ns for at_ns in node.registrations() if at_ns < began_ns + 60 * S]) <= 12


@pytest.mark.parametrize(("lived_ns", "settled"), [(10 * S - 1, False), (10 * S, True)])
def test_a_registration_that_lived_for_10_s_ended_for_a_new_reason(lived_ns: int, *, settled: bool) -> None:
    node = registering_node()
    for _ in range(6):
        node.fail_registration("rejected")
        node.after(node.wake_at_ns - node.now_ns)
    node.accept()
    node.until(node.now_ns + lived_ns)
    node.end_stream()
    assert (node.wake_at_ns - node.now_ns <= 120 * MS) is settled


@pytest.mark.parametrize(
    "late",
    [
        Registered(GPU, 1, K1, PLUGIN),
        RegistrationFailed(GPU, 1, "rejected", "late"),
        WatchersChanged(GPU, 1, 0),
        OwnSocketLost(GPU, 1),
        Registered(GPU, 3, K1, PLUGIN),
        Registered(ResourceName("nvidia.com/other"), 2, K1, PLUGIN),
    ],
)
def test_answers_of_other_generations_and_resources_change_nothing(late: Fact) -> None:
    node = registering_node()
    node.fail_registration("unreachable")
    node.after(50 * MS)
    node.accept()
    assert node.standing().generation == 2
    before = node.state
    assert node.apply(late) == ()
    assert node.state is before


def test_a_server_that_fails_ends_its_registration() -> None:
    node = registered_node(gpu(0))
    node.after(20 * S)
    node.fail_registration("socket_in_use", "The server of nvidia.com/gpu failed")
    assert not node.standing().registered
    assert node.standing().socket is None
    (finding,) = node.snapshot().findings
    assert finding.reason is Reason.SOCKET_IN_USE
    assert finding.message == "nvidia.com/gpu is not registered: The server of nvidia.com/gpu failed"
    assert node.wake_at_ns <= node.now_ns + 120 * MS
    node.after(S)
    assert len(node.registrations()) == 1


def test_a_server_that_was_started_again_by_itself_is_watched_at_its_new_socket() -> None:
    node = registered_node(gpu(0))
    moved = SocketIdentity(device=5, inode=901, mtime_ns=9_000)
    node.after(S, Registered(GPU, 1, K1, moved))
    assert node.standing().socket == moved
    assert node.standing().registered
    assert node.effects == []


# Which of two kubelet sockets is the newer one


def test_a_registration_may_find_a_new_kubelet_before_the_watch_of_the_directory() -> None:
    node = registering_node()
    node.apply(Registered(GPU, 1, K2, PLUGIN), WatchersChanged(GPU, 1, 1))
    node.apply(KubeletSocketSeen(K2))
    node.after(60 * S)
    assert len(node.registrations()) == 1
    assert node.state.kubelet == K2


def test_a_wall_clock_set_back_does_not_make_a_new_kubelet_an_old_one() -> None:
    node = registering_node()
    earlier = SocketIdentity(device=5, inode=200, mtime_ns=K1.mtime_ns - 500)
    node.apply(Registered(GPU, 1, earlier, PLUGIN), WatchersChanged(GPU, 1, 1))
    node.apply(KubeletSocketSeen(earlier))
    node.after(60 * S)
    assert len(node.registrations()) == 1


@pytest.mark.parametrize("sent", [False, True])
def test_a_kubelet_replaced_while_it_is_asked_is_not_waited_for(*, sent: bool) -> None:
    node = registering_node()
    if sent:
        node.apply(RegisterSent(GPU, 1, K1, PLUGIN))
    effects = node.after(S, KubeletSocketSeen(K2))
    assert RegisterResource(GPU, 2, K2) in effects
    node.apply(Registered(GPU, 1, K1, PLUGIN))
    assert node.standing().phase is RegistrationPhase.REGISTERING
    node.accept(kubelet=K2)
    node.after(60 * S)
    assert len(node.registrations()) == 2
    assert node.standing().registered


@pytest.mark.parametrize(("late", "behind"), [(False, 0), (True, 0), (False, 1)])
def test_a_socket_that_another_process_left_is_taken_a_tenth_of_a_second_later(
    late: bool, behind: int
) -> None:
    node = registering_node()
    for _ in range(8):
        node.fail_registration("socket_in_use", "in use")
        node.after(13 * S)
    node.fail_registration("socket_in_use", "in use")
    due_ns = node.standing().retry_at_ns
    assert due_ns is not None
    if late:
        node.until(due_ns - 50 * MS)
    node.apply(SocketFreed(GPU, node.standing().generation - behind))
    freed_ns = node.now_ns + 100 * MS
    assert node.standing().retry_at_ns == (due_ns if late or behind else freed_ns)


# What the kubelet has of what it was sent


HAS = frozenset({DeviceId("a"), DeviceId("b")})
FEWER, OTHERS, NONE = (
    frozenset({DeviceId("a")}),
    frozenset({DeviceId("a"), DeviceId("z")}),
    frozenset[DeviceId](),
)


def counted_node() -> Node:
    node = registered_node(gpu(0))
    node.apply(ListWritten(GPU, node.standing().generation, HAS))
    return node


def count(node: Node, has: frozenset[DeviceId], *, asked_ago_ns: int = 0) -> None:
    node.apply(KubeletCounted({GPU: has} if has else {}, node.now_ns - asked_ago_ns))


@pytest.mark.parametrize(
    ("has", "text"),
    [
        (NONE, "the kubelet has 0 of the 2 healthy devices it was sent"),
        (FEWER, "the kubelet has 1 of the 2 healthy devices it was sent"),
        (OTHERS, "the kubelet has 1 of the 2 healthy devices it was sent and 1 others"),
        (HAS | {DeviceId("z")}, "the kubelet has 2 of the 2 healthy devices it was sent and 1 others"),
    ],
)
def test_a_kubelet_that_lastingly_has_others_is_registered_with_anew_and_named_until_it_agrees(
    has: frozenset[DeviceId], text: str
) -> None:
    node = counted_node()
    node.after(2 * S)
    count(node, has)
    assert node.standing().registered
    node.after(S)
    count(node, has)
    assert (node.standing().phase, node.standing().message) == (RegistrationPhase.BACKING_OFF, MISCOUNTED)
    assert [each.reason for each in node.snapshot().findings] == [Reason.KUBELET_COUNT_MISMATCH]
    node.after(S)
    assert len(node.registrations()) == 1
    node.accept()
    (finding,) = node.snapshot().findings
    assert finding.reason is Reason.KUBELET_COUNT_MISMATCH
    assert finding.message == f"{GPU}: {text}; it was registered anew"
    node.apply(ListWritten(GPU, node.standing().generation, HAS))
    node.after(2 * S)
    count(node, HAS)
    assert node.snapshot().findings == ()
    assert node.snapshot().resources[0].counted


def test_no_count_applies_to_a_list_that_is_newer_than_the_question() -> None:
    node = counted_node()
    for _ in range(10):
        node.after(S - 1)
        count(node, NONE)
        node.apply(ListWritten(GPU, node.standing().generation, HAS))
    node.after(60 * S)
    for _ in range(3):
        count(node, NONE, asked_ago_ns=60 * S)
    assert node.standing().registered
    assert node.standing().counted is None


def test_a_difference_that_did_not_last_is_forgotten() -> None:
    node = counted_node()
    for has in (NONE, HAS, FEWER, HAS, NONE):
        node.after(2 * S)
        count(node, has)
    assert node.standing().registered
    assert node.registrations() == []


def test_a_list_that_is_not_sent_is_registered_anew_once() -> None:
    node = counted_node()
    stale = frozenset({ComponentId(LIST_AND_WATCH, GPU)})
    node.apply(ComponentsStale(stale))
    assert node.standing().message == LIST_OVERDUE
    assert {each.reason for each in node.snapshot().findings} == {Reason.SOURCE_FAILED}
    node.after(S)
    node.accept()
    node.apply(ComponentsStale(stale | {ComponentId(ENGINE)}))
    assert node.standing().registered
    assert len(node.registrations()) == 1


# One restart is one registration


SIGNS = ("stream", "socket", "gone", "new")
GAPS = st.sampled_from([0, 1, MS, 49 * MS, 50 * MS, 99 * MS, 100 * MS, 101 * MS, 150 * MS, S, 11 * S])


@st.composite
def restarts(draw: st.DrawFn) -> list[tuple[int, str]]:
    """Signs of one restart and how long after the one before each comes."""
    order = draw(st.permutations(SIGNS).filter(lambda signs: signs.index("gone") < signs.index("new")))
    without = draw(st.sets(st.sampled_from(["socket", "gone", "stream"]), max_size=2))
    return [(draw(GAPS), sign) for sign in order if sign not in without]


@given(restarts(), st.booleans(), GAPS)
@example([(0, "new"), (0, "stream"), (0, "socket")], False, 0)
@example([(0, "stream"), (100 * MS, "socket"), (50 * MS, "gone"), (50 * MS, "new")], True, MS)
def test_one_kubelet_restart_is_one_registration_in_every_order_of_its_signs(
    signs: list[tuple[int, str]], seen_early: bool, latency_ns: int
) -> None:
    """The new kubelet accepts from its sign on, or (seen early) from a moment before it."""
    node = registered_node(gpu(0))
    node.after(20 * S)
    began_ns = node.now_ns
    at_ns = began_ns
    timeline: list[tuple[int, Fact]] = []
    for gap_ns, sign in signs:
        at_ns += gap_ns
        timeline.append((at_ns, sign_fact(sign)))
    accepts_from_ns = max(began_ns, at_ns - 30 * MS) if seen_early and signs[-1][1] == "new" else at_ns
    for sign_at_ns, fact in timeline:
        if fact == KubeletSocketSeen(K2) and not seen_early:
            accepts_from_ns = sign_at_ns
    accepted = play(node, timeline, accepts_from_ns, latency_ns, until_ns=at_ns + 120 * S)
    assert accepted == 1
    assert node.standing().registered
    assert node.standing().kubelet == K2
    assert node.state.kubelet == K2


def sign_fact(sign: str) -> Fact:
    match sign:
        case "stream":
            return WatchersChanged(GPU, 1, 0)
        case "socket":
            return OwnSocketLost(GPU, 1)
        case "gone":
            return KubeletSocketSeen(None)
        case _:
            return KubeletSocketSeen(K2)


def play(
    node: Node, timeline: list[tuple[int, Fact]], accepts_from_ns: int, latency_ns: int, *, until_ns: int
) -> int:
    """Play facts, answer registrations as a kubelet would that accepts from a moment on.

    Returns how many it accepted.
    """
    accepted = 0
    answered = node.standing().generation
    latency_ns = min(latency_ns, S)
    pending = list(timeline)
    while True:
        standing = node.standing()
        if standing.phase is RegistrationPhase.REGISTERING and standing.generation > answered:
            answered = standing.generation
            pending.append((node.now_ns + latency_ns, answer(node, answered, accepts_from_ns)))
            accepted += isinstance(pending[-1][1], Registered)
        pending.sort(key=lambda item: item[0])
        next_ns = pending[0][0] if pending else until_ns + 1
        if min(next_ns, node.wake_at_ns) > until_ns:
            return accepted
        if node.wake_at_ns < next_ns:
            node.now_ns = node.wake_at_ns
            node.apply(Tick())
            continue
        node.now_ns, fact = pending.pop(0)
        node.apply(fact)
        if isinstance(fact, Registered):
            node.apply(WatchersChanged(GPU, fact.generation, 1))


def answer(node: Node, generation: int, accepts_from_ns: int) -> Fact:
    if node.now_ns >= accepts_from_ns:
        return Registered(GPU, generation, K2, PLUGIN)
    return RegistrationFailed(GPU, generation, "unreachable", "connection refused")


@given(st.lists(st.tuples(GAPS, st.sampled_from([None, K1, K2, K3])), max_size=12), GAPS)
def test_a_kubelet_whose_socket_flaps_is_registered_with_in_the_end(
    flaps: list[tuple[int, SocketIdentity | None]], latency_ns: int
) -> None:
    node = registered_node(gpu(0))
    at_ns = node.now_ns
    timeline: list[tuple[int, Fact]] = []
    for gap_ns, identity in flaps:
        at_ns += gap_ns
        timeline.append((at_ns, KubeletSocketSeen(identity)))
    at_ns += S
    timeline += [(at_ns, WatchersChanged(GPU, 1, 0)), (at_ns, KubeletSocketSeen(K2))]
    play(node, timeline, node.now_ns, latency_ns, until_ns=at_ns + 60 * S)
    assert node.standing().registered
    assert node.standing().kubelet == K2


def test_standings_of_several_resources_are_apart() -> None:
    node = healthy_node(gpu(0), mig_gpu(1, (1, 0, "1g.10gb")), policy=Policy(mig_strategy="mixed"))
    node.apply(KubeletSocketSeen(K1))
    slices = ResourceName("nvidia.com/mig-1g.10gb")
    assert {effect.resource for _, effect in node.effects if isinstance(effect, RegisterResource)} == {
        GPU,
        slices,
    }
    node.accept()
    node.fail_registration("rejected", "no", slices)
    assert node.standing().registered
    assert node.standing(slices).phase is RegistrationPhase.BACKING_OFF


# What the kubelet gets at a registration only


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_check_before_each_start_that_is_switched_makes_the_registration_anew(*, is_checked: bool) -> None:
    policy = Policy(pre_start_check=not is_checked)
    node = registered_node(gpu(0), policy=policy)
    node.after(S, PolicyChanged(replace(policy, pre_start_check=is_checked)))
    assert node.registrations() == [node.now_ns]
    node.accept()
    node.after(60 * S)
    assert len(node.registrations()) == 1
    assert node.standing().registered


def test_a_check_that_is_switched_while_the_kubelet_is_asked_makes_one_registration_more() -> None:
    node = registering_node()
    node.apply(PolicyChanged(Policy(pre_start_check=True)))
    assert len(node.registrations()) == 1
    node.accept()
    assert len(node.registrations()) == 2
    node.accept()
    node.after(60 * S)
    assert len(node.registrations()) == 2


def test_a_check_that_is_switched_while_there_is_no_kubelet_waits_for_one() -> None:
    node = registered_node(gpu(0))
    node.apply(KubeletSocketSeen(None))
    node.apply(PolicyChanged(Policy(pre_start_check=True)))
    assert node.registrations() == []
    node.after(S, KubeletSocketSeen(K1))
    assert node.registrations() == [node.now_ns]
