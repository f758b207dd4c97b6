"""The reference run, Marin 535B-A23B on 18T tokens, in its launch form, its later form and its four rungs.

Commands: `argosy plan marin-535b`, `marin-535b/ragged`, `marin-535b/d768`, `/d1024`, `/d1536`, `/d2048`.
Sources: marin-community/marin issue #8435 (the specification and the ladder), its public
`experiments/grug/moe_hero_ep`, and the pull requests named beside a number. Section numbers are those of
`docs/method.md` where the recipe is described in our words.
"""

import math
from dataclasses import replace

from argosy import spec
from argosy.plan import flops
from argosy.spec import Compute, Data, Evals, Mesh, Model, Moe, Optim, Phase, Routing, Run

TOKENS_PER_ACTIVE = 791  # chosen so that width 6,144 lands at 18T (#8435); the same for every rung
EXPERT_RANKS = 64  # GPUs used of a rack of 72
SEQS_PER_RACK = 1024  # 16 sequences of 4,096 per GPU
MIXTURE_TOKENS = 18_750_000_000_000  # what phase weights and epoch caps were fitted to: 15.0T + 3.75T

# width: layers, heads, key/value heads local and global, racks. Rungs: launch_scaling_ladder.py; the batch is
# SEQS_PER_RACK x racks. The depth rule of the rungs would give width 6,144 58 layers; the run has 48.
SHAPES = {
    768: (8, 6, 1, 1, 1),
    1024: (12, 8, 2, 1, 2),
    1536: (16, 12, 3, 1, 6),
    2048: (22, 16, 4, 2, 11),
    6144: (48, 48, 12, 6, 11),
}
RUNGS = tuple(width for width in SHAPES if width < 6144)

# Shares of ten of the forty topics in the first main mixture and in the cooldown (hero-mixture-log.md); the
# remaining thirty are public only as 200 anonymous cells and are one source here.
MAIN = (
    ("code_low_level", 0.090),
    ("software_infra_security", 0.093),
    ("agent_transcripts", 0.013),
    ("software_general", 0.079),
    ("research_natural_science", 0.088),
    ("history_literature", 0.069),
    ("finance", 0.056),
    ("math", 0.043),
    ("law", 0.011),
    ("world_news", 0.008),
    ("thirty_other_topics", 0.450),
)
COOLDOWN = (
    ("code_low_level", 0.114),
    ("software_infra_security", 0.080),
    ("agent_transcripts", 0.066),
    ("software_general", 0.031),
    ("research_natural_science", 0.113),
    ("history_literature", 0.037),
    ("finance", 0.028),
    ("math", 0.014),
    ("law", 0.029),
    ("world_news", 0.018),
    ("thirty_other_topics", 0.470),
)


def run() -> Run:
    """The launch form: bf16 on the device, fp32 masters and optimizer state in pinned host memory, pooled waves."""
    return _made("marin-535b", 6144)


def ragged() -> Run:
    """The form from step 81,716: fp32 on the device, ragged transport, optimizer state still in pinned host memory.

    The layers' inputs stay on the device here, as in the measurement of 137.9 GiB (#8549, #8753); production also
    moved them to pinned host memory, which brought 116.5 GiB (#8753).
    """
    launch = _made("marin-535b/ragged", 6144)
    return replace(
        launch,
        routing=replace(launch.routing, exchange="ragged"),
        compute=replace(launch.compute, params="fp32", masters="device"),
    )


def rung(width: int) -> Run:
    """A rung of the ladder: the same recipe at a smaller width, on fewer racks, with simulated epoching.

    Raises:
        ValueError: for a width that is no rung, naming the nearest.
    """
    if width not in RUNGS:
        by_distance = sorted(RUNGS, key=lambda w: abs(w - width))
        raise ValueError(
            f"width {width} is no rung of marin-535b; rungs: {', '.join(map(str, RUNGS))}; nearest {by_distance[0]}"
        )
    return _made(f"marin-535b/d{width}", width)


def model(width: int, layers: int, heads: int, kv_heads_local: int, kv_heads_global: int) -> Model:
    """The dense part by the recipe's rules (#8435)."""
    return Model(
        vocab=128_256,  # the Marin tokenizer, the size of llama 3's
        width=width,
        layers=layers,
        heads=heads,  # width / 128
        head_width=128,
        kv_heads_local=kv_heads_local,  # heads // 4
        kv_heads_global=kv_heads_global,  # heads // 8
        window=2048,  # last 2,048 tokens, self included
        global_every=4,  # layers 3, 7, ... and the last
        qk_mult=1.3,
        rope_theta=10_000.0,
        gate_rank=128,  # whatever the width
        conv_taps=4,
        z_loss_weight=1e-4,
        position="rope_local",
        attention="exclusive",
        head_gate="sigmoid",
        convolution="k_attn_mlp",
        z_loss="logit",
    )


