"""The reference of the JSON documents and their JSON Schema, generated from the types: see .ci/gen.

``python -m agent.views.reference`` prints the page, with ``--schema`` the schema.
"""

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

import msgspec

from agent.model import health
from agent.views import v1

_HEAD: Final = """\
# JSON documents of gpu-agent/v1

Generated from the types in `v1.py` by `.ci/gen`; `v1.schema.json` beside it has the same as JSON Schema.
Keys are stable and new ones are added beside them, so a program ignores the ones that it does not know.
"""

Schema = Mapping[str, Any]


def schema() -> dict[str, Any]:
    """Return the JSON Schema of all documents."""
    _, components = msgspec.json.schema_components(v1.DOCUMENTS, ref_template="#/$defs/{name}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": components}


def page() -> Iterator[str]:
    """Yield the lines of the reference: the documents, then what is in them."""
    definitions: dict[str, Schema] = schema()["$defs"]
    notes = _notes_of(health) | _notes_of(v1)
    yield _HEAD
    yield from (" ".join(line.split()) for line in inspect.cleandoc(v1.__doc__ or "").split("\n\n")[1:])
    documents = [each.__name__ for each in v1.DOCUMENTS]
    for name in (*documents, *sorted(definitions.keys() - documents)):
        yield from _section(name, definitions[name], notes.get(name, {}))


def _section(name: str, definition: Schema, notes: Mapping[str, str]) -> Iterator[str]:
    yield f"\n## {name}\n"
    if definition.get("description"):
        yield " ".join(definition["description"].split()).replace("``", "`") + "\n"
    if "enum" in definition:
        yield "One of " + ", ".join(f"`{word}`" for word in definition["enum"]) + "."
        return
    yield "| key | type | |\n|---|---|---|"
    keys: Mapping[str, Schema] = definition["properties"]
    for key in sorted(keys, key=list(notes).index):
        absent = "" if key in definition["required"] or "default" in keys[key] else "; may be absent"
        yield f"| `{key}` | {_type(keys[key])}{absent} | {notes[key]} |"


def _type(of: Schema) -> str:
    if "$ref" in of:
        name = of["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in of:
        return " or ".join(_type(each) for each in of["anyOf"])
    if "enum" in of:
        return ", ".join(f"`{word}`" for word in of["enum"])
    if of.get("type") == "array":
        return f"list of {_type(of['items'])}"
    if isinstance(of.get("additionalProperties"), dict):
        return f"object of {_type(of['additionalProperties'])}"
    return str(of.get("type", "any"))


def _notes_of(module: ModuleType) -> dict[str, dict[str, str]]:
    """Return the docstring of each field of each class by its key, those of its base first."""
    notes: dict[str, dict[str, str]] = {}
    for record in ast.parse(inspect.getsource(module)).body:
        if not isinstance(record, ast.ClassDef):
            continue
        mine: dict[str, str] = {}
        for base in record.bases:
            mine |= notes.get(ast.unparse(base), {})
        key = ""
        for line in record.body:
            if isinstance(line, ast.AnnAssign):
                key = _name_in_json(line)
                mine[key] = ""
            elif isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and key:
                mine[key] = " ".join(str(line.value.value).split()).replace("``", "`")
        notes[record.name] = mine
    return notes


def _name_in_json(field: ast.AnnAssign) -> str:
    keywords = field.value.keywords if isinstance(field.value, ast.Call) else ()
    names = (ast.literal_eval(each.value) for each in keywords if each.arg == "name")
    return str(next(names, ast.unparse(field.target)))


if __name__ == "__main__":
    is_schema = sys.argv[1:] == ["--schema"]
    sys.stdout.write((json.dumps(schema(), indent=1) if is_schema else "\n".join(page())) + "\n")
