"""A small corpus of real text: forty modules of the running Python's library, without its test suite."""

import shutil
import sysconfig
from pathlib import Path

import pytest

MODULES = (
    "os", "ast", "abc", "bisect", "calendar", "cmd", "codecs", "copy", "csv", "dataclasses", "difflib", "enum", "fileinput",
    "fnmatch", "functools", "genericpath", "glob", "gzip", "heapq", "hmac", "io", "keyword", "linecache", "locale", "mimetypes",
    "netrc", "numbers", "operator", "pathlib", "pickle", "queue", "random", "sched", "shlex", "shutil", "string", "tempfile",
    "textwrap", "types", "weakref",
)  # fmt: skip
PACKAGES = ("json", "collections", "logging", "html", "email")


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    """A folder laid out like a distribution's library: no test suite, a few files that are not text to learn from."""
    real, made = Path(sysconfig.get_path("stdlib")), tmp_path_factory.mktemp("lib")
    for name in MODULES:
        source = real / f"{name}.py"
        shutil.copy(source if source.exists() else real / name / "__init__.py", made / f"{name}.py")
    for name in PACKAGES:
        shutil.copytree(real / name, made / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pydoc_data/topics.py", "encodings/cp1252.py", "encodings/idna.py"):
        (made / name).parent.mkdir(exist_ok=True)
        shutil.copy(real / name, made / name)
    (made / "_sysconfigdata__x.py").write_text("build_time_vars = {}\n")
    (made / "empty.py").write_text("")
    (made / "latin.py").write_bytes("# é\n".encode("latin-1"))
    (made / "test").mkdir()
    (made / "test" / "test_support.py").write_text("import unittest\n" * 20)
    return made


@pytest.fixture(scope="session")
def home(library, tmp_path_factory) -> Path:
    """A home with the corpus `small`, built once."""
    from argosy.data import prepare

    home = tmp_path_factory.mktemp("home")
    prepare.build("small", [f"stdlib:{library}"], home, vocab=1024)
    return home


@pytest.fixture(scope="session")
def store(home):
    from argosy.data import tokens

    return tokens.open_store(home / "corpora" / "small", verify=True)


@pytest.fixture
def small(pocket):
    """A run on the small corpus: 40 steps of 8 sequences of 64 tokens."""
    from argosy import spec

    return spec.override(
        pocket, ["data.corpus=small", "data.seq_len=64", "optim.horizon_tokens=20480", "evals.tokens_per_set=3000"]
    )
