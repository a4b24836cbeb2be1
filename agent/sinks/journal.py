"""Writes the events of the core to the log; under systemd each kind has a MESSAGE_ID of its own.

``journalctl MESSAGE_ID=…`` finds all entries of a kind, ``journalctl GPU_UUID=GPU-…`` all of a GPU.
The ids are stable names: they were drawn once and never change.
"""

import logging
from collections.abc import Mapping
from typing import Final

from agent.log import fields
from agent.model.effects import EventKind, RecordEvent
from agent.views.sentences import sentence_of

MESSAGE_IDS: Final[Mapping[EventKind, str]] = {
    EventKind.ALLOCATABLE: "66010144bf724b0995cd6cc8a86f77ed",
    EventKind.DEVICE: "613ff0d3e9f747068cea63780b20b537",
    EventKind.CONDITION: "08b2b582289546fa83072184db16c7e6",
    EventKind.XID: "540a49a666a54d86800c832da61c2202",
    EventKind.DRIVER: "acf6dc6f159b4d8895115ee435608d6e",
    EventKind.GPUS: "5b0be933f9404ad8aefe92edb68a73ec",
    EventKind.KUBELET: "ce944f34aaa341e48183c40a75ad3e58",
    EventKind.REGISTRATION: "088ef8aec32c4250bffdeb31ae154d3c",
    EventKind.TASK: "3281b24d6f274a83b35d01bd1bea739e",
    EventKind.COMMAND: "b6ed250b0ecc430097b8b093253c1b4e",
    EventKind.LOSS: "942214cd317241af90bcc942be15a1f1",
}

_JOURNAL_NAMES: Final = {"uuid": "gpu_uuid", "gpu": "gpu_index", "message": "detail"}
"""Fields of events that have another name in the journal, where all programs share names."""

_log = logging.getLogger("agent.views.events")


class JournalSink:
    """Writes each event as one line."""

    def record(self, effect: RecordEvent) -> None:
        """Write an event; never blocks."""
        event = effect.event
        event_fields = {_JOURNAL_NAMES.get(name, name): value for name, value in (event.fields or {}).items()}
        _log.log(
            logging.WARNING if event.warning else logging.INFO,
            sentence_of(event.message, event.fields),
            extra={
                **fields(
                    **event_fields,
                    kind=str(event.kind),
                    event=event.message,
                    message_id=MESSAGE_IDS[event.kind],
                ),
                # A storm of one event must not silence the others, however its sentences differ; nor what a
                # program can cause the same event of a fault.
                "limited_as": f"{event.message} {(event.fields or {}).get('reason', '')}",
            },
        )
