"""Held-out loss and bits per byte, per source and macro: dropless, with the pending router bias, without z-loss."""

import math
from typing import Any

import jax

from argosy import mesh as meshes
from argosy import spec
from argosy.data import loader
from argosy.train import step as steps


def evaluator(run: spec.Run, corpus: Any) -> Any:
    """A function of a state that gives `eval_dropless/<source>/{loss,bpb}` and the corpus's macro means.

    Loss is nats per label, bits per byte counts every label's bits (the end of a document too) over the UTF-8
    bytes of the text; macro is the unweighted mean over sources. The same text is scored every time.
    """
    mesh = meshes.make(run)
    program = jax.jit(lambda params, bias, batch: steps.eval_step(run, params, bias, batch))

    def evaluate(state: steps.State) -> dict[str, float]:
        row, losses, bpbs = {}, [], []
        with jax.set_mesh(mesh):
            for source in corpus.held_out_sources:
                sums = []
                batches, text_bytes = loader.eval_batches(run, corpus, source, mesh)
                for batch in batches:
                    sums.append(program(state.params, state.router_bias, batch))
                nats = sum(float(n) for n, _ in sums)
                labels = sum(int(c) for _, c in sums)
                losses.append(nats / labels)
                bpbs.append(nats / math.log(2) / text_bytes)
                row |= {f"eval_dropless/{source}/loss": losses[-1], f"eval_dropless/{source}/bpb": bpbs[-1]}
        name = run.data.corpus
        row[f"eval_dropless/{name}/macro_loss"] = sum(losses) / len(losses)
        row[f"eval_dropless/{name}/macro_bpb"] = sum(bpbs) / len(bpbs)
        return row

    return evaluate
