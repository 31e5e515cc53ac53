"""How claims of speed are measured: contestants take turns in one run, and the ratio of medians is what counts."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

from pellucid.core.files import write_atomic


def medians(
    contestants: dict[str, Callable[[], object]], *, rounds: int = 15, warmup: int = 2
) -> dict[str, float]:
    """Median seconds of each contestant's call; all are called once in every round, so that noise hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(warmup + rounds):
        for name, call in contestants.items():
            start = time.perf_counter()
            call()
            if number >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def record(claim: str, **numbers: object) -> None:
    """Print a result and keep it, with machine and versions, in `perf/results/CLAIM.json`."""
    result = {
        "claim": claim,
        **numbers,
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    write_atomic(Path(__file__).parent / "results" / f"{claim}.json", text + "\n")
