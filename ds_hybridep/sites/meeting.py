# SPDX-License-Identifier: Apache-2.0
"""The meeting point: which sites train together, and from which step on.

Sites connect and stay connected.  Before an exchange that follows a change, each site calls for a *quorum*.  The
meeting point answers when all members are there or gone, and names the members of the next *epoch*.  Only the meeting
point makes epochs, so no two sets of sites can go on apart from each other.  A new epoch needs at least half of the
members of the last one: a minority waits.

    not running    waits for all sites, or for `wait_s` and at least half of them
    running        members that call are in the next epoch; members that are gone are not
    a newcomer     becomes an observer, gets the state and all packets of the members, and is a member once it is
                   up to date; the next one waits until then, since a new epoch would cut the first one off

A member that has all packets of a step which another member has already applied is told to apply them too.
"""

import asyncio
import hmac
import itertools
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ds_hybridep.sites import protocol

MAX_STRANGERS = 64  # connections that have not proved the secret
HANDSHAKE_S = 10.0
TICK_S = 0.25
TICKS_OF_A_BEAT = 4  # between heartbeats, which sites answer
GRACE_S = 3.0  # after its connection ended, a site that the others do not reach either is gone
MOST_TRIES = 2  # of one set of members at one step, before a site that others do not reach is left out


_CALL = {"step": int, "complete": bool, "is_ready": bool, "missed": list, "addresses": list, "digest": str}


@dataclass
class KnownSite:
    """A site as the meeting point knows it."""

    name: str
    instance: str
    wait_s: float
    send: Callable[[dict[str, Any]], None]
    is_connected: bool = True
    heard_at: float = field(default_factory=lambda: time.monotonic())  # looked up at each call, for tests' clocks
    call: dict[str, Any] | None = None  # its call for a quorum, not answered yet
    was_told: bool = False  # that others wait for its call

    def is_gone(self, now: float, is_missed: bool = False) -> bool:
        is_lost = is_missed and not self.is_connected and now - self.heard_at > GRACE_S
        return is_lost or now - self.heard_at > self.wait_s


