# SPDX-License-Identifier: Apache-2.0
"""Two ranks give each other NUM_FLOATS numbers, with the standard library alone: importing torch takes long here.

    exchange_script.py NUM_FLOATS

Prints "rank R of 2: SUM" with the sum of both ranks + 1, as allreduce_script.py does.
"""

import os
import socket
import sys
import threading
import time
from array import array


def connected(address):
    deadline_s = time.monotonic() + 200
    while True:
        try:
            return socket.create_connection(address)
        except OSError:  # the other rank does not listen yet
            assert time.monotonic() < deadline_s
            time.sleep(0.05)


def main():
    num_floats, rank = int(sys.argv[1]), int(os.environ["RANK"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    connection = connected(address) if rank else socket.create_server(address).accept()[0]
    own, others = array("f", [rank + 1.0]) * num_floats, array("f")
    sender = threading.Thread(target=connection.sendall, args=(own,))
    sender.start()
    with connection.makefile("rb") as stream:
        others.frombytes(stream.read(own.itemsize * num_floats))
    sender.join()
    assert min(others) == max(others)
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}: {own[0] + others[0]:g}", flush=True)


if __name__ == "__main__":
    main()
