"""The pocket run: every feature of the reference run, on two cores, in minutes.

Command: `make voyage`, or `argosy voyage pocket`. Expected: docs/log.md. Its geometry is its own: the reference's
rules (heads of 128, gate rank 128, latent and expert width d/2, 384 experts, 791 tokens per active parameter) shrunk
to d = 128 would leave one head, gates as wide as the model, and a run of hours.
"""

import math
from dataclasses import replace

from argosy.plan import flops
from argosy.plan.ladder import Rung
from argosy.spec import Compute, Data, Evals, Mesh, Model, Moe, Optim, Phase, Routing, Run


def mixture(**weights: int | float) -> tuple[tuple[str, float], ...]:
    return tuple((source, float(weight)) for source, weight in weights.items())


def run() -> Run:
    """The pocket run."""
    return Run(
        recipe="pocket",
        seed=0,
        model=Model(
            vocab=4096,  # the corpus's own; at 128,256 the two vocabulary matrices would be 94% of all parameters
            width=128,  # two cores take it through 2M tokens in minutes
            layers=4,  # one whole period: three local layers, one global
            heads=4,  # 4 : 2 : 1 is the least with different key/value heads on local and global layers
            head_width=32,  # 4 x 32 = width, as in the reference; 16 of them rotate
            kv_heads_local=2,
            kv_heads_global=1,
            window=128,  # half the sequence, as in the reference
            global_every=4,
            qk_mult=1.3,
            rope_theta=10_000.0,
            gate_rank=16,  # width / 8; the reference's 128 is width / 48, which would be 3
            conv_taps=4,
            z_loss_weight=1e-4,
            position="rope_local",
            attention="exclusive",
            head_gate="sigmoid",
            convolution="k_attn_mlp",
            z_loss="logit",
        ),
        moe=Moe(
            experts=32,  # 256 assignments per expert and update: a load that can be balanced
            experts_per_token=4,  # an eighth; at the reference's 1 in 48 an expert would see too few tokens to learn
            hidden=64,  # width / 2, like the latent and shared widths
            latent="norm",
            latent_width=64,
            shared_experts=2,
            shared_hidden=64,
            combine_sum=2.5,
        ),
        routing=Routing(
            balance="quantile",
            histogram_bins=10_000,
            aux_loss_weight=0.01,
            sign_bias_step=0.001,
            exchange="local",
            capacity="bounded",
            receiver_capacity=1.15,
            sender_capacity=1.15,
            waves=1,
        ),
        data=Data(
            corpus="stdlib",
            seq_len=256,  # about 950 bytes; longer sequences leave fewer documents in a batch
            batch_seqs=8,  # 2,048 tokens: small enough for 1,024 updates
            phases=(
                Phase(name="main", until_frac=0.8, weights=mixture(library=35, packages=30, tests=15, prose=15, topics=5)),
                Phase(name="cooldown", until_frac=1.0, weights=mixture(library=40, packages=30, tests=5, prose=20, topics=5)),
            ),
            mixture_reference_tokens=2_097_152,
            epoching="plain",  # the horizon is the mixture reference, so that simulating would change nothing
            max_epochs=8.0,
        ),
        optim=Optim(
            rule="hyperball",
            radius="joint",
            scaling="marin_2026_08",
            horizon_tokens=2_097_152,  # 3 tokens per active parameter: what two cores do in minutes, not what is best
            lr_scale=2.0,  # the rule is 1/265 outside its range here; 0.5 to 3 were tried at a quarter of the horizon (docs/log.md)
            warmup_frac=0.01,
            final_frac=0.05,
            decay="none",
            decay_peak=0.02,
            clip="none",
            clip_norm=1.0,
            adamw_lr=3e-3,
            weight_decay=0.1,
        ),
        mesh=Mesh(replica=1, data=1, context=1, expert=1),
        compute=Compute(
            chip="cpu",
            precision="fp32",
            params="fp32",
            masters="device",
            optimizer_state="device",
            remat="none",
            accumulate=1,
            attention_block=64,  # the fastest of 64 and 128 on two cores
            readout_block_tokens=512,
        ),
        # Twenty times a run, for the forecast; the same text each time, so that little of it compares runs well.
        evals=Evals(every_frac=0.05, tokens_per_set=16_384, batch_seqs=8),
    )


def rung(width: int, hero: Run | None = None) -> Run:
    """The hero (the pocket run) at a smaller width: as many heads, narrower, tokens by active parameters.

    Inner widths are halves of the width. Sequences per update follow the square root of the tokens, so that a smaller run has fewer
    updates, but not as many fewer as it has fewer tokens.

    Raises:
        ValueError: for a width that is no multiple of 16, as heads rotate in fours.
    """
    hero = hero or run()
    half = width // 2
    draft = replace(
        hero,
        recipe=f"{hero.recipe}/d{width}",
        model=replace(hero.model, width=width, head_width=width // hero.model.heads),
        moe=replace(hero.moe, hidden=half, latent_width=half, shared_hidden=half),
    )
    share = flops.active(draft) / flops.active(hero)
    return replace(
        draft,
        data=replace(hero.data, batch_seqs=max(1, round(hero.data.batch_seqs * math.sqrt(share)))),
        optim=replace(hero.optim, horizon_tokens=int(hero.optim.horizon_tokens * share)),
    )


def rungs(hero: Run | None = None) -> tuple[Rung, ...]:
    """Three sizes at the hero's tokens; the smallest again with another seed, and at half batch and half the tokens.

    By the reference's rule, tokens by active parameters (`rung`), the smaller ones would end before they have learned to spell, and
    what they lose by that is no power of anything: the forecast from such rungs was 6 to 15% too high (docs/log.md).
    """
    hero = hero or run()
    sizes = [
        replace(rung(hero.model.width * sixteenths // 16, hero), data=hero.data, optim=hero.optim) for sixteenths in (4, 6, 8)
    ]
    half = replace(hero.optim, horizon_tokens=hero.optim.horizon_tokens // 2)
    small = sizes[0]
    batch = replace(hero.data, batch_seqs=max(1, hero.data.batch_seqs // 2))
    name = f"d{small.model.width}"
    return (
        *(Rung(f"d{size.model.width}", size, "size") for size in sizes),
        Rung(f"{name}-small-batch", replace(small, data=batch, optim=half), "small_batch"),
        Rung(f"{name}-seed{small.seed + 1}", replace(small, seed=small.seed + 1), "seed"),
    )
