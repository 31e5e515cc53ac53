"""Reports made up for the tests: a sparse circuit, a dense one, and one whose every text is hostile."""

import random
from collections import Counter
from itertools import pairwise

from pellucid.viewer.schema import CircuitView, Curve, EdgeView, ModelView, NodeView, Report, Row, Snippet

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "]]>&lt;b&gt;&amp;",
    "line\u2028para\u2029end",
    "\"quotes\" 'and' `ticks` ${x} $title \\",
    "\n",
    "\t x",
    "\u202eright to left",
    "\x00\x1b",
    "",
)

FLOW = (
    ("attn.in", "attn.q"),
    ("attn.in", "attn.k"),
    ("attn.in", "attn.v"),
    ("attn.v", "attn.out"),
    ("mlp.in", "mlp.act"),
    ("mlp.act", "mlp.out"),
)
CODE = (
    "def",
    " greet",
    "(",
    "name",
    ")",
    ":",
    "\n",
    "    ",
    "return",
    " ",
    "'",
    "hello",
    "'",
    " +",
    " name",
    "\n",
)


def snippet(
    rng: random.Random, tokens: tuple[str, ...], shift: float = 0.0, label: str | None = None
) -> Snippet:
    focus = rng.randrange(len(tokens) // 2, len(tokens))
    values = [rng.gauss(0, 0.25) + 0.1 * shift for _ in tokens]
    values[focus] = rng.uniform(1.2, 2.4) * (1 if shift >= 0 else -0.6)
    return Snippet(tokens=tokens, activations=tuple(round(v, 4) for v in values), focus=focus, label=label)


def circuit(counts: dict[str, int], edges: int, width: int, token_edges: int, seed: int = 0) -> CircuitView:
    """A random two-layer circuit with `counts` nodes at each kind of site and about `edges` weights."""
    rng = random.Random(seed)
    residual = rng.sample(range(width), min(width, max(counts.values()) + 2))
    channels = {}
    for layer in range(2):
        for kind, count in counts.items():
            pool = residual if kind in ("attn.in", "attn.out", "mlp.in", "mlp.out") else range(4 * width)
            channels[f"{layer}.{kind}"] = sorted(rng.sample(pool, min(count, len(pool))))
    chosen: dict[tuple[str, str], EdgeView] = {}
    slots = [(f"{layer}.{a}", f"{layer}.{b}") for layer in range(2) for a, b in FLOW]
    for i in range(edges):
        a, b = slots[i % len(slots)]
        writer, reader = f"{a}:{rng.choice(channels[a])}", f"{b}:{rng.choice(channels[b])}"
        weight = round(rng.gauss(0, 0.6) or 0.1, 4)
        chosen[writer, reader] = EdgeView(writer=writer, reader=reader, weight=weight, kind="weight")
    tokens = ("'", '"', " '", ' "', "\n", "\t", " return", "(", "</b>", "f'")
    for i in range(token_edges):
        text, weight = tokens[i % len(tokens)], round(rng.gauss(0, 1), 4)
        if i % 3:
            writer, reader = f"token:{text}", f"0.attn.in:{rng.choice(channels['0.attn.in'])}"
            edge = EdgeView(writer=writer, reader=reader, weight=weight, kind="embed")
        else:
            writer, reader = f"1.mlp.out:{rng.choice(channels['1.mlp.out'])}", f"token:{tokens[i % 4]}"
            edge = EdgeView(writer=writer, reader=reader, weight=weight, kind="unembed")
        chosen[writer, reader] = edge
    made = tuple(chosen.values())
    reads, writes = Counter(edge.reader for edge in made), Counter(edge.writer for edge in made)
    nodes = []
    for site, kept in channels.items():
        for channel in kept:
            name = f"{site}:{channel}"
            few = sum(counts.values()) < 100
            nodes.append(
                NodeView(
                    id=name,
                    site=site,
                    channel=channel,
                    layer=int(site[0]),
                    mean=round(rng.gauss(0, 0.1), 4),
                    top=tuple(snippet(rng, CODE, 1) for _ in range(4)) if few else (),
                    bottom=tuple(snippet(rng, CODE, -1) for _ in range(3)) if few else (),
                    task=tuple(
                        snippet(rng, CODE, 1 if side == "positive" else -1, side)
                        for side in ("positive", "negative")
                        for _ in range(2)
                    )
                    if few
                    else (),
                    importance=round(rng.expovariate(3) ** 2 - 0.01, 4),
                    in_edges=reads[name],
                    out_edges=writes[name],
                )
            )
    weights = sum(edge.kind == "weight" for edge in made)
    return CircuitView(
        task="single or double quote",
        nodes=tuple(nodes),
        edges=made,
        total_edges=weights,
        token_edges=len(made) - weights,
    )


def sparse_circuit() -> CircuitView:
    counts = {
        "attn.in": 2,
        "attn.q": 1,
        "attn.k": 1,
        "attn.v": 2,
        "attn.out": 2,
        "mlp.in": 2,
        "mlp.act": 3,
        "mlp.out": 2,
    }
    return circuit(counts, edges=75, width=64, token_edges=24)


def dense_circuit() -> CircuitView:
    counts: dict[str, int] = dict.fromkeys(
        ("attn.in", "attn.q", "attn.k", "attn.v", "attn.out", "mlp.in", "mlp.act", "mlp.out"), 125
    )
    return circuit(counts, edges=8000, width=256, token_edges=400, seed=1)


def report(*circuits: CircuitView | None) -> Report:
    """A report with a model for each of `circuits`."""
    names = ("sparse", "dense", "unreachable", "fourth")[: len(circuits)]
    rng = random.Random(3)
    models = []
    for name, view in zip(names, circuits, strict=True):
        y = [4.2]
        for _ in range(80):
            y.append(y[-1] * (0.985 if name == "sparse" else 0.982) + rng.gauss(0, 0.01) + 0.022)
        curve = Curve(name="training loss", x=tuple(50.0 * i for i in range(81)), y=tuple(y))
        val = Curve(name="validation loss", x=curve.x[::8], y=tuple(v + 0.06 for v in y[::8]))
        models.append(
            ModelView(
                name=name,
                description=f"The {name} model: two layers, 64 residual channels, trained on Python functions.",
                metrics={
                    "parameters": 1_204_224,
                    "nonzero weights": 18_412,
                    "task loss": 0.0473,
                    "seed": "0",
                    "bridge": None,
                },
                circuit=view,
                note=None if view else "Unreachable: the best task loss was 0.41, and the target is 0.15.",
                curves=(curve, val),
            )
        )
    cells = [
        tuple(str(v)[:8] for v in row[: len(names)])
        for row in ((30, "2,000", "-", "7"), (52, "8,000", "-", "8"), (0.048, 0.051, 0.41, 1))
    ]
    helps = (
        "Channels that remain when everything else is mean-ablated.",
        "Nonzero weights between two kept nodes.",
        "",
    )
    labels = ("nodes in the circuit", "edges in the circuit", "task loss of the circuit")
    return Report(
        title="A sparse model closes its quotes with 30 nodes",
        summary=(
            "The weight-sparse model solves the quote task with a circuit of 30 nodes and 52 edges; a dense model of the same loss needs 2,000.",
            "Both circuits keep the task loss under 0.15 with everything else mean-ablated.",
        ),
        task="single_double_quote",
        task_description="Close a string with the kind of quote that opened it: the model must tell ' from \" at the end.",
        columns=names,
        rows=tuple(
            Row(label=label, help=help, values=values, best=0 if names else None)
            for label, help, values in zip(labels, helps, cells, strict=True)
        ),
        models=tuple(models),
        reproduce=("pip install pellucid", "pellucid demo --out runs/demo --seed 0"),
        provenance={
            "pellucid": "0.1.0",
            "torch": "2.9.1",
            "machine": "2 cores, no accelerator",
            "config": "9f2c41ab",
        },
        created="2025-01-01T00:00:00Z",
    )


def hostile_report() -> Report:
    """A report where every text that a model, a corpus or a user could supply tries to become markup."""
    text = HOSTILE[0]
    nodes = tuple(
        NodeView(
            id=f"0.mlp.{kind}:{channel}",
            site=f"0.mlp.{kind}",
            channel=channel,
            layer=0,
            mean=0.5,
            top=(
                Snippet(
                    tokens=HOSTILE, activations=tuple(map(float, range(len(HOSTILE)))), focus=0, label=text
                ),
            ),
            task=(Snippet(tokens=HOSTILE, activations=(1.0,) * len(HOSTILE), focus=1, label=text),),
            in_edges=1,
            out_edges=1,
        )
        for channel, kind in enumerate(("in", "act", "out"))
    )
    ids = [node.id for node in nodes]
    edges = [EdgeView(writer=a, reader=b, weight=1.0, kind="weight") for a, b in pairwise(ids)]
    for token in HOSTILE:
        edges.append(EdgeView(writer=f"token:{token}", reader=ids[0], weight=0.3, kind="embed"))
        edges.append(EdgeView(writer=ids[2], reader=f"token:{token}", weight=-0.3, kind="unembed"))
    view = CircuitView(
        task=text, nodes=nodes, edges=tuple(edges), total_edges=2, token_edges=2 * len(HOSTILE)
    )
    models = tuple(
        ModelView(
            name=name,
            description=name,
            metrics={name: name, "none": None},
            circuit=view,
            note=name,
            curves=(Curve(name=name, x=(0.0, 1.0), y=(2.0, 1.0)),),
        )
        for name in HOSTILE
    )
    return Report(
        title=text,
        summary=HOSTILE,
        task=text,
        task_description=text,
        columns=HOSTILE,
        rows=(Row(label=text, help=text, values=HOSTILE, best=0),),
        models=models,
        reproduce=HOSTILE,
        provenance=dict.fromkeys(HOSTILE, text),
        created=text,
    )
