"""Which text each step reads: a pure function of (run, step, tokens per source). Never imports JAX.

The run's sequences are numbered through: step `t` reads numbers `t*B` to `(t+1)*B - 1`. A phase is cut into
blocks; each block gives every source a fixed number of sequences (largest remainder of the weights) in a
shuffled order. A source hands out its windows of `seq_len` tokens in a pseudo-random order, each window once
per epoch, and goes on where it stopped when a phase ends. So a batch needs no state but its step, weights
that change later leave earlier samples as they were, and nothing repeats before a source's epoch ends.
"""

import functools
import hashlib
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from argosy import spec

_ROUNDS = 6


class Stretch(NamedTuple):
    """One phase as it is executed: steps `start` to `stop - 1`, in blocks of `block_seqs` sequences.

    `weights`, `counts` (sequences per block) and `before` (sequences handed out earlier) go by source.
    """

    name: str
    start: int
    stop: int
    block_seqs: int
    weights: dict[str, float]
    counts: dict[str, int]
    before: dict[str, int]


def effective_weights(run: spec.Run, sizes: Mapping[str, int]) -> tuple[list[dict[str, float]], str]:
    """Weights per phase that sum to 1, and a note on what was shared out ("" if nothing was).

    `sizes`: training tokens per source, 0 for a source that the corpus looked for and did not find; its
    weight goes to the phase's other sources in proportion.

    Raises:
        ValueError: for a source that the corpus does not know, or a phase with no source that is there.
    """
    phases: list[dict[str, float]] = []
    absent: dict[str, None] = {}
    for phase in run.data.phases:
        asked = {name: weight for name, weight in phase.weights if weight > 0}
        if list(asked) == ["*"]:
            asked = {name: float(size) for name, size in sizes.items() if size}
        for name in asked:
            if name not in sizes:
                raise ValueError(
                    f"data.phases: {phase.name!r} asks for source {name!r}, which corpus {run.data.corpus!r} does not have;"
                    f" nearest: {', '.join(spec.nearest(name, sizes))}"
                )
        there = {name: weight for name, weight in asked.items() if sizes[name] > 0}
        if not there:
            raise ValueError(
                f"data.phases: {phase.name!r} has only sources that are absent from corpus {run.data.corpus!r}:"
                f" {', '.join(asked)}; there are: {', '.join(n for n in sizes if sizes[n] > 0) or 'none'}"
            )
        total = sum(there.values())
        phases.append({name: weight / total for name, weight in there.items()})
        absent |= {name: None for name in asked if name not in there}
    note = (
        f"{', '.join(absent)} absent from corpus {run.data.corpus!r}: weights shared over the other sources" if absent else ""
    )
    return phases, note


def usable_tokens(run: spec.Run, tokens: int) -> int:
    """Tokens of a source that the run may read.

    With `data.epoching=simulated` a run of T tokens reads the first T / mixture_reference_tokens of each source,
    so that it repeats text as often as a run of mixture_reference_tokens would (reference_run 6).
    """
    if run.data.epoching == "plain":
        return tokens
    return tokens * min(run.optim.horizon_tokens, run.data.mixture_reference_tokens) // run.data.mixture_reference_tokens


def windows(run: spec.Run, tokens: int) -> int:
    """Sequences that a source of so many tokens gives per epoch. (Its last label is the `<|doc|>` that closes the store.)"""
    return usable_tokens(run, tokens) // run.data.seq_len


def stretches(run: spec.Run, sizes: Mapping[str, int]) -> tuple[Stretch, ...]:
    """The run's phases as executed. A phase ends with a whole block where blocks are fine enough (1/32 of the run).

    The reference run's phase switch comes out as step 312,192 of 390,251 (reference_run 6).

    Raises:
        ValueError: as `effective_weights`; for a source without one whole sequence; for a weight too small for a block.
    """
    return _stretches(run, tuple(sorted(sizes.items())))


