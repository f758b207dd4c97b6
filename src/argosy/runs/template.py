"""The commented recipe that `argosy new` writes."""

TEXT = '''"""A recipe of your own: a function that returns a complete run.

    argosy plan  {file}:run      parameters, memory, time, before anything runs
    argosy train {file}:run      train it; the same command goes on from the last checkpoint
    argosy train {file}:run --set model.layers=6 --as deeper

Every field and its meaning: argosy/spec.py. This recipe starts from `pocket` and changes what it names.
"""

from dataclasses import replace

from argosy import spec
from argosy.runs import pocket


def run() -> spec.Run:
    base = pocket.run()
    return replace(
        base,
        recipe="{name}",
        # The dense part: width, depth, heads; local layers see `window` positions, every `global_every`-th and
        # the last see all.
        model=replace(base.model, width=128, layers=4),
        # The sparse part: how many experts, how many each token meets, how wide they are.
        moe=replace(base.moe, experts=32, experts_per_token=4),
        # Ablations are named choices: balance="aux_loss", capacity="dropless", moe.latent="none", ...
        routing=replace(base.routing, balance="quantile"),
        # The text: `argosy data build notes/*.jsonl --name mine` makes a corpus "mine". Weights are relative within
        # a phase; "*" takes every source by its size, or name the sources that the command's table shows. A phase
        # lasts until a fraction of the run. A source is read at most `max_epochs` times.
        data=replace(
            base.data,
            corpus="stdlib",
            seq_len=256,
            batch_seqs=8,
            phases=(spec.Phase(name="all", until_frac=1.0, weights=(("*", 1.0),)),),
            max_epochs=8.0,
        ),
        # The horizon sets the number of steps and, by the scaling rule, the learning rates.
        optim=replace(base.optim, horizon_tokens=1_048_576, rule="hyperball"),
    )
'''
