"""Text from a trained run: simple and dropless, the whole window recomputed for every token."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from argosy import mesh as meshes
from argosy import processes, spec
from argosy.batch import Batch
from argosy.data import tokens as tokens_store
from argosy.model import transformer
from argosy.track import log as logs
from argosy.train import checkpoint
from argosy.train import step as steps


def from_run(name: str, home: Path, prompt: str, *, tokens: int, temperature: float, seed: int) -> Iterator[str]:
    """Pieces of text from the newest checkpoint of a run given by name or folder; see `sample`.

    On one device if there are fewer than the run was trained on. Several processes all get every piece.

    Raises:
        ValueError: for an unknown run, one without a checkpoint, or bad numbers.
    """
    log = logs.read(name, home)
    run = spec.from_json(log.run["run"])
    if not checkpoint.latest_step(log.folder):
        raise ValueError(f"run {log.name!r} has no checkpoint yet; training it makes one")
    corpus = tokens_store.open_store(tokens_store.corpus_folder(home, run.data.corpus))
    if processes.alone() and spec.devices(run) > jax.device_count():  # what many devices trained may fit on one
        run = on_one_device(run)
    mesh = meshes.make(run)
    compute = replace(run.compute, params="fp32", masters="device", optimizer_state="device")  # as checkpoints hold weights
    with jax.set_mesh(mesh), checkpoint.opened(log.folder, keep=None) as saved:
        state, _ = checkpoint.restore(saved, steps.abstract(replace(run, compute=compute), mesh), set_aside=False)
    assert state is not None
    yield from sample(run, state, corpus, prompt, tokens=tokens, temperature=temperature, seed=seed)


def on_one_device(run: spec.Run) -> spec.Run:
    """The run as one device computes it: all experts are here, whatever carried tokens to them."""
    mesh = spec.Mesh(replica=1, data=1, context=1, expert=1)
    return replace(run, mesh=mesh, routing=replace(run.routing, exchange="local"))


def sample(
    run: spec.Run, state: steps.State, corpus: tokens_store.Store, prompt: str, *, tokens: int, temperature: float, seed: int
) -> Iterator[str]:
    """The prompt, then pieces of text that continue it, until `<|doc|>` ends the document or `tokens` are drawn.

    `temperature` 0 takes the likeliest token. The window is the run's sequence length: older tokens fall out.

    Raises:
        ValueError: for a temperature below 0 or not finite, a count below 1, a seed outside 0 to 2^32 - 1.
    """
    if not (math.isfinite(temperature) and temperature >= 0) or tokens < 1 or not 0 <= seed < 2**32:
        raise ValueError(
            f"temperature={temperature}, tokens={tokens}, seed={seed}: temperature is finite and at least 0, tokens at least 1,"
            f" seed 0 to {2**32 - 1:,}; e.g. 0.7, 200, 0"
        )
    window = run.data.seq_len
    tokenizer = corpus.tokenizer()
    ids = [corpus.doc, *tokenizer.encode(prompt).ids]
    rows = run.mesh.replica * run.mesh.data * run.mesh.expert

    @jax.jit
    def draw(params: Any, bias: Array, batch: Batch, last: Array, key: Array) -> Array:
        logits = transformer.logits_at(params, bias, batch, 0, last, run)
        if temperature == 0:
            return jnp.argmax(logits)
        return jax.random.categorical(key, logits / temperature)

    mesh = meshes.make(run)
    key = jax.random.key(seed)
    shown = tokenizer.decode(ids[1:])
    yield prompt
    with jax.set_mesh(mesh):
        for i in range(tokens):
            recent = ids[-window:]
            row = np.zeros((rows, window), np.int32)
            row[:, : len(recent)] = recent
            zero = np.zeros_like(row)
            batch = jax.tree.map(
                lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, meshes.B_S)),
                Batch(
                    tokens=row, labels=zero, doc_start=zero, valid=np.broadcast_to(np.arange(window) < len(recent), row.shape)
                ),
            )
            token = int(draw(state.params, state.router_bias, batch, jnp.int32(len(recent) - 1), jax.random.fold_in(key, i)))
            if token == corpus.doc:
                return
            ids.append(token)
            text = tokenizer.decode(ids[1:])
            if not text.endswith("\ufffd"):  # wait for the rest of a character
                yield text[len(shown) :]
                shown = text
