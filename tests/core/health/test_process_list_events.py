"""A list of processes that is not believed is reported once, not for each GPU and each poll."""

from agent.model.effects import EventKind
from tests.core.build import U0, U1, Node
from tests.core.use import memory, node, user


def warnings(of: Node) -> list[str]:
    return [event.message for event in of.events(EventKind.GPUS) if event.warning]


def test_each_state_is_reported_once_however_many_gpus_are_in_it() -> None:
    reported = node()
    for _ in range(3):
        reported.apply(memory(on=U0, info="unreliable"), memory(on=U1, info="unreliable"))
    reported.apply(memory(on=U0, info="unsupported"))

    assert warnings(reported) == [
        "NVML lists processes that cannot be, so none of them is believed",
        "The driver does not list processes, so only open files show which processes hold a GPU",
    ]


def test_a_list_that_is_believed_is_not_reported() -> None:
    well = node()
    well.apply(memory(user(7, 1)))

    assert warnings(well) == []


def test_after_all_lists_were_believed_again_it_is_reported_anew() -> None:
    reported = node()
    for info in ("unreliable", "ok", "unreliable"):
        reported.apply(memory(on=U0, info=info))

    assert len(warnings(reported)) == 2
