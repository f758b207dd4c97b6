"""A rung: the hero's recipe at a smaller width, by rules that are named."""

import math
from dataclasses import replace
from fractions import Fraction

from argosy import spec
from argosy.plan import flops

LEAST_HEADS = 4
EVERY = 0.05

# What `derive` does, as it is said to the user; method: reference_run 5.1 and marin's heuristic.py where it says so.
RULES = (
    ("depth", "the hero's, times d / (55 + 4 log2 d) over the same of the hero (the reference's rule), rounded, up to even;"
              " at least one period of local and global layers"),
    ("heads", f"as wide as the hero's while {LEAST_HEADS} or more remain; below that {LEAST_HEADS}, narrower, in steps of 4"),
    ("key/value heads", "the hero's share of the heads, down to a number that divides them"),
    ("inner widths", "experts, latent and shared: the hero's, times the width over the hero's"),
    ("kept", "gate rank, experts, top-k, windows, sequence length, vocabulary, mixture and epoching, warm-up, final rate, the rule of"
             " learning rates and its factor, precision and placement"),
    ("tokens", "as many per active parameter as the hero"),
    ("batch", "the hero's, times the square root of the tokens over the hero's, to what divides over the devices"),
    ("devices", "as many as keep the hero's sequences on each: fewer replicas first, then a smaller data axis; expert and context stay,"
                " since drops depend on them"),
    ("evaluations", f"every {EVERY:.0%} of the run, on the hero's text"),
)  # fmt: skip


def depth(hero: spec.Run, width: int) -> int:
    """Layers at a width: the reference's rule, scaled so that the hero has its own depth (heuristic.py; `marin_535b.depth`).

    >>> from argosy.runs import marin_535b, pocket
    >>> [depth(marin_535b.run(), d) for d in (768, 2048, 6144)], depth(pocket.run(), 64)
    ([8, 18, 48], 4)
    """
    m = hero.model
    by_rule = round(m.layers * _rule(width) / _rule(m.width))
    return min(max(by_rule + by_rule % 2, m.global_every), m.layers)


def _rule(width: int) -> float:
    return width / (55 + 4 * math.log2(width))


def attempt(hero: spec.Run, width: int) -> spec.Run | None:
    """`derive`, or None where it refuses."""
    try:
        return derive(hero, width)
    except ValueError:
        return None


def derive(hero: spec.Run, width: int) -> spec.Run:
    """The hero at a smaller width, by `RULES`.

    >>> from argosy.runs import pocket
    >>> derive(pocket.run(), 64) == pocket.rung(64)
    True

    Raises:
        ValueError: for a width that is not below the hero's, or at which something does not divide.
    """
    m, moe = hero.model, hero.moe
    if not 1 < width < m.width:
        raise ValueError(f"a rung is narrower than its hero of width {m.width:,}")
    heads, head_width = _heads(m, width)

    def scaled(inner: int) -> int:
        return max(1, round(inner * width / m.width))

    def divides(stored: int) -> int:
        return max(n for n in range(1, max(1, stored * heads // m.heads) + 1) if heads % n == 0)

    draft = replace(
        hero,
        recipe=f"{hero.recipe}/d{width}",
        model=replace(
            m,
            width=width,
            layers=depth(hero, width),
            heads=heads,
            head_width=head_width,
            kv_heads_local=divides(m.kv_heads_local),
            kv_heads_global=divides(m.kv_heads_global),
        ),
        moe=replace(
            moe, hidden=scaled(moe.hidden), latent_width=scaled(moe.latent_width), shared_hidden=scaled(moe.shared_hidden)
        ),
        mesh=replace(hero.mesh, replica=1, data=1),
        evals=replace(hero.evals, every_frac=EVERY, batch_seqs=hero.mesh.expert),
        data=replace(hero.data, batch_seqs=hero.mesh.expert),
        compute=replace(hero.compute, accumulate=1),
    )
    tokens = hero.optim.horizon_tokens * flops.active(draft) // flops.active(hero)
    draft = replace(draft, optim=replace(hero.optim, horizon_tokens=tokens))
    return laid(draft, hero, hero.data.batch_seqs * math.sqrt(tokens / hero.optim.horizon_tokens))


def _heads(m: spec.Model, width: int) -> tuple[int, int]:
    """How many heads, and how wide, so that all together are to the width what the hero's are to its own."""
    together = Fraction(m.heads * m.head_width * width, m.width)
    number = together / m.head_width
    if number >= LEAST_HEADS:
        if number.denominator != 1:
            raise ValueError(f"it would have {float(number):.4g} heads of {m.head_width}")
        return int(number), m.head_width
    fewer = min(LEAST_HEADS, m.heads)
    if together % (4 * fewer):
        raise ValueError(f"its {fewer} heads would be {float(together / fewer):.4g} wide, which is no multiple of 4")
    return fewer, int(together / fewer)


def laid(run: spec.Run, hero: spec.Run, batch_seqs: float) -> spec.Run:
    """The run with the batch nearest to `batch_seqs`, on that part of the hero's mesh that it keeps as busy as the hero does."""
    mesh, accumulate = hero.mesh, hero.compute.accumulate
    shards = mesh.replica * mesh.data * mesh.expert
    wanted = batch_seqs / (hero.data.batch_seqs / shards)  # shards with the hero's sequences on each
    data = _divisor(mesh.data, wanted / mesh.expert)
    replica = min(mesh.replica, max(1, round(wanted / (data * mesh.expert)))) if data == mesh.data else 1
    here = replica * data * mesh.expert
    parts = _divisor(accumulate, batch_seqs / here)
    return replace(
        run,
        data=replace(run.data, batch_seqs=max(1, round(batch_seqs / (here * parts))) * here * parts),
        evals=replace(run.evals, batch_seqs=max(1, hero.evals.batch_seqs // shards) * here),
        mesh=replace(mesh, replica=replica, data=data),
        compute=replace(run.compute, accumulate=parts),
    )


def _divisor(value: int, most: float) -> int:
    """The largest divisor of `value` up to `most`, at least 1."""
    return max(n for n in range(1, value + 1) if value % n == 0 and (n <= most or n == 1))
