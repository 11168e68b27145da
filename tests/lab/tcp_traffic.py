# SPDX-License-Identifier: Apache-2.0
"""TCP traffic between emulated hosts: run as a script on a host, with the standard library alone.

tcp_traffic.py sink                        prints "ready", then "MONOTONIC_S TOTAL_BYTES" as bytes come in
tcp_traffic.py source ADDRESS [NUM_BYTES]  sends to a sink: for ever, or so many bytes and waits until they arrived
tcp_traffic.py echo                        prints "ready", then sends back what comes in, one peer after another
tcp_traffic.py ping ADDRESS COUNT          prints the milliseconds of COUNT round trips of one byte
"""

import socket
import sys
import time

PORT = 5001
CHUNK_BYTES = 1 << 18
SAMPLE_S = 0.01


def listen():
    listener = socket.create_server(("0.0.0.0", PORT), backlog=64)
    print("ready", flush=True)
    return listener


def sink():
    connection, _ = listen().accept()
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
    connection.recv(1)


def echo():
    listener = listen()
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while received := connection.recv(CHUNK_BYTES):
            connection.sendall(received)


def ping(address, count):
    with socket.create_connection((address, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(int(count)):
            start_s = time.monotonic()
            connection.sendall(b"x")
            connection.recv(1)
            print(1e3 * (time.monotonic() - start_s), flush=True)


if __name__ == "__main__":
    {"sink": sink, "source": source, "echo": echo, "ping": ping}[sys.argv[1]](*sys.argv[2:])
