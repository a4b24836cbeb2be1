"""What the front carries, and the tap that reads ``:authority`` along, over every shape of header block."""

import asyncio
import os
import random
import socket
from pathlib import Path

import h2.config
import h2.connection
import pytest
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.simulation.kubelet.front import AuthorityTap, SocketFront

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS = [(":method", "POST"), (":scheme", "http"), (":path", "/x")]


def frame(kind: int, flags: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + (1).to_bytes(4) + payload


def block(authority: str | None) -> bytes:
    fields = HEADERS if authority is None else [*HEADERS, (":authority", authority)]
    return bytes(Encoder().encode(fields))


@settings(deadline=None)  # a loaded machine says nothing about the code
@given(cuts=st.lists(st.integers(1, 40), max_size=40))
def test_the_authority_is_found_however_the_bytes_arrive(cuts: list[int]) -> None:
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    client.send_headers(1, [*HEADERS, (":authority", "first")])
    client.send_data(1, b"x" * 50, end_stream=True)
    client.send_headers(3, [*HEADERS, (":authority", "second")])
    data, tap = client.data_to_send(), AuthorityTap()
    for cut in cuts:
        tap.feed(data[:cut])
        data = data[cut:]
    tap.feed(data)
    assert tap.authority == "second"


def test_padding_priority_and_continuation_are_understood() -> None:
    encoded = block("localhost")
    padded = bytes((3,)) + bytes(5) + encoded[:4] + bytes(3)
    tap = AuthorityTap()
    tap.feed(PREFACE + frame(0x1, 0x8 | 0x20, padded) + frame(0x9, 0x4, encoded[4:]))
    assert tap.authority == "localhost"


def test_no_authority_is_none() -> None:
    tap = AuthorityTap()
    tap.feed(PREFACE + frame(0x1, 0x4, block(None)))
    assert tap.authority is None


@pytest.mark.parametrize("payload", [b"\xff\xff\xff\xff\xff\xff\xff", b"\x80"])
def test_a_block_it_cannot_decode_ends_it_quietly(payload: bytes) -> None:
    tap = AuthorityTap()
    tap.feed(PREFACE + frame(0x1, 0x4, payload) + frame(0x1, 0x4, block("late")))
    assert tap.authority is None


def test_a_header_block_without_end_is_not_kept() -> None:
    tap = AuthorityTap()
    tap.feed(PREFACE + frame(0x1, 0x0, b"x" * 16_000))
    for _ in range(10):
        tap.feed(frame(0x9, 0x0, b"x" * 16_000))
    assert len(tap._block) <= 80_000


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_garbage_never_raises(data: bytes) -> None:
    AuthorityTap().feed(data)
    AuthorityTap().feed(PREFACE + data)


async def test_what_a_client_sends_before_the_server_behind_is_reached_arrives_whole(tmp_path: Path) -> None:
    """Whether asyncio reads before the connection behind exists differs between versions of Python."""
    received: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def read_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.set_result(await reader.readexactly(len(sent)))
        writer.close()

    sent = random.Random(0).randbytes(2_000_000)
    name = f"gpu-agent-test-front-{os.getpid()}"
    front = SocketFront(tmp_path / "front.sock", name)
    async with await asyncio.start_unix_server(read_all, path=f"\0{name}"):
        front.bind()
        await front.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            client.connect(os.fspath(tmp_path / "front.sock"))
            async with asyncio.timeout(10):
                await asyncio.get_running_loop().sock_sendall(client, sent)
                assert await received == sent
        front.close()
        await front.drained()
