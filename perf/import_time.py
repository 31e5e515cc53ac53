"""What `import pellucid` adds to importing torch: at most a second."""

import statistics
import subprocess
import sys

from timing import record


def seconds(code: str) -> float:
    script = f"import time; t = time.perf_counter(); {code}; print(time.perf_counter() - t)"
    return float(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    )


def main() -> None:
    seconds("import pellucid")
    pairs = [(seconds("import torch"), seconds("import torch, pellucid")) for _ in range(7)]
    added = statistics.median(both - alone for alone, both in pairs)
    record(
        "import_time",
        added_seconds=round(added, 3),
        torch_seconds=round(statistics.median(a for a, _ in pairs), 3),
    )


if __name__ == "__main__":
    main()
