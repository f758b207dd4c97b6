"""Commands as a user types them. Each test fails when a mistake gives a traceback, a wrong exit status, or half an answer."""

import json
import subprocess
import sys

import pytest
from commands import call

from argosy import runs


def test_the_reference_run_in_json_to_the_last_digit(capsys):
    """Published: marin#8435 and #9277; reference_run 1.3, 1.4, 3.5."""
    status, out, _ = call(capsys, "plan", "marin-535b", "--json")
    plan = json.loads(out)
    assert status == 0
    assert plan["params"]["total"] == 535_477_106_688
    assert plan["params"]["active"] == 22_762_487_808
    assert f"{plan['flops']['train_step']:.12e}" == "6.908433317700e+18"
    assert f"{plan['flops']['train_step_no_head']:.12e}" == "6.690294608796e+18"
    assert (plan["steps"], plan["tokens"]["per_step"]) == (390_251, 46_137_344)
    optim = plan["optim"]
    assert (f"{optim['muonh_lr']:.7f}", f"{optim['adam_lr']:.8f}", f"{optim['eps']:.4e}") == (
        "0.0032905",
        "0.00075934",
        "6.0446e-15",
    )
    assert (optim["beta2"], optim["warmup_steps"]) == (0.95, 3_902)
    assert set(plan["memory"]["per_device_bytes"]) >= {"device", "host"}
    assert set(plan["tokens"]["phases"][0]) >= {"name", "tokens", "seq_len", "weights"}
    assert set(plan["time"]) >= {"floor_step_s", "step_s", "days"}
    assert plan["hardware"]["chips"] == 704


@pytest.mark.parametrize("name", sorted(runs.RECIPES))
def test_every_recipe_is_planned_in_words_and_in_json(capsys, name):
    status, out, _ = call(capsys, "plan", name)
    assert status == 0
    assert "parameters" in out
    status, out, _ = call(capsys, "plan", name, "--json")
    assert status == 0
    json.loads(out)


def test_the_inverse(capsys):
    status, out, _ = call(capsys, "plan", "--chip", "h100", "--chips", "512", "--days", "90", "--price", "2", "--json")
    body = json.loads(out)
    assert status == 0
    cost = body["proposal"]["plan"]["cost"]
    assert cost["money"] == 2 * cost["chip_hours"] > 0
    assert body["proposal"]["plan"]["time"]["days"] <= 90
    assert body["smaller"]["plan"]["params"]["active"] < body["proposal"]["plan"]["params"]["active"]


def test_choices_of_memory_in_words_and_in_json(capsys):
    """The settings that are printed are those of the JSON, and a run that takes them fits and has nothing more to set."""
    status, out, err = call(capsys, "plan", "marin-535b", "--fit", "--json")
    found = json.loads(out)
    assert (status, err, found["nothing"], found["chosen"]["fits"]) == (0, "", None, True)
    settings = [word for setting in found["set"] for word in ("--set", setting)]
    status, out, _ = call(capsys, "plan", "marin-535b", "--fit")
    assert status == 0
    assert " ".join(settings) in " ".join(out.split())
    status, out, _ = call(capsys, "plan", "marin-535b", *settings, "--fit", "--json")
    again = json.loads(out)
    assert (status, again["set"], again["asked"]) == (0, [], found["chosen"])


