"""Events that repeat, and what they may evict."""

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from agent.model.effects import Event, EventKind, RecordEvent
from agent.model.health import Evidence
from agent.views.event_files import append, path_of_others, read
from agent.views.events import EventRing, is_of_node
from agent.views.repeats import Repeats

S = 1_000_000_000
MINUTE = 60 * S


def ignored(xid: int, gpu: str, at_ns: int, count: int = 1) -> RecordEvent:
    fields = {"xid": xid, "uuid": gpu, "count": count}
    return RecordEvent(Event(EventKind.XID, "An XID was ignored by policy", fields=fields), at_ns)


def name(effect: RecordEvent) -> tuple[object, object]:
    fields = effect.event.fields or {}
    return fields["uuid"], fields["xid"]


def count(effect: RecordEvent) -> int:
    return int(str((effect.event.fields or {})["count"]))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 90 * S), st.sampled_from([13, 31]), st.sampled_from("ab"), st.integers(1, 9)
        ),
        max_size=60,
    )
)
def test_each_kind_is_recorded_at_once_then_once_a_minute_and_all_are_counted(
    happened: list[tuple[int, int, str, int]],
) -> None:
    repeats, now_ns = Repeats(), 0
    counted: Counter[object] = Counter()
    recorded: Counter[object] = Counter()
    last_ns: dict[object, int] = {}

    def note(effects: list[RecordEvent]) -> None:
        for each in effects:
            recorded[name(each)] += count(each)
            if name(each) in last_ns:
                assert now_ns - last_ns[name(each)] >= MINUTE
            last_ns[name(each)] = now_ns

    for gap_ns, xid, gpu, times in happened:
        until_ns = now_ns + gap_ns
        while (due_ns := repeats.due_ns) is not None and due_ns <= until_ns:
            now_ns = due_ns
            note(repeats.due(now_ns))
        now_ns = until_ns
        effect = ignored(xid, gpu, now_ns, times)
        counted[name(effect)] += times
        note(repeats.admitted(effect))
        # No event is delayed for longer than a minute.
        assert repeats.due_ns is None or now_ns < repeats.due_ns <= now_ns + MINUTE
    recorded.update({name(each): count(each) for each in repeats.rest(now_ns)})
    assert recorded == counted
    assert repeats.rest(now_ns) == []


def test_a_gpu_with_ever_new_kinds_costs_no_other_gpu_its_minute() -> None:
    repeats = Repeats(max_kinds=20, max_of_gpu=10)
    assert len(repeats.admitted(ignored(31, "quiet", 0))) == 1
    assert repeats.admitted(ignored(31, "quiet", 1)) == []
    recorded = sum(count(each) for xid in range(500) for each in repeats.admitted(ignored(xid, "loud", 2)))
    assert recorded == 500
    assert repeats.admitted(ignored(31, "quiet", 3)) == []
    (due,) = [each for each in repeats.due(MINUTE + 5) if name(each)[0] == "quiet"]
    assert count(due) == 2


def test_what_changes_is_never_a_repetition() -> None:
    repeats = Repeats()
    raised = RecordEvent(Event(EventKind.CONDITION, "A condition was raised", fields={"uuid": "a"}), 0)
    assert [repeats.admitted(raised) for _ in range(3)] == [[raised]] * 3


def test_noise_evicts_no_fault_and_no_command_from_the_ring() -> None:
    ring = EventRing(100)
    kept = [
        ring.record(RecordEvent(Event(EventKind.COMMAND, f"order {number}"), number)).number
        for number in range(20)
    ]
    for number in range(10_000):
        ring.record(ignored(number % 3, "GPU-a", number))
    shown = ring.since(0)
    assert [entry.number for entry in shown][:20] == kept
    assert [entry.number for entry in shown] == sorted(entry.number for entry in shown)
    assert (len(shown), ring.last) == (100, 10_020)


def test_events_of_programs_have_files_of_their_own_and_are_read_in_one_order(tmp_path: Path) -> None:
    soft = Event(EventKind.CONDITION, "A condition was raised", fields={"evidence": Evidence.SOFT})
    hard = Event(EventKind.CONDITION, "A condition was raised", fields={"evidence": Evidence.HARD})
    assert [is_of_node(each) for each in (soft, hard, ignored(31, "a", 0).event)] == [False, True, False]

    path = str(tmp_path / "events.jsonl")

    def line(number: int) -> bytes:
        rest = '"kind":"xid","warning":false,"message":"m","fields":{},"time_monotonic_ns":1'
        return f'{{"number":{number},"time":"2026-11-30T00:00:{number:02}.000Z",{rest}}}\n'.encode()

    append(path, [line(1), line(4)], max_bytes=10_000)
    for number in (2, 3, 5):
        append(path_of_others(path), [line(number)], max_bytes=10_000)
    assert [event["number"] for event in read(path)] == [1, 2, 3, 4, 5]
