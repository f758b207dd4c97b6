"""The mixture: what a step reads is a pure function of (run, step, tokens per source)."""

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy import spec
from argosy.data import mixture
from argosy.runs import pocket
from argosy.spec import Phase

SIZES = {"library": 30_000, "tests": 90_000, "prose": 20_000, "topics": 7_000}


def a_run(*, seq_len=64, batch=8, steps=200, main=None, cooldown=None, until=0.8, **fields):
    main = main or {"library": 0.5, "tests": 0.25, "prose": 0.15, "topics": 0.1}
    cooldown = cooldown or {"library": 0.6, "tests": 0.1, "prose": 0.2, "topics": 0.1}
    phases = (
        Phase(name="main", until_frac=until, weights=tuple(main.items())),
        Phase(name="cooldown", until_frac=1.0, weights=tuple(cooldown.items())),
    )
    run = pocket.run()
    fields = {"max_epochs": 1e9, **fields}
    data = replace(run.data, seq_len=seq_len, batch_seqs=batch, phases=phases, **fields)
    return replace(run, data=data, optim=replace(run.optim, horizon_tokens=steps * batch * seq_len))


def everything(run, sizes, stop=None):
    return [mixture.spans(run, sizes, step) for step in range(spec.steps(run) if stop is None else stop)]


def flat(steps):
    return [span for step in steps for span in step]


weights = st.dictionaries(st.sampled_from(sorted(SIZES)), st.floats(0.05, 1.0), min_size=1)


