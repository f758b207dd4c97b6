"""Expected drops of a transport from capacity factors, shape, documents per shard and one number, by seeded simulation.

Tokens of one document choose alike, so a shard that holds few documents fills its experts unevenly however well the router
is balanced over the batch. The model (expert_parallel A4): a shard holds D documents of equal length; each document's
shares of the E experts are a draw of a symmetric Dirichlet(alpha), none above 1/K, since a token takes an expert once.
Rows are noise around those shares as of tokens that choose K different experts independently of one another; at thousands
of rows per cell it is nothing, at the 64 of a small run it is not. A *cell* is one shard's rows for one expert.

alpha = 0.31 was fitted to one published figure, 7% dropped by cells of 1.33 times the mean at 16 documents per shard, and
meets four others within a quarter; `fit` finds it from a run's own logged loads.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from argosy import spec

ALPHA = 0.31  # of the reference run, 8 of 384 experts to a token; `assumed` for other numbers of them
FLAGGED = 0.05  # drops beyond this share are worth a word
LONGEST = 262_144  # tokens of the longest sequence that a plan looks at
CELL = 1.33  # capacity factor at which the older cell scheme was run (marin#8062)

Transport = Literal["pooled_wave", "ragged", "local", "cell"]
Floats = NDArray[np.float64]

_SEED = 535
_VALUES = 400_000  # numbers drawn at a time: small enough for a processor's cache
_PARTS = 4  # of a simulation: their spread is its error
_SMALLEST = 800_000  # numbers drawn for one figure, at least
_MOST_DOCUMENTS = 64  # more are simulated as this many, with their deviations made smaller by the square root

# Where the histogram of cells' relative loads is cut: what a step counts, what a fit reads. Sixteen bins, the first from 0.
EDGES = tuple(2.0 ** (i / 4) for i in range(-7, 8))
BINS = len(EDGES) + 1


@dataclass(frozen=True)
class Shape:
    """Who sends how much to whom, in one exchange of one layer."""

    senders: int  # ranks that exchange with one another; each holds experts / senders experts
    experts: int
    chosen: int  # experts per token
    tokens: int  # of one sender
    documents: float | int  # of one sender, of equal length: (sum of lengths)^2 / (sum of squared lengths) of unequal ones


class Capacity(NamedTuple):
    """What bounds a transport: factors of the mean load, and parts that go one after another."""

    sender: float
    receiver: float
    waves: int


class Drops(NamedTuple):
    """Shares of all assignments that are expected to be dropped, and the simulation's standard errors."""

    sender: float
    receiver: float
    sender_error: float
    receiver_error: float

    @property
    def total(self) -> float:
        return self.sender + self.receiver


# ---- loads ---------------------------------------------------------------------------------------


def weights(documents: float | int) -> Floats:
    """Lengths of whole and one shorter document that count as `documents` equal ones; their sum is 1.

    >>> weights(2.0).tolist(), round(float(1 / (weights(2.5) ** 2).sum()), 6)
    ([0.5, 0.5], 2.5)
    """
    whole = max(1, math.floor(documents))
    part = max(0.0, documents - whole)
    # (n + f)^2 / (n + f^2) = D has this root in 0..1
    short = [] if part == 0 else [(whole - math.sqrt(whole**2 - (documents - 1) * whole * part)) / (documents - 1)]
    lengths = np.array([1.0] * whole + short)
    return lengths / lengths.sum()


