"""One HTTP/2 connection of the plugin server, within its bounds.

grpclib has no bounds of its own: it accepts messages of any size, any number of frames and
cancelled streams, and remembers 65,536 closed streams. This subclass of its protocol adds them.

Guarantees:

1. What a peer can make the process hold is bounded (see Bounds): a connection over a bound is cut,
   with GOAWAY where it will still listen.
2. One peer cannot keep the loop busy: it is read in small turns, and slowed down when it sends
   more frames than a kubelet needs.
3. The server stops reading from a peer that does not read, so nothing accumulates for it.
4. Whatever bytes arrive, the worst is the end of this connection.

*Relies on* private names of grpclib 0.4.9, which is pinned; tests/sinks/plugin/test_grpc_server.py fails
if they move.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, cast

from grpclib.config import Configuration
from grpclib.const import Handler as Method
from grpclib.encoding.base import CodecBase
from grpclib.events import _DispatchServerEvents
from grpclib.protocol import Connection, EventsProcessor, H2Protocol
from grpclib.protocol import Stream as ProtocolStream
from grpclib.server import Handler
from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, RequestReceived, StreamReset
from h2.settings import SettingCodes, Settings

from agent.sinks.plugin.grpc_bounds import CLOSED_STREAMS, Bounds, Load, TokenBucket

NEEDED_PSEUDO_HEADERS: Final = frozenset({":method", ":path"})
"""grpclib reads these without a check; ``:authority`` may have any form or be absent."""

H2_CONFIG: Final = H2Configuration(
    client_side=False,
    # Every byte is a character of latin-1, so no header can fail to decode: clients of unix
    # sockets put paths, or nothing, where HTTP/2 wants a host (kubernetes/kubernetes#109081).
    header_encoding="latin-1",
    validate_inbound_headers=False,
    validate_outbound_headers=False,
    normalize_inbound_headers=False,
    normalize_outbound_headers=False,
)
CONFIG: Final = Configuration().__for_server__()


class Calls(Handler):
    """Starts one task for each call; what cannot be one is reset at once."""

    def __init__(
        self,
        methods: dict[str, Method],
        codec: CodecBase,
        dispatch: _DispatchServerEvents,
        *,
        bounds: Bounds,
        load: Load,
    ) -> None:
        super().__init__(methods, codec, None, dispatch)
        self._bounds = bounds
        self._load = load

    def accept(
        self, stream: ProtocolStream, headers: list[tuple[str, str]], release_stream: Callable[[], object]
    ) -> None:
        """Begin a call."""
        error = self._objection(headers)
        if error is not None:
            # A later frame of the same portion may have cancelled it.
            if stream.closable:
                stream.reset_nowait(error)
            release_stream()
            return
        self._load.calls += 1
        release_once = _Once(release_stream)
        super().accept(stream, headers, release_once)
        self._tasks[stream].add_done_callback(partial(self._ended, stream, release_once))

    def _objection(self, headers: list[tuple[str, str]]) -> ErrorCodes | None:
        if not {name for name, _ in headers} >= NEEDED_PSEUDO_HEADERS:
            self._load.malformed += 1
            return ErrorCodes.PROTOCOL_ERROR
        if self._load.calls >= self._bounds.calls and len(self._tasks) >= self._bounds.calls_share:
            self._load.calls_rejected += 1
            # The client knows by it that nothing was done, and may try again.
            return ErrorCodes.REFUSED_STREAM
        return None

    def _ended(self, stream: ProtocolStream, release_once: "_Once", task: asyncio.Task[None]) -> None:
        """Release everything a call held, now and not at some later garbage collection."""
        # grpclib does not release a call that is cancelled before its task first ran.
        release_once()
        self._load.calls -= 1
        self._tasks.pop(stream, None)
        self._cancelled.discard(task)
        error = None if stream.wrapper is None else stream.wrapper._error  # noqa: SLF001 - see above
        if error is not None:
            # Its frames hold the call, the call holds the error.
            error.__traceback__ = error.__context__ = None

    def running(self) -> set[asyncio.Task[None]]:
        """Return the tasks of calls that are not answered yet."""
        return {task for task in self._tasks.values() if not task.done()}


class _Once:
    """Does something the first time it is called."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work

    def __call__(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


class BoundedConnection(H2Protocol, asyncio.BufferedProtocol):
    """grpclib's protocol within bounds.

    It is a BufferedProtocol because asyncio would read 256 KiB at a time into new memory otherwise.
    """

    handler: Calls

    def __init__(
        self,
        handler: Calls,
        *,
        bounds: Bounds,
        load: Load,
        on_made: Callable[["BoundedConnection"], None],
        on_lost: Callable[["BoundedConnection"], None],
    ) -> None:
        super().__init__(handler, CONFIG, H2_CONFIG)
        self._bounds = bounds
        self._load = load
        self._on_made = on_made
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        now_s = self._loop.time()
        self._events = TokenBucket(bounds.events, bounds.events_per_s, bounds.events, now_s)
        self._resets = TokenBucket(bounds.resets, bounds.resets_per_s, bounds.resets, now_s)
        self._busy_at_s = now_s
        self._requests = 0
        self._buffer = memoryview(bytearray(bounds.read_bytes))
        # The part of the buffer that was read but not parsed; nothing is read before that is done.
        self._unfed = self._buffer[:0]
        self._eventless_bytes = 0
        self._buffered_bytes = 0
        self._is_write_paused = False
        self._is_over = False
        self._turn: asyncio.Handle | None = None
        self._idle_check: asyncio.Handle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send SETTINGS at once; clients wait for them before their first request."""
        self._transport = cast("asyncio.Transport", transport)
        self._h2 = _bounded_h2(self._bounds)
        self._h2.initiate_connection()
        living = cast("asyncio.Transport", _LivingTransport(self._transport, self._bounds.linger_s))
        self.connection = Connection(self._h2, living, config=self.config)
        self.connection.flush()
        self.processor = EventsProcessor(self.handler, self.connection)
        self._idle_check = self._loop.call_later(self._bounds.first_request_s, self._close_if_idle)
        self._on_made(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Let every call of this connection end.

        grpclib forgets calls that wait for room to write: without this they block without a limit.
        """
        self._is_over = True
        self._cancel_timers()
        self.connection.write_ready.set()
        for stream in self.processor.streams.values():
            stream.window_updated.set()
        super().connection_lost(exc)
        self._account(0)
        self._on_lost(self)

    def pause_writing(self) -> None:
        """Stop reading too while the peer does not read."""
        super().pause_writing()
        self._is_write_paused = True
        self._steer()

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        self._is_write_paused = False
        self._steer()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return where to read to."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Take what was read, in turns."""
        self._unfed = self._buffer[:nbytes]
        self._feed_turn()

    def _feed_turn(self) -> None:
        self._turn = None
        events, overdrawn_s = 0, 0.0
        while self._unfed and not self._is_over and events < self._bounds.turn_events and not overdrawn_s:
            portion = self._unfed[: self._bounds.portion_bytes]
            self._unfed = self._unfed[self._bounds.portion_bytes :]
            done = self._feed(portion)
            events += done
            overdrawn_s = self._events.spend(done, self._loop.time())
        self._steer(overdrawn_s)

    def _steer(self, overdrawn_s: float = 0.0) -> None:
        """Decide whether to process another turn, to read on, or to pause."""
        if self._is_over:
            return
        if self._turn is None and not self._is_write_paused and (self._unfed or overdrawn_s):
            self._turn = self._loop.call_later(overdrawn_s, self._feed_turn)
        if self._is_write_paused or self._turn is not None:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _feed(self, portion: memoryview) -> int:
        """Process one portion and return how many frames, about, it ended."""
        try:
            events = self.connection.feed(portion.tobytes())
        except Exception:  # noqa: BLE001 - h2 has its own error, hpack and the codecs raise others
            self._cut("protocol_error")
            return 0
        self.connection.flush()
        for event in events:
            self._process(event)
            if self._is_over or self.connection.is_closing():
                return len(events)
        self.connection.flush()
        self._check(portion, events)
        return len(events)

    def _process(self, event: Event) -> None:
        if isinstance(event, RequestReceived):
            self._requests += 1
            self._load.requests += 1
        elif isinstance(event, StreamReset) and event.remote_reset:
            self._load.resets += 1
            if self._resets.spend(1, self._loop.time()):
                self._cut("resets")
                return
        # What grpclib does not know (frames of an extension) is to be ignored, not an error.
        if type(event) in self.processor.processors:
            self.processor.process(event)
        if isinstance(event, DataReceived):
            stream = self.processor.streams.get(event.stream_id)
            if stream is not None:
                stream.data_received += self._bounds.frame_cost_bytes

    def _check(self, portion: memoryview, events: list[Event]) -> None:
        bounds = self._bounds
        self._eventless_bytes = 0 if events else self._eventless_bytes + len(portion)
        self._account(sum(stream.data_received for stream in self.processor.streams.values()))
        if self._eventless_bytes > bounds.eventless_bytes:
            self._cut("incomplete")
        elif self._buffered_bytes > bounds.request_bytes:
            self._cut("request_size")
        elif self._load.buffered_bytes > bounds.requests_bytes:
            self._cut("requests_size")
        elif len(self._h2.remote_settings) > bounds.settings:
            self._cut("settings")
        elif self._transport.get_write_buffer_size() > bounds.unsent_bytes:
            self._cut("unsent")

    def _account(self, buffered_bytes: int) -> None:
        self._load.buffered_bytes += buffered_bytes - self._buffered_bytes
        self._buffered_bytes = buffered_bytes

    def _close_if_idle(self) -> None:
        now_s = self._loop.time()
        if self.processor.streams:
            self._busy_at_s = now_s
        busy_at_s = max(self._busy_at_s, self.connection.last_stream_created or 0.0)
        limit_s = self._bounds.idle_s if self._requests else self._bounds.first_request_s
        left_s = busy_at_s + limit_s - now_s
        if left_s > 0:
            self._idle_check = self._loop.call_later(left_s, self._close_if_idle)
            return
        self._load.cuts["idle"] += 1
        self.close()

    def _cut(self, reason: str) -> None:
        """End a connection that is over a bound, without waiting for it to read."""
        self._load.cuts[reason] += 1
        self.close(ErrorCodes.ENHANCE_YOUR_CALM)
        self.abort()

    def close(self, error: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Send GOAWAY, cancel the calls and close once the peer closes, or after ``linger_s``."""
        if self._is_over:
            return
        self._is_over = True
        self._cancel_timers()
        # To see that the peer closes; what it still sends is dropped.
        self._transport.resume_reading()
        self._account(0)
        if not self.connection.is_closing():
            if self._h2.state_machine.state is not ConnectionState.CLOSED:
                self._h2.close_connection(error)
            self.connection.flush()
        self.processor.close("The server ended the connection")

    def abort(self) -> None:
        """Close now, whatever was not sent yet."""
        self._transport.abort()

    def _cancel_timers(self) -> None:
        for handle in (self._turn, self._idle_check):
            if handle is not None:
                handle.cancel()
        self._turn = self._idle_check = None


class _LivingTransport:
    """A transport as grpclib uses it; what is written to it after its end is dropped without a word.

    It closes its own direction first, for a client that still writes would get an error for that and could
    lose the answer that it has not read yet.
    """

    def __init__(self, transport: asyncio.Transport, linger_s: float) -> None:
        self._transport = transport
        self._linger_s = linger_s
        self._is_closed = False
        self.get_extra_info = transport.get_extra_info

    def is_closing(self) -> bool:
        """Return whether nothing is sent any more."""
        return self._is_closed or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send, unless the connection is over: asyncio would log each further try."""
        if not self.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Send what was written and its end; close when the peer does, or after a time."""
        if self.is_closing():
            return
        self._is_closed = True
        self._transport.write_eof()
        asyncio.get_running_loop().call_later(self._linger_s, self._transport.abort)


class _H2(H2Connection):
    """h2's connection, with a shorter memory."""

    MAX_CLOSED_STREAMS = CLOSED_STREAMS


def _bounded_h2(bounds: Bounds) -> H2Connection:
    """Return a connection whose own settings hold from the first byte, not only once acknowledged."""
    h2 = _H2(config=H2_CONFIG)
    h2.local_settings = Settings(
        client=False,
        initial_values={
            SettingCodes.MAX_CONCURRENT_STREAMS: bounds.streams,
            SettingCodes.MAX_HEADER_LIST_SIZE: bounds.header_list_bytes,
        },
    )
    h2.decoder.max_header_list_size = bounds.header_list_bytes
    return h2
