"""Several processes of one run on this machine, with CPU devices: what a cluster does, where it can be tried.

Process 0 has this terminal. What the others print is kept, and shown when they are what went wrong.
"""

import collections
import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from argosy import runs, spec

GRACE_S = 5.0  # to end by themselves once one has failed; twice that and they are killed
COMMANDS = ("train", "voyage", "sample")


@dataclass
class Child:
    """One process, and the last lines that it printed if nobody sees them."""

    process: subprocess.Popen[str]
    lines: collections.deque[str]
    reader: threading.Thread | None


def run(command: Sequence[str], processes: int, devices_per_process: int, argosy: Sequence[str] = ()) -> int:
    """Start a command of `argosy` as several processes, wait for all, and return the first exit status that is not 0.

    SIGINT and SIGTERM are passed on once each, so that every process saves and ends. If one fails, the others are ended.
    If this process is killed, they get SIGTERM.

    Args:
        command: what follows `argosy`, e.g. `["train", "pocket"]`.
        processes: how many.
        devices_per_process: CPU devices of each.
        argosy: how `argosy` is started; this Python's own when empty.

    Raises:
        ValueError: for numbers below 1, or a command that does not run in several processes.
    """
    check(command, processes, devices_per_process)
    start = [*(argosy or (sys.executable, "-m", "argosy.cli")), *command]
    address = f"127.0.0.1:{free_port()}"
    children: list[Child] = []
    with passing_on(children) as asked:
        try:
            for n in range(processes):
                words = [*start, "--coordinator", address, "--processes", str(processes), "--process", str(n)]
                with _later(signal.SIGINT):  # of a child: `join.interruptible`; of us: once the child is in the list
                    children.append(_start(words, environment(os.environ, devices_per_process), shown=n == 0))
            return _watch(children, asked)
        finally:
            _end(children, 0.0)


def check(command: Sequence[str], processes: int, devices_per_process: int) -> None:
    """Refuse what cannot be started.

    Raises:
        ValueError: with the nearest legal value.
    """
    for flag, value in (("--processes", processes), ("--devices-per-process", devices_per_process)):
        if not 1 <= value <= 512:
            raise ValueError(f"{flag} {value} is 1 to 512 on one machine; nearest legal {min(max(value, 1), 512)}")
    if not command or command[0] not in COMMANDS:
        raise ValueError(
            f"argosy launch local starts argosy {', '.join(COMMANDS)}, not {' '.join(command[:2]) or 'nothing'}; e.g. argosy launch"
            " local --processes 2 --devices-per-process 4 -- train pocket"
        )
    for flag in ("--coordinator", "--processes", "--process"):
        if any(word == flag or word.startswith(flag + "=") for word in command):
            raise ValueError(f"argosy launch local sets {flag} of each process itself; leave it out after --")


def grouped(words: Sequence[str]) -> list[str]:
    """The words of a launch with those of what is launched as one: all after `--`, or from the name of the command on.

    >>> grouped(["launch", "local", "--processes", "2", "--", "train", "pocket"])
    ['launch', 'local', '--processes', '2', 'train pocket']
    """
    cut = next((i for i, word in enumerate(words) if word in ("--", *COMMANDS)), len(words))
    command = words[cut + (words[cut : cut + 1] == ["--"]) :]
    return [*words[:cut], *([shlex.join(command)] if command else [])]


def widened(run: spec.Run, devices: int) -> tuple[str, ...]:
    """The settings that lay a recipe for one device over all that are started; nothing for a recipe with a mesh of its own.

    Experts are divided where the recipe's exchange can carry tokens between devices, else the batch.

    >>> from argosy.runs import pocket
    >>> widened(pocket.run(), 8)
    ('mesh.replica=8',)
    """
    if spec.devices(run) != 1 or devices == 1:
        return ()
    return (f"mesh.{'expert' if run.routing.exchange in ('pooled_wave', 'ragged') else 'replica'}={devices}",)


def laid_over(command: Sequence[str], devices: int) -> list[str]:
    """A command to train, with the settings that lay its recipe over all devices, which are said on standard error.

    Raises:
        ValueError: for a recipe that there is not, settings that it does not take, or a batch that does not divide.
    """
    recipe, settings = asked(command[1:])
    if command[0] == "sample" or not recipe:
        return list(command)
    run = spec.override(runs.find(recipe), settings)
    more = () if any(setting.startswith("mesh.") for setting in settings) else widened(run, devices)
    spec.override(run, more)  # refused here, before many processes start only to say the same
    if more:
        print(f"argosy: a recipe for one device, on {devices}: --set {' '.join(more)} is added", file=sys.stderr, flush=True)
    return [*command, *(word for setting in more for word in ("--set", setting))]


