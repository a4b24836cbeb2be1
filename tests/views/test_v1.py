"""Every document has the keys and the types that the reference and the schema publish."""

from typing import Any

import msgspec
import pytest

from agent.model.effects import Event, EventKind
from agent.model.snapshot import ListSent
from agent.views import documents, reference, usage, v1
from agent.views.events import Entry
from tests.core.build import U0, Node, S, xid
from tests.core.use import node, orphan, process, seen
from tests.views.test_usage import in_use, time_of


def unhealthy() -> Node:
    """Return a node with an XID, and a leak whose condition names a process."""
    made = node()
    made.apply(xid(79, U0), seen(process(8), orphans=[orphan(7, 8, ended_ns=0)]))
    return made


def all_documents(on: Node) -> dict[str, Any]:
    snapshot = on.snapshot()
    lists = [
        ListSent(
            each.name,
            1,
            len(each.devices),
            each.devices,
            bytes=9,
            changed_at_ns=0,
            began_ns=5 * S,
            sent_at_ns=5 * S,
        )
        for each in snapshot.resources
    ]
    entries = [Entry(1, 3 * S, Event(EventKind.XID, "An XID was reported", fields={"xid": 79}))]
    return {
        "Preflight": documents.preflight(snapshot),
        "Devices": documents.devices(snapshot, time_of),
        "Conditions": documents.conditions(snapshot, time_of),
        "Allocatable": documents.allocatable(snapshot, time_of),
        "Lists": documents.lists(lists, time_of),
        "Topology": documents.topology(snapshot, time_of),
        "Events": documents.events(entries, last=1, missed=0, time_of=time_of),
        "Contexts": usage.contexts(snapshot, time_of),
        "Owners": usage.ownership(snapshot, time_of),
    }


@pytest.mark.parametrize("made", [Node, in_use, unhealthy])
def test_each_document_is_of_its_type(made: type[Node]) -> None:
    made_documents = all_documents(made())
    assert list(made_documents) == [each.__name__ for each in v1.DOCUMENTS]
    schema = reference.schema()["$defs"]
    for each in v1.DOCUMENTS:
        raw = msgspec.json.encode(made_documents[each.__name__])
        msgspec.json.decode(raw, type=each)
        assert unpublished(msgspec.json.decode(raw), {"$ref": f"#/$defs/{each.__name__}"}, schema) == set()


def test_the_unhealthy_node_has_conditions_and_lists() -> None:
    conditions = documents.conditions(unhealthy().snapshot(), time_of)["conditions"]
    assert {condition["code"] for condition in conditions} == {"xid", "context_leak"}
    assert all_documents(unhealthy())["Lists"]["lists"][0]["unhealthy"][0]["reasons"]


def unpublished(value: object, of: dict[str, Any], schema: dict[str, Any]) -> set[str]:
    """Return the keys in a value that its schema does not have."""
    if "$ref" in of:
        of = schema[of["$ref"].rpartition("/")[2]]
    found: set[str] = set()
    for each in of.get("anyOf", ()):
        found |= unpublished(value, each, schema) if value is not None else set()
    if isinstance(value, list) and "items" in of:
        found |= {key for each in value for key in unpublished(each, of["items"], schema)}
    if isinstance(value, dict) and "properties" in of:
        found |= value.keys() - of["properties"].keys()
        for key in value.keys() & of["properties"].keys():
            found |= unpublished(value[key], of["properties"][key], schema)
    return found
