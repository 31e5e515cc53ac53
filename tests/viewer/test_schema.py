"""The report's schema: a JSON round trip, and an error that says what is wrong before a page could show it."""

import pytest
from pydantic import BaseModel, ValidationError

from pellucid.viewer.schema import CircuitView, Curve, EdgeView, NodeView, Report, Row, Snippet
from tests.viewer.examples import dense_circuit, hostile_report, report, sparse_circuit


@pytest.mark.parametrize(
    "made",
    [report(sparse_circuit(), dense_circuit(), None), report(None), report(), hostile_report()],
    ids=["three", "no circuit", "no model", "hostile"],
)
def test_json_round_trip(made: Report):
    assert Report.model_validate_json(made.model_dump_json()) == made


def test_views_are_frozen_and_closed():
    made = report(None)
    with pytest.raises(ValidationError, match="frozen"):
        made.title = "other"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Report.model_validate(made.model_dump() | {"colour": "red"})
    fields = sparse_circuit().nodes[0].model_dump()
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        NodeView.model_validate(fields | {"colour": "red"})


NODE = NodeView(id="0.mlp.act:3", site="0.mlp.act", channel=3, layer=0, mean=0.0, in_edges=0, out_edges=0)


def changed(view: BaseModel, **fields: object) -> BaseModel:
    return type(view).model_validate(dict(view) | fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Snippet(tokens=("a",), activations=(), focus=0), "1 tokens but 0 activations"),
        (lambda: Snippet(tokens=("a",), activations=(1.0,), focus=1), "focus 1 is outside the 1 tokens"),
        (lambda: Snippet(tokens=("a",), activations=(float("nan"),), focus=0), "finite number"),
        (lambda: changed(NODE, id="0.mlp.act:4"), "should be '0.mlp.act:3'"),
        (
            lambda: changed(NODE, layer=1),
            "unknown site of layer 1 '0.mlp.act'; did you mean",
        ),
        (lambda: changed(NODE, site="0.mlp.acts"), "did you mean '0.mlp.act'"),
        (lambda: EdgeView(writer="a", reader="b", weight=1.0, kind="embed"), "writer of an embed edge"),
        (lambda: EdgeView(writer="a", reader="b", weight=1.0, kind="unembed"), "reader of an unembed edge"),
        (
            lambda: CircuitView(task="", nodes=(NODE, NODE), edges=(), total_edges=0, token_edges=0),
            "more than one node",
        ),
        (
            lambda: CircuitView(
                task="",
                nodes=(NODE,),
                edges=(EdgeView(writer="token:x", reader="0.mlp.act:4", weight=1.0, kind="embed"),),
                total_edges=0,
                token_edges=1,
            ),
            "unknown node in edge 'token:x' -> '0.mlp.act:4'",
        ),
        (lambda: Curve(name="loss", x=(0.0,), y=()), "1 x values but 0 y values"),
        (lambda: Row(label="nodes", help="", values=("1",), best=1), "best 1 is outside its 1 values"),
        (
            lambda: changed(report(None), columns=("a", "b")),
            "row 'nodes in the circuit' has 1 values for 2 columns",
        ),
        (
            lambda: changed(report(None), models=report(None).models * 2),
            "more than one model named",
        ),
    ],
)
def test_errors_name_the_offending_value(make, message: str):
    with pytest.raises(ValidationError, match=message):
        make()
