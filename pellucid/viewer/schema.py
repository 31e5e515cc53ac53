"""The typed JSON that a report page reads: one `Report`, a `ModelView` a column, a `CircuitView` a drawing."""

from collections import Counter
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from pellucid.core.errors import unknown

SITE_KINDS = ("attn.in", "attn.q", "attn.k", "attn.v", "attn.out", "mlp.in", "mlp.act", "mlp.out")
"""The sites a circuit's nodes may be at, without their layer, in the order the drawing stacks them."""

TOKEN = "token:"
"""What the name of a token's end of an embed or unembed edge begins with."""


class _View(BaseModel):
    # JSON has no NaN: a value that cannot be written back equal is refused when it is made, not when it is saved.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Snippet(_View):
    """One text with a node's activation at each token; ValueError where lengths differ or `focus` is outside."""

    tokens: tuple[str, ...]
    activations: tuple[float, ...]
    focus: int
    """The token the text was chosen for."""
    label: str | None = None
    """What the text is an example of ("positive", "negative"); examples with one label are shown together."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.tokens) != len(self.activations):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.activations)} activations")
        if not 0 <= self.focus < len(self.tokens):
            raise ValueError(f"focus {self.focus} is outside the {len(self.tokens)} tokens")
        return self


class NodeView(_View):
    """One node of a circuit; ValueError where `id`, `site`, `channel` and `layer` disagree or the site is unknown."""

    id: str
    """`{site}:{channel}`, as in `0.mlp.act:37`."""
    site: str
    channel: int
    layer: int
    mean: float
    """The mean activation that ablation puts in the node's place."""
    top: tuple[Snippet, ...] = ()
    bottom: tuple[Snippet, ...] = ()
    task: tuple[Snippet, ...] = ()
    importance: float | None = None
    """How much the task loss rises when this node alone is mean-ablated from the circuit."""
    in_edges: int
    out_edges: int

    @model_validator(mode="after")
    def _check(self) -> Self:
        known = [f"{self.layer}.{kind}" for kind in SITE_KINDS]
        if self.site not in known:
            raise unknown(f"site of layer {self.layer}", self.site, known)
        if self.id != f"{self.site}:{self.channel}":
            raise ValueError(f"node id {self.id!r} should be {f'{self.site}:{self.channel}'!r}")
        return self


class EdgeView(_View):
    """One nonzero weight; ValueError where a token's end is not named `token:<text>`."""

    writer: str
    reader: str
    weight: float
    kind: Literal["weight", "embed", "unembed"]

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, end, of in (("writer", self.writer, "embed"), ("reader", self.reader, "unembed")):
            if self.kind == of and not end.startswith(TOKEN):
                raise ValueError(f"the {name} of an {of} edge should be '{TOKEN}<text>', not {end!r}")
        return self

    @property
    def node_ends(self) -> tuple[str, ...]:
        """The ends that are nodes: both of a weight, one of an embedding or unembedding."""
        return {
            "weight": (self.writer, self.reader),
            "embed": (self.reader,),
            "unembed": (self.writer,),
        }[self.kind]


class CircuitView(_View):
    """A pruned circuit; ValueError where two nodes share an id or an edge ends at a node that is not there."""

    task: str
    nodes: tuple[NodeView, ...]
    edges: tuple[EdgeView, ...]
    total_edges: int
    """Weights between two kept nodes, also those that `edges` leaves out."""
    token_edges: int
    """Embedding and unembedding weights at kept channels, also those that `edges` leaves out."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _unique("node", (node.id for node in self.nodes))
        ids = {node.id for node in self.nodes}
        for edge in self.edges:
            for end in edge.node_ends:
                if end not in ids:
                    raise unknown(f"node in edge {edge.writer!r} -> {edge.reader!r}:", end, ids)
        return self


class Curve(_View):
    """One line of a chart; curves of several models with one name share a chart. ValueError where lengths differ."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.x) != len(self.y):
            raise ValueError(f"curve {self.name!r} has {len(self.x)} x values but {len(self.y)} y values")
        return self


class ModelView(_View):
    """One model of the comparison, with its circuit or a `note` that says why it has none."""

    name: str
    description: str
    metrics: dict[str, float | int | str | None]
    circuit: CircuitView | None
    note: str | None
    curves: tuple[Curve, ...] = ()


class Row(_View):
    """One measure of the results table: a value a column; ValueError where `best` is no column."""

    label: str
    help: str
    values: tuple[str, ...]
    best: int | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.best is not None and not 0 <= self.best < len(self.values):
            raise ValueError(f"row {self.label!r}: best {self.best} is outside its {len(self.values)} values")
        return self


class Report(_View):
    """Everything on one page; ValueError where a row does not fit the columns or two models share a name."""

    title: str
    summary: tuple[str, ...]
    """The headline sentences."""
    task: str
    task_description: str
    columns: tuple[str, ...]
    """The models' names, as the table shows them."""
    rows: tuple[Row, ...]
    models: tuple[ModelView, ...]
    reproduce: tuple[str, ...]
    """Shell commands that make the page again."""
    provenance: dict[str, str]
    created: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        _unique("model", (model.name for model in self.models))
        for row in self.rows:
            if len(row.values) != len(self.columns):
                raise ValueError(
                    f"row {row.label!r} has {len(row.values)} values for {len(self.columns)} columns"
                )
        return self


def _unique(kind: str, names) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"more than one {kind} named {', '.join(map(repr, twice[:5]))}")
