"""The documents say what is there. Each test fails when a name, an example, a walk or a table in them is no longer true."""

import ast
import dataclasses
import doctest
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import argosy
from argosy import mesh as meshes
from argosy import spec
from argosy.batch import Batch
from argosy.runs import pocket
from argosy.train import step as steps

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "argosy"
MODULES = ["argosy", *sorted(m.name for m in pkgutil.walk_packages(argosy.__path__, "argosy."))]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
USERS = r"my_run\.py|log\.\w+|.*\.(json|jsonl|sqlite|lock)"  # what a user makes or finds, not ours


def fenced(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page: (kind, body)."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.S | re.M)


# ---- doctests ------------------------------------------------------------------------------------


def examples(name: str) -> list[doctest.DocTest]:
    """The examples of a module's docstrings, those of wrapped functions too, which doctest's own finder passes over."""
    module = importlib.import_module(name)
    path = Path(module.__file__ or "")
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            where = f"{name}.{getattr(node, 'name', '')}"
            found.append(doctest.DocTestParser().get_doctest(text, dict(vars(module)), where, str(path), node.body[0].lineno))
    return [one for one in found if one.examples]


@pytest.mark.parametrize("name", [n for n in MODULES if n != "argosy.track.server"])
def test_examples_of_docstrings_are_true(name):
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for one in examples(name):
        runner.run(one)
    assert runner.failures == 0


def test_there_are_examples():
    assert sum(len(examples(name)) for name in MODULES) > 25


# ---- names ---------------------------------------------------------------------------------------


def named(text: str) -> list[str]:
    """What stands in single backticks outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M))


def has(thing: object, path: list[str]) -> bool:
    """Whether an attribute, or a field of a dataclass or a NamedTuple, is there."""
    for part in path:
        fields = (
            {f.name for f in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else getattr(thing, "_fields", ())
        )
        if not hasattr(thing, part) and part not in fields:
            return False
        thing = getattr(thing, part, None)
    return True


def exists(name: str) -> bool:
    """Whether `room.module.function`, `module.function`, a key of a run or a name of a library is there."""
    first, *rest = name.split(".")
    if name in spec.keys(pocket.run()):
        return True
    if first in ("jax", "optax", "numpy"):
        return has(importlib.import_module(first), rest)
    for module in MODULES:
        parts = module.split(".")
        for depth in range(len(parts)):
            tail = parts[depth:]
            if name.split(".")[: len(tail)] == tail and has(importlib.import_module(module), name.split(".")[len(tail) :]):
                return True
    return False


def there(path: str) -> bool:
    """Whether a file or folder is in the repository, from its root, the package or beside the documents."""
    return any((base / path).exists() for base in (ROOT, PACKAGE, ROOT / "docs", ROOT / "tests"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_in_backticks_exist(page):
    lost = []
    for name in named(page.read_text(encoding="utf-8")):
        bare = re.sub(r"\(.*\)$", "", name).partition("=")[0]
        if re.fullmatch(USERS, bare):
            continue
        if re.fullmatch(r"[\w./-]+\.(py|md|toml)", bare):
            known = there(bare) or ("/" not in bare and any(PACKAGE.rglob(bare)))
        elif re.fullmatch(r"(src|tests|docs|bench|requirements|\.ci)/[\w./-]*", bare):
            known = there(bare)
        elif re.fullmatch(r"[a-z_]\w*(\.[A-Za-z_]\w*)+", bare):
            known = exists(bare)
        else:
            continue
        if not known:
            lost.append(name)
    assert not lost


def test_the_names_check_can_fail():
    for name in ("router.rout", "model.route", "optimizer.hyperbal", "optim.rul", "jax.numpie", "tokens.Store.gather_all"):
        assert not exists(name)
    for name in (
        "router.route",
        "model.router.route",
        "spec.Run.seed",
        "tokens.Store.gather",
        "optim.rule",
        "step.State.params",
    ):
        assert exists(name)
    assert not there("model/rooter.py")


def test_the_floor_plan_is_the_tree():
    plan = next(body for _, body in fenced((ROOT / "docs" / "house.md").read_text(encoding="utf-8")) if "src/argosy/" in body)
    ours = {p.name for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"}
    assert set(re.findall(r"(\w+\.py)\b", plan)) - {"__init__.py"} == ours


SECTION = r"[A-Z]?\d+(?:\.\d+)?"


def test_every_section_that_a_docstring_cites_is_explained():
    """Fails when a docstring cites a section of the public run's digest that docs/method.md does not resolve."""
    cite = re.compile(rf"\b(reference_run|expert_parallel|operations)(?:\.md)? ({SECTION}(?:(?:, | to ){SECTION})*)")
    cited = {
        f"{work} {section}"
        for path in PACKAGE.rglob("*.py")
        for work, sections in cite.findall(path.read_text(encoding="utf-8"))
        for section in re.findall(SECTION, sections)
    }
    page = (ROOT / "docs" / "method.md").read_text(encoding="utf-8").split("## 11.")[1]
    rows = re.findall(r"^\| (\w+) ([^|]+) \|", page, re.M)
    explained = {f"{work} {section}" for work, sections in rows for section in re.findall(SECTION, sections)}
    assert len(cited) > 10
    assert cited <= explained


# ---- the table of roundings ----------------------------------------------------------------------

SHORT = {"bfloat16": "bf16", "float32": "fp32"}


@pytest.fixture(scope="module")
def operations():
    """Every operation of a bf16 training step: (primitive, file, operands' dtypes, result's dtype)."""
    run = spec.override(pocket.run(), ["compute.precision=bf16", "data.seq_len=64", "data.batch_seqs=2", "evals.batch_seqs=2"])
    mesh, found = meshes.make(run), []

    def file_of(eqn) -> str:
        frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else []
        return next((f.file_name.split("/argosy/")[-1] for f in frames if str(PACKAGE) in f.file_name), "")

    def walk(jaxpr) -> None:
        for eqn in jaxpr.eqns:
            for value in eqn.params.values():
                for inner in value if isinstance(value, list | tuple) else [value]:
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        walk(inner)
            kinds = [
                SHORT.get(str(v.aval.dtype), str(v.aval.dtype)) for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "dtype")
            ]
            found.append((eqn.primitive.name, file_of(eqn), tuple(kinds[: len(eqn.invars)]), tuple(kinds[len(eqn.invars) :])))

    with jax.set_mesh(mesh):
        shape, sharding = (run.data.batch_seqs, run.data.seq_len), jax.sharding.NamedSharding(mesh, meshes.B_S)
        whole = [jax.ShapeDtypeStruct(shape, d, sharding=sharding) for d in (jnp.int32, jnp.int32, jnp.int32, jnp.bool_)]
        state = steps.abstract(run, mesh)
        walk(jax.make_jaxpr(lambda s, b: steps.train_step(run, s, b))(state, Batch(*whole)).jaxpr)
        new, _ = jax.eval_shape(lambda s, b: steps.train_step(run, s, b), state, Batch(*whole))
    assert {str(x.dtype) for x in jax.tree.leaves(new)} == {"float32", "int32"}
    return found


