"""Fails when an illegal run is accepted, an override is lost, or identity does not follow the values."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy import runs, spec

ALL = [
    "pocket",
    "marin-535b",
    "marin-535b/ragged",
    "marin-535b/d768",
    "marin-535b/d1024",
    "marin-535b/d1536",
    "marin-535b/d2048",
]


@pytest.mark.parametrize("name", ALL)
def test_json_and_back(name):
    run = runs.find(name)
    again = spec.from_json(json.loads(json.dumps(spec.to_json(run))))
    assert again == run
    assert again.key() == run.key()


def test_fields_are_few_and_never_booleans(pocket):
    values = spec.keys(pocket)
    assert len(values) <= 80
    assert not any(isinstance(v, bool) for v in values.values())


@pytest.mark.parametrize("key", ["data.batch_seqs", "evals.batch_seqs"])
def test_more_assignments_than_int32_counts_are_refused_with_the_most_that_it_does(pocket, key):
    """4 x 256 of each of 2^21 sequences are 2^31, one more than fits. Fails when a step or an evaluation could overflow."""
    legal = 2**21 - 1
    spec.override(pocket, [f"{key}={legal}"])
    with pytest.raises(ValueError, match=rf"{key}=2,097,152 .* 2,147,483,648 assignments .* nearest legal {key}={legal:,}$"):
        spec.override(pocket, [f"{key}={legal + 1}"])


def test_key_follows_every_value_but_the_recipes_name(pocket):
    assert dataclasses.replace(pocket, recipe="other").key() == pocket.key()
    seen = {pocket.key()}
    for setting in ("seed=1", "data.seq_len=128", "moe.latent=none", "optim.lr_scale=0.5", "routing.balance=sign_bias"):
        seen.add(spec.override(pocket, [setting]).key())
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["compute.params=bf16"], "compute.precision=fp32 would not; nearest legal compute.params=fp32"),
        (["compute.masters=pinned_host"], "float32 weights are their own masters; nearest legal compute.masters=device"),
        (
            ["compute.accumulate=2", "routing.balance=aux_loss"],
            "loads of the whole batch .* nearest legal compute.accumulate=1",
        ),
    ],
)
def test_choices_of_memory_that_do_not_go_together_are_refused(pocket, settings, words):
    """Fails when a choice that would change the mathematics, or have no effect, is planned, rehearsed or trained in silence."""
    with pytest.raises(ValueError, match=words):
        spec.override(pocket, settings)


@given(st.integers(1, 10**13), st.floats(0.01, 100, allow_nan=False))
def test_override_is_exact(tokens, scale):
    base = runs.find("pocket")
    run = spec.override(base, [f"optim.horizon_tokens={tokens}", f"optim.lr_scale={scale!r}"])
    assert run.optim.horizon_tokens == tokens
    assert run.optim.lr_scale == scale
    changed = set(spec.difference(base, run))
    assert changed <= {"optim.horizon_tokens", "optim.lr_scale"}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("data.seqlen=4", ["data.seqlen", "data.seq_len"]),
        ("data.seq_len", ["key=value"]),
        ("data.seq_len=many", ["data.seq_len", "whole number", "256"]),
        ("data.seq_len=2.5", ["whole number"]),
        ("data.seq_len=0", ["data.seq_len=0", "above 0"]),
        ("data.batch_seqs=-8", ["data.batch_seqs=-8"]),
        ("optim.lr_scale=nan", ["optim.lr_scale"]),
        ("optim.lr_scale=inf", ["optim.lr_scale"]),
        ("optim.warmup_frac=1.5", ["optim.warmup_frac", "nearest legal 1"]),
        ("moe.latent=full", ["moe.latent", "norm", "none"]),
        ("model.kv_heads_local=3", ["model.kv_heads_local=3", "model.heads=4", "2, 4"]),
        ("model.kv_heads_global=4", ["kv_heads_global=4", "kv_heads_local=2"]),
        ("model.head_width=30", ["head_width=30", "28 or 32"]),
        ("moe.experts_per_token=64", ["experts_per_token=64", "experts=32"]),
        ("mesh.replica=3", ["data.batch_seqs=8", "replica 3", "6 or 9"]),
        ("mesh.expert=3", ["3"]),
        ("routing.receiver_capacity=0", ["routing.receiver_capacity=0", "above 0"]),
        ("data.phases=[]", ["data.phases"]),
        ('data.phases=[{"name":"a","until_frac":0.5,"weights":[["library",1]]}]', ["until_frac=1.0"]),
        ('data.phases=[{"name":"a","until_frac":1.0,"weights":[["library",-1]]}]', ["weights"]),
        ("data.phases={", ["JSON"]),
        ("evals.batch_seqs=0", ["evals.batch_seqs=0"]),
        ("seed=99999999999999999999", ["seed=", "4,294,967,295"]),
        ("model.layers=1000000000", ["model.layers", "10,000"]),
        ("model.width=1e308", ["model.width", "1,000,000,000"]),
        ("routing.receiver_capacity=1e300", ["routing.receiver_capacity"]),
        ("moe.shared_experts=-1", ["moe.shared_experts=-1"]),
        ("data.phases=3", ["data.phases", "list of phases"]),
        ('data.phases=[{"name":"a","until_frac":1.0,"weights":[["library"]]}]', ["pairs of source and weight"]),
        ("optim.decay=gates_router optim.rule=adamw", ["optim.decay"]),
        ("seed=x", ["seed", "whole number"]),
        ("moe.experts=1024 routing.exchange=pooled_wave mesh.expert=2", ["1,024", "512", "256", "mesh.expert=4", "ragged"]),
        ("data.batch_seqs=8000 data.seq_len=1000000", ["32,000,000,000", "int32", "2,147,483,647", "data.batch_seqs=536"]),
        ("data.seq_len=900000000", ["int32", "data.batch_seqs=1 with data.seq_len=536,870,911"]),
    ],
)
def test_a_users_mistake_is_named_with_its_numbers(pocket, setting, words):
    with pytest.raises(ValueError) as error:
        spec.override(pocket, setting.split() if "[" not in setting else [setting])
    for word in words:
        assert word in str(error.value), str(error.value)


def test_unknown_and_missing_keys_of_a_stored_run_are_refused(pocket):
    body = spec.to_json(pocket)
    with pytest.raises(ValueError, match=r"unknown key moe\.expert; nearest: experts"):
        spec.from_json({**body, "moe": {**body["moe"], "expert": 3}})
    del body["seed"]
    with pytest.raises(ValueError, match="missing key seed"):
        spec.from_json(body)


def test_global_layers_of_the_reference_run():
    model = runs.find("marin-535b").model
    assert [i for i in range(48) if spec.is_global(model, i)] == list(range(3, 48, 4))  # 12 of 48
    model = runs.find("marin-535b/d2048").model
    assert [i for i in range(22) if spec.is_global(model, i)] == [3, 7, 11, 15, 19, 21]  # the last one too


def test_recipes_of_ones_own(tmp_path):
    from argosy.runs import template

    path = tmp_path / "mine.py"
    path.write_text(template.TEXT.format(file=path, name="mine"))
    assert runs.find(f"{path}:run").recipe == "mine"
    with pytest.raises(ValueError, match="no function 'rum'; nearest: run"):
        runs.find(f"{path}:rum")
    with pytest.raises(ValueError, match="does not exist"):
        runs.find(f"{tmp_path}/nothing.py:run")
    with pytest.raises(ValueError, match="unknown recipe 'poket'; nearest: pocket"):
        runs.find("poket")
    path.write_text("def run(): return 3\n")
    with pytest.raises(ValueError, match="returned int, not a Run"):
        runs.find(f"{path}:run")
    path.write_text("import nothing_of_that_name\n")
    with pytest.raises(ValueError, match="does not run: ModuleNotFoundError"):
        runs.find(f"{path}:run")