@settings(max_examples=15, deadline=None)
@given(weights=weights, batch=st.sampled_from([6, 8, 24]), seed=st.integers(0, 2**31))
def test_every_block_honours_the_weights(weights, batch, seed):
    """Fails when a whole block of the stream misses a source's share by a sequence, or a batch has other rows than B."""
    run = replace(a_run(main=weights, until=1.0 - 1e-9, batch=batch, steps=600 // batch), seed=seed)
    first = mixture.stretches(run, SIZES)[0]
    stream = flat(everything(run, SIZES))
    total = sum(Fraction(w) for w in weights.values())
    for start in range(0, first.stop * batch - first.block_seqs + 1, first.block_seqs):
        counts = Counter(name for name, _ in stream[start : start + first.block_seqs])
        assert sum(counts.values()) == first.block_seqs
        for name, weight in weights.items():
            assert abs(counts[name] - first.block_seqs * Fraction(weight) / total) < 1
    assert all(len(step) == batch for step in everything(run, SIZES, 3))


@settings(max_examples=20, deadline=None)
@given(
    until=st.floats(0.05, 0.95),
    main=weights,
    cooldown=weights,
    seq_len=st.sampled_from([7, 64, 400]),
    epoching=st.sampled_from(["plain", "simulated"]),
)
def test_no_window_repeats_before_its_source_is_through(until, main, cooldown, seq_len, epoching):
    """Fails when, across phases, a source repeats or misses a window within an epoch, or reads outside itself."""
    run = a_run(
        main=main,
        cooldown=cooldown,
        until=until,
        seq_len=seq_len,
        epoching=epoching,
        mixture_reference_tokens=150 * 8 * seq_len,
    )
    seen = defaultdict(list)
    for name, start in flat(everything(run, SIZES)):
        seen[name].append(start)
    for name, starts in seen.items():
        there = SIZES[name] if epoching == "plain" else min(SIZES[name], SIZES[name] * spec.steps(run) // 150)
        every = {n * seq_len for n in range(there // seq_len)}
        for at in range(0, len(starts), len(every)):
            epoch = starts[at : at + len(every)]
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= every
            if len(epoch) == len(every):
                assert set(epoch) == every
    expected = {name: len(starts) / (mixture.windows(run, SIZES[name])) for name, starts in seen.items()}
    assert mixture.exposure(run, SIZES) == pytest.approx(expected)


def test_epochs_have_orders_of_their_own():
    """Fails when the second epoch goes through the windows in the order of the first, or in the order of the text."""
    run = a_run(main={"topics": 1.0}, cooldown={"topics": 1.0}, steps=40)
    starts = [start for _, start in flat(everything(run, SIZES))]
    size = SIZES["topics"] // 64
    first, second = starts[:size], starts[size : 2 * size]
    assert sorted(first) == sorted(second)
    assert sum(a == b for a, b in zip(first, second, strict=True)) < 12  # one is expected; at random 12 has probability 1e-9
    assert abs(np.corrcoef(np.arange(size), first)[0, 1]) < 0.45  # five standard deviations of 1/sqrt(109)


def test_a_step_needs_nothing_but_its_number():
    """Fails when a step's spans depend on the steps asked before it, on the process, or on Python's hash seed."""
    run = a_run()
    straight = everything(run, SIZES)
    mixture._block.cache_clear(), mixture._stretches.cache_clear(), mixture._round_keys.cache_clear()
    for step in (199, 7, 160, 7, 0):
        assert mixture.spans(run, SIZES, step) == straight[step]
    code = "import json, sys; from argosy.data import mixture; from argosy import spec; assert 'jax' not in sys.modules;"
    code += "run, sizes = json.load(sys.stdin); print([mixture.spans(spec.from_json(run), sizes, s) for s in (3, 199)])"
    asked = json.dumps([spec.to_json(run), dict(reversed(SIZES.items()))])  # the same sizes in another order
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=asked,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == f"{[straight[3], straight[199]]}\n"


def test_seeds_differ():
    """Fails when the seed does not reach the order."""
    assert everything(a_run(), SIZES, 4) != everything(replace(a_run(), seed=1), SIZES, 4)


def test_later_weights_leave_earlier_samples():
    """Fails when changing a later phase moves samples before it (operations.md 2.18)."""
    old = a_run(steps=400)
    switch = mixture.stretches(old, SIZES)[0].stop
    for other in (a_run(steps=400, cooldown={"tests": 1.0}), a_run(steps=400, cooldown={"prose": 0.001, "topics": 0.999})):
        assert mixture.stretches(other, SIZES)[0].stop == switch
        assert everything(other, SIZES, switch) == everything(old, SIZES, switch)
        assert everything(other, SIZES) != everything(old, SIZES)


def test_a_phase_inserted_midway_leaves_earlier_samples():
    """Fails when a mixture swap in the middle of a phase changes what came before it (the reference did so at step 108,000)."""
    old = a_run(steps=400)
    swap = Phase(name="swap", until_frac=0.48, weights=old.data.phases[0].weights)
    new = replace(
        old,
        data=replace(old.data, phases=(swap, Phase(name="new", until_frac=0.8, weights=(("tests", 1.0),)), old.data.phases[1])),
    )
    stop = mixture.stretches(new, SIZES)[0].stop
    assert 150 < stop < 200
    assert everything(new, SIZES, stop) == everything(old, SIZES, stop)


def test_a_new_horizon_leaves_earlier_samples():
    """Fails when shortening a run moves the samples of its first phase."""
    long, short = a_run(steps=400), a_run(steps=300)
    assert everything(short, SIZES, 200) == everything(long, SIZES, 200)


@pytest.mark.parametrize("batch", [4, 16, 32])
def test_the_batch_only_cuts_the_stream(batch):
    """Fails when the order of sequences depends on how many of them make a step."""
    eight, other = a_run(batch=8, steps=480), a_run(batch=batch, steps=480 * 8 // batch)
    assert flat(everything(other, SIZES)) == flat(everything(eight, SIZES))


@settings(max_examples=20, deadline=None)
@given(step=st.integers(0, 199), first=st.integers(0, 8), last=st.integers(0, 8))
def test_rows_are_rows_of_the_batch(step, first, last):
    """Fails when a process that asks for its rows gets other spans than those rows of the whole batch."""
    run = a_run()
    rows = range(min(first, last), max(first, last))
    assert mixture.spans(run, SIZES, step, rows) == mixture.spans(run, SIZES, step)[rows.start : rows.stop]


def test_simulated_epoching_repeats_as_the_full_run_would():
    """Fails when a run of a quarter of the reference does not repeat each source as often as the reference does."""
    sizes = {name: 40 * size for name, size in SIZES.items()}
    full = a_run(steps=16_000, epoching="simulated", mixture_reference_tokens=16_000 * 8 * 64)
    quarter = a_run(steps=4_000, epoching="simulated", mixture_reference_tokens=16_000 * 8 * 64)
    a, b = mixture.exposure(full, sizes), mixture.exposure(quarter, sizes)
    assert a == pytest.approx(b, rel=0.01)
    assert mixture.exposure(replace(full, data=replace(full.data, epoching="plain")), sizes) == a
    assert {start // 64 for name, start in flat(everything(quarter, sizes, 2000)) if name == "topics"} <= set(
        range(70_000 // 64)
    )


def test_hero_sizes():
    """Fails when 18T tokens overflow, the phase switch leaves step 312,192, or a late step costs more than an early one."""
    run = a_run(seq_len=4096, batch=11_264, steps=390_251)
    sizes = dict.fromkeys(SIZES, 10_000_000_000_000)
    assert [s.stop for s in mixture.stretches(run, sizes)] == [312_192, 390_251]
    mixture.spans(run, sizes, 0)
    begun = time.process_time()
    late = mixture.spans(run, sizes, 390_250)
    assert time.process_time() - begun < 1
    assert len(late) == 11_264
    assert all(0 <= start <= 10_000_000_000_000 - 4096 and start % 4096 == 0 for _, start in late)
    assert max(start for _, start in late) > 2**42
    tokens = 11_264 * 4096 * (312_192 * Fraction(1, 2) + 78_059 * Fraction(6, 10))
    assert mixture.exposure(run, sizes)["library"] == pytest.approx(float(tokens / 10**13), rel=1e-4)


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 100))
def test_permute_is_a_permutation(size, seed):
    """Fails when two positions go to one place, or one outside."""
    keys = np.tile(np.random.default_rng(seed).integers(0, 2**63, 6, dtype=np.uint64), (size, 1))
    moved = mixture.permute(np.arange(size), np.full(size, size), keys)
    assert sorted(moved.tolist()) == list(range(size))


def test_permutations_look_random():
    """Fails when small sources are read in nearly the same order each epoch: all 24 orders of four windows, equally often."""
    found = Counter()
    for epoch in range(2400):
        keys = np.tile(mixture._round_keys(0, "a", epoch), (4, 1))
        found[tuple(mixture.permute(np.arange(4), np.full(4, 4), keys).tolist())] += 1
    assert len(found) == 24
    assert sum((n - 100) ** 2 / 100 for n in found.values()) < 60  # chi-squared, 23 degrees of freedom: p = 4e-5


# ---- refusals -----------------------------------------------------------------------------------


def test_absent_sources_share_their_weight():
    """Fails when a source that a distribution's Python lacks is read, or its weight is lost instead of shared."""
    run = a_run()
    phases, note = mixture.effective_weights(run, {**SIZES, "tests": 0})
    assert phases[0] == pytest.approx({"library": 0.5 / 0.75, "prose": 0.15 / 0.75, "topics": 0.1 / 0.75})
    assert "tests absent" in note
    assert "tests" not in {name for name, _ in flat(everything(run, {**SIZES, "tests": 0}))}
    assert mixture.effective_weights(run, SIZES)[1] == ""
    with pytest.raises(ValueError, match=r"only sources that are absent.*: tests; there are: library, prose, topics"):
        mixture.spans(a_run(cooldown={"tests": 1.0}), {**SIZES, "tests": 0}, 0)


def test_unknown_source_names_the_nearest():
    """Fails when a misspelt source is taken for an absent one."""
    with pytest.raises(ValueError, match=r"'libary'.*nearest: library"):
        mixture.check(a_run(main={"libary": 1.0}), SIZES)


@settings(max_examples=20, deadline=None)
@given(seq_len=st.integers(1, 8000), epoching=st.sampled_from(["plain", "simulated"]))
def test_no_source_is_silently_empty_at_any_length(seq_len, epoching):
    """Fails when a sequence length leaves a source without a sequence and nothing is said (operations.md 2.18)."""
    run = a_run(seq_len=seq_len, steps=96, epoching=epoching, mixture_reference_tokens=192 * 8 * seq_len)
    there = SIZES["topics"] // (2 if epoching == "simulated" else 1)
    if there < seq_len:
        with pytest.raises(ValueError, match=rf"'topics' has {there:,} tokens.*seq_len={seq_len:,}"):
            mixture.stretches(run, SIZES)
    else:
        assert {name for name, _ in flat(everything(run, SIZES, 96))} == set(SIZES)


def test_too_small_a_weight_is_refused():
    """Fails when a weight below one sequence per block drops out of the mixture in silence."""
    with pytest.raises(ValueError, match=r"'topics' the weight 1e-06, none of the 49,152 sequences.*0 or 2.03e-05"):
        mixture.stretches(a_run(main={"library": 1.0, "topics": 1e-6}), SIZES)


@pytest.mark.parametrize(
    ("epoching", "reference", "limit", "keys"),
    [
        ("plain", 800, 2.0, ["optim.horizon_tokens"]),
        ("simulated", 800, 5.0, ["data.mixture_reference_tokens"]),
        ("simulated", 800, 2.0, ["data.mixture_reference_tokens", "optim.horizon_tokens"]),
        ("simulated", 300, 2.0, ["optim.horizon_tokens"]),
    ],
)
def test_too_many_epochs_are_refused_with_a_legal_way_out(epoching, reference, limit, keys):
    """Fails when the epoch limit is passed, or what the message offers is not legal, or needlessly short."""
    sizes = {**SIZES, "library": 60_000}  # so that the most read is topics: 20,480 tokens of 7,000
    run = a_run(steps=400, max_epochs=limit, epoching=epoching, mixture_reference_tokens=reference * 8 * 64)
    with pytest.raises(
        ValueError, match=rf"'topics' would be read .* times: the run needs .* tokens.*max_epochs={limit:g}"
    ) as refused:
        mixture.check(run, sizes)
    shorter, wider = str(refused.value).split("nearest legal ")[1].split(", or ")
    settings = shorter.split(" and ")
    assert [setting.split("=")[0] for setting in settings] == keys
    mixture.check(spec.override(run, settings), sizes)
    mixture.check(spec.override(run, [wider]), sizes)
    longer = [f"{setting.split('=')[0]}={int(setting.split('=')[1].replace(',', '')) * 11 // 10}" for setting in settings]
    with pytest.raises(ValueError, match="would be read"):
        mixture.check(spec.override(run, longer), sizes)


@pytest.mark.parametrize("step", [-1, 200])
def test_steps_outside_the_run_are_refused(step):
    """Fails when a step that does not exist is given text."""
    with pytest.raises(ValueError, match="not in the run, which has 200: 0 to 199"):
        mixture.spans(a_run(), SIZES, step)
