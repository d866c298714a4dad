"""A process is alive until it ends, reaped or not, and no later one is taken for it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace

from nemo_rl.distributed.liveness import ProcessIdentity

SHOW = (
    "import json; from dataclasses import asdict; from nemo_rl.distributed.liveness import ProcessIdentity as P; "
    "print(json.dumps(asdict(P.of_this_process())), flush=True); input()"
)


def test_a_killed_child_is_dead_before_anybody_reaps_it():
    me = ProcessIdentity.of_this_process()
    with subprocess.Popen([sys.executable, "-c", SHOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        identity = replace(me, pid=child.pid, start=_start_of(child.stdout.readline()))
        assert identity.is_visible_from(me) and identity.is_alive()
        assert not replace(identity, start=identity.start + 1).is_alive(), "another process of the same number"
        child.kill()
        deadline = time.monotonic() + 10
        while identity.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not identity.is_alive(), "a zombie counts as alive"
        child.wait(timeout=10)
    assert not identity.is_alive()


def test_processes_elsewhere_are_not_looked_at():
    me = ProcessIdentity.of_this_process()
    assert me.is_alive() and me.is_visible_from(me)
    assert not replace(me, namespace="another machine").is_visible_from(me)
    assert not replace(me, namespace="").is_visible_from(replace(me, namespace=""))


def _start_of(line: bytes) -> int:
    return int(json.loads(line)["start"])
