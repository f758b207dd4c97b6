"""Fails when freed memory goes back to the system although the heap was told to keep it."""

import platform
import subprocess
import sys

import pytest

CODE = """
import resource
import numpy as np
from argosy import heap

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.full(2**24, 1.0, np.float32)  # 64 MiB, 16,384 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert heap.keep()
faults()
assert faults() < 1000

def resident():
    return int(open("/proc/self/statm").read().split()[1])

before = resident()
assert heap.trim()
assert before - resident() > 10_000
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_memory_freed_once_is_used_again_without_page_faults_until_it_is_given_back():
    subprocess.run([sys.executable, "-c", CODE], check=True)


@pytest.mark.skipif(platform.libc_ver()[0] == "glibc", reason="glibc has mallopt")
def test_elsewhere_nothing_changes():
    from argosy import heap

    assert not heap.keep()
    assert not heap.trim()
