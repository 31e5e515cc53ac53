"""A run's log: one JSON object a line, and TensorBoard if asked."""

import json
from pathlib import Path
from typing import Any

from pellucid.core.files import write_atomic
from pellucid.training import distributed


class RunLog:
    """Appends to `out/log.jsonl`. A resumed run first drops the lines after the step it goes on from."""

    def __init__(self, out: Path, start: int, *, tensorboard: bool = False):
        self.path, self.writer = out / "log.jsonl", None
        self.active = distributed.rank() == 0
        if not self.active:
            return
        out.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_log(self.path) if line["step"] <= start] if start else []
        write_atomic(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise ValueError("tensorboard is not installed: pip install 'pellucid[track]'") from None
            self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=start or None)

    def write(self, step: int, **values: float) -> None:
        """Log `values` at `step`."""
        if not self.active:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
            self.writer.flush()


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's log; a last line that a crash cut short is left out."""
    path = Path(path)
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
