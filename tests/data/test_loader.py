"""Batches: right labels, right documents, the same on any mesh, read ahead without loose ends; every held-out byte once."""

import itertools
import threading
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from argosy import mesh as meshes
from argosy import spec
from argosy.data import loader, mixture, tokens


def settings(run, **mesh):
    return spec.override(run, ["routing.exchange=pooled_wave", *(f"mesh.{axis}={size}" for axis, size in mesh.items())])


def test_a_batch_is_the_text_at_its_spans(small, store):
    """Fails when rows are mixed up, labels are not the next tokens, or a document's start is wrong."""
    for step in (0, 7, 39):
        batch = loader.batch_numpy(small, store, step)
        assert [a.dtype for a in batch] == [np.int32] * 3 + [np.bool_]
        assert batch.valid.all() and batch.tokens.shape == (8, 64)
        for row, (source, start) in enumerate(mixture.spans(small, store.sizes, step)):
            text = store.read(source, "train", start, 65).tolist()
            assert batch.tokens[row].tolist() == text[:-1]
            assert batch.labels[row].tolist() == text[1:]
            began = 0
            for at in range(64):
                began = at if text[at] == store.doc else began
                assert batch.doc_start[row, at] == began


def test_document_starts_are_the_stores_offsets(small, store):
    """Fails when a document begins in a batch where the store does not begin one (operations.md 2.22)."""
    offsets = {source: set(store.offsets(source, "train").tolist()) for source in store.sources}
    run, begun = spec.override(small, ["data.seq_len=1024", "optim.horizon_tokens=163840"]), 0
    for step in range(20):
        batch = loader.batch_numpy(run, store, step)
        for row, (source, start) in enumerate(mixture.spans(run, store.sizes, step)):
            own = set(batch.doc_start[row].tolist()) - {0}
            assert {start + at for at in own} == offsets[source] & set(range(start + 1, start + 1024))
            begun += len(own)
    assert begun > 10


@pytest.mark.parametrize("axes", [{}, {"data": 2, "expert": 4}, {"replica": 2, "context": 4}, {"context": 2, "expert": 2}])
def test_any_mesh_gets_the_same_batch(small, store, axes, monkeypatch):
    """Fails when the devices of a mesh put together another batch, its sharding is not the mesh's, or a row is read twice."""
    run = settings(small, **axes)
    mesh = meshes.make(run)
    rows = []
    read = loader.batch_numpy
    monkeypatch.setattr(loader, "batch_numpy", lambda *a: rows.extend(a[3]) or read(*a))
    batch = loader.batch(run, store, 5, mesh)
    assert sorted(rows) == list(range(8))
    for placed, plain in zip(batch, read(run, store, 5), strict=True):
        assert placed.sharding.spec == meshes.B_S and placed.sharding.mesh == mesh
        assert placed.dtype == plain.dtype
        assert (np.asarray(placed) == plain).all()
    program = jax.jit(lambda b: b.tokens.sum() + b.labels.sum())
    with jax.set_mesh(mesh):
        assert int(program(batch)) == int(read(run, store, 5).tokens.sum() + read(run, store, 5).labels.sum())


# ---- reading ahead ------------------------------------------------------------------------------


def loaders():
    return [t for t in threading.enumerate() if t.name == "argosy-loader"]


def test_prefetch_gives_the_steps_in_order_and_ends(small, store):
    """Fails when a step is skipped, doubled or out of order, the iterator does not end, or the thread outlives it."""
    mesh = meshes.make(small)
    with loader.prefetch(small, store, mesh, 3, 9) as batches:
        found = [np.asarray(b.tokens) for b in batches]
    assert not loaders()
    assert len(found) == 6
    assert all((a == loader.batch_numpy(small, store, s).tokens).all() for s, a in enumerate(found, 3))
    with loader.prefetch(small, store, mesh, 38) as batches:
        assert len(list(batches)) == 2


def test_prefetch_reads_ahead_but_not_without_bound(small, store, monkeypatch):
    """Fails when nothing is read before it is asked for, or the whole run is read into memory."""
    read, made = loader.batch, []
    monkeypatch.setattr(loader, "batch", lambda run, store, step, mesh: made.append(step) or read(run, store, step, mesh))
    with loader.prefetch(small, store, meshes.make(small), 0, 40, ahead=2) as batches:
        deadline = time.monotonic() + 20
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert made == [0, 1, 2]  # two wait, the third is held
        next(batches)
        deadline = time.monotonic() + 20
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert made == [0, 1, 2, 3]


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_leaving_early_ends_the_thread(small, store, taken):
    """Fails when Ctrl-C or an error in the loop leaves a thread that waits for ever on a full queue."""
    with pytest.raises(KeyboardInterrupt), loader.prefetch(small, store, meshes.make(small), 0) as batches:
        list(itertools.islice(batches, taken))
        raise KeyboardInterrupt
    assert not loaders()


