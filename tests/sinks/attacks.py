"""Attacks on a plugin socket: python -m tests.sinks.attacks SOCKET NAME WAVES."""

import asyncio
import itertools
import random
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import h2.exceptions
from h2.settings import SettingCodes

from agent.sinks.plugin.grpc_bounds import Bounds
from tests.sinks.raw_http2 import RawClient, framed, headers

HUGE = b"\x00\xff\xff\xff\xff"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
NO_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
PING = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"\x00" * 8
ATTACKERS = Bounds().connections - 1
"""All connections but the kubelet's."""

SEEDS = itertools.count()

Attack = Callable[[RawClient], Awaitable[None]]


async def on_each_connection(path: Path, attack: Attack, *, waves: int) -> None:
    """Attack from as many connections as there can be, and again when they are cut."""
    for _ in range(waves):
        async with asyncio.TaskGroup() as tasks:
            for _ in range(ATTACKERS):
                tasks.create_task(_attack_once(path, attack))


async def _attack_once(path: Path, attack: Attack) -> None:
    client = await RawClient.connect(path)
    try:
        # The client's own protocol engine does not go on after a GOAWAY.
        with suppress(h2.exceptions.ProtocolError):
            await attack(client)
    finally:
        client.writer.transport.abort()


async def declare_a_huge_message(client: RawClient) -> None:
    client.h2.initiate_connection()
    client.h2.send_headers(1, headers("Allocate"))
    client.h2.send_data(1, HUGE)
    await client.flush()
    # Past the window, as a client that keeps no rules does; the server has to cut it.
    frame = (16_384).to_bytes(3, "big") + b"\x00\x00\x00\x00\x00\x01" + b"x" * 16_384
    for _ in range(256):
        if client.reader.at_eof() or client.writer.transport.is_closing():
            return
        await client.send(frame)


async def keep_the_rules_of_a_huge_message(client: RawClient) -> None:
    client.h2.initiate_connection()
    client.h2.send_headers(1, headers("Allocate"))
    client.h2.send_data(1, HUGE)
    await client.flush()
    async for _ in client.events():
        while (
            room := client.h2.local_flow_control_window(1)
        ) > 0 and not client.writer.transport.is_closing():
            client.h2.send_data(1, b"x" * min(room, 16_384))
            await client.flush()


async def drip(client: RawClient) -> None:
    for byte in (PREFACE + NO_SETTINGS)[:20]:
        await client.send(bytes((byte,)))
        await asyncio.sleep(0.01)


async def drip_a_request(client: RawClient) -> None:
    client.h2.initiate_connection()
    for stream_id in range(1, 2 * Bounds().streams, 2):
        client.h2.send_headers(stream_id, headers("Allocate"))
        client.h2.send_data(stream_id, b"\x00")
        await client.flush()
        await asyncio.sleep(0.005)


async def babble(client: RawClient) -> None:
    noise = random.Random(next(SEEDS))
    await client.send(
        noise.choice([b"", PREFACE, PREFACE + NO_SETTINGS]) + noise.randbytes(noise.randrange(1, 4_000))
    )
    await client.send(noise.randbytes(noise.randrange(1, 4_000)))


async def leave_out_pseudo_headers(client: RawClient) -> None:
    client.h2.initiate_connection()
    for number in range(200):
        missing = (":method", ":path", ":scheme", ":authority")[number % 4]
        kept = [line for line in headers("Allocate") if line[0] != missing]
        stream_id = client.h2.get_next_available_stream_id()
        client.h2.send_headers(stream_id, kept)
        client.h2.send_data(stream_id, framed(b""), end_stream=True)
        await client.flush()
        if number % 16 == 15:
            await _drink(client)


async def _drink(client: RawClient) -> None:
    """Take what there is, so that calls can end."""
    data = await client.read()
    if data:
        client.h2.receive_data(data)


async def open_headers_and_never_end_them(client: RawClient) -> None:
    await client.send(PREFACE + NO_SETTINGS + b"\x00\x00\x01\x01\x00\x00\x00\x00\x01\x82")
    for _ in range(64):
        await client.send(b"\x00\x40\x00\x09\x00\x00\x00\x00\x01" + b"\x82" * 16_384)


async def unpack_a_bomb(client: RawClient) -> None:
    client.h2.initiate_connection()
    client.h2.send_headers(1, [*headers("Allocate"), *[("x", "y" * 4_000)] * 400])
    await client.flush()


async def open_100_streams(client: RawClient) -> None:
    client.h2.remote_settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 1_000
    client.h2.remote_settings.acknowledge()
    client.h2.initiate_connection()
    for _ in range(100):
        stream_id = client.h2.get_next_available_stream_id()
        client.h2.send_headers(stream_id, headers("ListAndWatch"))
        client.h2.send_data(stream_id, framed(b""), end_stream=True)
    await client.flush()
    # Some are cut, and those whose calls were rejected one by one stay.
    with suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await client.wait_end()


async def cancel_every_call(client: RawClient) -> None:
    client.h2.initiate_connection()
    for _ in range(1_000):
        stream_id = client.h2.get_next_available_stream_id()
        client.h2.send_headers(stream_id, headers("ListAndWatch"))
        client.h2.reset_stream(stream_id)
    await client.flush()
    await client.wait_end()


async def ping_and_never_read(client: RawClient) -> None:
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    client.writer.write(PREFACE + NO_SETTINGS + PING * 50_000)
    await asyncio.sleep(0.3)


async def invent_settings(client: RawClient) -> None:
    await client.send(PREFACE)
    for first in range(0x100, 0x8000, 0x400):
        settings = b"".join(number.to_bytes(2, "big") + b"\0\0\0\1" for number in range(first, first + 0x400))
        await client.send(len(settings).to_bytes(3, "big") + b"\x04\x00\x00\x00\x00\x00" + settings)


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack
    for attack in (
        declare_a_huge_message,
        keep_the_rules_of_a_huge_message,
        drip,
        drip_a_request,
        babble,
        leave_out_pseudo_headers,
        open_headers_and_never_end_them,
        unpack_a_bomb,
        open_100_streams,
        cancel_every_call,
        ping_and_never_read,
        invent_settings,
    )
}


async def connect_1000_times(path: Path) -> None:
    """Open connections and send nothing; all but the first few have to be closed by the server."""
    clients = [await RawClient.connect(path) for _ in range(1_000)]
    for client in clients[ATTACKERS + 1 :]:
        await client.wait_closed()
    for client in clients:
        client.writer.transport.abort()


async def main(path: Path, name: str, waves: int) -> None:
    if name == connect_1000_times.__name__:
        await connect_1000_times(path)
    else:
        await on_each_connection(path, ATTACKS[name], waves=waves)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
