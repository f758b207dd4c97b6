"""The launcher, with children that only pretend: who sees what, who is told what, and that nothing is left running.

Each test fails when a process outlives another's failure, a signal is lost or doubled, or the exit status is not the first bad one.
"""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from argosy import spec
from argosy.launch import local

# The launcher never loads JAX, so its forks are safe; a test process may have loaded it.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")

CHILD = """
import os, signal, sys, time
me = int(sys.argv[sys.argv.index("--process") + 1])
mode, folder = sys.argv[2:4]
print(f"hello from {me}", flush=True)

def on(number, frame):
    with open(f"{folder}/signals-{me}", "a") as file:
        file.write(f"{number}\\n")
    if mode == "stops" or mode == "hangs" and number == 15 and me == 0:
        sys.exit(0)

if mode != "deaf":
    signal.signal(signal.SIGTERM, on)
    signal.signal(signal.SIGINT, on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(f"{folder}/begun-{me}", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{folder}/begun-{me}", f"{folder}/up-{me}")
while mode in ("stops", "orphan"):
    time.sleep(0.02)
if mode == "environment":
    print(os.environ["XLA_FLAGS"], os.environ["JAX_PLATFORMS"], *sys.argv[4:], flush=True)
if me == 1 and mode in ("fails", "deaf"):
    print("process one has a reason", file=sys.stderr, flush=True)
    sys.exit(7)
if me == 1 and mode == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if mode == "all fail":
    print("a plain sentence", file=sys.stderr, flush=True)
    sys.exit(2)
while mode in ("fails", "killed", "deaf"):
    time.sleep(0.02)
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """A function of (mode, processes) that starts children which pretend; the exit status."""
    monkeypatch.setattr(local, "GRACE_S", 0.3)
    (tmp_path / "child.py").write_text(CHILD)
    start = (sys.executable, str(tmp_path / "child.py"))
    yield lambda mode, processes=3: local.run(["train", mode, str(tmp_path)], processes, 4, start)
    assert not psutil.Process().children(recursive=True)


def ups(folder, processes):
    """Once all children are up; whether they are."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and len(list(folder.glob("up-*"))) < processes:
        time.sleep(0.01)
    time.sleep(0.05)
    return len(list(folder.glob("up-*"))) >= processes


def test_all_well(launch, capfd):
    assert launch("passes") == 0
    out, err = capfd.readouterr()
    assert out == "hello from 0\n"
    assert err == ""


