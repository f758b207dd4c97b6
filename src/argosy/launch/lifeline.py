"""A connection from process 0 to each other process, which tells at once when one is gone.

Collectives wait for a process that died, some for ever, and JAX's own service notices it after half a minute and ends
everybody with a stack of C++. Who was started by hand or by our launcher has this as well. Nothing is sent but farewells
and the number of the one that is gone.
"""

import atexit
import contextlib
import os
import selectors
import socket
import sys
import threading
import time

GRACE_S = 2.0  # a process that fails for the same reason as its peer says so itself

_parting = threading.Event()
_kept = threading.Event()  # there are connections
_apart = threading.Event()  # none is left


def keep(links: dict[int, socket.socket], process: int, processes: int) -> None:
    """Watch these connections until this process ends; process 0 has one to each of the others, which have one to it."""
    for link in links.values():
        link.setblocking(True)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # so that nothing on the way forgets an idle one
        if hasattr(socket, "TCP_KEEPIDLE"):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    _kept.set()
    threading.Thread(target=_watch, args=(links, process, processes), name="argosy-lifeline", daemon=True).start()
    atexit.register(part, links)


def part(links: dict[int, socket.socket]) -> None:
    """Say that this process is about to end as it should."""
    _parting.set()
    _tell(links, b"bye\n")


def outlast(seconds: float) -> None:
    """Before process 0 ends with an error: let the others end first, who may be about to say the same."""
    _parting.set()
    if _kept.is_set():
        _apart.wait(seconds)
    else:
        time.sleep(seconds)


def _tell(links: dict[int, socket.socket], words: bytes) -> None:
    for link in list(links.values()):
        with contextlib.suppress(OSError):
            link.sendall(words)


def _watch(links: dict[int, socket.socket], process: int, processes: int) -> None:
    with selectors.DefaultSelector() as waiting:
        for number, link in links.items():
            waiting.register(link, selectors.EVENT_READ, number)
        while waiting.get_map():
            for key, _ in waiting.select():
                assert isinstance(key.fileobj, socket.socket)
                try:
                    said = key.fileobj.recv(64)
                except OSError:
                    said = b""
                if not said or said.startswith(b"bye"):
                    waiting.unregister(key.fileobj)
                if not said.startswith(b"bye") and not _parting.is_set():
                    gone = int(said.split()[0]) if said else int(key.data)
                    if process == 0:
                        _tell(links, b"%d\n" % gone)
                    _end(gone, processes)
    _apart.set()


def _end(gone: int, processes: int) -> None:
    time.sleep(GRACE_S)
    print(
        f"argosy: process {gone} of {processes} ended or cannot be reached, so this one ends too; started again, all go on from the"
        " last checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)