def test_an_error_in_the_thread_is_raised_where_the_batch_is_taken(small, store, monkeypatch):
    """Fails when a bad disk in the reading thread makes the loop wait for ever or end as if the run were over."""
    read = loader.batch

    def broken(run, store, step, mesh):
        if step == 2:
            raise OSError("bad disk")
        return read(run, store, step, mesh)

    monkeypatch.setattr(loader, "batch", broken)
    with loader.prefetch(small, store, meshes.make(small), 0) as batches:
        next(batches), next(batches)
        with pytest.raises(OSError, match="bad disk"):
            next(batches)
    assert not loaders()


def test_prefetch_refuses_before_it_reads(small, store):
    """Fails when a corpus that cannot feed the run is noticed in the middle of it, or a vocabulary never."""
    mesh = meshes.make(small)
    for setting, says in (("model.vocab=512", "model.vocab=512 is smaller"), ("data.max_epochs=0.01", "would be read")):
        with pytest.raises(ValueError, match=says), loader.prefetch(spec.override(small, [setting]), store, mesh, 0):
            pass
    assert not loaders()


def test_two_resumes_see_what_one_run_sees(small, store):
    """Fails when stopping at 7 and at 20 changes what any step reads (operations.md 2.17)."""
    mesh = meshes.make(small)

    def seen(*spans):
        found = []
        for start, stop in spans:
            with loader.prefetch(small, store, mesh, start, stop) as batches:
                found += [np.asarray(b.tokens).tobytes() for b in batches]
        return found

    assert seen((0, 7), (7, 20), (20, 40)) == seen((0, 40))


# ---- held-out text ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 8, 24])
@pytest.mark.parametrize("limit", [50, 640, 3000, 10**9])
@pytest.mark.parametrize("source", ["library", "topics"])
def test_every_held_out_label_counts_once(small, store, source, limit, rows):
    """Fails when a held-out byte is scored twice or not at all, padding is scored, or the bytes are not those of the labels."""
    run = replace(small, evals=replace(small.evals, tokens_per_set=limit, batch_seqs=rows))
    batches, size = loader.eval_batches(run, store, source)
    labels, inputs = [], []
    for batch in batches:
        assert batch.tokens.shape == (rows, 64)
        labels += batch.labels[batch.valid].tolist()
        inputs += batch.tokens[batch.valid].tolist()
        assert (batch.tokens[~batch.valid] == store.doc).all()
        assert (batch.doc_start[0, 0], batch.doc_start.dtype) == (0, np.int32)
    total = store.tokens(source, "held_out")
    stream = store.read(source, "held_out", 0, total + 1).tolist()
    count = min(limit, total)
    assert labels == stream[1 : count + 1] and inputs == stream[:count]
    text = tokens.read_bytes(store.folder, f"{source}/held_out/text")
    decoded = store.tokenizer().decode(labels).encode()  # ends of documents decode to nothing
    assert (
        decoded.rstrip("\N{REPLACEMENT CHARACTER}".encode())
        == text[:size][: len(decoded.rstrip("\N{REPLACEMENT CHARACTER}".encode()))]
    )
    assert abs(len(decoded) - size) <= 3
    if count == total:
        assert decoded == text and size == len(text)


def test_eval_batches_on_a_mesh(small, store):
    """Fails when the evaluation on eight devices is of other text than on the host."""
    run = settings(small, data=2, expert=4)
    placed, size = loader.eval_batches(run, store, "prose", meshes.make(run))
    plain, same = loader.eval_batches(small, store, "prose")
    assert size == same
    for a, b in zip(placed, plain, strict=True):
        assert a.tokens.sharding.spec == meshes.B_S
        assert all((np.asarray(x) == y).all() for x, y in zip(a, b, strict=True))


def test_evaluating_does_not_move_training(small, store):
    """Fails when reading held-out text changes what the next step reads (operations.md 2.25)."""
    before = loader.batch_numpy(small, store, 11)
    list(loader.eval_batches(small, store, "library")[0])
    assert all((a == b).all() for a, b in zip(before, loader.batch_numpy(small, store, 11), strict=True))
