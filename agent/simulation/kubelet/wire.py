"""gRPC as a kubelet speaks it: channels, servers, method tables and the texts of Go's errors.

grpcio on purpose: the agent's own stack is another one, so each call here tests interoperability.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import grpc
import grpc.aio

from agent.simulation.stubs.deviceplugin.v1beta1 import api_pb2 as plugin_pb

DEFAULT_MESSAGE_LIMIT_BYTES: Final = 4_194_304
"""grpc-go's limit on a message it receives (facts: kubelet item 8)."""
AUTHORITY: Final = "localhost"
"""What the kubelet sends as ``:authority`` (facts: kubelet item 11)."""

_CHANNEL_OPTIONS: Final = (
    # Channels to one path would otherwise share a connection, also with the socket's former owner.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.default_authority", AUTHORITY),
    ("grpc.max_receive_message_length", DEFAULT_MESSAGE_LIMIT_BYTES),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(path: Path) -> Any:
    """Return a channel of its own to a unix socket; it connects when first used."""
    return grpc.aio.insecure_channel(f"unix:{quote(os.fspath(path))}", options=_CHANNEL_OPTIONS)


async def start_server(name: str, service: str, methods: Mapping[str, Any]) -> Any:
    """Start a server in the abstract socket namespace, where it leaves no file."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, dict(methods)),))
    server.add_insecure_port(f"unix-abstract:{name}")
    await server.start()
    return server


def unary_method(function: Callable[..., Any], request: Any, response: Any) -> Any:
    """Return a method table entry."""
    return grpc.unary_unary_rpc_method_handler(
        function, request_deserializer=request.FromString, response_serializer=response.SerializeToString
    )


class PluginStub:
    """The five methods of a device plugin on one channel; ListAndWatch yields undecoded bytes."""

    def __init__(self, channel: Any) -> None:
        def unary(method: str, request: Any, response: Any) -> Any:
            return channel.unary_unary(
                f"/v1beta1.DevicePlugin/{method}",
                request_serializer=request.SerializeToString,
                response_deserializer=response.FromString,
            )

        self.GetDevicePluginOptions = unary(
            "GetDevicePluginOptions", plugin_pb.Empty, plugin_pb.DevicePluginOptions
        )
        self.Allocate = unary("Allocate", plugin_pb.AllocateRequest, plugin_pb.AllocateResponse)
        self.GetPreferredAllocation = unary(
            "GetPreferredAllocation",
            plugin_pb.PreferredAllocationRequest,
            plugin_pb.PreferredAllocationResponse,
        )
        self.PreStartContainer = unary(
            "PreStartContainer", plugin_pb.PreStartContainerRequest, plugin_pb.PreStartContainerResponse
        )
        self.ListAndWatch = channel.unary_stream(
            "/v1beta1.DevicePlugin/ListAndWatch", request_serializer=plugin_pb.Empty.SerializeToString
        )


def go_error(error: grpc.aio.AioRpcError) -> str:
    """Return the error as Go prints it, which is how it reaches a pod's status."""
    return f"rpc error: code = {go_code(error.code())} desc = {error.details() or ''}"


def go_code(code: grpc.StatusCode) -> str:
    """Return Go's name of a status code: ``InvalidArgument``."""
    if code is grpc.StatusCode.CANCELLED:
        return "Canceled"
    return "".join(word.capitalize() for word in code.name.split("_"))


def sever(path: Path) -> int:
    """Break this process's connections to a unix socket, without a goodbye; return how many.

    gRPC has no call for it, so the sockets are found among the process's own and shut down.
    """
    severed = 0
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 (the names are all that is wanted)
        with contextlib.suppress(OSError), _own_socket(int(entry)) as connection:
            if connection.family == socket.AF_UNIX and _is_path(connection.getpeername(), path):
                connection.shutdown(socket.SHUT_RDWR)
                severed += 1
    return severed


def _is_path(name: str | bytes, path: Path) -> bool:
    """Return whether a socket's name is a path, however it was written when the socket was bound."""
    return isinstance(name, str) and name != "" and os.path.realpath(name) == os.path.realpath(path)


def _own_socket(fd: int) -> socket.socket:
    """Return a second handle on one of this process's sockets; OSError for any other file."""
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
