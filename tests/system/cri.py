"""A pod's container as the kubelet has it started: python -m tests.system.cri SOCKET IMAGE SCRIPT < ANSWER.

ANSWER is the container's part of an AllocateResponse, as JSON. Prints what the script wrote in the container.
A process of its own, since gRPC's threads and a fork do not go together.
"""

import json
import sys
import uuid
from typing import Any, Final

import grpc

CALL_S: Final = 120.0
"""Longer than any call takes on a loaded machine."""


def main(socket: str, image: str, script: str) -> None:
    messages, services = grpc.protos_and_services("tests/system/cri.proto")
    with grpc.insecure_channel(f"unix:{socket}") as channel:
        stub = services.RuntimeServiceStub(channel)

        def call(name: str, **request: object) -> Any:
            return getattr(stub, name)(getattr(messages, f"{name}Request")(**request), timeout=CALL_S)

        pod = {
            "metadata": {"name": "pod", "uid": str(uuid.uuid4()), "namespace": "default"},
            # No network of its own, which plugins would have to make.
            "linux": {"security_context": {"namespace_options": {"network": messages.NODE}}},
        }
        sandbox = call("RunPodSandbox", config=pod).pod_sandbox_id
        try:
            config = container(json.load(sys.stdin), image)
            made = call("CreateContainer", pod_sandbox_id=sandbox, config=config, sandbox_config=pod)
            call("StartContainer", container_id=made.container_id)
            done = call(
                "ExecSync", container_id=made.container_id, cmd=["/bin/sh", "-c", script], timeout=int(CALL_S)
            )
        finally:
            call("StopPodSandbox", pod_sandbox_id=sandbox)
            call("RemovePodSandbox", pod_sandbox_id=sandbox)
    sys.stdout.write(done.stdout.decode())
    sys.stderr.write(done.stderr.decode())
    sys.exit(done.exit_code)


def container(answer: dict[str, Any], image: str) -> dict[str, object]:
    """Return a container's configuration with what the device plugin answered, as the kubelet adds it."""
    return {
        "metadata": {"name": "container"},
        "image": {"image": image},
        "envs": [{"key": key, "value": value} for key, value in answer.get("envs", {}).items()],
        "annotations": answer.get("annotations", {}),
        "CDI_devices": answer.get("cdiDevices", []),
    }


main(*sys.argv[1:])
