"""Several models' circuits of one task as one report: a table of what was measured, and each circuit drawn."""

import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from pellucid.core.errors import unknown
from pellucid.tasks import TASKS
from pellucid.viewer.schema import ModelView, Report, Row

Value = float | int | str | None


def count(value: Value) -> str:
    return f"{value:,}"


def nats(value: Value) -> str:
    return f"{value:.3f}"


def percent(value: Value) -> str:
    return f"{100 * float(value or 0):.2f}%"


CORPUS = "validation_loss_"
"""What the names of a corpus' own validation loss begin with."""
OF_CIRCUIT = ("nodes", "edges", "token_edges")
"""What only circuits that met the target compete for."""
MEASURES: tuple[tuple[str, str, str, Callable[[Value], str], Callable | None], ...] = (
    ("validation_loss", "Validation loss", "Nats a token on held-out text, over all corpora.", nats, min),
    ("parameters", "Parameters", "Without the bigram table and sinks.", count, None),
    ("nonzeros", "Nonzero parameters", "Without the bigram table and sinks, which are dense by design.", count, None),
    ("nonzero_fraction", "Nonzero share", "Nonzero parameters over parameters.", percent, None),
    ("dense_apart_parameters", "Bigram table and sinks", "Parameters that are dense by design, counted apart.", count, None),
    ("tokens", "Training tokens", "Tokens that training saw.", count, None),
    ("full_task_loss", "Task loss, whole model", "Two-way cross-entropy in nats on held-out pairs; chance is 0.693.", nats, min),
    ("circuit_task_loss", "Task loss, circuit alone", "With every other node frozen at its mean.", nats, None),
    ("calibrated_task_loss", "Task loss, circuit recalibrated", "After a scale and a shift of its logits, fitted on training pairs: what the target is for.", nats, None),
    ("circuit_accuracy", "Accuracy, circuit alone", "Share of held-out prompts whose right answer has the larger logit.", percent, None),
    ("nodes", "Nodes in the circuit", "Channels kept.", count, min),
    ("edges", "Edges in the circuit", "Nonzero weights between two kept nodes.", count, min),
    ("total_edges", "Edges in the model", "Nonzero weights of all attention and MLP matrices.", count, None),
    ("token_edges", "Token edges", "Nonzero entries of the task's tokens' embedding and unembedding rows at kept channels; not among the edges.", count, None),
    ("ablated_task_loss", "Task loss, circuit ablated", "With only the circuit's nodes frozen at their mean: how necessary it is.", nats, None),
    ("random_ablated_task_loss", "Task loss, random others ablated", "With as many random nodes outside the circuit frozen, site by site; mean of 8 draws.", nats, None),
    ("nothing_task_loss", "Task loss, all nodes ablated", "What the embedding, unembedding and bigram table do alone.", nats, None),
    ("partial_task_loss", "Task loss, half of the others ablated", "With a random half of the other nodes frozen; mean of 20 draws, recalibrated.", nats, None),
    ("partial_shift", "- how far that moves it", "Mean distance of these losses from the circuit's own: how much the circuit rests on what is frozen.", nats, None),
    ("resample_task_loss", "Task loss, others from the other prompt", "With the other nodes as they are in the pair's other prompt, which asks for the other answer.", nats, None),
    ("kl", "KL on the task", "From the model's next-token distribution to the circuit's, in nats.", nats, None),
    ("text_kl", "KL on pretraining text", "The same, a token of text: what else the model does.", nats, None),
    ("pattern_distance", "Attention moved", "Total variation between attention patterns in circuit and model, over the circuit's heads.", nats, None),
    ("activation_correlation", "Activations alike", "Correlation of kept nodes' activations in circuit and model; the mean over nodes.", nats, None),
    *(
        (f"control_{name}", f"Control: {what}", "The least loss that the same search reaches there within the circuit's edges; low means that the circuit says little. Searched where asked for (--controls).", nats, None)
        for name, what in (("shuffled", "shuffled answers"), ("nonsense", "answers that mean nothing"), ("untrained", "untrained model"))
    ),
)  # fmt: skip


def compare(
    views: Sequence[ModelView], *, task: str, title: str, summary: Sequence[str], reproduce: Sequence[str]
) -> Report:
    """A report on models' circuits for `task`. Circuits that missed the target do not compete for the best value."""
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    by_corpus = sorted({key for view in views for key in view.metrics if key.startswith(CORPUS)})
    measures = [
        *MEASURES[:1],
        *(
            (key, f"- on {key.removeprefix(CORPUS)}", "Nats a token on held-out text.", nats, min)
            for key in by_corpus
        ),
        *MEASURES[1:],
    ]
    in_table = {measure[0] for measure in measures}
    searches = {str(view.metrics["search"]) for view in views if "search" in view.metrics}
    return Report(
        title=title,
        summary=tuple(summary),
        task=task,
        task_description=TASKS[task].description,
        columns=tuple(view.name for view in views),
        rows=tuple(row(views, *measure) for measure in measures),
        models=tuple(
            view.model_copy(
                update={
                    "metrics": {
                        k: v
                        for k, v in view.metrics.items()
                        if k not in in_table | {"search", "target", "task", "reached", "searched"}
                    }
                }
            )
            for view in views
        ),
        reproduce=tuple(reproduce),
        provenance={**provenance(), **({"search": "; ".join(sorted(searches))} if searches else {})},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def row(
    views: Sequence[ModelView],
    key: str,
    label: str,
    help: str,
    show: Callable[[Value], str],
    best: Callable | None,
) -> Row:
    """One measure over all models; the best is marked where two or more compete."""
    values = [view.metrics.get(key) for view in views]
    competing = {
        i: v for i, (v, view) in enumerate(zip(values, views, strict=True))
        if v is not None and (view.circuit is not None or key not in OF_CIRCUIT)
    }  # fmt: skip
    winner = best(competing, key=competing.__getitem__) if best and len(competing) > 1 else None
    texts = [
        "-" if v is None else show(v) + (" (missed)" if key in OF_CIRCUIT and view.circuit is None else "")
        for v, view in zip(values, views, strict=True)
    ]
    return Row(label=label, help=help, values=tuple(texts), best=winner)


def provenance() -> dict[str, str]:
    """The software and hardware that made a page."""
    return {
        "pellucid": version("pellucid"),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
    }