def test_each_process_has_its_devices_its_number_and_one_coordinator(launch, capfd, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1 --xla_force_host_platform_device_count=99")
    assert launch("environment", 2) == 0
    flags, platform, *words = capfd.readouterr()[0].splitlines()[1].rsplit(" ", 7)
    assert flags == "--xla_a=1 --xla_force_host_platform_device_count=4"
    assert platform == "cpu"
    assert words[0] == "--coordinator" and words[1].startswith("127.0.0.1:")
    assert words[2:] == ["--processes", "2", "--process", "0"]


def test_one_that_fails_ends_the_others_and_is_heard(launch, capfd):
    began = time.monotonic()
    assert launch("fails") == 7
    assert time.monotonic() - began < 10
    err = capfd.readouterr()[1].splitlines()
    assert err == [
        "[1] hello from 1",
        "[1] process one has a reason",
        "argosy: process 1 of 3 ended with exit status 7; processes 0, 2 had to be stopped; the same command goes on from the"
        " last checkpoint",
    ]


def test_one_that_is_killed_is_named(launch, capfd):
    assert launch("killed", 2) == 128 + signal.SIGKILL
    assert "process 1 of 2 was ended by SIGKILL; process 0 had to be stopped" in capfd.readouterr()[1]


def test_one_that_does_not_listen_is_killed(launch):
    began = time.monotonic()
    assert launch("deaf") == 7
    assert time.monotonic() - began < 10


def test_when_all_end_alike_process_0_has_said_it(launch, capfd):
    assert launch("all fail") == 2
    assert capfd.readouterr()[1] == "a plain sentence\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_every_process_once(launch, tmp_path, number):
    before = signal.getsignal(number)

    def stop():
        if ups(tmp_path, 3):  # else the signal would be for the tests
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    assert launch("stops") == 0
    thread.join()
    assert [(tmp_path / f"signals-{n}").read_text() for n in range(3)] == [f"{int(number)}\n"] * 3
    assert signal.getsignal(number) == before


STARTING = """
import sys, time
me, folder = sys.argv[sys.argv.index("--process") + 1], sys.argv[3]
open(f"{folder}/up-{me}", "w").close()
time.sleep(0.5)  # imports
from argosy import cli
cli.main(["runs", "--home", folder])
"""


@pytest.mark.parametrize(
    ("number", "says"), [(signal.SIGTERM, "process 0 of 2 was ended by SIGTERM"), (signal.SIGINT, "argosy: interrupted\n")]
)
def test_a_signal_during_imports_ends_in_a_sentence(tmp_path, capfd, number, says):
    """Fails when processes that have not begun yet end with a traceback, or the exit status does not tell the signal."""
    (tmp_path / "child.py").write_text(STARTING)

    def stop():
        if ups(tmp_path, 2):
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    start = (sys.executable, str(tmp_path / "child.py"))
    assert local.run(["train", "pocket", str(tmp_path)], 2, 1, start) == 128 + number
    thread.join()
    err = capfd.readouterr()[1]
    assert says in err and "Traceback" not in err, err


def test_when_the_launcher_is_killed_its_processes_are_told_to_end(tmp_path):
    (tmp_path / "child.py").write_text(CHILD)
    start = (sys.executable, str(tmp_path / "child.py"))
    code = f"from argosy.launch import local; local.run(['train', 'stops', {str(tmp_path)!r}], 2, 4, {start!r})"
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    ups(tmp_path, 2)
    pids = [int((tmp_path / f"up-{n}").read_text()) for n in range(2)]
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(psutil.pid_exists(pid) for pid in pids):
        time.sleep(0.02)
    assert [(tmp_path / f"signals-{n}").read_text() for n in range(2)] == ["15\n"] * 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((["train", "pocket"], 0, 4), "--processes 0 is 1 to 512 on one machine; nearest legal 1"),
        ((["train", "pocket"], 2, 513), "--devices-per-process 513 is 1 to 512 on one machine; nearest legal 512"),
        (([], 2, 4), "e.g. argosy launch local --processes 2 --devices-per-process 4 -- train pocket"),
        ((["plan", "pocket"], 2, 4), "starts argosy train, voyage, sample, not plan pocket"),
        ((["train", "pocket", "--process", "1"], 2, 4), "sets --process of each process itself"),
        ((["train", "pocket", "--coordinator=h:9"], 2, 4), "sets --coordinator of each process itself"),
    ],
)
def test_what_cannot_be_started(words, says):
    with pytest.raises(ValueError, match=says):
        local.check(*words)


def test_a_recipe_for_one_device_is_laid_over_all_of_them(pocket):
    assert local.widened(pocket, 8) == ("mesh.replica=8",)
    waves = spec.override(pocket, ["routing.exchange=pooled_wave"])
    assert local.widened(waves, 8) == ("mesh.expert=8",)
    assert local.widened(spec.override(pocket, ["mesh.data=2"]), 8) == ()
    assert local.widened(pocket, 1) == ()


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["train", "pocket"], ["--set", "mesh.replica=8"]),
        (["train", "--as", "mine", "--json", "--set=routing.exchange=ragged", "pocket"], ["--set", "mesh.expert=8"]),
        (["voyage", "pocket", "--set=mesh.data=8"], []),
        (["train", "--help"], []),
        (["sample", "pocket", "x"], []),
    ],
)
def test_a_command_is_laid_over_all_devices_whatever_the_order_of_its_words(words, more):
    assert local.laid_over(words, 8) == [*words, *more]


def test_a_recipe_that_there_is_not_is_named_before_anything_starts():
    with pytest.raises(ValueError, match="unknown recipe 'poket'"):
        local.laid_over(["train", "--seed", "3", "poket"], 8)


@pytest.mark.parametrize("more", [[], ["--set", "mesh.replica=12"]])
def test_a_batch_that_does_not_divide_is_refused_before_anything_starts(more):
    with pytest.raises(ValueError, match=r"data\.batch_seqs=8 does not divide over .* 12 devices"):
        local.laid_over(["train", "pocket", *more], 12)
