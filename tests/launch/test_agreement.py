"""Two real processes that agree: what each of them is told. Fails when they differ, wait for ever, or mix up their words."""

import json
import os
import subprocess
import sys

from argosy.launch import local

PROGRAM = """
import json, sys

from argosy.launch import join

me = int(sys.argv[2])
assert not join.several()
join.join(join.Link(sys.argv[1], 2, me), {})

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from argosy import processes
from argosy import mesh as meshes
from argosy import runs, spec

said = {"several": join.several(), "alone": processes.alone(), "first": processes.first()}
said["exchanged"] = processes.exchange({"me": me})
said["on_first"] = processes.on_first(lambda: {"by": me})


def caught(work):
    try:
        return work()
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"


def fails(error):
    raise error


said["in_one"] = caught(lambda: processes.together(lambda: fails(ValueError("no corpus")) if me == 1 else "fine"))
said["in_first"] = caught(lambda: processes.on_first(lambda: fails(OSError(28, "disk full", "/log"))))
said["in_none"] = processes.together(lambda: me)

mesh = Mesh(np.asarray(jax.devices()), "x", axis_types=(AxisType.Explicit,))
vote = processes.voting(mesh)
wishes = [(False, False), (me == 1, False), (False, me == 1), (False, me == 0), (False, False)]
said["votes"] = [vote(*wish) for wish in wishes]

run = spec.override(runs.find("pocket"), ["mesh.replica=2", "mesh.expert=2", "routing.exchange=pooled_wave"])
said["mesh"] = [[d.process_index for d in row] for row in meshes.make(run).devices.reshape(2, 2)]
said["too_small"] = caught(lambda: meshes.make(spec.override(run, ["mesh.replica=1"])))
print(json.dumps(said), flush=True)

processes.wait()
if me == 1:
    join.leave(3)
while True:
    vote(False, False)  # waits for ever for process 1
"""


def test_two_processes_agree_on_everything_and_notice_when_one_is_gone(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    address = f"127.0.0.1:{local.free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "program.py"), address, str(n)],
            env=local.environment(os.environ, 2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for n in range(2)
    ]  # fmt: skip
    ends = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [1, 3], ends
    lines = [out.splitlines() for out, _ in ends]
    one, two = (json.loads(each[0]) for each in lines)
    assert (one["several"], one["alone"], one["first"]) == (True, False, True)
    assert (two["several"], two["alone"], two["first"]) == (True, False, False)
    assert one["exchanged"] == two["exchanged"] == [{"me": 0}, {"me": 1}]
    assert one["on_first"] == two["on_first"] == {"by": 0}
    assert one["in_one"] == "ValueError: process 1 of 2: no corpus"
    assert two["in_one"] == "ValueError: no corpus"
    assert one["in_first"] == "OSError: [Errno 28] disk full: '/log'"
    assert two["in_first"] == "ValueError: process 0 of 2: disk full: /log"
    assert [one["in_none"], two["in_none"]] == [0, 1]
    # what was wished one call before: a stop by any, a save by process 0 alone
    assert one["votes"] == two["votes"] == [[False, False], [False, False], [True, False], [False, False], [False, True]]
    assert one["mesh"] == two["mesh"] == [[0, 0], [1, 1]]  # experts stay inside a process
    assert "2 processes have 4, and each has to take part; nearest legal: --set mesh.replica=2" in one["too_small"]
    assert ends[0][1].splitlines()[-1].startswith("argosy: process 1 of 2 ended or cannot be reached, so this one ends too")
