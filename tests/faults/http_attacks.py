"""Attacks on an HTTP port: python -m tests.faults.http_attacks PORT EVENT NAME CONNECTIONS, until killed.

Each keeps so many connections open, and opens another one for each that was closed, at most PER_S a second.
EVENT is the number of the newest event, for the next one of which is waited.
"""

import contextlib
import select
import socket
import sys
import time

PER_S = 500
EVENTS = b"/v1/events?since=EVENT&wait=30 HTTP/1.1\r\nHost: localhost\r\n\r\n"
REQUESTS = {
    "idle": b"",
    "drip": b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: ",
    "readers": b"GET " + EVENTS,
    "disguised": b"GET /livez/.." + EVENTS,
    "unread": b"GET /debug/state HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def main(port: int, request: bytes, name: str, connections: int) -> None:
    poll = select.epoll()
    peers: dict[int, socket.socket] = {}
    opened = 0
    began_s = time.monotonic()
    is_reported = False
    while True:
        while len(peers) < connections and opened < (time.monotonic() - began_s) * PER_S:
            peer = _connected(port, request, name)
            peers[peer.fileno()] = peer
            poll.register(peer, select.EPOLLRDHUP | (0 if name == "unread" else select.EPOLLIN))
            opened += 1
        if opened >= connections and not is_reported:
            is_reported = True
            sys.stdout.write("attacking\n")
            sys.stdout.flush()
        for number, event in poll.poll(0.01):
            if event != select.EPOLLIN or not _read(peers[number]):
                poll.unregister(number)
                peers.pop(number).close()
        if name == "drip":
            for peer in peers.values():
                with contextlib.suppress(OSError):
                    peer.send(b"x")


def _connected(port: int, request: bytes, name: str) -> socket.socket:
    peer = socket.socket()
    if name == "unread":
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    peer.setblocking(False)
    # On this machine a connection is there at once, or the queue is full and nothing can be sent.
    with contextlib.suppress(OSError):
        peer.connect_ex(("127.0.0.1", port))
        peer.send(request)
    return peer


def _read(peer: socket.socket) -> bool:
    try:
        return bool(peer.recv(65_536))
    except BlockingIOError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    asked = REQUESTS[sys.argv[3]].replace(b"EVENT", sys.argv[2].encode())
    main(int(sys.argv[1]), asked, sys.argv[3], int(sys.argv[4]))
