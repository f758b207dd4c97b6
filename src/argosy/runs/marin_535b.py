"""The reference run, Marin 535B-A23B on 18T tokens: its launch form, its later form, its four rungs, its rules.

Commands: `argosy plan marin-535b`, `marin-535b/ragged`, `marin-535b/d768`, `/d1024`, `/d1536`, `/d2048`.
Numbers are those of marin-community/marin issue #8435 (the specification and the ladder) and of its public
`experiments/grug/moe_hero_ep`; another source stands beside its number as #issue or #pull request.
"""

import math
from dataclasses import replace

from argosy.plan import flops
from argosy.plan.ladder import Rung, carried
from argosy.spec import Compute, Data, Evals, Mesh, Model, Moe, Optim, Phase, Routing, Run

HERO = 6144  # width
RACKS = {768: 1, 1024: 2, 1536: 6, 2048: 11, HERO: 11}
RUNGS = (768, 1024, 1536, 2048)
EXPERT_RANKS = 64  # GPUs used of a rack of 72
SEQS_PER_CHIP = 16  # of 4,096 tokens: 1,024 sequences per rack
TOKENS_PER_ACTIVE = 791  # chosen so that the hero lands at 18T; the same for every rung
MIXTURE_TOKENS = 18_750_000_000_000  # what phase weights and epoch limits were fitted to: 15.0T + 3.75T
DEEPEST = 48

# Shares of ten of the forty topics in the first main mixture and in the cooldown (hero-mixture-log.md); the other
# thirty are public only within 200 anonymous cells and are one source here.
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

LAUNCH = Compute(
    chip="gb200",
    precision="bf16",
    params="bf16",
    masters="pinned_host",  # the pooled buffers left no room on the device (#8884)
    optimizer_state="pinned_host",
    # Every block is recomputed whole; to keep the dispatched rows of 48 layers would take 166 GiB more.
    remat="block",
    accumulate=1,
    attention_block=512,  # ours: the block of the plain JAX attention
    readout_block_tokens=4096,  # ours: the reference blocks the vocabulary, by 4,096
)


def run() -> Run:
    """The launch form: bf16 on the device, fp32 masters and optimizer state in pinned host memory, pooled waves."""
    return recipe("marin-535b", HERO, mesh=_racks(HERO))


def ragged() -> Run:
    """The form from step 81,716: fp32 on the device, ragged transport, optimizer state still in pinned host memory.

    The layers' inputs stay on the device, as in the measurement of 137.9 GiB (#8549, #8753). Production then moved
    them to pinned host memory, which left 116.5 GiB (#8753).
    """
    launch = recipe("marin-535b/ragged", HERO, mesh=_racks(HERO), compute=replace(LAUNCH, params="fp32", masters="device"))
    return replace(launch, routing=replace(launch.routing, exchange="ragged", waves=2))  # two halves of 3 experts (#8549)


def rung(width: int) -> Run:
    """A rung of the ladder: the same recipe at a smaller width, on fewer racks, with simulated epoching.

    Raises:
        ValueError: for a width that is no rung, naming the nearest.
    """
    if width not in RUNGS:
        nearest = min(RUNGS, key=lambda w: abs(w - width))
        raise ValueError(f"width {width} is no rung of marin-535b; rungs: {', '.join(map(str, RUNGS))}; nearest {nearest}")
    return recipe(f"marin-535b/d{width}", width, mesh=_racks(width))


def rungs(hero: Run | None = None) -> tuple[Rung, ...]:
    """The reference's ladder: four sizes, each once. Depth, heads, racks and batch are the recipe's, not scaled from the hero.

    Raises:
        ValueError: for a hero that differs from `run` in what each rung has its own value of.
    """
    return carried([Rung(f"d{width}", rung(width), "size") for width in RUNGS], run(), hero or run())


def depth(width: int) -> int:
    """Layers: width / (55 + 4 log2 width), rounded, then up to even (heuristic.py); at most the hero's 48.

    The rule would give the hero 58.

    >>> [depth(w) for w in (768, 1024, 1536, 2048, 6144)]
    [8, 12, 16, 22, 48]
    """
    by_rule = round(width / (55 + 4 * math.log2(width)))
    return min(by_rule + by_rule % 2, DEEPEST)


