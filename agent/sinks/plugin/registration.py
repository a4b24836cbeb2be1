"""The calls the agent makes to the kubelet and to plugin sockets, its own and another process's.

Connecting and calling are two steps: the kubelet deletes every plugin's socket before it listens, so only
after the first can the caller know that its own is there to stay.

Source: kubernetes pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go: the kubelet answers
Register only after it has dialled the plugin, which it tries for 10 s.
"""

import asyncio
from pathlib import Path
from typing import Final

from grpclib.client import Handler
from grpclib.config import Configuration
from grpclib.const import Status
from grpclib.encoding.proto import ProtoCodec
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from h2.config import H2Configuration

from agent.api.deviceplugin.v1beta1 import DevicePluginStub, RegisterRequest, RegistrationStub
from agent.model.ids import ResourceName
from agent.sinks.plugin.socket_file import NotRegisteredError
from agent.sinks.plugin.wire import API_VERSION, options
from agent.unix_channel import UnixChannel

WATCH_GAP_S: Final = 1.0
REGISTER_TIMEOUT_S: Final = 12.0
"""Above the 10 s after which the kubelet gives up on an endpoint, so that its own error arrives."""


async def connect(kubelet_socket: Path) -> UnixChannel:
    """Connect to the kubelet, without a call yet; NotRegisteredError: absent or unreachable."""
    channel = UnixChannel(kubelet_socket, ProtoCodec())
    try:
        await channel.__connect__()
    except FileNotFoundError:
        raise NotRegisteredError(
            "absent",
            f"The kubelet's socket {kubelet_socket} does not exist; it appears when the kubelet starts",
        ) from None
    except ConnectionRefusedError:
        raise NotRegisteredError(
            "unreachable", f"No process listens on {kubelet_socket}; check that the kubelet is running"
        ) from None
    except BlockingIOError:
        raise NotRegisteredError(
            "unreachable",
            f"The kubelet accepts no connection on {kubelet_socket}, where many wait; check whether it hangs",
        ) from None
    except OSError as error:
        raise NotRegisteredError(
            "unreachable", f"Could not connect to {kubelet_socket}: {error.strerror or error}"
        ) from None
    return channel


async def register(
    kubelet: UnixChannel,
    *,
    endpoint: str,
    resource: ResourceName,
    pre_start: bool = False,
    timeout_s: float = REGISTER_TIMEOUT_S,
) -> None:
    """Register a resource served at ``endpoint``, a base name beside the kubelet's socket.

    With ``pre_start`` the kubelet calls PreStartContainer before each container.

    NotRegisteredError: unreachable or rejected, with what to do next.
    """
    request = RegisterRequest(
        version=API_VERSION,
        endpoint=endpoint,
        resource_name=resource,
        options=options(pre_start=pre_start),
    )
    unanswered = f"The kubelet did not answer Register for {resource} within {timeout_s:g} s; check its log"
    try:
        await RegistrationStub(kubelet).register(request, timeout=timeout_s)
    except TimeoutError:
        raise NotRegisteredError("unreachable", unanswered) from None
    except GRPCError as error:
        if error.status is Status.DEADLINE_EXCEEDED:
            # The call carries its deadline, so the kubelet's own clock may be the first to notice.
            raise NotRegisteredError("unreachable", unanswered) from None
        raise NotRegisteredError(
            "rejected",
            f"The kubelet rejected {resource}: {error.status.name}: {error.message or 'no message'}",
        ) from None
    except (StreamTerminatedError, OSError, AssertionError):
        # The generated client asserts that a call without an error has an answer.
        raise NotRegisteredError(
            "unreachable", f"The kubelet ended the connection before it answered Register for {resource}"
        ) from None


class _WatchedProtocol(H2Protocol):
    """grpclib's protocol, whose end can be waited for."""

    def __init__(self, handler: Handler, config: Configuration, h2_config: H2Configuration) -> None:
        super().__init__(handler, config, h2_config)
        self.ended = asyncio.Event()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.ended.set()


class _WatchedChannel(UnixChannel):
    def _protocol_factory(self) -> H2Protocol:
        return _WatchedProtocol(Handler(), self._config, self._h2_config)


async def wait_unserved(plugin_socket: Path, *, gap_s: float = WATCH_GAP_S) -> None:
    """Return when no process serves a plugin socket any more.

    A connection is kept open, since its end is the first sign that the process ended. A server may also
    close an idle one: the agent then connects again, once in ``gap_s`` at most.
    """
    loop = asyncio.get_running_loop()
    while True:
        may_connect_s = loop.time() + gap_s
        channel = _WatchedChannel(plugin_socket, ProtoCodec())
        try:
            protocol = await channel.__connect__()
            if isinstance(protocol, _WatchedProtocol):
                await protocol.ended.wait()
        except (FileNotFoundError, ConnectionRefusedError):
            return
        except OSError:
            pass  # whether a process serves it is unknown now
        finally:
            channel.close()
        await asyncio.sleep(may_connect_s - loop.time())


async def answers(plugin_socket: Path, *, timeout_s: float) -> bool:
    """Return whether a plugin socket of ours answers, asked the way the kubelet does."""
    try:
        async with UnixChannel(plugin_socket, ProtoCodec()) as channel:
            await DevicePluginStub(channel).get_device_plugin_options(timeout=timeout_s)
    except (GRPCError, StreamTerminatedError, AssertionError, OSError):
        return False
    return True
