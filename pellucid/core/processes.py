"""Worker processes that never outlive the one that started them."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from typing import TypeVar

import torch

K = TypeVar("K")
T = TypeVar("T")


def in_processes(todo: Mapping[K, Callable[[], T]], jobs: int, *, threads: int = 1) -> Iterator[tuple[K, T]]:
    """(key, what `todo[key]()` returned) for each as they are done, in `jobs` processes of `threads` threads; one job: here.

    When this process ends, however it does, an error is raised, or the iterator is closed, the workers end at once.
    Raises what a call raises, `ValueError` for less than one job, and `ChildProcessError` where a worker ended on its own.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if jobs == 1:
        yield from ((key, call()) for key, call in todo.items())
        return
    context = get_context("spawn")
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(jobs, context, initializer=begin_worker, initargs=(threads, theirs))
    try:
        futures = {pool.submit(call): key for key, call in todo.items()}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BrokenProcessPool:
        raise ChildProcessError(
            "a worker process ended on its own: run again to go on, with fewer jobs if memory was short"
        ) from None
    except BaseException:
        ours.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        ours.close()
        theirs.close()


def begin_worker(threads: int, parent: Connection | None = None) -> None:
    """What a worker does first, so that it ends at once when the process that started it does, or closes the far end
    of `parent`, on which nothing is sent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that the user started
    torch.set_num_threads(threads)
    started_by = parent_process()
    assert started_by is not None
    ends = [started_by.sentinel, *([parent] if parent else [])]

    def watch() -> None:
        wait(ends)
        os._exit(1)  # while C code is at work nothing gentler is sure

    threading.Thread(target=watch, daemon=True).start()