class Meeting:
    """Who is there, and what is agreed; knows nothing of connections.  `tick` and all events run in one thread."""

    def __init__(self, log: Callable[[str], None] = lambda _: None) -> None:
        self.sites: dict[str, KnownSite] = {}
        self.epoch = 0
        self.members: list[str] = []  # of this epoch, in the order of `names`
        self.observers: list[str] = []
        self._names: list[str] = []
        self._settings: dict[str, Any] = {}
        self._tried: tuple[int, tuple[str, ...], int] = (0, (), 0)  # step, members, how often
        self._first_call_at = 0.0
        self._adopted_at = float("-inf")  # when members were learned from a site
        self._has_formed = False  # the present members were chosen here
        self._log = log

    @property
    def is_running(self) -> bool:
        """True while a member of the last epoch is there."""
        return any(name in self.sites and self.sites[name].is_connected for name in self.members)

    # -- events -----------------------------------------------------------------------------------------------------

    def hello(self, said: dict[str, Any], send: Callable[[dict[str, Any]], None]) -> tuple[KnownSite | None, str]:
        """Take a site in; returns it, or None and the reason."""
        self._drop_gone()
        name, names, instance = said["site"], said["names"], said["instance"]
        kinds = {"site": str, "names": list, "settings": dict, "instance": str, "epoch": int, "members": list}
        if not all(isinstance(said[key], kind) for key, kind in kinds.items()) or not 0 < float(said["wait_s"]) < 1e9:
            raise ValueError("not a site's first message")
        known = self.sites.get(name)
        if name not in names:
            return None, f"site '{name}' is not one of sites.names, {names}; correct HYBRIDEP_SITE"
        if known is not None and known.instance != instance and known.is_connected:
            return None, f"another site '{name}' is here already; give each site a name of its own in HYBRIDEP_SITE"
        if self.sites.keys() - {name}:
            differing = [
                f"{key} is {value!r} instead of {self._settings.get(key)!r}"
                for key, value in {**said["settings"], "sites.names": names}.items()
                if value != {**self._settings, "sites.names": self._names}.get(key)
            ]
            if differing:
                text = f"site '{name}' differs from the sites that are here: {'; '.join(differing[:4])}"
                for other in self.sites.values():
                    other.send({"op": "note", "text": f"{text}; it was refused"})
                return None, f"{text}; use the same model and settings on all sites"
        self._settings, self._names = said["settings"], names
        is_newer = said["epoch"] > self.epoch or (0 < said["epoch"] == self.epoch and not self.members)
        is_known = name in self.members or (said["epoch"], said["members"]) == (self.epoch, self.members)
        if 0 < said["epoch"] and not is_known and (self._has_formed or not is_newer):
            return None, f"the other sites went on without site '{name}'; start it again with the same command"
        if is_newer:
            # This meeting point was restarted, or out of reach: other members may still come.
            self.epoch, self.members, self._adopted_at = said["epoch"], list(said["members"]), time.monotonic()
            self._has_formed = False
        elif said["epoch"] == 0 and name in self.members and (known is None or known.instance != instance):
            self.members.remove(name)  # another process, which has the state of a start
        if name in self.observers and (known is None or known.instance != instance):
            self.observers.remove(name)
        site = KnownSite(name, instance, float(said["wait_s"]), send)
        if known is not None and known.instance == instance:
            site.call = known.call
        self.sites[name] = site
        self._log(f"site '{name}' is here")
        return site, ""

    def hear(self, site: KnownSite, said: dict[str, Any]) -> None:
        """Take a message of a site.  Raises ValueError for one that makes no sense, or if the site was given up."""
        if self.sites.get(site.name) is not site:
            raise ValueError(f"site '{site.name}' was given up; it may come again")
        site.heard_at = time.monotonic()
        if said["op"] == "quorum":
            if not all(isinstance(said[key], kind) for key, kind in _CALL.items()):
                raise ValueError("not a call")
            site.call, site.was_told = said, False
            self._first_call_at = self._first_call_at or site.heard_at
            self.tick()
        elif said["op"] == "leave":
            self._remove(site, "has left")
            self.tick()

    def lose(self, site: KnownSite) -> None:
        """A site's connection has ended; it may come back."""
        site.is_connected = False

    def _remove(self, site: KnownSite, why: str) -> None:
        if self.sites.get(site.name) is site:
            del self.sites[site.name]
            self._log(f"site '{site.name}' {why}")
        if not self.is_running:
            if not any(other.call for other in self.sites.values()):
                self._first_call_at = 0.0
            elif self.members:
                self._first_call_at = time.monotonic()
            self.members, self.observers, self._has_formed = [], [], False

    def _drop_gone(self) -> None:
        now = time.monotonic()
        calls = [site.call for site in self.sites.values() if site.call is not None]
        for site in list(self.sites.values()):
            if site.is_gone(now, any(site.name in call["missed"] for call in calls)):
                self._remove(site, f"is gone: nothing was heard of it for {now - site.heard_at:.0f} s")

    # -- the quorum -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Answer calls, if they can be answered now."""
        self._drop_gone()
        # An answer to a site that is not connected would be lost, and the others would try to connect with it.
        calling = {name: site for name, site in self.sites.items() if site.call is not None and site.is_connected}
        if self.members and self._is_catching_up():
            calling = {name: site for name, site in calling.items() if not self._is_newcomer(site)}
        if not calling:
            return
        if self.members:
            self._go_on(calling)
        else:
            self._begin(calling)

    def _is_catching_up(self) -> bool:
        """Return True while an observer is not up to date; it calls when it is, or when it must begin again."""
        there = [self.sites[name] for name in self.observers if name in self.sites]
        return any(site.is_connected and site.call is None for site in there)

    def _is_newcomer(self, site: KnownSite) -> bool:
        return site.name not in self.members and site.call is not None and not site.call["is_ready"]

    def _begin(self, calling: dict[str, KnownSite]) -> None:
        """The first epoch: all sites, or after a wait those that are there."""
        waited_s = time.monotonic() - self._first_call_at
        wait_s = max(site.wait_s for site in calling.values())
        is_enough = 2 * len(calling) >= len(self._names) and waited_s > wait_s
        if len(calling) == len(self._names) or (is_enough and calling.keys() >= self.sites.keys()):
            self._form([name for name in self._names if name in calling], [])

    def _go_on(self, calling: dict[str, KnownSite]) -> None:
        there = [name for name in self.members if name in self.sites]
        waiting = [name for name in there if name not in calling]
        for name in waiting:  # they call before their next exchange
            if not self.sites[name].was_told:
                self.sites[name].send({"op": "change"})
                self.sites[name].was_told = True
        newest_wait_s = max(site.wait_s for site in calling.values())
        may_come = len(there) < len(self.members) and time.monotonic() - self._adopted_at < newest_wait_s
        if waiting or may_come or 2 * len(there) < len(self.members):
            return
        calls = {name: site.call for name, site in calling.items() if site.call is not None}
        newest = max(calls[name]["step"] for name in there)
        for name in list(there):
            if calls[name]["step"] < newest:
                has_all = calls[name]["step"] == newest - 1 and calls[name]["complete"]
                self._answer(name, {"op": "commit"} if has_all else {"op": "left out", "step": newest})
                if has_all:
                    return  # it calls again at the next step
                there.remove(name)
                del calls[name]
                self._remove(self.sites[name], f"was left out at step {newest}: it is at another step")
        there = self._reachable(there, calls, newest)
        ready = [name for name in self.observers if name in calls and calls[name]["is_ready"]]
        observers = [name for name in self._names if name in calls and name not in (*there, *ready)]
        self._form([name for name in self._names if name in (*there, *ready)], observers)

    def _reachable(self, there: list[str], calls: dict[str, dict[str, Any]], step: int) -> list[str]:
        """Leave out a site that the others do not reach, if the same sites have failed at the same step before."""
        key = step, tuple(there)
        count = self._tried[2] + 1 if self._tried[:2] == key else 1
        self._tried = (*key, count)
        if count <= MOST_TRIES or len(there) == 1:
            return there
        votes = {name: sum(name in calls[other]["missed"] for other in there) for name in there}
        worst = max(reversed(there), key=lambda name: votes[name])
        if votes[worst] == 0 or 2 * (len(there) - 1) < len(self.members):
            return there
        self._answer(worst, {"op": "left out", "step": step})
        del calls[worst]
        self._remove(self.sites[worst], f"was left out at step {step}: the others do not reach it")
        return [name for name in there if name != worst]

    def _form(self, members: list[str], observers: list[str]) -> None:
        self.epoch += 1
        calls = {name: self.sites[name].call for name in (*members, *observers)}
        self.members, self.observers, self._has_formed = members, observers, True
        said = {name: call for name, call in calls.items() if call is not None}
        message = {
            "op": "epoch", "epoch": self.epoch, "members": members, "observers": observers,
            "calls": said,
        }  # fmt: skip
        for name in calls:
            self._answer(name, message)
        also = f", and {', '.join(observers)} catching up" if observers else ""
        step = max(int(call["step"]) for call in said.values())
        self._log(f"epoch {self.epoch} from step {step} on: {', '.join(members)}{also}")

    def _answer(self, name: str, message: dict[str, Any]) -> None:
        site = self.sites[name]
        site.call = None
        site.send(message)


