"""The sweeps: what their points hold equal, that a stopped one goes on, and what is drawn of them."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.core.config import uniform
from pellucid.core.transformer import Transformer
from pellucid.recipes import sweeps, workbench
from pellucid.recipes.ablations import base, topk
from pellucid.recipes.figures import sweeps_figure
from pellucid.recipes.recipe import make_constraint
from pellucid.recipes.registry import demo_sparse
from pellucid.recipes.sweeps import points, rows, sweep, sweep_table, widened
from pellucid.sparse.projection import Projection
from tests.recipes.test_ablations import tiny
from tests.recipes.test_study import SEARCH, result


def nonzeros(recipe):
    """How many weights a projection to the end of the schedule leaves, of those that it is on."""
    model = Transformer(recipe.model, seed=0, device="cpu")
    for p in model.parameters():
        torch.nn.init.normal_(p)  # biases begin at 0
    constraint = make_constraint(model, recipe)
    assert isinstance(constraint, Projection)
    constraint.apply(progress=1.0)
    return sum(int(p.count_nonzero()) for p in constraint.parameters.values())


@settings(deadline=None, max_examples=8)
@given(st.sampled_from((0.5, 0.75, 1.0, 1.5, 2.0)), st.floats(0.02, 0.2))
def test_a_wider_model_has_as_many_nonzeros(times, fraction):
    recipe = replace(base(), sparsity=replace(topk(base()), fraction=fraction))
    wide = widened(recipe, times)
    layer, wider = recipe.model.layers[0], wide.model.layers[0]
    assert wide.model.d_model == times * recipe.model.d_model
    assert (wider.d_attn, wider.d_mlp) == (times * layer.d_attn, times * layer.d_mlp)
    assert wider.heads[0] == layer.heads[0]
    assert nonzeros(wide) == pytest.approx(nonzeros(recipe), abs=20)


def test_what_cannot_be_widened_is_said():
    with pytest.raises(ValueError, match=r"0\.3 times a width of 8 is not a whole number"):
        widened(base(), 0.3)
    with pytest.raises(ValueError, match="fraction must be in"):
        widened(replace(base(), sparsity=replace(topk(base()), fraction=0.9)), 0.5)
    with pytest.raises(ValueError, match="SparsityConfig"):
        points(replace(base(), sparsity=None))


def test_both_sweeps_go_through_the_recipe_and_change_one_thing():
    recipe = demo_sparse()
    lines = points(recipe)
    for line in lines.values():
        assert replace(line["base"], name=recipe.name) == recipe
        for name, r in line.items():
            assert r.name == name
            assert (r.train, r.data) == (recipe.train, recipe.data)
    assert [topk(r).fraction for r in lines["L0"].values()] == pytest.approx([0.01, 0.03, 0.1])
    assert {r.model for r in lines["L0"].values()} == {recipe.model}
    assert [r.model.d_model for r in lines["width"].values()] == [128, 256, 512]


def test_the_mean_is_over_tasks_that_every_point_does():
    found = [
        result("base", "a", 9), result("base", "b", 99), result("base", "c", 5),
        result("width-2", "a", 3), result("width-2", "b", 24), result("width-2", "c", None),
    ]  # fmt: skip
    by_name = rows(found)
    assert by_name["base"].mean_edges == pytest.approx(math.sqrt(10 * 100) - 1)
    assert by_name["width-2"].mean_edges == pytest.approx(math.sqrt(4 * 25) - 1)
    assert by_name["width-2"].edges == {"a": 3, "b": 24, "c": None}
    assert math.isnan(rows([*found, result("l0-0.1", "c", 4)])["base"].mean_edges)
    assert rows([]) == {}


def test_sweeps_are_drawn_and_tabulated_from_results_on_disk(tmp_path):
    lines = points(demo_sparse())
    found = [result(name, "a", 9) for line in lines.values() for name in line]
    text = sweeps_figure(lines, found, tmp_path / "figure.svg").read_text()
    for label in ("1%", "3%", "10%", "width 128", "width 256", "width 512", "L0", "width"):
        assert f">{label}<" in text
    assert sweeps_figure(lines, found, tmp_path / "again.svg").read_text() == text
    assert sweep_table(lines, found, 0.15).row_count == 6
    assert sweep_table(lines, found[:1], 0.15).row_count == 1


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(workbench, "MEAN_TOKENS", 2000)
    small = tiny()
    layers = uniform(n_layer=1, n_head=2, d_head=8, d_mlp=32)
    recipe = replace(small, model=replace(small.model, d_model=32, layers=layers))
    trained, real = [], sweeps.run

    def stopping(r, out, **options):
        if r.name == stop:
            raise KeyboardInterrupt
        trained.append(r.name)
        return real(r, out, **options)

    monkeypatch.setattr(sweeps, "run", stopping)
    stop = "l0-0.17"
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path / "out", recipe=recipe, tasks=["for_while"], config=SEARCH, device="cpu")
    assert trained == ["base", "l0-0.017"]
    files = {f: f.stat().st_mtime_ns for f in (tmp_path / "out").rglob("*.json")}
    stop = ""
    found = sweep(tmp_path / "out", recipe=recipe, tasks=["for_while"], config=SEARCH, device="cpu")
    assert {f: f.stat().st_mtime_ns for f in files} == files
    assert {r.run for r in found} == {"base", "l0-0.017", "l0-0.17", "width-0.5", "width-2"}
    longer = replace(recipe, train=replace(recipe.train, steps=5))
    with pytest.raises(ValueError, match="holds another run"):
        sweep(tmp_path / "out", recipe=longer, tasks=["for_while"], config=SEARCH, device="cpu")


def test_a_task_that_there_is_not_is_said_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'for_while'"):
        sweep(tmp_path / "out", tasks=["for_whilst"])
    assert not (tmp_path / "out").exists()