def moe(width: int) -> Moe:
    """The sparse part: all inner widths are half the model's (#8435)."""
    return Moe(
        experts=384,
        experts_per_token=8,
        hidden=width // 2,
        latent="norm",
        latent_width=width // 2,
        shared_experts=2,
        shared_hidden=width // 2,
        combine_sum=2.5,
    )


def _made(recipe: str, width: int) -> Run:
    layers, heads, local, wide, racks = SHAPES[width]
    draft = Run(
        recipe=recipe,
        seed=0,  # not published
        model=model(width, layers, heads, local, wide),
        moe=moe(width),
        routing=Routing(
            balance="quantile",
            histogram_bins=10_000,
            aux_loss_weight=0.01,  # used by balance=aux_loss alone
            sign_bias_step=0.001,  # used by balance=sign_bias alone
            exchange="pooled_wave",
            capacity="bounded",
            receiver_capacity=1.15,
            sender_capacity=1.15,  # raised from 1.05 before launch (#8347)
            waves=3,
        ),
        data=Data(
            corpus="harrier-2026-08-18",  # 23.1T tokens, not public
            seq_len=4096,
            batch_seqs=SEQS_PER_RACK * racks,  # the hero: 11,264
            # By steps the switch is 80% of 390,251 = 312,201; the reference rounds down to whole blocks of its
            # mixture, lcm(11,264, 49,152) sequences = 48 steps, and switches at 312,192.
            phases=(
                Phase(name="main", until_frac=0.8, weights=MAIN),
                Phase(name="cooldown", until_frac=1.0, weights=COOLDOWN),
            ),
            mixture_reference_tokens=MIXTURE_TOKENS,
            # A rung repeats a source as often as the hero would; above 1e23 FLOPs it is off (#8414).
            epoching="plain" if width == 6144 else "simulated",
            max_epochs=8.0,
        ),
        optim=Optim(
            rule="hyperball",
            radius="joint",  # one radius per layer over all experts, as the run did (#8621)
            scaling="marin_2026_08",
            horizon_tokens=1,  # set below, from the active parameters
            lr_scale=1.0,
            warmup_frac=0.01,
            final_frac=0.05,
            decay="none",  # gates and router from step 58,014 on (#8833)
            decay_peak=0.02,
            clip="none",
            clip_norm=1.0,  # used by clip=global alone
            adamw_lr=3e-4,  # used by rule=adamw alone
            weight_decay=0.1,  # used by rule=adamw and rule=muon alone
        ),
        mesh=Mesh(replica=racks, data=1, context=1, expert=EXPERT_RANKS),
        compute=Compute(
            chip="gb200",
            precision="bf16",
            params="bf16",
            masters="pinned_host",  # the pooled buffers left no room on the device (#8884)
            optimizer_state="pinned_host",
            # Every block is recomputed whole. Keeping the dispatched rows of 48 layers would take 166 GiB.
            remat="block",
            accumulate=1,
            attention_block=512,  # ours: a block of the plain JAX attention
            readout_block_tokens=4096,  # ours: the reference blocks the vocabulary by 4,096 instead
        ),
        evals=Evals(
            every_frac=3000 / 390_251 if width == 6144 else 0.05,  # every 3,000 steps; rungs every 5%
            tokens_per_set=2_097_152,  # ours
            batch_seqs=EXPERT_RANKS * racks,  # one sequence per GPU
        ),
    )
    horizon = TOKENS_PER_ACTIVE * flops.active(draft)
    return replace(draft, optim=replace(draft.optim, horizon_tokens=horizon))


def switch_step(run: spec.Run, block_seqs: int = 49_152) -> int:
    """The step at which the reference enters its cooldown: 80% of the steps, down to whole mixture blocks.

    >>> switch_step(run())
    312192
    """
    block_steps = math.lcm(run.data.batch_seqs, block_seqs) // run.data.batch_seqs
    return round(run.data.phases[0].until_frac * spec.steps(run)) // block_steps * block_steps