def asked(words: Sequence[str]) -> tuple[str, list[str]]:
    """The recipe, empty if there is none, and the settings among the words after `train` or `voyage`, in any order.

    >>> asked(["--as", "mine", "--set=seed=3", "pocket", "--json", "--set", "mesh.data=2"])
    ('pocket', ['seed=3', 'mesh.data=2'])
    """
    recipe, settings, rest = "", [], iter(words)
    for word in rest:
        flag, joined, value = word.partition("=")
        if not word.startswith("-"):
            recipe = recipe or word
        elif flag not in ("--json", "--help", "-h"):  # every other flag has a value
            value = value if joined else next(rest, "")
            settings += [value] if flag == "--set" else []
    return recipe, settings


def environment(inherited: Mapping[str, str], devices: int) -> dict[str, str]:
    """The environment of a process with so many CPU devices."""
    flags = [f for f in inherited.get("XLA_FLAGS", "").split() if "xla_force_host_platform_device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return {**inherited, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "PYTHONUNBUFFERED": "1"}


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])


def _start(words: Sequence[str], environment: Mapping[str, str], shown: bool) -> Child:
    kept: Any = {} if shown else {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        words,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches it through us alone, once
        preexec_fn=end_with_parent if sys.platform == "linux" else None,
        **kept,
    )
    lines: collections.deque[str] = collections.deque(maxlen=40)
    if shown:
        return Child(process, lines, None)
    assert process.stdout is not None
    reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
    reader.start()
    return Child(process, lines, reader)


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """In a new process: SIGTERM when the one that started it is gone, however that ended."""
    assert _libc is not None
    _libc.prctl(1, int(signal.SIGTERM))


@contextlib.contextmanager
def passing_on(children: list[Child]) -> Iterator[list[int]]:
    """The signals that were asked to stop; each goes to every child once, a second SIGINT too."""
    asked: list[int] = []

    def handler(number: int, _frame: Any) -> None:
        asked.append(number)
        for child in children:
            _send(child, number)

    before = {s: signal.signal(s, handler) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def _later(number: signal.Signals) -> Iterator[None]:
    """A signal waits meanwhile; for a process that is started here it waits until that lets it through."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(child: Child, number: int) -> None:
    if child.process.poll() is None:
        child.process.send_signal(number)


def _watch(children: Sequence[Child], asked: Sequence[int]) -> int:
    """Wait for all; once one has failed, for a few seconds only."""
    while True:
        codes = [child.process.poll() for child in children]
        if failed := [n for n, code in enumerate(codes) if code]:
            break
        if None not in codes:
            return 0
        time.sleep(0.05)
    first = failed[0]
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(c.process.poll() is None for c in children):
        time.sleep(0.05)
    by_us = [n for n, child in enumerate(children) if child.process.poll() is None]
    _end(children, GRACE_S)
    code = children[first].process.returncode
    status = code if code > 0 else 128 - code
    _tell(children, first, by_us, asked)
    return status


def _end(children: Sequence[Child], grace_s: float) -> None:
    """End those that still run: SIGTERM and some time, where time is given; then SIGKILL. Our own children, by their ids."""
    if grace_s:
        for child in children:
            _send(child, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait()
        if child.reader is not None:
            child.reader.join(1)
            if not child.reader.is_alive() and child.process.stdout is not None:
                child.process.stdout.close()


def _tell(children: Sequence[Child], first: int, by_us: Sequence[int], asked: Sequence[int]) -> None:
    """One sentence on what went wrong, under what the process itself said of it; nothing where process 0 has said it."""
    code = children[first].process.returncode
    if code > 0 and (first == 0 or children[0].process.returncode == code):
        return
    for line in children[first].lines:
        print(f"[{first}] {line}", end="" if line.endswith("\n") else "\n", file=sys.stderr)
    how = f"ended with exit status {code}" if code > 0 else f"was ended by {_name(-code)}"
    after = (
        "was stopped before the first update could be saved" if asked else "the same command goes on from the last checkpoint"
    )
    others = f"; process{'es' if len(by_us) > 1 else ''} {', '.join(map(str, by_us))} had to be stopped" if by_us else ""
    print(f"argosy: process {first} of {len(children)} {how}{others}; {after}", file=sys.stderr, flush=True)


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