def test_products_are_rounded_as_the_table_says(operations):
    """Fails when a matrix product of the bf16 step has other operand or result dtypes than docs/method.md lists."""
    page = (ROOT / "docs" / "method.md").read_text(encoding="utf-8")
    listed = {tuple(row) for row in re.findall(r"^\| `([\w/]+\.py)` \| (\w+, \w+) \| (\w+) \|$", page, re.M)}
    real = {(file, ", ".join(ins), *out) for name, file, ins, out in operations if name == "dot_general"}
    assert listed == real


def test_everything_but_products_and_sums_is_float32(operations):
    """Fails when a nonlinearity or a division of the bf16 step is computed in bf16."""
    names = {
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "rsqrt",
        "sqrt",
        "div",
        "top_k",
        "sort",
        "sin",
        "cos",
        "pow",
        "reduce_max",
    }
    seen = {(name, file) for name, file, ins, _ in operations if name in names and "bf16" in ins}
    assert not seen
    assert {"exp", "log", "logistic", "rsqrt", "div", "top_k"} <= {name for name, *_ in operations}


# ---- the first voyage ----------------------------------------------------------------------------


def plain(text: str) -> str:
    """A text without what differs from machine to machine: numbers, widths, where lines are broken."""
    return re.sub(r"\s+", " ", re.sub(r"\d[\d.,]*", "#", text)).strip()


def test_the_harness_of_the_walk_tells_lines_apart():
    assert plain("steps      60, warm-up 6") == plain("steps  1,024, warm-up 10") != plain("steps 60")


@pytest.mark.slow
def test_first_voyage(tmp_path):
    """Fails when a command of the walk fails, or no longer prints a line that the walk shows (numbers aside)."""
    blocks = fenced((ROOT / "docs" / "first_voyage.md").read_text(encoding="utf-8"))
    script = "set -euo pipefail\n" + "".join(f"echo '@@@ {n}'\n{body}" for n, (kind, body) in enumerate(blocks) if kind == "sh")
    shell = shutil.which("bash")
    assert shell, "bash runs the walk"
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "ARGOSY_HOME", "FORCE_COLOR")}
    env |= {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}", "COLUMNS": "80", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [shell, "-c", script],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    outputs = dict(re.findall(r"^@@@ (\d+)\n(.*?)(?=^@@@ |\Z)", done.stdout, re.S | re.M))
    checked = 0
    for n, (kind, body) in enumerate(blocks):
        if kind == "text":
            printed = plain(outputs[str(n - 1)])
            for line in filter(lambda line: line.strip() and "..." not in line, body.splitlines()):
                assert plain(line) in printed, f"not printed: {line!r}; was:\n{outputs[str(n - 1)]}"
                checked += 1
    assert checked > 30
