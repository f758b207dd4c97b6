"""How a process becomes one of several: told on the command line, or found in what Slurm, Kubernetes or Open MPI set.

Joining happens once, before anything asks JAX for a device. JAX's own service ends a process without a sentence when the
coordinator does not answer, a port is taken, a process is missing or two have one number; so processes that were told
on the command line meet at the coordinator's port first, and what is wrong is told to all of them.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from argosy.launch import lifeline

LONGEST_S = 7 * 24 * 3600  # to wait for the others
PEER_SILENT_S = 30  # a process that has not been heard of for so long is taken for dead, and all end


@dataclass(frozen=True)
class Link:
    """Where this process belongs when a run has several.

    Args:
        coordinator: Address of process 0, host:port; all processes give the same.
        processes: How many processes the run has; as Slurm or Open MPI say when left out.
        process: Which one this is, from 0; as Slurm, Open MPI or an indexed Kubernetes job say when left out.
        join_timeout: Seconds to wait for the other processes.
    """

    coordinator: str = ""
    processes: int | None = None
    process: int | None = None
    join_timeout: float = 300.0


def interruptible() -> None:
    """Let SIGINT through, which `launch local` holds back from its processes until they can end with a sentence."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def join(link: Link, environment: Mapping[str, str] = os.environ) -> None:
    """Become one of the run's processes; a run of one process, or an environment that says nothing, is left alone.

    Raises:
        ValueError: when the numbers do not fit together, or the others do not come: at every process that is there.
    """
    if not 0 < link.join_timeout <= LONGEST_S:
        nearest = LONGEST_S if link.join_timeout > LONGEST_S else 1
        raise ValueError(
            f"--join-timeout {link.join_timeout} is in seconds, above 0 and at most {LONGEST_S:,}; nearest legal {nearest}"
        )
    told = explicit(link, environment)
    if told is None:
        name = detected(environment)
        if name and link.processes != 1:
            with _deadline(link.join_timeout, f"{name} started several processes, but they did not all come together"):
                _initialize(name)
        return
    address, processes, process = told
    if processes == 1:
        return
    links = meet(address, processes, process, link.join_timeout)
    with _deadline(60, f"all {processes} processes met at {address}, but JAX's service there did not come up"):
        own = gpu_of(environment) if link.process is None else None
        _initialize("", coordinator_address=address, num_processes=processes, process_id=process, local_device_ids=own)
    lifeline.keep(links, process, processes)  # after JAX's own, so that we part before it waits for the others