def model(width: int) -> Model:
    """The dense part by the recipe's rules: heads of 128, a quarter and an eighth of them for keys and values.

    Where those do not divide the heads, the next smaller count that does.
    """
    heads = width // 128

    def divides(at_most: int) -> int:
        return max(n for n in range(1, max(1, at_most) + 1) if heads % n == 0)

    return Model(
        vocab=128_256,  # the Marin tokenizer, the size of llama 3's
        width=width,
        layers=depth(width),
        heads=heads,
        head_width=128,
        kv_heads_local=divides(heads // 4),
        kv_heads_global=divides(heads // 8),
        window=2048,  # the last 2,048 tokens, self included
        global_every=4,  # layers 3, 7, ... and the last
        qk_mult=1.3,
        rope_theta=10_000.0,
        gate_rank=128,  # at every width
        conv_taps=4,
        z_loss_weight=1e-4,
        position="rope_local",
        attention="exclusive",
        head_gate="sigmoid",
        convolution="k_attn_mlp",
        z_loss="logit",
    )


def moe(width: int) -> Moe:
    """The sparse part: all inner widths are half the model's."""
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


def routing(expert_ranks: int) -> Routing:
    """Quantile balancing, and pooled waves where the experts are divided over ranks."""
    local = 384 // expert_ranks
    return Routing(
        balance="quantile",
        histogram_bins=10_000,
        aux_loss_weight=0.01,  # used by balance=aux_loss alone
        sign_bias_step=0.001,  # used by balance=sign_bias alone
        exchange="pooled_wave" if expert_ranks > 1 else "local",
        capacity="bounded",
        receiver_capacity=1.15,
        sender_capacity=1.15,  # raised from 1.05 before launch (#8347)
        waves=max(w for w in (1, 2, 3) if local % w == 0),  # 3 of the hero's 6 local experts
    )


def recipe(name: str, width: int, *, mesh: Mesh, compute: Compute = LAUNCH, seqs_per_chip: int = SEQS_PER_CHIP) -> Run:
    """The reference recipe at a width on a mesh: 791 tokens per active parameter, 16 sequences per chip.

    Above 1e23 FLOPs simulated epoching is off (#8414): the run is then close to what it would simulate.
    """
    chips = mesh.replica * mesh.data * mesh.context * mesh.expert
    draft = Run(
        recipe=name,
        seed=0,  # not published
        model=model(width),
        moe=moe(width),
        routing=routing(mesh.expert),
        data=Data(
            corpus="harrier-2026-08-18",  # 23.1T tokens, not public
            seq_len=4096,
            batch_seqs=seqs_per_chip * chips,  # the hero: 11,264
            # By steps the switch is 80% of 390,251 = 312,201; the reference rounds down to whole blocks of its
            # mixture, lcm(11,264, 49,152) sequences = 48 steps, and switches at 312,192.
            phases=(
                Phase(name="main", until_frac=0.8, weights=MAIN),
                Phase(name="cooldown", until_frac=1.0, weights=COOLDOWN),
            ),
            mixture_reference_tokens=MIXTURE_TOKENS,
            epoching="simulated",
            max_epochs=8.0,
        ),
        optim=Optim(
            rule="hyperball",
            radius="joint",  # one radius per layer over all experts, as the run did (#8621)
            scaling="marin_2026_08",
            horizon_tokens=1,  # below, from the active parameters
            lr_scale=1.0,
            warmup_frac=0.01,
            final_frac=0.05,
            decay="none",  # on gates and router from step 58,014 (#8833)
            decay_peak=0.02,
            clip="none",
            clip_norm=1.0,  # used by clip=global alone
            adamw_lr=3e-4,  # used by rule=adamw alone
            weight_decay=0.1,  # used by rule=adamw and rule=muon alone
        ),
        mesh=mesh,
        compute=compute,
        evals=Evals(
            every_frac=3000 / 390_251 if width == HERO else 0.05,  # every 3,000 steps; rungs every 5%
            tokens_per_set=2_097_152,  # ours
            batch_seqs=chips,  # one sequence per GPU
        ),
    )
    horizon = TOKENS_PER_ACTIVE * flops.active(draft)
    large = 3 * flops.forward_per_token(draft, readout=False) * horizon > 1e23
    return replace(
        draft,
        optim=replace(draft.optim, horizon_tokens=horizon),
        data=replace(draft.data, epoching="plain" if large else "simulated"),
    )


def _racks(width: int) -> Mesh:
    return Mesh(replica=RACKS[width], data=1, context=1, expert=EXPERT_RANKS)
