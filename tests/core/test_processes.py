"""Worker processes: what they return, and that none outlives the one that started it."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from pellucid.core.processes import in_processes


def threads_and(x):
    return x, torch.get_num_threads()


def fails(error):
    raise error


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_come_by_key(jobs):
    found = dict(in_processes({name: partial(threads_and, name) for name in "abc"}, jobs, threads=3))
    assert {key: value[0] for key, value in found.items()} == {"a": "a", "b": "b", "c": "c"}
    assert jobs == 1 or {value[1] for value in found.values()} == {3}


def test_less_than_one_job_is_refused():
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        list(in_processes({}, 0))


def test_an_error_is_raised_and_stops_the_others_at_once():
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="this one"):
        list(in_processes({0: partial(time.sleep, 600), 1: partial(fails, ZeroDivisionError("this one"))}, 2))
    assert time.monotonic() - began < 120


def test_a_worker_that_ends_on_its_own_is_an_error_that_says_so():
    with pytest.raises(ChildProcessError, match="a worker process ended on its own"):
        list(in_processes({0: partial(os._exit, 3)}, 2))


WORK = """
from functools import partial
from pellucid.core.processes import in_processes
from tests.core.test_processes import says_so_and_sleeps

if __name__ == "__main__":
    list(in_processes({i: partial(says_so_and_sleeps, i) for i in range(4)}, 2))
"""


def says_so_and_sleeps(i):
    print("at work", flush=True)
    time.sleep(600)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_when_their_parent_alone_is_stopped(stop, tmp_path):
    script = tmp_path / "work.py"
    script.write_text(WORK)
    parent = subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert parent.stdout is not None
        assert [parent.stdout.readline() for _ in range(2)] == ["at work\n"] * 2
        parent.send_signal(stop)
        parent.communicate(timeout=10)  # the pipe ends with the last process that could write to it
        assert parent.returncode != 0
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)
