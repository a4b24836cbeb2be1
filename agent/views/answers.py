"""Allocate answers in protobuf's JSON form.

Source: protobuf's JSON mapping: names in lowerCamelCase, empty and false values omitted; the names are those
of proto/deviceplugin/v1beta1.
"""

from typing import Any

from agent.core.allocation.injection import ContainerAnswer, DeviceNode, Mount

Json = dict[str, Any]


def allocate_response(*answers: ContainerAnswer) -> Json:
    """Return an AllocateResponse."""
    return {"containerResponses": [_container(answer) for answer in answers]}


def _container(answer: ContainerAnswer) -> Json:
    fields: Json = {
        "envs": dict(answer.envs),
        "mounts": [_mount(mount) for mount in answer.mounts],
        "devices": [_device_spec(node) for node in answer.device_nodes],
        "annotations": dict(answer.annotations),
        "cdiDevices": [{"name": name} for name in answer.cdi_devices],
    }
    return {name: value for name, value in fields.items() if value}


def _mount(mount: Mount) -> Json:
    document: Json = {"containerPath": mount.container_path, "hostPath": mount.host_path}
    return document | {"readOnly": True} if mount.read_only else document


def _device_spec(node: DeviceNode) -> Json:
    return {
        "containerPath": node.container_path,
        "hostPath": node.host_path,
        "permissions": node.permissions,
    }