@functools.lru_cache(maxsize=32)
def _stretches(run: spec.Run, sizes: tuple[tuple[str, int], ...]) -> tuple[Stretch, ...]:
    phases, _ = effective_weights(run, dict(sizes))
    tokens = dict(sizes)
    for name in dict.fromkeys(name for weights in phases for name in weights):
        if windows(run, tokens[name]) < 1:
            _refuse_empty(run, name, tokens[name])
    batch = run.data.batch_seqs
    stops = spec.phase_stops(run, [min(weights.values()) for weights in phases])
    found: list[Stretch] = []
    start, before = 0, dict.fromkeys(tokens, 0)
    for phase, weights, stop in zip(run.data.phases, phases, stops, strict=True):
        block = spec.mixture_block(batch, min(weights.values()))
        counts = _largest_remainder(weights, block)
        for name, count in counts.items():
            if count == 0 and stop > start:
                raise ValueError(
                    f"data.phases: {phase.name!r} gives {name!r} the weight {weights[name]:.3g}, none of the {block:,}"
                    f" sequences of a mixture block; nearest legal 0 or {1 / block:.3g}"
                )
        one = Stretch(phase.name, start, stop, block, weights, counts, before)
        found.append(one)
        before = _handed_out(run.seed, one, (stop - start) * batch, start * batch)
        start = stop
    return tuple(found)


