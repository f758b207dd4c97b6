"""Fails when a command that needs no JAX loads it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "argosy.plan.cost",
        "argosy.plan.report",
        "argosy.track.server",
        "argosy.runs",
        "argosy.data.mixture",
        "argosy.forecast.fit",
        "argosy.judge.register",
        "argosy.judge.verdict",
        "argosy.judge.check",
        "argosy.cli",
    ],
)
def test_starts_without_jax(module):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