def explicit(link: Link, environment: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Coordinator, number of processes, number of this one; None when the command line names no coordinator.

    Raises:
        ValueError: naming what is missing or out of range.
    """
    if not link.coordinator:
        if (link.processes, link.process) not in ((None, None), (1, None), (1, 0)):
            raise ValueError(
                f"--processes {link.processes} --process {link.process} need --coordinator HOST:PORT, the address of process 0"
            )
        return None
    host, _, port = link.coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--coordinator {link.coordinator!r} is not HOST:PORT with a port of 1 to 65,535; e.g. 10.0.0.1:9876")

    def number(given: int | None, flag: str, *names: str) -> int:
        found = [environment[n] for n in names if environment.get(n, "").isdecimal()]
        if given is None and not found:
            raise ValueError(f"--coordinator {link.coordinator} needs {flag}; neither it nor {', '.join(names)} is set")
        return int(found[0]) if given is None else given

    processes = number(link.processes, "--processes", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
    process = number(link.process, "--process", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
    if processes < 1:
        raise ValueError(f"--processes {processes} counts this one too; nearest legal 1")
    if not 0 <= process < processes:
        nearest = min(max(process, 0), processes - 1)
        raise ValueError(
            f"--process {process} of --processes {processes}: they are numbered 0 to {processes - 1}, each once; nearest legal {nearest}"
        )
    return link.coordinator, processes, process


def detected(environment: Mapping[str, str]) -> str:
    """The launcher that started several processes, by name; empty when none did, or it started one.

    The variables are those that JAX's own detection needs, and the number of processes, which it does not look at.

    >>> detected({"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    'Slurm'
    >>> detected({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"})  # a batch script outside srun
    ''
    """
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if "OMPI_MCA_orte_hnp_uri" in environment and int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        return "Open MPI"
    if all(name in environment for name in slurm):
        return "Slurm" if int(environment.get("SLURM_STEP_NUM_TASKS") or environment["SLURM_NTASKS"]) > 1 else ""
    if int(environment.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"mpirun started {environment['OMPI_COMM_WORLD_SIZE']} processes, but this Open MPI does not say where the first one is;"
            " add --coordinator HOST:PORT with the host of rank 0 and a free port"
        )
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes"
    return ""


def gpu_of(environment: Mapping[str, str]) -> list[int] | None:
    """The GPU of a process that a launcher has numbered within its machine, as JAX takes it too; None for all of them."""
    found = environment.get("SLURM_LOCALID") or environment.get("OMPI_COMM_WORLD_LOCAL_RANK")
    return [int(found)] if found and not environment.get("JAX_LOCAL_DEVICE_IDS") else None


def meet(address: str, processes: int, process: int, timeout_s: float) -> dict[int, socket.socket]:
    """Connections, once each number from 0 to `processes - 1` has come to the coordinator's port exactly once.

    Process 0 has one to each of the others, by number; each of the others one to process 0.

    Raises:
        ValueError: at every process that came, with what is wrong.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if process == 0:
        return _gather(host, int(port), processes, timeout_s)
    return {0: _report(host, int(port), processes, process, timeout_s)}


def _gather(host: str, port: int, processes: int, timeout_s: float) -> dict[int, socket.socket]:
    """Process 0's side of `meet`: hear everybody, then answer everybody."""
    deadline = time.monotonic() + timeout_s
    came: dict[int, tuple[socket.socket, str]] = {}
    with contextlib.ExitStack() as stack:
        try:
            door = stack.enter_context(socket.create_server((host if _loopback(host) else "", port), backlog=1024))
        except OSError as error:
            raise ValueError(
                f"--coordinator {host}:{port}: process 0 cannot listen on port {port} ({os.strerror(error.errno or 0)}); take another port, the same"
                " for all processes"
            ) from error

        def answer(text: str) -> None:
            for guest, _ in came.values():
                with contextlib.suppress(OSError):
                    guest.sendall(text.encode() + b"\n")

        def refuse(text: str) -> ValueError:
            answer(text)
            return ValueError(text)

        while len(came) < processes - 1:
            door.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                guest, (peer, *_) = door.accept()
            except TimeoutError:
                missing = [str(i) for i in range(1, processes) if i not in came]
                named = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
                raise refuse(
                    f"waited {timeout_s:g} s at {host}:{port} for {processes} processes; not there: --process {named}"
                ) from None
            stack.enter_context(guest)
            said = _heard(guest)
            if said is None:
                guest.close()  # a stranger
                continue
            number, of = said
            if number in came and _hung_up(came[number][0]):
                came.pop(number)[0].close()  # it was ended and started again meanwhile
            came.setdefault(number, (guest, peer))
            if of != processes:
                came[-1] = (guest, peer)
                raise refuse(f"process {number} was started with --processes {of}, process 0 with --processes {processes}")
            if came[number][0] is not guest or number == 0:
                other = "process 0" if number == 0 else came[number][1]
                came[-1] = (guest, peer)
                raise refuse(
                    f"two processes say --process {number} ({other} and {peer}); each of 0 to {processes - 1} is given once"
                )
        door.close()  # the port is JAX's before anybody asks for its service there
        answer("")
        stack.pop_all()
        return {number: guest for number, (guest, _) in came.items()}


def _heard(guest: socket.socket) -> tuple[int, int] | None:
    guest.settimeout(5)
    try:
        body = json.loads(_line(guest))
        return int(body["process"]), int(body["processes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _hung_up(guest: socket.socket) -> bool:
    guest.setblocking(False)
    try:
        return not guest.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            guest.settimeout(5)


def _line(guest: socket.socket) -> bytes:
    text = b""
    while not text.endswith(b"\n") and len(text) < 4096:
        more = guest.recv(1024)
        if not more:
            break
        text += more
    return text


def _report(host: str, port: int, processes: int, process: int, timeout_s: float) -> socket.socket:
    """The side of `meet` of all but process 0: say who this is, hear whether all are there."""
    deadline = time.monotonic() + timeout_s
    while True:
        said = b""
        try:
            door = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
        except OSError as error:
            why = error.strerror or str(error)
            if time.monotonic() > deadline - 0.2:
                raise ValueError(
                    f"--coordinator {host}:{port} does not answer after {timeout_s:g} s ({why}); process 0 has to run there, and its"
                    " port has to be open to this machine"
                ) from error
        else:
            with contextlib.suppress(OSError):
                door.sendall(json.dumps({"process": process, "processes": processes}).encode() + b"\n")
                door.settimeout(max(0.1, deadline - time.monotonic()) + 10)  # process 0 gives up first, and says why
                said = _line(door)
            if said == b"\n":
                return door
            door.close()
            if said.endswith(b"\n"):
                raise ValueError(said.decode().strip())
            if time.monotonic() > deadline:
                raise ValueError(f"--coordinator {host}:{port} answers, but is not process 0 of this run")
        time.sleep(0.2)


def _loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _initialize(launcher: str, **told: Any) -> None:
    """JAX's own joining, its devices and its collectives between CPUs."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM; the loop has its own handler
    if told:
        told["cluster_detection_method"] = "deactivate"
        host, _, port = told["coordinator_address"].rpartition(":")
        if _loopback(host.strip("[]")):
            told["coordinator_bind_address"] = f"{host}:{port}"
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=PEER_SILENT_S, **told)
    except (RuntimeError, ValueError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if launcher == "Kubernetes" and "should be defined" in first:
            first = "JAX needs the package kubernetes for that"
        raise ValueError(
            f"{launcher or 'these processes'} could not be joined: {first}; --coordinator HOST:PORT --processes N --process I say it"
            " by hand, --processes 1 trains alone"
        ) from error
    _quiet_standard_output()


def _quiet_standard_output() -> None:
    """Keep what C++ libraries print of their connections out of standard output, which may be JSON for a program."""
    sys.stdout.flush()
    real, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(real, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, buffering=1)


@contextlib.contextmanager
def _deadline(seconds: float, sentence: str) -> Any:
    """End the process with a sentence when what is inside takes too long: JAX's own deadlines end it with a stack of C++."""

    def end() -> None:
        print(f"argosy: {sentence} within {seconds:g} s", file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def several() -> bool:
    """Whether this process has joined others."""
    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized()


def lost(error: BaseException) -> bool:
    """Whether an error says that another process of the run is gone or cannot be reached."""
    signs = ("Gloo", "gloo/", "NCCL", "nccl", "oordination service", "CoordinationService", "Connection reset by peer")
    return several() and any(sign in f"{type(error).__name__}: {error}" for sign in signs)


def leave(status: int) -> None:
    """End this process at once if it is one of several: the usual way out would wait minutes for the others.

    Process 0 waits until the others have ended, or two seconds: JAX's service goes with it, and would end them first.
    """
    if several():
        from jax._src import distributed  # jax.process_index() may wait for processes that are gone

        sys.stdout.flush()
        sys.stderr.flush()
        if distributed.global_state.process_id == 0:
            lifeline.outlast(2.0)
        os._exit(status)
