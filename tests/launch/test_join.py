"""Joining: what the command line and a cluster's variables mean, and what is said when processes do not come together.

Each test fails when a single process joins something, or when a mistake ends in a wait or in words of a library.
"""

import contextlib
import json
import socket
import threading
import time

import pytest

from argosy.launch import join, local

SLURM = {
    "SLURM_JOB_ID": "71", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, ""),
        (SLURM, "Slurm"),
        (SLURM | {"SLURM_NTASKS": "1"}, ""),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, ""),  # an interactive step of an allocation for two
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, ""),  # the batch script itself
        (OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://10.0.0.1:34911"}, "Open MPI"),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_MCA_orte_hnp_uri": "x"}, ""),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ""),  # any pod
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, "Kubernetes"),
    ],
)
def test_what_started_several_processes(environment, launcher):
    assert join.detected(environment) == launcher


def test_an_open_mpi_that_does_not_tell_where_rank_0_is_asks_for_it():
    with pytest.raises(ValueError, match=r"mpirun started 4 processes.*--coordinator HOST:PORT"):
        join.detected(OPEN_MPI)


def test_numbers_come_from_the_command_line_then_from_the_launcher():
    assert join.explicit(join.Link("h:9", 2, 1), SLURM | {"SLURM_PROCID": "0"}) == ("h:9", 2, 1)
    assert join.explicit(join.Link("h:9"), SLURM) == ("h:9", 2, 1)
    assert join.explicit(join.Link("h:9"), OPEN_MPI) == ("h:9", 4, 3)
    assert join.explicit(join.Link("h:9", 8), {"JOB_COMPLETION_INDEX": "5"}) == ("h:9", 8, 5)
    assert join.explicit(join.Link(), SLURM) is None


@pytest.mark.parametrize(
    ("link", "says"),
    [
        (join.Link(processes=2, process=0), "need --coordinator HOST:PORT"),
        (join.Link("somewhere", 2, 0), "not HOST:PORT"),
        (join.Link("h:70000", 2, 0), "port of 1 to 65,535"),
        (join.Link("h:9", None, 0), "needs --processes"),
        (join.Link("h:9", 2, None), "needs --process;"),
        (join.Link("h:9", 0, 0), "nearest legal 1"),
        (join.Link("h:9", 2, 2), "numbered 0 to 1, each once; nearest legal 1"),
        (join.Link("h:9", 2, -1), "nearest legal 0"),
        (join.Link(join_timeout=0.0), "above 0"),
        (join.Link(join_timeout=float("nan")), "nearest legal 1"),
        (join.Link(join_timeout=float("inf")), "nearest legal 604800"),
    ],
)
def test_a_wrong_link_is_refused_with_the_nearest_legal_one(link, says):
    with pytest.raises(ValueError, match=says):
        join.join(link, {})


def test_one_process_joins_nothing():
    import jax

    for environment in ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, SLURM | {"SLURM_NTASKS": "1"}):
        join.join(join.Link(), environment)
    join.join(join.Link("127.0.0.1:9", 1, 0), {})
    join.join(join.Link(processes=1), SLURM)
    assert not jax.distributed.is_initialized()


# ---- meeting ------------------------------------------------------------------------------------


def meeting(*guests, timeout_s=20.0, address=""):
    """What each of the given (process, processes) is told: None when all is well."""
    address = address or f"127.0.0.1:{local.free_port()}"
    told = {}

    def come(at, process, processes):
        try:
            for link in join.meet(address, processes, process, timeout_s).values():
                link.close()
            told[at] = None
        except ValueError as error:
            told[at] = str(error)

    threads = [threading.Thread(target=come, args=(at, *guest)) for at, guest in enumerate(guests)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s + 15)
    return [told[at] for at in range(len(guests))]


def test_processes_that_fit_together_meet_whoever_comes_first():
    assert meeting((2, 4), (0, 4), (3, 4), (1, 4)) == [None] * 4


@pytest.mark.parametrize(
    ("guests", "says"),
    [
        ([(0, 3), (1, 3), (1, 3)], "two processes say --process 1"),
        ([(0, 2), (1, 3)], "started with --processes 3, process 0 with --processes 2"),
    ],
)
def test_what_is_wrong_is_told_to_everybody_at_once(guests, says):
    began = time.monotonic()
    told = meeting(*guests)
    assert time.monotonic() - began < 10
    assert all(says in sentence for sentence in told), told


def test_who_is_missing_is_named():
    told = meeting((0, 4), (2, 4), timeout_s=1.0)
    assert all("not there: --process 1, 3" in sentence for sentence in told), told


def test_a_coordinator_that_does_not_answer():
    [told] = meeting((1, 2), timeout_s=1.0)
    assert "does not answer after 1 s (Connection refused); process 0 has to run there" in told


def test_a_coordinator_that_is_somebody_else():
    def hang_up():
        with contextlib.suppress(OSError):
            while True:
                door.accept()[0].close()

    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=hang_up, daemon=True).start()
        [told] = meeting((1, 2), timeout_s=0.3, address=f"127.0.0.1:{door.getsockname()[1]}")
        door.shutdown(socket.SHUT_RDWR)
    assert "answers, but is not process 0 of this run" in told


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        [told] = meeting((0, 2), timeout_s=1.0, address=f"127.0.0.1:{port}")
    assert f"process 0 cannot listen on port {port} (Address already in use); take another port" in told


def test_strangers_at_the_door_change_nothing():
    address = f"127.0.0.1:{local.free_port()}"

    def stranger():
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", int(address.split(":")[1]))) as door:
                    door.sendall(json.dumps(["GET / HTTP/1.1"]).encode() + b"\n")
                    return
            except OSError:
                time.sleep(0.02)

    thread = threading.Thread(target=stranger)
    thread.start()
    late = threading.Timer(0.5, lambda: meeting((1, 2), address=address))
    late.start()
    assert meeting((0, 2), address=address) == [None]
    thread.join()
    late.join()
