"""Asks the agent on a simulated node over its control socket, in the caller's loop.

Guarantees: a question is bounded in time and its answer in size.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MAX_ANSWER_BYTES: Final = 8 * 1024 * 1024
ANSWER_TIMEOUT_S: Final = 2.0
"""The deadline of one question."""
_ASK_AGAIN_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    """What the agent answered: an HTTP status and a JSON object."""

    status: int
    document: Mapping[str, Any]


async def ask(
    path: Path,
    target: str,
    *,
    command: Mapping[str, Any] | None = None,
    timeout_s: float = ANSWER_TIMEOUT_S,
) -> Answer | None:
    """Return the answer to a GET, or to a POST with an command; None where none came."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(_request(target, command))
                raw = await _read_all(reader)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return None
    return _parsed(raw)


async def document(path: Path, target: str) -> Mapping[str, Any] | None:
    """Return the JSON of a document; None where the agent did not answer with it."""
    answer = await ask(path, target)
    return answer.document if answer is not None and answer.status == 200 else None


async def wait_for_answer(path: Path, target: str, within_s: float) -> Answer | None:
    """Return the first answer with status 200, since HTTP is served last; None: none came."""
    try:
        async with asyncio.timeout(within_s):
            while (answer := await ask(path, target)) is None or answer.status != 200:  # noqa: ASYNC110 - another process
                await asyncio.sleep(_ASK_AGAIN_S)
    except TimeoutError:
        return None
    return answer


def _request(target: str, command: Mapping[str, Any] | None) -> bytes:
    if command is None:
        return f"GET {target} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()
    body = json.dumps(command).encode()
    head = (
        f"POST {target} HTTP/1.0\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    answer = bytearray()
    while len(answer) < MAX_ANSWER_BYTES and (data := await reader.read(65_536)):
        answer += data
    return bytes(answer)


def _parsed(raw: bytes) -> Answer | None:
    head, _, body = raw.partition(b"\r\n\r\n")
    try:
        status = int(head.split(maxsplit=2)[1])
        document = json.loads(body)
    except (ValueError, IndexError):
        return None
    return Answer(status, document) if isinstance(document, dict) else None