def _largest_remainder(weights: Mapping[str, float], total: int) -> dict[str, int]:
    quotas = {name: weight * total for name, weight in weights.items()}
    counts = {name: math.floor(quota) for name, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda name: (counts[name] - quotas[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def _handed_out(seed: int, stretch: Stretch, sequences: int, first: int) -> dict[str, int]:
    """Sequences per source after so many of a stretch whose first sequence has the number `first`."""
    blocks, rest = divmod(sequences, stretch.block_seqs)
    total = dict(stretch.before)
    for name, count in stretch.counts.items():
        total[name] += blocks * count
    if rest:
        owner, _ = _block(seed, first + blocks * stretch.block_seqs, tuple(stretch.counts.values()))
        tail = np.bincount(owner[:rest], minlength=len(stretch.counts))
        for name, count in zip(stretch.counts, tail, strict=True):
            total[name] += int(count)
    return total


def _refuse_empty(run: spec.Run, name: str, tokens: int) -> None:
    usable, need = usable_tokens(run, tokens), run.data.seq_len
    cut = ""
    if usable < tokens:
        least = -(-need * run.data.mixture_reference_tokens // tokens) if tokens >= need else 0
        cut = f" of {tokens:,} (data.epoching=simulated keeps optim.horizon_tokens / data.mixture_reference_tokens"
        cut += f"; a horizon of {least:,} tokens keeps enough)" if least else ")"
    raise ValueError(
        f"source {name!r} has {usable:,} tokens{cut}, fewer than one sequence of data.seq_len={need:,};"
        f" nearest legal data.seq_len={max(1, usable):,}, or leave the source out"
    )


# ---- how often text is seen ----------------------------------------------------------------------


def exposure(run: spec.Run, sizes: Mapping[str, int]) -> dict[str, float]:
    """Epochs that the run makes over each of its sources."""
    last = stretches(run, sizes)[-1]
    first = last.start * run.data.batch_seqs
    total = _handed_out(run.seed, last, (last.stop - last.start) * run.data.batch_seqs, first)
    return {name: count / windows(run, sizes[name]) for name, count in total.items() if count}


def check(run: spec.Run, sizes: Mapping[str, int]) -> None:
    """Refuse a run that its corpus cannot feed.

    Raises:
        ValueError: as `stretches`; or for a source read more than `data.max_epochs` times, with the numbers.
    """
    epochs = exposure(run, sizes)
    name = max(epochs, key=lambda n: epochs[n])
    if epochs[name] <= run.data.max_epochs:
        return
    there = windows(run, sizes[name]) * run.data.seq_len
    raise ValueError(
        f"source {name!r} would be read {epochs[name]:.2f} times: the run needs {round(epochs[name] * there):,} tokens of it,"
        f" {there:,} are there; data.max_epochs={run.data.max_epochs:g}; nearest legal {_nearest_legal(run, sizes)}"
    )


def _nearest_legal(run: spec.Run, sizes: Mapping[str, int]) -> str:
    """The longest horizon within the epoch limit, and the limit that would do.

    Under simulated epoching the reference decides instead, as long as it is longer than the horizon.
    """
    unit, worst = spec.tokens_per_step(run), max(exposure(run, sizes).values())
    horizon, reference = run.optim.horizon_tokens, run.data.mixture_reference_tokens
    simulated = run.data.epoching == "simulated" and reference > horizon
    value = int((reference if simulated else horizon) * run.data.max_epochs / worst) // unit * unit
    while value >= unit:
        keys = ["data.mixture_reference_tokens"] if simulated else []
        keys += ["optim.horizon_tokens"] if not simulated or value < horizon else []
        try:
            offered = spec.override(run, [f"{key}={value}" for key in keys])
            if max(exposure(offered, sizes).values()) <= run.data.max_epochs:
                return f"{' and '.join(f'{key}={value:,}' for key in keys)}, or data.max_epochs={math.ceil(worst)}"
        except ValueError:  # too short for a sequence of each source
            break
        value = min(value - unit, value * 99 // 100 // unit * unit)
    return f"data.max_epochs={math.ceil(worst)}"


# ---- (run, step) -> spans ------------------------------------------------------------------------


def spans(run: spec.Run, sizes: Mapping[str, int], step: int, rows: range | None = None) -> list[tuple[str, int]]:
    """For each sequence of a step's batch its source and the token where it starts; or for some rows of it.

    A sequence is the tokens `start` to `start + seq_len`, one more than `seq_len`: the last is a label only.
    The work does not grow with the step, but for O(block) when a block is first met.

    Raises:
        ValueError: as `stretches`; for a step outside the run.
    """
    phases = stretches(run, sizes)
    batch = run.data.batch_seqs
    rows = range(batch) if rows is None else rows
    one = next((s for s in phases if s.start <= step < s.stop), None)
    if one is None or step < 0:
        raise ValueError(f"step {step:,} is not in the run, which has {phases[-1].stop:,}: 0 to {phases[-1].stop - 1:,}")
    if not rows:
        return []
    names, first = list(one.counts), one.start * batch
    number = (step - one.start) * batch + np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)
    block = number // one.block_seqs
    counts = np.array([one.counts[n] for n in names], np.int64)
    before = np.array([one.before[n] for n in names], np.int64)
    whose, nth = np.empty_like(number), np.empty_like(number)
    for b in sorted(set(block.tolist())):
        here = block == b
        slot = number[here] - b * one.block_seqs
        owner, rank = _block(run.seed, first + b * one.block_seqs, tuple(one.counts.values()))
        whose[here] = owner[slot]
        nth[here] = before[owner[slot]] + b * counts[owner[slot]] + rank[slot]
    size = np.array([windows(run, sizes[n]) for n in names], np.int64)[whose]
    epoch = nth // size
    keys = np.stack([_round_keys(run.seed, names[s], e) for s, e in zip(whose.tolist(), epoch.tolist(), strict=True)])
    start = permute(nth - epoch * size, size, keys) * run.data.seq_len
    return [(names[s], t) for s, t in zip(whose.tolist(), start.tolist(), strict=True)]


@functools.lru_cache(maxsize=64)
def _block(seed: int, first: int, counts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of each slot of a block: its source, and how many slots of that source come before it."""
    total = sum(counts)
    order = np.argsort(_mix(np.arange(total, dtype=np.uint64) + np.uint64(_key("block", seed, first))), kind="stable")
    owner = np.repeat(np.arange(len(counts)), counts)[order]
    rank = np.empty(total, np.int64)
    rank[np.argsort(owner, kind="stable")] = np.arange(total) - np.repeat(np.cumsum((0, *counts[:-1])), counts)
    return owner, rank


def permute(position: np.ndarray, size: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Where each position below its `size` goes: for fixed keys a permutation of range(size), elementwise.

    A Feistel network over the next power of four, walked until the value is below `size` (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002). `keys`: uint64 `[n, rounds]`. int64 in and out.
    """
    bits = np.maximum(1, (np.frexp(np.maximum(size - 1, 1).astype(np.float64))[1] + 1) // 2).astype(np.uint64)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    value, bound = position.astype(np.uint64), size.astype(np.uint64)
    todo = np.arange(len(value))
    while len(todo):
        half, low = bits[todo], mask[todo]
        left, right = value[todo] >> half, value[todo] & low
        for key in keys[todo].T:
            left, right = right, left ^ (_mix(right + key) & low)
        value[todo] = (left << half) | right
        todo = todo[value[todo] >= bound[todo]]
    return value.astype(np.int64)


@functools.lru_cache(maxsize=4096)
def _round_keys(seed: int, source: str, epoch: int) -> np.ndarray:
    return np.array([_key("window", seed, source, epoch, r) for r in range(_ROUNDS)], np.uint64)


def _key(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser (Steele, Lea, Flood, 2014): each bit of the input moves half of the output's."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
