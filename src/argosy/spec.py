"""What a run is: frozen values, their checks, their identity and their JSON form.

A `Run` holds everything that changes the mathematics, and has no hidden default: a recipe in
`argosy.runs` writes every field. What can be derived is a function here or in `argosy.plan`.
A `Host` holds what does not change the mathematics and stays out of `Run.key()`.
Only the standard library is imported.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

BATCH_AXES = ("replica", "data", "expert")
AXES = ("replica", "data", "context", "expert")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The dense part of the network: sizes and named choices (reference_run 1.1, 1.2)."""

    vocab: int
    width: int
    layers: int
    heads: int
    head_width: int
    kv_heads_local: int
    kv_heads_global: int
    window: int
    global_every: int
    qk_mult: float
    rope_theta: float
    gate_rank: int
    conv_taps: int
    z_loss_weight: float
    position: Literal["rope_local", "rope_all", "none"]
    attention: Literal["exclusive", "plain"]
    head_gate: Literal["sigmoid", "none"]
    convolution: Literal["k_attn_mlp", "none"]
    z_loss: Literal["logit", "none"]


@dataclass(frozen=True, kw_only=True)
class Moe:
    """The sparse part: routed experts in the latent width, shared experts in the full width."""

    experts: int
    experts_per_token: int
    hidden: int
    latent: Literal["norm", "none"]
    latent_width: int
    shared_experts: int
    shared_hidden: int
    combine_sum: float


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How tokens are balanced over experts and how they travel to them.

    `waves` divides a rank's experts. With `pooled_wave` every wave serves all of them, each with its part of the
    pools; with `ragged` a wave is a chunk, so many of the experts, which share one buffer.
    """

    balance: Literal["quantile", "aux_loss", "sign_bias"]
    histogram_bins: int
    aux_loss_weight: float
    sign_bias_step: float
    exchange: Literal["dense", "local", "pooled_wave", "ragged"]
    capacity: Literal["bounded", "dropless"]
    receiver_capacity: float
    sender_capacity: float
    waves: int


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One stretch of the mixture: it lasts until `until_frac` of the run, with these weights.

    The one source `*` stands for all sources of the corpus, each by its size.
    """

    name: str
    until_frac: float
    weights: tuple[tuple[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Data:
    """Which text, in which proportions, how long the sequences are."""

    corpus: str
    seq_len: int
    batch_seqs: int
    phases: tuple[Phase, ...]
    mixture_reference_tokens: int
    epoching: Literal["simulated", "plain"]
    max_epochs: float


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer's named choice, its horizon and the shape of its schedule (reference_run 3).

    `horizon_tokens` sets both the number of steps and the horizon of the learning-rate rule.
    `lr_scale` multiplies both learning rates that the rule gives. `adamw_lr` and `weight_decay`
    belong to the choices `adamw` and `muon` alone; `muon` uses the rule's MuonH rate.
    """

    rule: Literal["hyperball", "adamw", "muon"]
    radius: Literal["joint", "per_expert"]
    scaling: Literal["marin_2026_08", "marin_2026_05", "marin_2026_04"]
    horizon_tokens: int
    lr_scale: float
    warmup_frac: float
    final_frac: float
    decay: Literal["none", "gates_router"]
    decay_peak: float
    clip: Literal["none", "global"]
    clip_norm: float
    adamw_lr: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices along each axis; their product is the number of devices."""

    replica: int
    data: int
    context: int
    expert: int


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Precision, memory choices and the hardware that the plan is made for."""

    chip: str
    precision: Literal["fp32", "bf16"]
    params: Literal["fp32", "bf16"]
    masters: Literal["device", "pinned_host"]
    optimizer_state: Literal["device", "pinned_host"]
    remat: Literal["none", "block", "block_keep_dispatch"]
    accumulate: int
    attention_block: int
    readout_block_tokens: int


@dataclass(frozen=True, kw_only=True)
class Evals:
    """Held-out evaluation: always dropless, at the registered sequence length."""

    every_frac: float
    tokens_per_set: int
    batch_seqs: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """A complete run. Equal runs give equal bits on equal hardware."""

    recipe: str
    seed: int
    model: Model
    moe: Moe
    routing: Routing
    data: Data
    optim: Optim
    mesh: Mesh
    compute: Compute
    evals: Evals

    def __post_init__(self) -> None:
        check(self)

    def key(self) -> str:
        """Identity: SHA-256 of the canonical JSON, 16 hex digits. The recipe's name is no part of it."""
        body = to_json(self)
        del body["recipe"]
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Host:
    """Where and how a run executes; nothing here changes its mathematics."""

    home: Path = Path("voyages")
    name: str = ""
    checkpoint_every_s: float = 60.0
    keep_checkpoints: int = 2
    port: int = 0

    @property
    def folder(self) -> Path:
        return self.home / "runs" / self.name


# ---- what follows from a run -------------------------------------------------------------------


def tokens_per_step(run: Run) -> int:
    """Tokens in one optimizer step: B x S."""
    return run.data.batch_seqs * run.data.seq_len


def steps(run: Run) -> int:
    """Optimizer steps in the run: the horizon over the tokens of a step, to the nearest."""
    return max(1, round(run.optim.horizon_tokens / tokens_per_step(run)))


def evaluation_every(run: Run) -> Fraction:
    """Updates between two held-out evaluations, at least one, of a share as it was meant: a decimal, or a division that no float holds.

    >>> from argosy.runs import marin_535b, pocket
    >>> evaluation_every(pocket.run()), evaluation_every(marin_535b.run())
    (Fraction(256, 5), Fraction(3000, 1))
    """
    return max(Fraction(1), Fraction(str(run.evals.every_frac)).limit_denominator(10**7) * steps(run))


def devices(run: Run) -> int:
    m = run.mesh
    return m.replica * m.data * m.context * m.expert


def is_global(model: Model, layer: int) -> bool:
    """Every `global_every`-th layer and the last see the whole sequence (reference_run 1.1).

    >>> from argosy.runs import pocket
    >>> [is_global(pocket.run().model, i) for i in range(4)]
    [False, False, False, True]
    """
    return (layer + 1) % model.global_every == 0 or layer == model.layers - 1


def expert_width(moe: Moe, model: Model) -> int:
    """Z: the width that routed experts see."""
    return model.width if moe.latent == "none" else moe.latent_width


BLOCK_SEQS = 49_152  # the reference run's mixture block (reference_run 8), and the largest here
SMALLEST_BLOCK = 192  # BLOCK_SEQS / 2^8


def mixture_block(batch: int, smallest_weight: float) -> int:
    """Sequences in a block of the mixture: at least four batches, and at least eight of the smallest source.

    192, 384, ... 49,152. It depends on the phase and the batch alone, so that a new horizon leaves the order as it was.
    """
    block = SMALLEST_BLOCK
    while block < BLOCK_SEQS and (block < 4 * batch or block * smallest_weight < 8):
        block *= 2
    return block


def phase_stops(run: Run, smallest_weights: Sequence[float] | None = None) -> list[int]:
    """The step at which each phase ends: with a whole block where blocks are fine enough (1/32 of the run).

    `smallest_weights` are those of the sources that a corpus has, as shares of 1; the recipe's own if not given.
    The reference run's phase switch comes out as step 312,192 of 390,251 (reference_run 6).
    """
    if smallest_weights is None:
        smallest_weights = [min(w for _, w in p.weights if w > 0) / sum(w for _, w in p.weights) for p in run.data.phases]
    total, batch, stops = steps(run), run.data.batch_seqs, [0]
    for phase, smallest in zip(run.data.phases, smallest_weights, strict=True):
        unit = math.lcm(mixture_block(batch, smallest), batch) // batch
        unit = unit if unit * 32 <= total else 1
        here = stops[-1] + max(0, round((phase.until_frac * total - stops[-1]) / unit)) * unit
        stops.append(total if phase.until_frac == 1.0 else min(here, total))
    return stops[1:]


# ---- checks: what was asked, the numbers, the rule, the nearest legal value ----------------------


def nearest_divisors(value: int, asked: int) -> str:
    """The one or two divisors of `value` that are nearest to what was asked.

    >>> nearest_divisors(12, 5)
    '4, 6'
    """
    legal = sorted((n for n in range(1, value + 1) if value % n == 0), key=lambda n: abs(n - asked))
    return ", ".join(map(str, legal[:2]))


def nearest_multiples(value: int, unit: int) -> str:
    low = value // unit * unit
    return f"{low + unit}" if low <= 0 else f"{low} or {low + unit}"


# The largest values that make sense of any machine to come: loops over layers end, and device integers hold the sizes.
_MOST = {
    "layers": 10_000,
    "heads": 1_000_000,
    "experts": 1_000_000,
    "horizon_tokens": 10**18,
    "mixture_reference_tokens": 10**18,
}
_MOST_WHOLE, _MOST_REAL = 10**9, 1e38


def _positive(section: str, name: str, value: int | float) -> None:
    if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise ValueError(f"{section}.{name}={value!r} must be a finite number above 0; e.g. {section}.{name}=1")


def _bounded(section: str, name: str, value: int | float) -> None:
    most = _MOST.get(name, _MOST_WHOLE) if isinstance(value, int) else _MOST_REAL
    if value > most:
        raise ValueError(f"{section}.{name}={value:.6g} is more than the {most:,} that is allowed; nearest legal {most:,}")


def _fraction(section: str, name: str, value: int | float) -> None:
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(
            f"{section}.{name}={value!r} is a fraction: 0 to 1; nearest legal {min(max(value, 0), 1) if math.isfinite(value) else 0}"
        )


def _choice(kind: Any, value: Any, path: str) -> None:
    """Refuse a value that is not one of a named choice's names."""
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else (value,)
    if value not in choices:
        raise ValueError(
            f"{path}={value!r} is not one of {', '.join(map(str, choices))}; nearest: {', '.join(nearest(str(value), choices))}"
        )


_MAY_BE_ZERO = {
    "shared_experts", "z_loss_weight", "aux_loss_weight", "sign_bias_step", "decay_peak", "clip_norm",
    "weight_decay", "warmup_frac", "final_frac", "adamw_lr",
}  # fmt: skip


def check(run: Run) -> None:
    """Refuse a run that cannot be, before anything is compiled.

    Raises:
        ValueError: naming the field, the numbers, the rule and the nearest legal values.
    """
    _check_values(run)
    _check_model(run)
    _check_routing(run)
    _check_memory(run)
    _check_counts(run)
    _check_division(run)
    _check_phases(run.data.phases)


def _check_values(run: Run) -> None:
    """Every value on its own: a known choice, a finite number in its range."""
    for section in dataclasses.fields(run):
        part = getattr(run, section.name)
        if not dataclasses.is_dataclass(part):
            continue
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            _choice(field.type, value, f"{section.name}.{field.name}")
            if not isinstance(value, int | float):
                continue
            if field.name not in _MAY_BE_ZERO:
                _positive(section.name, field.name, value)
            elif not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{section.name}.{field.name}={value!r} must be finite and at least 0; nearest legal 0")
            _bounded(section.name, field.name, value)
            if field.name.endswith("_frac"):
                _fraction(section.name, field.name, value)
    if not 0 <= run.seed < 2**32:
        raise ValueError(f"seed={run.seed} must be 0 to {2**32 - 1:,}; nearest legal {min(max(run.seed, 0), 2**32 - 1):,}")


def _check_model(run: Run) -> None:
    m, moe = run.model, run.moe
    for name in ("kv_heads_local", "kv_heads_global"):
        kv = getattr(m, name)
        if m.heads % kv:
            raise ValueError(
                f"model.{name}={kv} does not divide model.heads={m.heads}; each key/value head serves a whole"
                f" group of query heads; nearest legal {nearest_divisors(m.heads, kv)}"
            )
    if m.kv_heads_global > m.kv_heads_local:
        raise ValueError(
            f"model.kv_heads_global={m.kv_heads_global} exceeds model.kv_heads_local={m.kv_heads_local}; global layers"
            f" use the first of the stored local heads; nearest legal {m.kv_heads_local}"
        )
    if m.head_width % 4:
        raise ValueError(
            f"model.head_width={m.head_width} must be a multiple of 4: rotary pairs fill its first half;"
            f" nearest legal {nearest_multiples(m.head_width, 4)}"
        )
    if moe.experts_per_token > moe.experts:
        raise ValueError(
            f"moe.experts_per_token={moe.experts_per_token} exceeds moe.experts={moe.experts}; nearest legal {moe.experts}"
        )
    if run.optim.decay != "none" and run.optim.rule != "hyperball":
        raise ValueError(
            f"optim.decay={run.optim.decay} belongs to optim.rule=hyperball, asked {run.optim.rule}, which has"
            " optim.weight_decay; nearest legal optim.decay=none"
        )


LOCAL_EXPERTS = 256  # bfloat16 holds every whole number up to this
MOST_ASSIGNMENTS = 2**31 - 1  # of a step over the whole mesh, in one layer


def _check_routing(run: Run) -> None:
    moe, mesh, routing = run.moe, run.mesh, run.routing
    if moe.experts % mesh.expert:
        raise ValueError(
            f"moe.experts={moe.experts} does not divide over mesh.expert={mesh.expert} ranks; nearest moe.experts"
            f" {nearest_multiples(moe.experts, mesh.expert)}, nearest mesh.expert {nearest_divisors(moe.experts, mesh.expert)}"
        )
    if mesh.expert > 1 and routing.exchange == "local":
        raise ValueError(
            f"routing.exchange=local needs mesh.expert=1, asked {mesh.expert}; nearest: mesh.expert=1 or routing.exchange=pooled_wave"
        )
    here = moe.experts // mesh.expert
    if routing.exchange in ("pooled_wave", "ragged") and here % routing.waves:
        raise ValueError(
            f"routing.waves={routing.waves} does not divide the {here} experts of a rank; nearest"
            f" {nearest_divisors(here, routing.waves)}"
        )
    if routing.exchange == "pooled_wave" and here > LOCAL_EXPERTS:
        ranks = range(mesh.expert, moe.experts + 1)
        legal = next(n for n in ranks if moe.experts % n == 0 and moe.experts // n <= LOCAL_EXPERTS)
        raise ValueError(
            f"routing.exchange=pooled_wave holds at most {LOCAL_EXPERTS} experts on a rank, moe.experts={moe.experts:,} over"
            f" mesh.expert={mesh.expert} are {here:,}: their numbers travel as bfloat16, which counts no further; nearest"
            f" mesh.expert={legal}, or routing.exchange=ragged"
        )


def _check_memory(run: Run) -> None:
    """Choices of memory that go together, and with the mathematics."""
    c = run.compute
    if c.params == "bf16" and c.precision != "bf16":
        raise ValueError(
            f"compute.params=bf16 rounds weights that compute.precision={c.precision} would not; nearest legal"
            " compute.params=fp32, or compute.precision=bf16"
        )
    if c.params == "fp32" and c.masters != "device":
        raise ValueError(
            f"compute.masters={c.masters} belongs to compute.params=bf16: float32 weights are their own masters; nearest legal"
            " compute.masters=device"
        )
    if c.accumulate > 1 and run.routing.balance == "aux_loss":
        raise ValueError(
            f"routing.balance=aux_loss needs the loads of the whole batch before its gradient, compute.accumulate={c.accumulate}"
            " cuts it into parts; nearest legal compute.accumulate=1, or routing.balance=quantile"
        )


def _check_counts(run: Run) -> None:
    """One layer's assignments in a step, and in an evaluation's batch, can be counted on a device."""
    d, k, mesh = run.data, run.moe.experts_per_token, run.mesh
    shards = mesh.replica * mesh.data * mesh.expert
    for key, seqs, unit in (
        ("data.batch_seqs", d.batch_seqs, shards * run.compute.accumulate),
        ("evals.batch_seqs", run.evals.batch_seqs, shards),
    ):
        if seqs * d.seq_len * k <= MOST_ASSIGNMENTS:
            continue
        legal = MOST_ASSIGNMENTS // (d.seq_len * k) // unit * unit
        shorter = f"{key}={unit:,} with data.seq_len={MOST_ASSIGNMENTS // unit // k:,}"
        raise ValueError(
            f"{key}={seqs:,} x data.seq_len={d.seq_len:,} x moe.experts_per_token={k} are {seqs * d.seq_len * k:,} assignments"
            f" in a step; they are counted in int32, up to {MOST_ASSIGNMENTS:,}; nearest legal"
            f" {f'{key}={legal:,}' if legal else shorter}"
        )


def _check_division(run: Run) -> None:
    """What is divided over the mesh divides."""
    m, d, mesh = run.model, run.data, run.mesh
    shards = mesh.replica * mesh.data * mesh.expert
    if d.batch_seqs % (shards * run.compute.accumulate):
        raise ValueError(
            f"data.batch_seqs={d.batch_seqs:,} does not divide over replica {mesh.replica} x data {mesh.data} x expert"
            f" {mesh.expert} = {shards} devices x compute.accumulate {run.compute.accumulate}; nearest"
            f" {nearest_multiples(d.batch_seqs, shards * run.compute.accumulate)}"
        )
    if run.evals.batch_seqs % shards:
        raise ValueError(
            f"evals.batch_seqs={run.evals.batch_seqs} does not divide over {shards} devices; nearest"
            f" {nearest_multiples(run.evals.batch_seqs, shards)}"
        )
    if d.seq_len % mesh.context:
        raise ValueError(
            f"data.seq_len={d.seq_len} does not divide over context {mesh.context}; nearest"
            f" {nearest_multiples(d.seq_len, mesh.context)}"
        )
    fsdp = mesh.data * mesh.expert
    for label, size in (("model.width", m.width), ("model.vocab", m.vocab)):
        if size % fsdp:
            raise ValueError(
                f"{label}={size:,} does not divide over data {mesh.data} x expert {mesh.expert} = {fsdp} devices; nearest"
                f" {nearest_multiples(size, fsdp)}"
            )


def _check_phases(phases: Sequence[Phase]) -> None:
    if not phases or phases[-1].until_frac != 1.0:
        raise ValueError("data.phases must end at until_frac=1.0: the last phase lasts to the end of the run")
    previous = 0.0
    for phase in phases:
        if not previous < phase.until_frac <= 1.0:
            raise ValueError(
                f"data.phases: {phase.name!r} ends at {phase.until_frac}, the one before it at {previous}; ends must rise to 1.0"
            )
        previous = phase.until_frac
        weights = [w for _, w in phase.weights]
        if not weights or not all(math.isfinite(w) and w >= 0 for w in weights) or sum(weights) <= 0:
            raise ValueError(
                f"data.phases: {phase.name!r} needs weights of at least 0 with a sum above 0, got {phase.weights!r}"
            )
        names = [n for n, _ in phase.weights]
        if len(set(names)) != len(names):
            raise ValueError(f"data.phases: {phase.name!r} names a source twice: {names}")


# ---- JSON and overrides ------------------------------------------------------------------------


def nearest(asked: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names closest to what was asked, closest first."""
    known = list(dict.fromkeys(known))
    return difflib.get_close_matches(asked, known, n=count, cutoff=0.0)


def to_json(run: Run) -> dict[str, Any]:
    """A run as plain JSON values."""
    return dataclasses.asdict(run)


def from_json(body: dict[str, Any]) -> Run:
    """The run that `to_json` wrote.

    Raises:
        ValueError: for an unknown or a missing key, naming it and the nearest known ones.
    """
    return _build(Run, body, "")


def _build(cls: Any, body: Any, path: str) -> Any:
    if not isinstance(body, dict):
        raise ValueError(f"{path or 'run'} must be an object with the fields of {cls.__name__}, got {body!r}")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name in body:
        if name not in fields:
            raise ValueError(f"unknown key {path}{name}; nearest: {', '.join(nearest(name, fields))}")
    for name in fields:
        if name not in body:
            raise ValueError(f"missing key {path}{name}")
    return cls(**{name: _coerce(fields[name].type, value, f"{path}{name}") for name, value in body.items()})


def _coerce(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _build(kind, value, path + ".")
    if path.endswith("phases"):
        if not isinstance(value, list | tuple):
            raise ValueError(f"{path}={value!r} must be a list of phases, each with name, until_frac and weights")
        return tuple(_build(Phase, v, f"{path}[{i}].") for i, v in enumerate(value))
    if path.endswith("weights"):
        pairs = list(value.items()) if isinstance(value, dict) else value
        if not isinstance(pairs, list | tuple) or not all(
            isinstance(p, list | tuple) and len(p) == 2 and isinstance(p[1], int | float) for p in pairs
        ):
            raise ValueError(f'{path}={value!r} must be pairs of source and weight, e.g. [["library", 2], ["prose", 1]]')
        return tuple((str(n), float(w)) for n, w in pairs)
    _choice(kind, value, path)
    if kind is int and isinstance(value, float) and value == int(value):
        return int(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (int, float, str) and (not isinstance(value, kind) or isinstance(value, bool)):
        raise ValueError(f"{path}={value!r} must be of type {kind.__name__}")
    return value


def keys(run: Run) -> dict[str, Any]:
    """Every overridable key of a run with its value: `{'seed': 0, 'data.seq_len': 256, ...}`."""
    found: dict[str, Any] = {}
    for section in dataclasses.fields(run):
        part = getattr(run, section.name)
        if dataclasses.is_dataclass(part):
            found |= {f"{section.name}.{f.name}": getattr(part, f.name) for f in dataclasses.fields(part)}
        elif section.name != "recipe":
            found[section.name] = part
    return found


def override(run: Run, settings: Sequence[str]) -> Run:
    """The run with `key=value` settings applied, all at once, then checked.

    >>> from argosy.runs import pocket
    >>> override(pocket.run(), ["data.seq_len=128", "moe.latent=none"]).data.seq_len
    128

    Raises:
        ValueError: for an unknown key (naming the nearest three), a value of the wrong type, or an illegal run.
    """
    known = keys(run)
    body = to_json(run)
    for setting in settings:
        key, sign, text = setting.partition("=")
        key = key.strip()
        if not sign:
            raise ValueError(f"--set {setting!r} must have the form key=value, e.g. data.seq_len={run.data.seq_len}")
        if key not in known:
            raise ValueError(f"unknown key {key!r}; nearest: {', '.join(nearest(key, known))}")
        section, _, name = key.rpartition(".")
        target = body[section] if section else body
        target[name] = _parse(text.strip(), known[key], key)
    return from_json(body)


def _parse(text: str, like: Any, key: str) -> Any:
    try:
        if isinstance(like, str):
            return text
        if isinstance(like, int | float):
            number = text.replace("_", "").replace(",", "")
            value = float(number)
            if isinstance(like, int):
                if value != int(value):
                    raise ValueError
                return int(number) if number.lstrip("+-").isdigit() else int(value)
            return value
        return json.loads(text)
    except (ValueError, OverflowError):
        kind = "a whole number" if isinstance(like, int) else "a number" if isinstance(like, float) else "JSON"
        raise ValueError(f"{key}={text!r} must be {kind}; it is now {like!r}") from None


def difference(a: Run, b: Run) -> dict[str, tuple[Any, Any]]:
    """Keys whose values differ: `{key: (value in a, value in b)}`."""
    left, right = keys(a), keys(b)
    return {key: (left[key], right[key]) for key in left if left[key] != right[key]}
