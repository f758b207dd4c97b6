"""Batches on the mesh: a pure function of (run, step), read ahead by a thread; and the held-out text in order."""

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int, Integer
from numpy import ndarray

from argosy import mesh as meshes
from argosy import spec
from argosy.batch import Batch
from argosy.data import mixture, tokens


def batch_numpy(run: spec.Run, store: tokens.Store, step: int, rows: range | None = None) -> Batch:
    """The batch of a step on the host, or some rows of it.

    Raises:
        ValueError: as `mixture.spans`.
    """
    spans = mixture.spans(run, store.sizes, step, rows)
    text = np.empty((len(spans), run.data.seq_len + 1), np.int32)
    for source in dict.fromkeys(name for name, _ in spans):
        here = [i for i, (name, _) in enumerate(spans) if name == source]
        text[here] = store.gather(source, tokens.TRAIN, [spans[i][1] for i in here], run.data.seq_len + 1)
    return packed(text, np.ones((len(spans), run.data.seq_len), np.bool_), store.doc)


def packed(text: Int[ndarray, "B S_and_1"], valid: ndarray, doc: int) -> Batch:
    """Spans of tokens as a batch: labels are the tokens one further on, documents begin at `doc`, and padding is `doc`."""
    seen, labels = (np.where(valid, part, np.int32(doc)) for part in (text[:, :-1], text[:, 1:]))
    return Batch(seen, labels, doc_starts(seen, doc), valid)


def doc_starts(seen: Integer[ndarray, "B S"], doc: int) -> Int[ndarray, "B S"]:
    """Where in its row each token's document begins, int32; 0 for a document that began before the row.

    >>> doc_starts(np.array([[5, 6, 0, 7, 0, 0, 8]], np.int32), 0).tolist()
    [[0, 0, 2, 2, 4, 5, 5]]
    """
    begins = np.where(seen == doc, np.arange(seen.shape[1], dtype=np.int32)[None, :], np.int32(0))
    return np.maximum.accumulate(begins, axis=1)


def batch(run: spec.Run, store: tokens.Store, step: int, mesh: Mesh) -> Batch:
    """The batch of a step on the mesh, sequences over its batch axes, positions over `context`.

    A process reads the rows of its own devices only, so the batch is the same for any number of processes.
    """
    return place(run.data.batch_seqs, run.data.seq_len, mesh, lambda rows: batch_numpy(run, store, step, rows))


def place(rows: int, seq_len: int, mesh: Mesh, read: Callable[[range], Batch]) -> Batch:
    """A global batch from a function that gives rows of it on the host."""
    sharding = NamedSharding(mesh, meshes.B_S)
    once = functools.cache(read)

    def field(n: int) -> jax.Array:
        def local(index: Any) -> Any:
            return once(range(*index[0].indices(rows)))[n][:, index[1]]

        return jax.make_array_from_callback((rows, seq_len), sharding, local)

    return Batch(*(field(n) for n in range(len(Batch._fields))))


@contextlib.contextmanager
def prefetch(
    run: spec.Run, store: tokens.Store, mesh: Mesh, start: int, stop: int | None = None, ahead: int = 2
) -> Iterator[Iterator[Batch]]:
    """The batches of steps `start` to `stop - 1` (the run's end by default), `ahead` of them read before they are asked for.

    What goes wrong in the reading thread is raised where the batch is taken. Leaving the context ends the thread.

    Raises:
        ValueError: for a corpus that cannot feed the run.
    """
    mixture.check(run, store.sizes)
    tokens.check(run, store)
    stop = spec.steps(run) if stop is None else stop
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=ahead)
    leaving = threading.Event()

    def put(item: Batch | BaseException | None) -> None:
        while not leaving.is_set():
            with contextlib.suppress(queue.Full):
                return ready.put(item, timeout=0.05)

    def work() -> None:
        try:
            for step in range(start, stop):
                if leaving.is_set():
                    return
                put(batch(run, store, step, mesh))
            put(None)
        except BaseException as error:
            put(error)

    def taken() -> Iterator[Batch]:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = threading.Thread(target=work, name="argosy-loader", daemon=True)
    thread.start()
    try:
        yield taken()
    finally:
        leaving.set()
        thread.join()


def eval_batches(run: spec.Run, store: tokens.Store, source: str, mesh: Mesh | None = None) -> tuple[Iterator[Batch], int]:
    """A source's held-out text in order, and the UTF-8 bytes that its labels stand for.

    Sequences do not overlap; `evals.tokens_per_set` limits the labels; the last batch is padded with
    `valid=False`. Bits per byte are the bits of all valid labels, ends of documents among them, over these bytes.
    On the host when no mesh is given.

    Raises:
        ValueError: for a source without held-out text; as `tokens.Store.held_out_extent`.
    """
    tokens.check(run, store)
    labels, text_bytes = store.held_out_extent(source, run.evals.tokens_per_set)
    seq_len, rows = run.data.seq_len, run.evals.batch_seqs
    sequences = -(-labels // seq_len)

    def read(first: int, local: range) -> Batch:
        chosen = np.arange(local.start, local.stop) + first
        text = np.full((len(chosen), seq_len + 1), store.doc, np.int32)
        for row, n in enumerate(chosen.tolist()):
            if n < sequences:
                there = min(seq_len, labels - n * seq_len)
                text[row, : there + 1] = store.read(source, tokens.HELD_OUT, n * seq_len, there + 1)
        valid = chosen[:, None] * seq_len + np.arange(seq_len)[None, :] < labels
        return packed(text, valid, store.doc)

    def batches() -> Iterator[Batch]:
        for first in range(0, sequences, rows):
            if mesh is None:
                yield read(first, range(rows))
            else:
                yield place(rows, seq_len, mesh, functools.partial(read, first))

    return batches(), text_bytes
