"""The run store: nothing that was recorded is lost, attempts are kept apart, drawing summaries are exact."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from sample_runs import small_run

from argosy import cli, spec, track
from argosy.track import columns, layout, log, store

RUN = {"recipe": "pocket", "seed": 0, "data": {"seq_len": 256, "batch_seqs": 8}}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "runs" / "try"
    store.create(folder, RUN, {"argosy": "0.1.0"}, corpus={"name": "stdlib", "checksum": "abc"})
    return folder


def write(folder, steps, at_step=0, scale=1.0, outcome=""):
    with store.open_writer(folder, at_step) as writer:
        for step in steps:
            writer.record(step, {"train/loss": scale * step, "grad/norm/total": 1.0})
        writer.close(outcome)


def test_what_was_recorded_reads_back_exactly(folder):
    """Fails when a value, a step or a name changes on its way through tail and chunk."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(50) * 10.0 ** rng.integers(-30, 30, 50)
    writer = store.open_writer(folder, 0)
    for step, value in enumerate(values):
        writer.record(step + 1, {"train/loss": float(value), "naïve/ß": np.float32(value)})
    writer.record(51, {"train/loss": math.nan, "optim/learning_rate": math.inf})
    live = log.read(folder)
    writer.close("done")
    for found in (live, log.read(folder)):
        steps, loss = found.series("train/loss")
        assert steps.dtype == np.int64 and loss.dtype == np.float64
        np.testing.assert_array_equal(steps, np.arange(1, 52))
        np.testing.assert_array_equal(loss, np.append(values, np.nan))
        assert found.last("optim/learning_rate") == (51, math.inf)
        assert found.metrics == ["naïve/ß", "optim/learning_rate", "time", "train/loss"]
        assert found.run["run"] == RUN and found.run["corpus"]["checksum"] == "abc"
        assert np.all(np.abs(found.series("time")[1] - time.time()) < 600)


def test_rollback_view_is_continuous_and_attempts_stay_apart(folder):
    """Fails when rows after a rollback are refused or dropped, or the view jumps (operations.md entry 26)."""
    write(folder, range(1, 51))
    with store.open_writer(folder, 30) as writer:
        writer.event("note", 31)
        halfway = log.read(folder)
        for step in range(31, 61):
            writer.record(step, {"train/loss": -1.0 * step})
    np.testing.assert_array_equal(halfway.series("train/loss")[0], np.arange(1, 31))
    found = log.read(folder)
    steps, loss = found.series("train/loss")
    np.testing.assert_array_equal(steps, np.arange(1, 61))
    np.testing.assert_array_equal(loss, np.where(steps <= 30, steps, -steps))
    np.testing.assert_array_equal(found.series("train/loss", attempt=1)[0], np.arange(1, 51))
    np.testing.assert_array_equal(found.series("train/loss", attempt=2)[0], np.arange(31, 61))
    assert [(r["kind"], r["step"], r["attempt"]) for r in found.lineage] == [
        ("attempt", 0, 1), ("ended", 50, 1), ("attempt", 30, 2), ("ended", 60, 2)
    ]  # fmt: skip
    drawn = columns.buckets(found.pieces("train/loss"), 20)
    assert drawn.points.sum() == 60 and drawn.last[-1] == 60 and len(drawn.points) <= 20


def test_two_rollbacks_and_a_row_repeated_at_the_seam(folder):
    """Fails when an older attempt shows through a later one that went back further, or the seam holds a step twice."""
    write(folder, range(1, 51), scale=1.0)
    write(folder, range(40, 61), at_step=40, scale=10.0)  # says step 40 again
    write(folder, range(21, 31), at_step=20, scale=100.0)
    steps, loss = log.read(folder).series("train/loss")
    np.testing.assert_array_equal(steps, np.arange(1, 31))
    np.testing.assert_array_equal(loss, np.where(steps <= 20, steps, 100 * steps))
    with store.open_writer(folder, 30) as writer:
        writer.event("spike", 30)
    write(folder, [25, 26], at_step=24, scale=5.0)
    found = log.read(folder)
    assert found.events[0]["superseded"] and list(found.series("train/loss")[0]) == list(range(1, 27))


