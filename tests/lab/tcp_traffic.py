# SPDX-License-Identifier: Apache-2.0
"""TCP traffic between emulated hosts: run as a script on a host, with the standard library alone.

tcp_traffic.py sink                        prints "ready", then "MONOTONIC_S TOTAL_BYTES" as bytes come in
tcp_traffic.py source ADDRESS [NUM_BYTES]  sends to a sink: for ever, or so many bytes and waits until they arrived
"""

import socket
import sys
import time

PORT = 5001
CHUNK_BYTES = 1 << 18
SAMPLE_S = 0.01


def sink():
    listener = socket.create_server(("0.0.0.0", PORT))
    print("ready", flush=True)
    connection, _ = listener.accept()
    buffer, total, last_s = bytearray(CHUNK_BYTES), 0, 0.0
    print(time.monotonic(), 0, flush=True)
    while received := connection.recv_into(buffer):
        total += received
        now_s = time.monotonic()
        if now_s - last_s >= SAMPLE_S:
            print(now_s, total, flush=True)
            last_s = now_s
    print(time.monotonic(), total, flush=True)
    connection.sendall(b"x")


def source(address, num_bytes=None):
    connection = socket.create_connection((address, PORT))
    left = float("inf") if num_bytes is None else int(num_bytes)
    chunk = memoryview(bytes(CHUNK_BYTES))
    while left > 0:
        left -= connection.send(chunk[: int(min(left, CHUNK_BYTES))])
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b"x"


if __name__ == "__main__":
    {"sink": sink, "source": source}[sys.argv[1]](*sys.argv[2:])
