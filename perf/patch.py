"""Exact patching of every edge: all edges stacked in a few forward passes, against one forward pass for each edge.

The program of the library with the most edges, 64 rows, one thread. The loop uses the same edge tap with one mask.
"""

import torch
from timing import medians, record

from pellucid.bench.task import ProgramTask
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import compile_program
from pellucid.core.edges import EdgeTap, edge_table
from pellucid.lab.ablate import last_logits
from pellucid.lab.fills import fills
from pellucid.lab.patch import cut_edges, edges_of

torch.set_num_threads(1)


def compiled(name: str):
    case = PROGRAMS[name]
    return compile_program(case.program, case.vocab, case.max_len, causal=case.causal)


@torch.no_grad()
def main() -> None:
    name = max(PROGRAMS, key=lambda n: edge_table(compiled(n).transformer.config).n_edges)
    model = compiled(name)
    transformer, task = model.transformer.cpu(), ProgramTask(model, name)
    batch, places = task.pairs(32), edges_of(transformer)
    replaced = fills(transformer, batch, "resample")
    exists = edge_table(transformer.config).exists

    def one_by_one() -> torch.Tensor:
        found = []
        for reader, writer in places:
            keep = torch.ones(exists.shape)
            keep[reader, writer] = 0
            logits = last_logits(transformer, batch, EdgeTap(transformer.config, replaced, keep))
            found.append(task.metric(logits, batch))
        return torch.stack(found)

    def stacked() -> torch.Tensor:
        return cut_edges(transformer, batch, replaced, task.metric, places)

    torch.testing.assert_close(one_by_one(), stacked(), atol=1e-4, rtol=0)
    times = medians({"one forward an edge": one_by_one, "stacked": stacked}, rounds=7)
    loop, fast = times.values()
    record(
        "patch", program=name, edges=len(places), rows=len(batch), seconds=times, ratio=round(loop / fast, 1)
    )


if __name__ == "__main__":
    main()
