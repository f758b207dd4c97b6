"""The pocket run: every feature of the reference run, on two cores, in minutes.

Command: `make voyage` or `argosy voyage pocket`.
"""

from argosy.spec import Compute, Data, Evals, Mesh, Model, Moe, Optim, Phase, Routing, Run


def mixture(**weights: int | float) -> tuple[tuple[str, float], ...]:
    return tuple((source, float(weight)) for source, weight in weights.items())


def run() -> Run:
    """The pocket run."""
    return Run(
        recipe="pocket",
        seed=0,
        model=Model(
            vocab=4096,
            width=128,
            layers=4,
            heads=4,
            head_width=32,
            kv_heads_local=2,
            kv_heads_global=1,
            window=128,
            global_every=4,
            qk_mult=1.3,
            rope_theta=10_000.0,
            gate_rank=16,
            conv_taps=4,
            z_loss_weight=1e-4,
            position="rope_local",
            attention="exclusive",
            head_gate="sigmoid",
            convolution="k_attn_mlp",
            z_loss="logit",
        ),
        moe=Moe(
            experts=32,
            experts_per_token=4,
            hidden=64,
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
            seq_len=256,
            batch_seqs=8,
            phases=(
                Phase(name="main", until_frac=0.8, weights=mixture(library=35, packages=30, tests=15, prose=15, topics=5)),
                Phase(name="cooldown", until_frac=1.0, weights=mixture(library=40, packages=30, tests=5, prose=20, topics=5)),
            ),
            mixture_reference_tokens=2_097_152,
            epoching="plain",
            max_epochs=8.0,
        ),
        optim=Optim(
            rule="hyperball",
            radius="joint",
            scaling="marin_2026_08",
            horizon_tokens=2_097_152,
            lr_scale=1.0,
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
            attention_block=64,
            readout_block_tokens=512,
        ),
        evals=Evals(every_frac=0.1, tokens_per_set=32_768, batch_seqs=8),
    )