def test_choices_of_memory_where_none_fits_are_status_one(capsys):
    status, out, _ = call(capsys, "plan", "marin-535b", "--set", "compute.chip=a100", "--fit")
    assert status == 1
    assert "nothing fits: the smallest misses by" in out and "nearest: " in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["launch", "local", "--processes", "2"], ["not nothing", "-- train pocket"]),
        (["launch", "local", "train", "poket"], ["unknown recipe 'poket'"]),
        (["plan", "--fit"], ["takes a recipe"]),
        (["plan", "pocket", "--fit", "--price", "2"], ["takes a recipe and --set alone"]),
        (["plan", "pocket", "--fit", "--drops-from", "pocket"], ["takes a recipe and --set alone"]),
        (["plan", "--chip", "h100", "--chips", "8", "--days", "9", "--drops-from", "pocket"], ["not both"]),
        (["plan", "--chip", "h100", "--chips", "8", "--days", "9", "--seed", "1"], ["whole run", "leave them out"]),
        (["plan", "--chip", "h100", "--chips", "8", "--days", "9", "--deadline", "9"], ["whose deadline is --days"]),
        (["plan", "poket"], ["unknown recipe 'poket'", "pocket"]),
        (["plan"], ["needs a recipe", "pocket"]),
        (["plan", "pocket", "--chip", "h100"], ["not both"]),
        (["plan", "--chip", "h10", "--chips", "8", "--days", "9"], ["h100"]),
        (["plan", "--chip", "h100", "--chips", "0", "--days", "9"], ["chips=0"]),
        (["plan", "--chip", "h100", "--chips", "8", "--days", "nan"], ["days"]),
        (["plan", "pocket", "--set", "data.seqlen=3"], ["data.seq_len"]),
        (["plan", "pocket", "--set", "compute.chip=b2000"], ["b200"]),
        (["plan", "pocket", "--deadline", "soon"], ["soon"]),
        (["plan", "pocket", "--price", "-1"], ["-1"]),
        (["plan", "pocket", "--goodput", "0"], ["goodput"]),
        (["plan", "nowhere.py:run"], ["does not exist", "argosy new"]),
        (["trian", "pocket"], ["unknown command 'trian'", "train"]),
        (["train", "pocket", "--as", "../up"], ["plain folder name"]),
        (["train", "marin-535b"], ["704 devices", "mesh.replica"]),
        (
            [
                "train",
                "pocket",
                "--set",
                "mesh.replica=1000",
                "--set",
                "data.batch_seqs=1000",
                "--set",
                "evals.batch_seqs=1000",
            ],
            ["1000 devices"],
        ),
        (["train", "pocket", "--set", "routing.exchange=ring"], ["routing.exchange", "local"]),
        (
            ["train", "pocket", "--set", "compute.accumulate=2", "--set", "routing.balance=aux_loss"],
            ["compute.accumulate=2", "routing.balance=quantile"],
        ),
        (["train", "pocket", "--set", "mesh.context=2"], ["mesh.context=2", "nearest legal 1"]),
        (["train", "pocket", "--set", "compute.masters=pinned_host"], ["compute.masters"]),
        (["plan", "pocket", "--set", "compute.masters=pinned_host"], ["compute.masters", "nearest legal"]),
        (["rehearse", "pocket", "--set", "compute.params=bf16"], ["compute.precision=fp32", "nearest legal"]),
        (["train", "pocket", "--set", "data.corpus=mine"], ["argosy data build", "mine"]),
        (["train", "pocket", "--stop-after", "-3"], ["--stop-after"]),
        (["show", "pocket"], ["pocket", "no run"]),
        (["sample", "pocket", "x"], ["no run"]),
        (["diff", "a", "b"], ["no run"]),
        (["serve", "a"], ["no run"]),
        (["data", "build", "nothing.jsonl", "--name", "mine"], ["nothing.jsonl"]),
        (["data", "build", "x.txt"], ["--name"]),
        (["new", "recipe.txt"], ["recipe.py"]),
    ],
)
def test_a_mistake_is_a_sentence_and_status_two(capsys, tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    if argv[0] in ("train", "show", "sample", "diff", "serve", "data"):
        argv = [*argv, "--home", str(tmp_path / "home")]
    status, out, err = call(capsys, *argv)
    assert status == 2, err
    assert out == ""
    assert err.startswith("argosy: ")
    assert "Traceback" not in err
    for word in words:
        assert word in err, err
    assert not (tmp_path / "home" / "runs" / "pocket" / "run.json").exists() or argv[0] == "train"


def test_an_unknown_option_is_status_two(capsys):
    status, _, _ = call(capsys, "plan", "pocket", "--jsn")
    assert status == 2


def test_new_never_overwrites(capsys, tmp_path):
    path = tmp_path / "mine.py"
    assert call(capsys, "new", path)[0] == 0
    path.write_text("# my work\n")
    status, _, err = call(capsys, "new", path)
    assert status == 2
    assert "left as it is" in err
    assert path.read_text() == "# my work\n"


def test_runs_of_an_empty_home(capsys, tmp_path):
    status, out, _ = call(capsys, "runs", "--home", tmp_path, "--json")
    assert (status, json.loads(out)) == (0, [])
    assert call(capsys, "runs", "--home", tmp_path)[0] == 0


def test_help_and_the_module_form():
    done = subprocess.run([sys.executable, "-m", "argosy.cli", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for name in ("voyage", "train", "plan", "data", "serve", "runs", "show", "diff", "sample", "new"):
        assert name in done.stdout
