"""What compiling and running compiled programs costs.

Compile time of every library program at its own size, of three large ones with their peak memory, and how it grows with
the number of weights that are not zero; sequences per second in batches of 256 of mixed lengths, beside one sequence at a
time, which is how the peer runs (google-deepmind/tracr at 9ce2b8c on two such cores: 0.05-0.25 ms a sequence once jitted,
6-38 ms eager; it took 136 s to compile shuffle_dyck2 at length 40, and did not finish reverse at 80 in 140 s).
"""

import math
import random
import resource
import statistics
import subprocess
import sys
import time

import torch
from timing import medians, record

from pellucid.compiled import compile_program
from pellucid.compiled.library import PROGRAMS

LARGE = {"shuffle_dyck2": ("()[]", 40), "reverse": (range(8), 80), "sort": (range(8), 80)}
PEER_JITTED_MS = {
    "frac_prevs": 0.07,
    "hist": 0.07,
    "reverse": 0.08,
    "sort": 0.08,
    "sort_freq": 0.10,
    "shuffle_dyck2": 0.17,
}
"""Milliseconds a sequence at vocabulary 4, length 5."""


def compile_large(name: str) -> str:
    """Seconds and peak megabytes of compiling in a process of its own."""
    code = (
        "import resource, time\n"
        "from pellucid.compiled import compile_program\n"
        "from pellucid.compiled.library import PROGRAMS\n"
        "from compiled import LARGE\n"
        f"vocab, n = LARGE[{name!r}]\n"
        "compile_program(PROGRAMS['copy'].program, 'ab', 2)\n"
        "start = time.perf_counter()\n"
        f"compile_program(PROGRAMS[{name!r}].program, vocab, n)\n"
        "print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)\n"
    )
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=sys.path[0],
    ).stdout


def growth() -> float:
    """The exponent with which `reverse`'s compile time grows in its nonzero weights, from length 40 to 160."""
    points = []
    for n in (40, 160):
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            model = compile_program(PROGRAMS["reverse"].program, range(8), n)
            seconds.append(time.perf_counter() - start)
        points.append((math.log(model.summary()["nonzero"]), math.log(statistics.median(seconds))))
    (x0, y0), (x1, y1) = points
    return (y1 - y0) / (x1 - x0)


def main() -> None:
    torch.set_num_threads(1)  # small models' kernels are shorter than it takes to wake a second thread
    times = {}
    for name, case in PROGRAMS.items():
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            compile_program(case.program, case.vocab, case.max_len, causal=case.causal)
            seconds.append(time.perf_counter() - start)
        times[name] = 1000 * statistics.median(seconds)
    slowest = max(times, key=lambda name: times[name])
    large = {name: [round(float(x), 2) for x in compile_large(name).split()] for name in LARGE}
    rng = random.Random(0)
    forward, ratio = {}, {}
    for name, peer in PEER_JITTED_MS.items():
        vocab = PROGRAMS[name].vocab[:4]
        model = compile_program(PROGRAMS[name].program, vocab, 5)
        batch = [rng.choices(vocab, k=rng.randint(1, 5)) for _ in range(256)]
        s = medians(
            {"batch": lambda m=model, b=batch: m.batch(b), "single": lambda m=model, b=batch: m(b[0])}
        )
        forward[name] = round(256 / s["batch"])
        ratio[name] = {
            "times_faster_than_peer_jitted": round(peer / (1000 * s["batch"] / 256), 1),
            "times_faster_than_one_at_a_time": round(s["single"] / (s["batch"] / 256), 1),
        }
    record(
        "compiled",
        compile_ms_median=round(statistics.median(times.values()), 2),
        compile_ms_slowest={slowest: round(times[slowest], 2)},
        large_seconds_and_peak_mb=large,
        growth_exponent_in_nonzero_weights=round(growth(), 2),
        sequences_per_second_batch_256=forward,
        ratios=ratio,
        peak_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    )


if __name__ == "__main__":
    main()