async def serve(
    host: str, port: int, secret: bytes, context: ssl.SSLContext | None, log: Callable[[str], None]
) -> None:
    """Run a meeting point until cancelled.  port: 0 for any; log: is told which one it is, and what happens."""
    meeting = Meeting(log)
    strangers: dict[asyncio.StreamWriter, None] = {}  # in the order in which they came

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        site = None
        try:
            strangers[writer] = None
            if len(strangers) > MAX_STRANGERS:
                next(iter(strangers)).transport.abort()
            try:
                site = await asyncio.wait_for(_admit(meeting, secret, reader, writer), HANDSHAKE_S)
            finally:
                del strangers[writer]
            while site is not None:
                meeting.hear(site, await _receive(reader))
        except (OSError, EOFError, TimeoutError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as error:
            if site is not None:
                log(f"the connection of site '{site.name}' has ended: {type(error).__name__}: {error}")
        finally:
            if site is not None:
                meeting.lose(site)
            writer.close()

    limits = {} if context is None else {"ssl_handshake_timeout": HANDSHAKE_S}
    server = await asyncio.start_server(
        connected, host, port, ssl=context, limit=2**16, backlog=MAX_STRANGERS, **limits
    )
    log(f"meeting point on port {server.sockets[0].getsockname()[1]}")
    async with server:
        for number in itertools.count():
            await asyncio.sleep(TICK_S)
            meeting.tick()
            for site in meeting.sites.values() if number % TICKS_OF_A_BEAT == 0 else ():
                site.send({"op": "beat"})


async def _admit(
    meeting: Meeting, secret: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> KnownSite | None:
    """Return the site at the other end once it has proved the secret and is welcome, else None."""
    ours = protocol.challenge()
    writer.write(ours)
    hello = await reader.readexactly(protocol.HELLO_BYTES)
    theirs, proof = hello[: protocol.CHALLENGE_BYTES], hello[protocol.CHALLENGE_BYTES :]
    knows_secret = hmac.compare_digest(proof, protocol.prove(secret, "site", ours, theirs))
    if not theirs.startswith(protocol.MAGIC) or not knows_secret:
        writer.write(bytes(protocol.ANSWER_BYTES))
        await writer.drain()
        return None
    writer.write(b"\1" + protocol.prove(secret, "meeting", ours, theirs))

    def send(message: dict[str, Any]) -> None:
        if not writer.is_closing():
            writer.write(protocol.pack(message))

    site, why = meeting.hello(await _receive(reader), send)
    if site is None:
        send({"op": "refused", "text": why})
    else:
        send({"op": "welcome", "is_running": meeting.is_running, "epoch": meeting.epoch})
    await writer.drain()
    return site


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    (length,) = protocol.LENGTH.unpack(await reader.readexactly(protocol.LENGTH.size))
    if length > protocol.MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    message = json.loads(await reader.readexactly(length))
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message
