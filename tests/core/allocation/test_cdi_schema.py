"""The schema check rejects what container runtimes reject, with its place."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.allocation.cdi_schema import MAX_PROBLEMS, VERSIONS, oldest_version, problems_of

GOOD: dict[str, Any] = {
    "cdiVersion": "0.5.0",
    "kind": "k8s.device-plugin.nvidia.com/gpu",
    "devices": [
        {
            "name": "0:1",
            "containerEdits": {
                "deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/dev/nvidia0", "permissions": "rw"}],
                "hooks": [
                    {
                        "hookName": "createContainer",
                        "path": "/usr/bin/nvidia-ctk",
                        "args": ["nvidia-ctk", "hook", "create-symlinks"],
                        "env": ["NVIDIA_CTK_DEBUG=false"],
                        "timeout": 5,
                    }
                ],
            },
        }
    ],
    "containerEdits": {
        "env": ["NVIDIA_VISIBLE_DEVICES=void", "EMPTY="],
        "mounts": [{"hostPath": "/usr/lib/a.so", "containerPath": "/usr/lib/a.so", "options": ["ro"]}],
    },
}

NODE = "devices[0].containerEdits.deviceNodes[0]"
HOOK = "devices[0].containerEdits.hooks[0]"

Change = Callable[[dict[str, Any]], object]


def changed(change: Change) -> dict[str, Any]:
    document = copy.deepcopy(GOOD)
    change(document)
    return document


def node(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["devices"][0]["containerEdits"]["deviceNodes"][0]
    return found


def hook(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["devices"][0]["containerEdits"]["hooks"][0]
    return found


def mount(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["containerEdits"]["mounts"][0]
    return found


def intel(document: dict[str, Any], **fields: object) -> None:
    document["cdiVersion"] = "1.1.0"
    document["containerEdits"]["intelRdt"] = fields


def nets(document: dict[str, Any], *names: tuple[str, str]) -> None:
    document["cdiVersion"] = "1.1.0"
    document["containerEdits"]["netDevices"] = [
        {"hostInterfaceName": host, "name": name} for host, name in names
    ]


def test_a_good_specification_has_no_problem() -> None:
    assert problems_of(GOOD) == ()


FULL: dict[str, Any] = {
    "cdiVersion": "v1.1.0",
    "kind": "smartnic.vendor-1.com/Net_fn-1.b",
    "annotations": {"vendor.com/serial": "1", "": ""},
    "containerEdits": {},
    "devices": [
        {
            "name": "0",
            "annotations": {"a": "b"},
            "containerEdits": {
                "env": ["A=b=c"],
                "deviceNodes": [
                    {
                        "path": "/dev/../dev//x",
                        "hostPath": "/run/x",
                        "type": "c",
                        "major": 195,
                        "minor": -1,
                        "fileMode": 0o660,
                        "permissions": "mrw",
                        "uid": 0,
                        "gid": 2**32 - 1,
                    },
                    {"path": "/dev/y", "permissions": "none", "type": ""},
                    {"path": "/dev/z", "permissions": "", "hostPath": None},
                ],
                "mounts": [{"hostPath": "tmpfs", "containerPath": "/x", "type": "tmpfs", "options": ["ro"]}],
                "hooks": [{"hookName": "prestart", "path": "/h", "args": [], "env": None, "timeout": 1}],
                "additionalGids": [0, 44],
                "intelRdt": {
                    "closID": "/",
                    "l3CacheSchema": "L3:0=f",
                    "memBwSchema": "MB:0=100",
                    "schemata": ["L2:0=f"],
                    "enableMonitoring": True,
                },
                "netDevices": [{"hostInterfaceName": "eth0", "name": "net0"}],
            },
        }
    ],
}


def test_the_whole_format_is_known_whether_or_not_the_agent_writes_it() -> None:
    assert problems_of(FULL) == ()
    assert oldest_version(FULL) == "1.1.0"
    before = intel_of_1_0(FULL)
    assert problems_of(before) == ()
    assert oldest_version(before) == "0.7.0"


def intel_of_1_0(document: dict[str, Any]) -> dict[str, Any]:
    """The same as it was before version 1.1.0."""
    older = copy.deepcopy(document) | {"cdiVersion": "1.0.0"}
    edits = older["devices"][0]["containerEdits"]
    edits["intelRdt"] = {"closID": "guaranteed", "enableCMT": True, "enableMBM": False}
    del edits["netDevices"]
    return older


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.update(version="1"), "version: is no field"),
        (lambda d: d.pop("cdiVersion"), "cdiVersion: is missing"),
        (lambda d: d.update(cdiVersion="0.2.0"), "cdiVersion: must be a released version, not '0.2.0'"),
        (lambda d: d.update(cdiVersion=["0.5.0"]), "cdiVersion: must be a released version"),
        (lambda d: d.update(kind="gpu"), "kind: must be a kind, not 'gpu'"),
        (lambda d: d.update(kind="Nvidia.com/gpu"), "kind: must be a kind"),
        (lambda d: d.update(kind="nvidia.com/gpu/0"), "kind: must be a kind"),
        (lambda d: d.update(kind="nvidia.com/-gpu"), "kind: must be a kind"),
        (lambda d: d.update(kind="nvidia.com/gpu\n"), "kind: must be a kind"),
        (lambda d: d.update(kind=f"{'a.' * 127}com/gpu"), "kind: must be a kind"),
        (lambda d: d.pop("devices"), "devices: is missing"),
        (lambda d: d.update(devices=[]), "devices: must not be empty"),
        (lambda d: d.update(devices={}), "devices: must be a list"),
        (lambda d: d["devices"].append(d["devices"][0]), "devices: '0:1' is there twice"),
        (lambda d: d["devices"][0].update(name=""), "devices[0].name: must be a device name"),
        (lambda d: d["devices"][0].update(name="-0"), "devices[0].name: must be a device name"),
        (lambda d: d["devices"][0].update(name="a/b"), "devices[0].name: must be a device name"),
        (lambda d: d["devices"][0].update(name=0), "devices[0].name: must be a device name, not 0"),
        (lambda d: d["devices"][0].pop("containerEdits"), "devices[0].containerEdits: is missing"),
        (lambda d: d["devices"][0].update(containerEdits={}), "devices[0].containerEdits: must not be empty"),
        (lambda d: d["containerEdits"].update(devices=[]), "containerEdits.devices: is no field"),
        (lambda d: d["containerEdits"].update(env=["A"]), "containerEdits.env[0]: must be NAME=VALUE"),
        (lambda d: d["containerEdits"].update(env=["=A"]), "containerEdits.env[0]: must be NAME=VALUE"),
        (
            lambda d: d["containerEdits"].update(additionalGids=[-1]),
            "containerEdits.additionalGids[0]: must be",
        ),
        (
            lambda d: d["containerEdits"].update(additionalGids=[True]),
            "containerEdits.additionalGids[0]: must",
        ),
        (
            lambda d: d["containerEdits"].update(additionalGids=[2**32]),
            "containerEdits.additionalGids[0]: must",
        ),
        (lambda d: node(d).pop("path"), "devices[0].containerEdits.deviceNodes[0].path: is missing"),
        (lambda d: node(d).update(path="dev/nvidia0"), "deviceNodes[0].path: must be an absolute path"),
        (lambda d: node(d).update(path="/dev/nvidia0\n"), "deviceNodes[0].path: must be an absolute path"),
        (lambda d: node(d).update(permissions="x"), "deviceNodes[0].permissions: must be permissions"),
        (lambda d: node(d).update(permissions="nonenone"), "deviceNodes[0].permissions: must be permissions"),
        (lambda d: node(d).update(major="195"), "deviceNodes[0].major: must be an integer"),
        (lambda d: node(d).update(uid=-1), "deviceNodes[0].uid: must be an integer"),
        (lambda d: intel(d, closID="a/b"), "intelRdt.closID: must be the name of a class of service"),
        (lambda d: intel(d, closID=".."), "intelRdt.closID: must be the name of a class of service"),
        (lambda d: intel(d, enableMonitoring=1), "intelRdt.enableMonitoring: must be true or false"),
        (lambda d: intel(d, enableCMT=True), "1.1.0 has no enableCMT any more, which went with 1.1.0"),
        (lambda d: nets(d, ("eth0", "a"), ("eth0", "b")), "hostInterfaceName 'eth0' is there twice"),
        (lambda d: nets(d, ("eth0", "a"), ("eth1", "a")), "netDevices: name 'a' is there twice"),
        (lambda d: nets(d, ("", "a")), "netDevices[0].hostInterfaceName: must be the name of an interface"),
        (lambda d: node(d).update(type="x"), "deviceNodes[0].type: must be one of b, c, p, u"),
        (lambda d: mount(d).pop("hostPath"), "containerEdits.mounts[0].hostPath: is missing"),
        (lambda d: mount(d).update(containerPath="x"), "mounts[0].containerPath: must be an absolute path"),
        (lambda d: mount(d).update(options="ro"), "containerEdits.mounts[0].options: must be a list"),
        (lambda d: mount(d).update(options=[1]), "containerEdits.mounts[0].options[0]: must be text"),
        (lambda d: hook(d).update(hookName="create"), "hooks[0].hookName: must be one of"),
        (lambda d: hook(d).update(hookName=[]), "hooks[0].hookName: must be one of"),
        (lambda d: hook(d).update(path="nvidia-ctk"), "hooks[0].path: must be an absolute path"),
        (lambda d: hook(d).update(timeout=0), "hooks[0].timeout: must be an integer"),
        (lambda d: hook(d).update(args=["a\0"]), "hooks[0].args[0]: must be text"),
        (lambda d: d.update(annotations=[]), "annotations: must be an object"),
        (lambda d: d.update(annotations={"a": 1}), "annotations.a: must be text"),
    ],
)
def test_what_runtimes_reject_is_a_problem_with_its_place(change: Change, problem: str) -> None:
    found = problems_of(changed(change))
    assert len(found) == 1, found
    assert problem in found[0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda d: d.update(version=1),
            "version: is no field of a specification, so runtimes reject the file",
        ),
        (lambda d: d.update(containerEdits=[]), "containerEdits: must be an object, not []"),
        (lambda d: d.update(kind=0), "kind: must be a kind, not 0"),
        (lambda d: d.update(kind="x" * 90), f"kind: must be a kind, not '{'x' * 76}..."),
        (
            lambda d: node(d).update(path=["/dev"]),
            f"{NODE}.path: must be an absolute path, not ['/dev']",
        ),
        (lambda d: node(d).update(type="x"), f"{NODE}.type: must be one of b, c, p, u, not 'x'"),
        (lambda d: hook(d).pop("hookName"), f"{HOOK}.hookName: is missing"),
        (lambda d: hook(d).pop("path"), f"{HOOK}.path: is missing"),
        (lambda d: hook(d).update(args={}), f"{HOOK}.args: must be a list, not {{}}"),
        (lambda d: hook(d).update(env=["A"]), f"{HOOK}.env[0]: must be NAME=VALUE, not 'A'"),
        (
            lambda d: hook(d).update(x=1),
            f"{HOOK}.x: is no field of a specification, so runtimes reject the file",
        ),
        (
            lambda d: hook(d).update(timeout=2**31),
            f"{HOOK}.timeout: must be an integer between 1 and 2147483647, not 2147483648",
        ),
        (lambda d: d.update(annotations=1), "annotations: must be an object, not 1"),
        (
            lambda d: mount(d).update(options=[None]),
            "containerEdits.mounts[0].options[0]: must be text, not None",
        ),
    ],
)
def test_a_problem_has_these_words(change: Change, problem: str) -> None:
    assert problems_of(changed(change)) == (problem,)


def test_a_document_of_another_kind_is_a_problem() -> None:
    assert problems_of(None) == ("the document: must be an object, not None",)


def test_the_limits_themselves_are_good() -> None:
    def at_the_limits(document: dict[str, Any]) -> None:
        document["cdiVersion"] = "0.7.0"
        document["containerEdits"]["additionalGids"] = [0, 2**32 - 1]
        hook(document)["timeout"] = 2**31 - 1

    assert problems_of(changed(at_the_limits)) == ()
    assert problems_of(changed(lambda d: hook(d).update(timeout=1))) == ()


@pytest.mark.parametrize(
    ("change", "version", "what"),
    [
        (lambda _: None, "0.3.0", ""),
        (lambda d: mount(d).update(type="none"), "0.4.0", "type of a mount"),
        (lambda d: node(d).update(hostPath="/run/dev/nvidia0"), "0.5.0", "hostPath of a device node"),
        (lambda d: d["devices"][0].update(name="0"), "0.5.0", "a device name that begins with a digit"),
        (lambda d: d.update(annotations={"a": "b"}), "0.6.0", "annotations"),
        (lambda d: d["devices"][0].update(annotations={"a": "b"}), "0.6.0", "annotations"),
        (lambda d: d.update(kind="nvidia.com/gpu.shared"), "0.6.0", "a dot in the class"),
        (lambda d: d["devices"][0]["containerEdits"].update(additionalGids=[44]), "0.7.0", "additionalGids"),
        (lambda d: d["containerEdits"].update(additionalGids=[44]), "0.7.0", "additionalGids"),
        (lambda d: d["containerEdits"].update(intelRdt={"closID": "x"}), "0.7.0", "intelRdt"),
        (lambda d: intel(d, schemata=[]), "1.1.0", "schemata of intelRdt"),
        (lambda d: intel(d, enableMonitoring=True), "1.1.0", "enableMonitoring of intelRdt"),
        (lambda d: nets(d, ("eth0", "a")), "1.1.0", "netDevices"),
    ],
)
def test_the_version_is_the_oldest_that_has_what_is_used(change: Change, version: str, what: str) -> None:
    def simplest(document: dict[str, Any]) -> None:
        document["devices"][0]["name"] = "GPU-0"
        del node(document)["hostPath"]
        change(document)

    document = changed(simplest)
    assert oldest_version(document) == version
    assert problems_of({**document, "cdiVersion": version}) == ()
    for older in VERSIONS[: VERSIONS.index(version)]:
        problem = f"cdiVersion: {older} has no {what}, which came with {version}"
        assert problem in problems_of({**document, "cdiVersion": older})


def test_the_newest_of_what_is_used_decides() -> None:
    document = changed(lambda d: d["containerEdits"].update(additionalGids=[44]))
    mount(document)["type"] = "none"
    assert oldest_version(document) == "0.7.0"


def test_the_number_of_problems_is_bounded() -> None:
    document = changed(lambda d: d["containerEdits"].update(env=["A"] * 100))
    assert len(problems_of(document)) == MAX_PROBLEMS


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                (
                    *("cdiVersion", "kind", "devices", "containerEdits", "name", "env", "deviceNodes"),
                    *("mounts", "hooks", "path", "hostPath", "annotations", "x"),
                )
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_any_document_is_checked(document: object) -> None:
    assert isinstance(problems_of(document), tuple)


@given(JSON, st.sampled_from(("devices", "containerEdits", "kind", "cdiVersion", "annotations")))
def test_any_value_of_a_field_is_checked(part: object, key: str) -> None:
    assert isinstance(problems_of({**GOOD, key: part}), tuple)
