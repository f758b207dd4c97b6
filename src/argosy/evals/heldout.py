"""Held-out loss and bits per byte, per source and macro: dropless, with the pending router bias, without z-loss."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax

from argosy import mesh as meshes
from argosy import spec
from argosy.data import loader
from argosy.train import step as steps


def evaluator(run: spec.Run, corpus: Any) -> Callable[..., dict[str, float]]:
    """A function of a state that gives `eval_dropless/<source>/{loss,bpb}` and the corpus's macro means.

    Loss is nats per label, bits per byte counts every label's bits (the end of a document too) over the UTF-8
    bytes of the text; macro is the unweighted mean over sources. The same text is scored every time: the first
    `evals.tokens_per_set` labels of each source, or with `whole=True` all of them, as `eval_whole/...`.
    """
    mesh = meshes.make(run)
    program = jax.jit(lambda params, bias, batch: steps.eval_step(run, params, bias, batch))
    everything = replace(run, evals=replace(run.evals, tokens_per_set=10**9))

    def evaluate(state: steps.State, whole: bool = False) -> dict[str, float]:
        row: dict[str, float] = {}
        losses, bpbs = [], []
        prefix = "eval_whole" if whole else "eval_dropless"
        with jax.set_mesh(mesh):
            for source in corpus.held_out_sources:
                batches, text_bytes = loader.eval_batches(everything if whole else run, corpus, source, mesh)
                sums = [program(state.params, state.router_bias, batch) for batch in batches]
                nats = sum(float(n) for n, _ in sums)
                labels = sum(int(c) for _, c in sums)
                losses.append(nats / labels)
                bpbs.append(nats / math.log(2) / text_bytes)
                row |= {f"{prefix}/{source}/loss": losses[-1], f"{prefix}/{source}/bpb": bpbs[-1]}
        row[f"{prefix}/{run.data.corpus}/macro_loss"] = sum(losses) / len(losses)
        row[f"{prefix}/{run.data.corpus}/macro_bpb"] = sum(bpbs) / len(bpbs)
        return row

    return evaluate