def test_events_of_rolled_back_steps_are_marked(folder):
    """Fails when the page cannot tell what still holds from what was rolled back."""
    with store.open_writer(folder, 0) as writer:
        writer.event("baseline", 0, library=2.0, tests=1.8)
        writer.event("checkpoint", 50, path=folder)
    write(folder, [31], at_step=30)
    first, second = log.read(folder).events
    assert first["fields"] == {"library": 2.0, "tests": 1.8} and not first["superseded"]
    assert second["fields"] == {"path": str(folder)} and second["superseded"]


def test_a_killed_writer_loses_nothing(folder):
    """Fails when SIGKILL in the middle of recording loses a row that record() had returned for, or blocks a reopen."""
    script = (
        "import sys, pathlib\n"
        "from argosy.track import store\n"
        "store.TAIL_ROWS, store.MERGE = 16, 2\n"  # roll and merge all the time, so that the kill hits those too
        "writer = store.open_writer(pathlib.Path(sys.argv[1]), 0)\n"
        "for step in range(1, 10**9):\n"
        "    writer.record(step, {f'm/{i}': step + i / 100 for i in range(50)})\n"
        "    sys.stdout.write(f'{step}\\n'); sys.stdout.flush()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if int(line) >= 700:
                break
        assert layout.writing(folder)
        child.send_signal(signal.SIGKILL)
        told = [int(line), *(int(rest) for rest in child.stdout.read().split("\n")[:-1] if rest)][-1]
    assert not layout.writing(folder)
    before = log.read(folder)
    write(folder, [told + 2], at_step=told + 1)
    for found in (before, log.read(folder)):
        steps, values = found.series("m/7", attempt=1)
        assert steps[-1] in (told, told + 1)
        np.testing.assert_array_equal(steps, np.arange(1, steps[-1] + 1))
        np.testing.assert_array_equal(values, steps + 7 / 100)
    ended = [r for r in log.read(folder).lineage if r["kind"] == "ended"]
    assert ended[0]["fields"] == {"outcome": "killed"} and ended[0]["step"] == steps[-1]


@pytest.mark.parametrize("name", ["metrics/tail-000000.jsonl", "events.jsonl", "lineage.jsonl"])
def test_a_torn_last_line_is_left_out_and_closed_off(folder, name):
    """Fails when half a line hides the lines before it, or swallows the first line after it."""
    writer = store.open_writer(folder, 0)
    writer.record(1, {"train/loss": 1.0})
    writer.event("one", 1)
    with (folder / name).open("ab") as file:
        file.write(b'{"kind": "torn", "step": 2, "time": 3, "metr')
    torn = log.read(folder)
    assert list(torn.series("train/loss")[0]) == [1] and len(torn.events) == 1 and len(torn.lineage) == 1
    os.close(writer._lock)  # as if the process had died here
    with store.open_writer(folder, 1) as writer:
        writer.record(2, {"train/loss": 2.0})
        writer.event("two", 2)
    found = log.read(folder)
    assert list(found.series("train/loss")[1]) == [1.0, 2.0]
    assert [e["kind"] for e in found.events] == ["one", "two"]
    assert [r["kind"] for r in found.lineage] == ["attempt", "ended", "attempt", "ended"]


def test_a_second_writer_is_refused_while_the_first_lives(folder):
    """Fails when two processes can interleave rows, or when a dead process keeps the run for ever."""
    script = (
        "import sys, pathlib, time\n"
        "from argosy.track import store\n"
        "writer = store.open_writer(pathlib.Path(sys.argv[1]), 0)\n"
        "print('open', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        with pytest.raises(ValueError, match=rf"being written by process {child.pid} on .*--as try-2"):
            store.open_writer(folder, 0)
        child.kill()
    write(folder, [1])  # the lock file is still there, its owner is not
    first = store.open_writer(folder, 1)
    with pytest.raises(ValueError, match=f"process {os.getpid()}"):
        store.open_writer(folder, 1)
    first.close()
    assert not layout.writing(folder)


def test_a_full_disk_raises_and_harms_nothing(folder):
    """Fails when a write that does not fit leaves half a line or half a chunk, or is not reported as OSError."""
    script = (
        "import resource, sys, pathlib\n"
        "from argosy.track import store\n"
        "store.TAIL_ROWS = 40\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))\n"
        "writer, kept = store.open_writer(pathlib.Path(sys.argv[1]), 0), 0\n"
        "try:\n"
        "    for step in range(1, 1000):\n"
        "        writer.record(step, {f'm/{i}': step / 3 for i in range(5)}); kept = step\n"
        "except OSError as error:\n"
        "    print(kept, type(error).__name__)\n"
        "try:\n"
        "    writer.close('failed')\n"
        "except OSError:\n"
        "    print('close')\n"
    )
    for limit in (3000, 2000):  # the tail does not fit; a chunk's file does not fit
        own = folder.with_name(f"limit-{limit}")
        store.create(own, RUN, {})
        done = subprocess.run([sys.executable, "-c", script, str(own), str(limit)], capture_output=True, text=True, check=True)
        kept = int(done.stdout.split()[0])
        assert "OSError" in done.stdout and 5 < kept < 999
        assert not list((own / "metrics").glob("*.tmp"))
        steps, _ = log.read(own).series("m/3")
        assert steps[-1] >= kept
        np.testing.assert_array_equal(steps, np.arange(1, steps[-1] + 1))
        write(own, [int(steps[-1]) + 1], at_step=int(steps[-1]))
        assert log.read(own).series("m/3", attempt=1)[0][-1] == steps[-1]


def test_a_chunk_that_cannot_be_saved_keeps_its_rows(folder, monkeypatch):
    """Fails when rows are lost or hidden because the chunk after a failed one covers them."""
    monkeypatch.setattr(store, "TAIL_ROWS", 10)
    real, broken = columns.save, [True]

    def save(*args):
        if broken:
            broken.pop()
            raise OSError(28, "No space left on device")
        real(*args)

    monkeypatch.setattr(columns, "save", save)
    writer = store.open_writer(folder, 0)
    for step in range(1, 46):
        if step == 10:
            with pytest.raises(OSError):
                writer.record(step, {"train/loss": step})
        else:
            writer.record(step, {"train/loss": step})
    np.testing.assert_array_equal(log.read(folder).series("train/loss")[0], np.arange(1, 46))
    writer.close()
    np.testing.assert_array_equal(log.read(folder).series("train/loss")[0], np.arange(1, 46))


def test_chunks_merge_and_readers_see_every_row_at_any_time(folder, monkeypatch):
    """Fails when merging reorders, loses or doubles rows, or a reader that began before a merge breaks."""
    monkeypatch.setattr(store, "TAIL_ROWS", 10)
    writer = store.open_writer(folder, 0)
    early = None
    for step in range(1, 701):
        writer.record(step, {"train/loss": float(step)} | ({"eval/loss": -step} if step % 100 == 0 else {}))
        if step % 37 == 0:
            assert log.read(folder).series("train/loss")[0][-1] == step
        if step == 75:
            early = log.read(folder)
    found = log.read(folder)
    assert len(found.chunks) < 25
    np.testing.assert_array_equal(found.series("train/loss")[1], np.arange(1.0, 701.0))
    np.testing.assert_array_equal(found.series("eval/loss")[0], np.arange(100, 701, 100))
    np.testing.assert_array_equal(early.series("train/loss")[0], np.arange(1, 76))
    writer.close()


def test_files_left_by_a_crash_in_between_are_not_counted_twice(folder, monkeypatch):
    """Fails when a tail beside its chunk, parts beside their merge, or a half-written chunk show up in the view."""
    monkeypatch.setattr(store, "TAIL_ROWS", 10)
    monkeypatch.setattr(store, "_remove", lambda path: None)
    writer = store.open_writer(folder, 0)
    for step in range(1, 86):
        writer.record(step, {"train/loss": float(step)})
    (folder / "metrics" / "tail-000003.jsonl").write_bytes(
        b'{"attempt": 1}\n{"step": 31, "time": 1, "metrics": {"train/loss": 9}}\n'
    )
    (folder / "metrics" / "chunk-000009-000009.tmp").mkdir()
    np.testing.assert_array_equal(log.read(folder).series("train/loss")[1], np.arange(1.0, 86.0))
    os.close(writer._lock)
    monkeypatch.undo()
    write(folder, [86], at_step=85)
    np.testing.assert_array_equal(log.read(folder).series("train/loss")[1], np.arange(1.0, 87.0))
    assert not list((folder / "metrics").glob("*.tmp")) and len(layout.listing(folder).covered) == 0


def direct(values, counts):
    """Smallest, largest and mean per stretch of `counts` points, over the finite ones."""
    edges = np.cumsum(counts)[:-1]
    parts = [part[np.isfinite(part)] for part in np.split(values, edges)]
    return [[f(p) if len(p) else math.nan for p in parts] for f in (np.min, np.max, np.mean)]


@pytest.mark.parametrize("most", [2000, 777, 7])
def test_a_million_points_summarised_equal_the_direct_result(tmp_path, most):
    """Fails when the pyramid, its use across chunks and cuts, or the finite counts are wrong."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal(1_000_000).cumsum()
    values[rng.integers(0, 1_000_000, 500)] = np.nan
    values[250_000:250_700] = np.inf
    steps = np.cumsum(rng.integers(1, 4, 1_000_000))
    pieces, at, shown = [], 0, []
    for i, size in enumerate([524_288, 300_000, 65_536, 65_536, 40_000, 3_000, 1_024, 600, 15, 1]):
        path = tmp_path / f"chunk-{i}-{i}"
        columns.save(path, {"x": columns.column(steps[at : at + size], values[at : at + size])}, 1)
        start, stop = (5, size - 77) if size > 1_000 else (0, size)
        pieces.append(columns.Piece(columns.pick(columns.load(path), "x"), start, stop))
        shown.append(np.arange(at + start, at + stop))
        at += size
    assert at == 1_000_000
    index = np.concatenate(shown)
    found = columns.buckets(pieces, most)
    assert most / 2 < len(found.points) <= most and found.points.sum() == len(index)
    edges = np.cumsum(found.points)
    np.testing.assert_array_equal(found.first, steps[index][np.append(0, edges[:-1])])
    np.testing.assert_array_equal(found.last, steps[index][edges - 1])
    low, high, mean = direct(values[index], found.points)
    np.testing.assert_array_equal(found.low, low)
    np.testing.assert_array_equal(found.high, high)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-9, atol=1e-9)


def test_few_points_are_drawn_one_by_one():
    """Fails when a short series is blurred, or an empty or all-NaN one breaks."""
    points = columns.column([3, 7, 9], [1.0, math.nan, 3.0])
    found = columns.buckets([columns.Piece(points, 0, 3)], 2000)
    assert list(found.first) == [3, 7, 9] and list(found.points) == [1, 1, 1]
    np.testing.assert_array_equal(found.mean, [1.0, math.nan, 3.0])
    assert len(columns.buckets([], 10).mean) == 0


def test_rows_that_arrive_late_are_put_in_order(folder):
    """Fails when an evaluation that ends after the next step was recorded is lost or spoils the order."""
    with store.open_writer(folder, 0) as writer:
        for step in (1, 2, 4, 3, 5, 5):
            writer.record(step, {"x": float(10 * step)})
        writer.record(5, {"x": 51.0})
    steps, values = log.read(folder).series("x")
    assert list(steps) == [1, 2, 3, 4, 5] and list(values) == [10, 20, 30, 40, 51]


def test_follow_gives_each_row_once(folder, monkeypatch):
    """Fails when a page that follows a run misses rows without being told, or gets them twice."""
    monkeypatch.setattr(store, "TAIL_ROWS", 10)
    start = log.follow(folder)
    assert not start.rows and not start.missed
    seen, position, missed = [], start.position, 0
    with store.open_writer(folder, 0) as writer:
        for step in range(1, 26):
            writer.record(step, {"x": 1.0})
            if step == 12:
                writer.event("note", 12)
            news = log.follow(folder, position)
            seen += [row[0] for row in news.rows]
            missed += news.missed
            position = news.position
            if step == 12:
                assert [e["kind"] for e in news.events] == ["note"]
    assert missed == 3 and len(seen) == len(set(seen)) == 22  # the first rows of the three tails came with `missed`
    with pytest.raises(ValueError, match="tail:bytes"):
        log.follow(folder, "7")


def test_an_existing_run_keeps_its_values(folder):
    """Fails when a run can be continued with other values without anybody noticing."""
    write(folder, [1])
    store.create(folder, json.loads(json.dumps(RUN)), {"argosy": "9"})
    with pytest.raises(ValueError, match=r"data.seq_len 256 -> 512; .*--as try-2"):
        store.create(folder, RUN | {"data": {"seq_len": 512, "batch_seqs": 8}}, {})


def test_mistakes_are_answered_in_words(folder):
    """Fails when an unknown run or metric, or a folder without a run, ends in a bare traceback."""
    home = folder.parents[1]
    write(folder, [1])
    with pytest.raises(ValueError, match=r"no run 'tyr' .*nearest: try"):
        track.read("tyr", home)
    with pytest.raises(ValueError, match="no run was started there yet"):
        track.read("tyr", home / "elsewhere")
    with pytest.raises(ValueError, match=r"no metric 'train/los'; nearest: train/loss, "):
        track.read("try", home).series("train/los")
    with pytest.raises(ValueError, match="holds no run"):
        store.open_writer(home, 0)
    with pytest.raises(ValueError, match="nearest legal 0"):
        store.open_writer(folder, -1)
    with pytest.raises(OSError):
        store.create(layout.Path("/proc/argosy"), RUN, {})


def test_a_damaged_chunk_is_named(folder):
    """Fails when a truncated file gives wrong numbers, or an error that does not say which file."""
    write(folder, range(1, 20))
    for name, kept in (("values.npy", 200), ("values.npy", 10), ("index.json", 10), ("index.json", 0)):
        path = next((folder / "metrics").glob("chunk-*")) / name
        whole = path.read_bytes()
        path.write_bytes(whole[:kept])
        columns._load.cache_clear()
        with pytest.raises(ValueError, match=rf"chunk-000000-000000/{name} is not what was written"):
            log.read(folder)
        path.write_bytes(whole)
    columns._load.cache_clear()
    assert len(log.read(folder).series("train/loss")[0]) == 19


def test_a_torn_run_json_is_named(folder):
    """Fails when starting a run again over a torn run.json does not say which file it is."""
    (folder / "run.json").write_bytes(b'{"name": "trail\n')
    with pytest.raises(ValueError, match=r"try/run\.json is not what was written: Invalid control"):
        store.create(folder, RUN, {})


def test_foreign_names_among_the_metrics_are_not_looked_at(folder):
    """Fails when a stray folder or file stops readers or the next writer."""
    for name in ("chunk-foo", "chunk-1-2-3", "chunk-000000-000000.bak", "tail-x.jsonl", "tail-000000.jsonl~", "notes"):
        (folder / "metrics" / name).mkdir()
    write(folder, [1])
    write(folder, [2], at_step=1)
    assert list(log.read(folder).series("train/loss")[0]) == [1, 2] and (folder / "metrics" / "chunk-foo").is_dir()


def test_track_starts_without_jax():
    """Fails when reading a run in a notebook pulls in JAX."""
    done = "import sys, argosy.track, argosy.track.store, argosy.track.provenance; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", done], capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_change_is_noted_from_outside_the_writer(tmp_path, capsys):
    """Fails when a note disturbs the writer, is lost, or is taken of a run that has not begun."""
    folder = tmp_path / "runs" / "small"
    store.create(folder, spec.to_json(small_run()), {"argosy": "0.1.0"})
    with pytest.raises(ValueError, match="has not begun"):
        store.note(folder, "change", 0, what="x")
    with store.open_writer(folder, 0) as writer:
        writer.record(7, {"train/loss": 2.0})
        cli.main(["note", str(folder), "decay of gates", "--home", str(tmp_path)])
        cli.main(["note", str(folder), "earlier", "--at", "3", "--home", str(tmp_path), "--json"])
        writer.record(8, {"train/loss": 1.9})
    assert "from update 7 on: decay of gates" in capsys.readouterr().out
    noted = [(r["step"], r["attempt"], r["fields"]) for r in store.read(folder).lineage if r["kind"] == "change"]
    assert noted == [(7, 1, {"what": "decay of gates"}), (3, 1, {"what": "earlier"})]
