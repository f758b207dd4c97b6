"""`argosy voyage` as its user meets it: a process, its page, its end, and what comes after a kill or a full disk.

Each test fails when the main job leaves something behind, says more or less than it should, or ends elsewhere after a break.
"""

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import commands
import psutil
import pytest
from commands import files, finished, spawn

pytestmark = pytest.mark.slow

UPDATES = 200  # of milliseconds each: a kill at the first that is told of falls well before the end


def start(home, name, *more):
    """A voyage under way without a ladder, its outputs as pipes."""
    return spawn(home, "voyage", f"{home / 'tiny.py'}:run", "--ladder", "skip", "--as", name, "--port", "0", *more)


def voyage(home, name, *more):
    """Exit status, standard output, standard error of a whole voyage."""
    process = start(home, name, *more)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def address_in(line):
    found = re.search(r"http://127\.0\.0\.1:\d+/", line)
    assert found, line
    return found[0]


def answers(address):
    """What the page says of runs; None when nobody listens there."""
    try:
        with urllib.request.urlopen(address + "api/runs", timeout=60) as answer:
            return json.load(answer)
    except urllib.error.URLError as error:
        assert isinstance(error.reason, ConnectionRefusedError), error
        return None


def pages(process):
    """Page processes of a voyage."""
    return [c for c in psutil.Process(process.pid).children() if "argosy.track.server" in c.cmdline()]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with a recipe and a corpus; its voyages share compiled programs."""
    return commands.make(tmp_path_factory.mktemp("home"), UPDATES)


@pytest.fixture(scope="module")
def whole(home):
    """A voyage that nobody disturbs: its summary, and what was seen of it while it lasted and after."""
    process = start(home, "whole")
    first = process.stdout.readline()
    address = address_in(first)
    page = pages(process)
    during = answers(address)
    rest, err = process.communicate(timeout=300)
    return {"first": first, "during": during, "page": page, "rest": rest, "err": err, "status": process.returncode,
            "address": address, "after": answers(address)}  # fmt: skip


@pytest.fixture(scope="module")
def expected(home, whole):
    """What every other voyage has to come to: the summary of the undisturbed one."""
    assert whole["status"] == 0, whole["err"]
    return json.loads(voyage(home, "whole", "--json")[1])


def numbers(summary):
    return {key: summary[key] for key in ("updates", "loss", "macro_bits_per_byte", "sources", "tokens", "drop_fraction_last")}


def test_a_voyage_serves_its_page_while_it_lasts_and_not_longer(whole):
    assert whole["status"] == 0, whole["err"]
    assert "whole" in whole["first"]
    assert [run["name"] for run in whole["during"]["runs"]] == ["whole"]
    assert len(whole["page"]) == 1
    assert not whole["page"][0].is_running()
    assert whole["after"] is None
    assert "Held-out bits per byte" in whole["rest"]
    assert "Traceback" not in whole["err"]


def test_json_is_alone_and_a_finished_run_stays_as_it_is(home, whole):
    folder = home / "runs" / "whole"
    before = files(folder)
    status, out, err = voyage(home, "whole", "--json")
    assert status == 0, err
    result = json.loads(out)
    assert result["updates"] == result["updates_total"] == UPDATES
    assert result["held_out"] == "all"
    assert answers(address_in(err)) is None
    told = {Path("lineage.jsonl"), Path("writer.lock")}  # that there was one more attempt, and who made it
    after = files(folder)
    assert any("checkpoints" in path.parts for path in before)
    assert {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)} <= told
    again = json.loads(voyage(home, "whole", "--json")[1])
    assert again == result


def test_killed_in_the_middle_it_goes_on_to_the_same_end(home, expected):
    """Killed once before its first checkpoint of training, and once after one."""
    early = start(home, "killed")
    kill_at_first_progress(early)
    assert finished(home, "train", f"{home / 'tiny.py'}:run", "--as", "killed", "--stop-after", "20").returncode == 0
    late = start(home, "killed")
    kill_at_first_progress(late)
    status, out, err = voyage(home, "killed", "--json")
    assert status == 0, err
    assert numbers(json.loads(out)) == numbers(expected)


def kill_at_first_progress(process):
    """SIGKILL once an update is told of; then the page has ten seconds to go by itself."""
    address = address_in(process.stdout.readline())
    (page,) = pages(process)
    for line in process.stderr:
        if found := re.match(rf"(\d+)/{UPDATES} ", line):
            break
    else:
        pytest.fail("the voyage told of no update")
    process.kill()
    process.communicate(timeout=10)
    assert process.returncode == -9  # it had not ended by itself
    assert int(found[1]) < UPDATES
    limit = time.monotonic() + 10
    while page.is_running() and page.status() != psutil.STATUS_ZOMBIE and time.monotonic() < limit:
        time.sleep(0.1)
    assert answers(address) is None


@contextlib.contextmanager
def small_disk(at: Path, size: str):
    """A file system of its own at a folder.

    Skips where this user may not mount one.
    """
    at.mkdir(parents=True)
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(at)], capture_output=True, text=True
    )
    if not done or done.returncode:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip() if done else 'there is no mount'}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def test_a_full_disk_is_one_sentence_and_costs_no_checkpoint(home, expected, tmp_path):
    for name in ("corpora", "cache", "tiny.py"):
        (tmp_path / name).symlink_to(home / name)
    with small_disk(tmp_path / "runs", "16m"):
        begun = finished(tmp_path, "train", f"{tmp_path / 'tiny.py'}:run", "--as", "full", "--stop-after", "190")
        assert begun.returncode == 0, begun.stderr
        kept = tmp_path / "runs" / "full" / "checkpoints" / "step_190"
        before = files(kept)
        filler = tmp_path / "runs" / "filler"
        for left, what in ((8_000, ""), (300_000, "checkpoint not written")):  # first the log does not fit, then it does
            filler.unlink(missing_ok=True)
            filler.write_bytes(b"\0" * (shutil.disk_usage(tmp_path / "runs").free - left))
            status, _, err = voyage(tmp_path, "full")
            assert status == 1, err
            told = [line for line in err.splitlines() if line.startswith("argosy: ")]
            assert len(told) == 1, err
            assert "No space left on device" in told[0]
            assert what in told[0]
            assert len(err.splitlines()) <= 10, err
            assert "Traceback" not in err
            assert files(kept) == before
        filler.unlink()
        status, out, err = voyage(tmp_path, "full", "--json")
        assert status == 0, err
        assert numbers(json.loads(out)) == numbers(expected)


def test_the_whole_job_with_its_ladder_goes_on_after_a_kill(home):
    """Rungs, check, forecast, run, verdict; killed within the ladder, then called again, and once more when all is done."""
    small = ("data.corpus=words", "model.vocab=320", "model.layers=2", "model.window=8", "model.gate_rank=4", "data.seq_len=32",
             "data.batch_seqs=8", "data.max_epochs=100", "moe.experts=4", "moe.experts_per_token=2", "optim.horizon_tokens=25600",
             "evals.tokens_per_set=256", "evals.every_frac=0.1", "compute.readout_block_tokens=64",
             'data.phases=[{"name": "main", "until_frac": 1.0, "weights": {"words": 1}}]')  # fmt: skip
    words = ["voyage", "pocket", "--port", "0", "--despite-no-go", *(word for value in small for word in ("--set", value))]
    first = spawn(home, *words)
    for line in first.stderr:
        if "rung 2 of 5" in line:
            break
    first.kill()
    first.communicate(timeout=30)
    assert not (home / "forecasts").exists() and not any((home / "runs" / "pocket" / "metrics").iterdir())
    second = finished(home, *words)
    assert second.returncode == 0, second.stderr
    assert "1 of 5" not in second.stderr and "rung 2 of 5" in second.stderr
    shown = " ".join(second.stdout.split())
    for text in ("GO pocket:", "Forecast registered", "Against its forecast", "before the run's first update", "Verdict: "):
        assert text in shown or text.replace("GO ", "NO-GO ") in shown or text.replace("GO ", "CAUTION ") in shown
    kept = files(home / "forecasts" / "pocket")
    third = finished(home, *words, "--json")
    assert third.returncode == 0, third.stderr
    result = json.loads(third.stdout)
    assert result["updates"] == result["updates_total"] == 100
    assert result["forecast"]["forecast"]["late"] is None and result["forecast"]["forecast"]["number"] == 1
    assert result["forecast"]["verdict"] in ("ahead", "on track", "behind", "off")
    assert kept[Path("0001.json")] == files(home / "forecasts" / "pocket")[Path("0001.json")]
    events = [json.loads(line) for line in (home / "runs" / "pocket" / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "verdict" for event in events)
