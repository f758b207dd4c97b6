"""Token and parameter figures that circulate for one run, side by side, so that no two are taken for each other."""

from argosy import spec
from argosy.plan import flops


def phases(run: spec.Run) -> list[dict]:
    """The phases as trained: name, first step, steps, tokens, sequence length, weights that sum to 1.

    A phase ends with a whole block of the mixture (`spec.phase_stops`).
    """
    found, first = [], 0
    for phase, last in zip(run.data.phases, spec.phase_stops(run), strict=True):
        total = sum(w for _, w in phase.weights)
        found.append(
            {
                "name": phase.name,
                "first_step": first,
                "steps": last - first,
                "tokens": (last - first) * spec.tokens_per_step(run),
                "seq_len": run.data.seq_len,
                "weights": {name: w / total for name, w in phase.weights},
            }
        )
        first = last
    return found


def tokens(run: spec.Run) -> list[dict]:
    """Every token figure of the run with its steps and what it means.

    Keeps apart the horizon (which sets steps and learning rates), what is trained (whole steps), the phases, and the
    mixture reference (to which weights and epoch limits were fitted). Source: reference_run 6.
    """
    per_step, steps, horizon = spec.tokens_per_step(run), spec.steps(run), run.optim.horizon_tokens
    reference = run.data.mixture_reference_tokens
    spoken = round(horizon, 3 - len(str(horizon)))
    per_active, with_readout = horizon / flops.active(run), horizon / flops.active_variants(run)["+ readout"]
    rows = [
        _row("horizon", horizon, steps, f"sets steps and learning rates: {per_active:,.1f} per active parameter, {with_readout:,.1f} with the readout"),
        _row("trained", steps * per_step, steps, "whole steps of the horizon, to the nearest"),
    ]  # fmt: skip
    if spoken != horizon and horizon >= 1e9:
        rows.insert(
            1, _row("spoken", spoken, round(spoken / per_step), "the horizon to three digits; its steps are not the run's")
        )
    rows += [_row(f"phase {p['name']}", p["tokens"], p["steps"], f"trained from step {p['first_step']:,}") for p in phases(run)]
    rows.append(_row("mixture reference", reference, None, "what phase weights and epoch limits were fitted to; not trained"))
    before = 0.0
    for phase in run.data.phases:
        share = phase.until_frac - before
        rows.append(_row(f"reference, {phase.name}", round(share * reference), None, f"{share:.0%} of the mixture reference"))
        before = phase.until_frac
    if run.data.epoching == "simulated":
        share = horizon / reference
        rows.append(
            _row("simulated epoching", horizon, None, f"each source is cut to {share:.3%} and repeats as in the reference")
        )
    return rows


def _row(name: str, count: int, steps: int | None, meaning: str) -> dict:
    return {"name": name, "tokens": count, "steps": steps, "meaning": meaning}


def params(run: spec.Run) -> list[dict]:
    """Every parameter figure of the run and what it means."""
    parts, total = flops.params(run), sum(flops.params(run).values())
    in_blocks = run.model.layers * 2 * 2 * run.model.width * run.model.gate_rank
    rows = [
        {"name": "total", "params": total, "meaning": "every weight, and the router's bias, which is state"},
        {
            "name": "without block gates",
            "params": total - in_blocks,
            "meaning": "total less the blocks' gated norms, as some count",
        },
        {
            "name": "optimized",
            "params": total - parts["router_bias"],
            "meaning": "what the optimizer steps and a checkpoint names",
        },
    ]
    variants = flops.active_variants(run)
    rows += [{"name": "active", "params": variants.pop("active"), "meaning": flops.CONVENTION}]
    return rows + [{"name": name, "params": count, "meaning": "active, and all of these"} for name, count in variants.items()]