def _shares(rng: np.random.Generator, size: tuple[int, ...], shape: Shape, alpha: float | int) -> Floats:
    """Expert shares of documents [..., E], none above 1/K: what is above is given to the others, in their proportions."""
    p = np.maximum(rng.standard_gamma(alpha, (*size, shape.experts), dtype=np.float32), np.float32(1e-30)).astype(np.float64)
    p /= p.sum(-1, keepdims=True)
    most = 1 / shape.chosen
    if shape.chosen == shape.experts:
        return np.full_like(p, most)
    for _ in range(shape.chosen):  # each time at least one more expert is full
        above = p.max(-1) > most * (1 + 1e-9)
        if not above.any():
            break
        rows = p[above]
        full = rows >= most * (1 - 1e-9)
        rest = np.where(full, 0.0, rows)
        left = 1 - most * full.sum(-1, keepdims=True)
        p[above] = np.where(full, most, rest * left / rest.sum(-1, keepdims=True))
    return p


def loads(rng: np.random.Generator, exchanges: int, shape: Shape, alpha: float | int) -> Floats:
    """Relative loads [exchange, sender, expert] of simulated cells, mean 1.

    The noise of rows is normal, with the variance of tokens that take expert e with probability K p_e, and each sender's
    rows sum to T K.
    """
    simulated = min(shape.documents, _MOST_DOCUMENTS)
    w = weights(simulated)
    p = _shares(rng, (exchanges, shape.senders, len(w)), shape, alpha)
    x = shape.experts * np.einsum("xsde,d->xse", p, w)
    if simulated < shape.documents:
        x = np.maximum(0.0, 1 + (x - 1) * math.sqrt(simulated / shape.documents))
    taken = shape.chosen * p
    variance = np.einsum("xsde,d->xse", np.maximum(0.0, taken * (1 - taken)), w)
    noise = np.sqrt(variance) * rng.standard_normal(x.shape)
    total = np.maximum(variance.sum(-1, keepdims=True), 1e-30)
    noise -= variance / total * noise.sum(-1, keepdims=True)
    return np.maximum(0.0, x + noise * shape.experts / (shape.chosen * math.sqrt(shape.tokens)))


# ---- what is kept --------------------------------------------------------------------------------


def capacity_rows(factor: float, rows: float, parts: int, most: int) -> float:
    """Capacity over the mean, when `rows` are expected and each of `parts` gets a whole number of rows, `most` in all.

    >>> capacity_rows(1.15, 524_288 / 64, 3, 524_288) * 524_288 / 64 / 3
    3141.0
    """
    return min(most, parts * max(1, math.ceil(factor * rows / parts))) / rows


def dropped(x: Floats, shape: Shape, transport: Transport, capacity: Capacity) -> tuple[Floats, Floats]:
    """Sender and receiver drops of each exchange, from relative loads [exchange, sender, expert].

    A full pool refuses all its experts' rows in the same proportion.
    """
    ranks, local = shape.senders, shape.experts // shape.senders
    mine = shape.tokens * shape.chosen  # assignments of one sender
    zero = np.zeros(len(x))
    if transport in ("local", "cell"):
        factor = capacity.receiver if transport == "local" else capacity.sender
        over = _over(x, capacity_rows(factor, mine / shape.experts, 1, mine))
        return (zero, over) if transport == "local" else (over, zero)
    pools = x.reshape(len(x), ranks, ranks, local)
    if transport == "pooled_wave":
        full = pools.mean(-1)
        pool = capacity_rows(capacity.sender, mine / ranks, capacity.waves, mine)
        rows = capacity_rows(capacity.receiver, mine / local, capacity.waves, mine * ranks)
        kept = pools * np.minimum(1.0, pool / np.maximum(full, 1e-30))[..., None]
        return _over(full, pool), _over(kept.mean(1), rows)
    received = pools.mean(1)  # exchange, receiver, local expert
    refused = zero
    for chunk in np.array_split(received, min(capacity.waves, local), -1):
        share = chunk.shape[-1] / local
        cap = capacity_rows(capacity.receiver, mine * share, 1, mine * ranks)
        refused = refused + share * _over(chunk.mean(-1), cap)
    return zero, refused


def _over(x: Floats, cap: float) -> Floats:
    """The mean load above a capacity, for each exchange."""
    return np.maximum(0.0, x - cap).reshape(len(x), -1).mean(1)


