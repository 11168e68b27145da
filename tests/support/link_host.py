# SPDX-License-Identifier: Apache-2.0
"""One side of a link between two hosts: link_host.py RANK SENDER HOST FOLDER TIMEOUT_S BYTES PRIORITIES

Rank SENDER sends a message of so many bytes with each priority, and the other rank receives them, once the file "go"
is in the folder, where the ranks tell their addresses too.  Prints what has arrived, or why it has not.
"""

import json
import sys
import time
from pathlib import Path

from ds_hybridep.errors import CommunicationError
from ds_hybridep.link import Handle, Link

LIMIT_S = 300.0


def read_when_there(path: Path) -> str:
    deadline_s = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} never came"
        time.sleep(0.01)
    return path.read_text()


def main() -> None:
    rank, sender, host, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    timeout_s = float(sys.argv[5])
    link = Link(rank, 2, secret=b"0123456789abcdef", host=host, timeout_s=timeout_s)
    (folder / f".{rank}").write_text(json.dumps(link.address))
    (folder / f".{rank}").rename(folder / str(rank))
    link.connect({other: tuple(json.loads(read_when_there(folder / str(other)))) for other in (0, 1)})
    print("connected", flush=True)
    read_when_there(folder / "go")
    num_bytes, began_s = int(sys.argv[6]), time.monotonic()
    handles: list[Handle] = []
    for priority in map(int, sys.argv[7]):
        channel = link.channel(f"of priority {priority}", (0, 1), priority=priority)
        if rank == sender:
            handles.append(channel.send(1 - rank, bytes(num_bytes)))
        else:
            handles.append(channel.receive(sender, max_bytes=num_bytes))
    try:
        for handle in handles:
            handle.wait(LIMIT_S)
        print(f"arrived {num_bytes}", flush=True)
    except CommunicationError as error:
        print(f"after {time.monotonic() - began_s:.1f} s: {error}", flush=True)
        time.sleep(3)  # the other side may dial meanwhile
    link.close()


if __name__ == "__main__":
    main()