@functools.lru_cache(maxsize=512)
def _simulated(shape: Shape, alpha: float, asked: tuple[tuple[Transport, Capacity], ...]) -> tuple[Drops, ...]:
    rng = np.random.default_rng(_SEED)
    one = shape.senders * shape.experts * math.ceil(min(shape.documents, _MOST_DOCUMENTS))  # numbers of one exchange
    each = max(1, round(_SMALLEST / _PARTS / one))
    parts = []  # part, transport, (sender, receiver)
    for _ in range(_PARTS):
        found, left = [], each
        while left > 0:
            now = min(left, max(1, _VALUES // one))
            x = loads(rng, now, shape, alpha)
            found.append([[side.sum() for side in dropped(x, shape, *what)] for what in asked])
            left -= now
        parts.append(np.sum(found, 0) / each)
    mean, error = np.mean(parts, 0), np.std(parts, 0, ddof=1) / math.sqrt(_PARTS)
    return tuple(Drops(*map(float, (*m, *e))) for m, e in zip(mean, error, strict=True))


def expected(shape: Shape, transport: Transport, capacity: Capacity, alpha: float = ALPHA) -> Drops:
    """Expected drops of one transport; the same figures at every call, with the simulation's standard errors.

    `pooled_wave`: the sender's pool for a destination, then the receiver's rows for an expert. `ragged`: the receiver's
    buffer for `waves` chunks of its experts. `local`: rows per expert. `cell`: the older scheme, rows per (sender,
    expert), planned for and not built.

    >>> hero = Shape(senders=64, experts=384, chosen=8, tokens=65_536, documents=16)
    >>> f"{expected(hero, 'cell', Capacity(sender=1.33, receiver=1.33, waves=1)).sender:.0%}"
    '7%'
    """
    return _simulated(shape, float(alpha), ((transport, capacity),))[0]


def assumed(experts: int, chosen: int, alpha: float = ALPHA, of: tuple[int, int] = (384, 8)) -> float:
    """Alpha of a run that none was fitted for, from that of one with `of` experts: uneven use by a document grows with E / K.

    The squared coefficient of variation of a document's loads is (E - 1) / (alpha E + 1); it was 0.066 E / K in the reference
    run, 0.065 in the pocket run (alpha 1.83), 0.043 in one of 16 experts (2.65): a rule of thumb, not a law.

    >>> assumed(384, 8), round(assumed(32, 4), 2), round(assumed(384, 8, 1.79, (32, 4)), 2)
    (0.31, 1.79, 0.31)
    """
    if (experts, chosen) == of or of[0] == 1:
        return alpha
    per_choice = (of[0] - 1) * of[1] / ((alpha * of[0] + 1) * of[0])
    return max(0.02, round(((experts - 1) * chosen / (per_choice * experts) - 1) / experts, 9))


# ---- a run ---------------------------------------------------------------------------------------


def bounded(run: spec.Run) -> bool:
    """Whether anything can be dropped."""
    return run.routing.capacity == "bounded" and run.routing.exchange != "dense"


def shape(run: spec.Run, seq_len: int | None = None) -> Shape:
    """The run's exchange at a sequence length, tokens per device as they are, one document per sequence.

    A sequence longer than a device's tokens is divided over devices, and each then holds a part of one document.
    """
    mesh, per_shard = run.mesh, run.data.batch_seqs // (run.mesh.replica * run.mesh.data * run.mesh.expert)
    tokens = per_shard * run.data.seq_len // (mesh.context * run.compute.accumulate)
    documents = max(1.0, tokens / (seq_len or run.data.seq_len))
    return Shape(mesh.expert, run.moe.experts, run.moe.experts_per_token, tokens, documents)


def seq_lens(run: spec.Run) -> list[int]:
    """The run's own sequence length and its doublings up to 262,144.

    >>> from argosy.runs import marin_535b
    >>> seq_lens(marin_535b.run())
    [4096, 8192, 16384, 32768, 65536, 131072, 262144]
    """
    own = run.data.seq_len
    return [own, *(own << i for i in range(1, 64) if own << i <= LONGEST)]


def transports(run: spec.Run) -> list[tuple[str, Transport, Capacity]]:
    """What a plan compares: a name, the transport, its bounds; the run's own first."""
    r = run.routing
    own = Capacity(r.sender_capacity, r.receiver_capacity, r.waves)
    if r.exchange == "local":
        return [("local", "local", own)]
    others: list[tuple[str, Transport, Capacity]] = [("pooled_wave", "pooled_wave", own), ("ragged", "ragged", own)]
    others.sort(key=lambda one: one[0] != r.exchange)
    factors = dict.fromkeys((r.sender_capacity, CELL))
    return others + [(f"cell at {f:g}", "cell", own._replace(sender=f)) for f in factors]


def plan(run: spec.Run, fitted: dict | None = None) -> dict | None:
    """Drops of every transport at every sequence length, as plain JSON values; None where nothing can be dropped.

    `fitted` is what `refit` returned; without it, and for a run of other experts than its own, alpha is `assumed`.
    `by_seq_len` holds, per length, the documents per shard that are assumed (one per sequence) and, per transport, the shares dropped at the sender and the receiver with the
    simulation's standard errors. The first transport is the run's own. `flagged` lists (transport, seq_len) past `flag_above`.
    """
    if not bounded(run):
        return None
    alpha = assumed(run.moe.experts, run.moe.experts_per_token)
    if fitted is not None:
        of = (fitted["experts"], fitted["experts_per_token"])
        alpha = assumed(run.moe.experts, run.moe.experts_per_token, fitted["alpha"], of)
    asked = transports(run)
    rows, flagged = [], []
    for seq_len in seq_lens(run):
        at = shape(run, seq_len)
        found = _simulated(at, float(alpha), tuple((kind, bounds) for _, kind, bounds in asked))
        by_name = {name: drops for (name, *_), drops in zip(asked, found, strict=True)}
        flagged += [[name, seq_len] for name, drops in by_name.items() if drops.total > FLAGGED]
        by_transport = {name: drops._asdict() for name, drops in by_name.items()}
        rows.append({"seq_len": seq_len, "documents_per_shard": at.documents, "transports": by_transport})
    own = shape(run)
    return {
        "alpha": float(alpha),
        "published_alpha": ALPHA,
        "fitted": fitted,
        "own": asked[0][0],
        "senders": own.senders,
        "experts_per_rank": own.experts // own.senders,
        "tokens_per_device": own.tokens,
        "sender_capacity": run.routing.sender_capacity,
        "receiver_capacity": run.routing.receiver_capacity,
        "waves": run.routing.waves,
        "flag_above": FLAGGED,
        "flagged": flagged,
        "by_seq_len": rows,
    }


# ---- alpha from a run's own loads ----------------------------------------------------------------


class Logged(NamedTuple):
    """What a run logged of its cells' loads, one row per update."""

    histogram: Floats  # N BINS: shares of cells whose relative load lies between `EDGES`
    documents: Floats  # N: documents per shard that count as equally long
    sender: Floats  # N: shares of valid assignments dropped at the sender
    receiver: Floats


class Fit(NamedTuple):
    """Alpha with its 95% interval, and what it was read from."""

    alpha: float
    low: float
    high: float
    documents: float  # per shard, as logged: the harmonic mean
    updates: int
    edge: Literal["", "least", "most"]  # whether alpha is only a bound: the end of what was looked at


_ALPHAS = np.geomspace(0.02, 20.0, 31)
_LEAST_UPDATES = 16
_BLOCKS = 8


def fit(logged: Logged, at: Shape) -> Fit:
    """The alpha that makes a run's logged histograms likeliest; `at` is the run's exchange, its documents replaced here.

    The interval is 95%, from the spread of alphas fitted to eight stretches of the updates and from the simulation's own
    error; it knows nothing of what the model leaves out.

    Raises:
        ValueError: for fewer than 16 updates, or histograms of another number of bins.
    """
    n, bins = logged.histogram.shape
    if bins != BINS:
        raise ValueError(f"the histograms have {bins} bins, this version reads {BINS}; nearest legal {BINS}")
    if n < _LEAST_UPDATES:
        raise ValueError(f"{n} updates with histograms of loads are too few to fit alpha; nearest legal {_LEAST_UPDATES}")
    documents = float(1 / np.mean(1 / np.maximum(logged.documents, 1.0)))
    at = replace(at, documents=documents)
    curves = _histograms(at)  # part, alpha, bin
    whole = logged.histogram.mean(0)
    at_best, edge = _likeliest(whole, curves.mean(0))
    blocks = [_likeliest(part.mean(0), curves.mean(0))[0] for part in np.array_split(logged.histogram, _BLOCKS)]
    parts = [_likeliest(whole, curve)[0] for curve in curves]
    error = math.hypot(np.std(blocks, ddof=1) / math.sqrt(_BLOCKS), np.std(parts, ddof=1) / math.sqrt(_PARTS))
    span = 2.36 * error  # Student's t of seven degrees
    return Fit(math.exp(at_best), math.exp(at_best - span), math.exp(at_best + span), documents, n, edge)


def refit(name: str, run: spec.Run, logged: Logged) -> dict:
    """Alpha from the run `name`, with the drops that it then predicts for that run beside the logged ones; plain JSON values.

    `predicted` is at the documents per shard that the run logged; None where nothing could be dropped.

    Raises:
        ValueError: as `fit`.
    """
    found = fit(logged, shape(run))
    predicted = None
    if bounded(run):
        _, kind, bounds = transports(run)[0]
        at = replace(shape(run), documents=round(found.documents, 3))
        predicted = expected(at, kind, bounds, found.alpha)._asdict()
    return {
        "run": name,
        "recipe": run.recipe,
        **found._asdict(),
        "experts": run.moe.experts,
        "experts_per_token": run.moe.experts_per_token,
        "transport": run.routing.exchange,
        "predicted": predicted,
        "logged": {"sender": float(logged.sender.mean()), "receiver": float(logged.receiver.mean())},
    }


@functools.lru_cache(maxsize=16)
def _histograms(at: Shape) -> Floats:
    """Logarithms of simulated shares of cells by bin: part of the simulation, alpha, bin."""
    one = replace(at, senders=1)  # what a shard sends depends on no other shard
    numbers = at.experts * math.ceil(min(at.documents, _MOST_DOCUMENTS))
    found = np.zeros((_PARTS, len(_ALPHAS), BINS))
    for part in range(_PARTS):
        for i, alpha in enumerate(_ALPHAS):
            x = loads(np.random.default_rng((_SEED, part, i)), max(1, _SMALLEST // _PARTS // numbers), one, alpha)
            counts = np.histogram(x, (0.0, *EDGES, np.inf))[0] + 0.5
            found[part, i] = np.log(counts / counts.sum())
    return found


def _likeliest(histogram: Floats, curves: Floats) -> tuple[float, Literal["", "least", "most"]]:
    """ln alpha of the largest likelihood, between the simulated ones by a parabola, and at which end it lies if at one."""
    ln, score = np.log(_ALPHAS), curves @ histogram
    best = int(np.argmax(score))
    if best in (0, len(ln) - 1):
        return float(ln[best]), "least" if best == 0 else "most"
    a, b, c = score[best - 1 : best + 2]
    return float(ln[best] + 0.5 * (ln[1] - ln[0]) * (a - c) / min(a - 2 * b + c, -1e-30)), ""
