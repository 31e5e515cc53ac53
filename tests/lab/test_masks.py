"""Masks that are learned find the parts that are known to matter, and keep nothing where nothing matters."""

import pytest
import torch

from pellucid.core.edges import EdgeTap, edge_table
from pellucid.lab.ablate import all_logits
from pellucid.lab.acdc import acdc
from pellucid.lab.edge_masks import MaskConfig, edge_masks
from pellucid.lab.fills import fills
from pellucid.lab.node_masks import KeepNodes, node_masks
from pellucid.lab.patch import draw, patch_nodes
from tests.lab.test_sanity import program, small
from tests.lab.two_heads import Anything, TwoTokens, edge_effects, two_heads


def test_two_heads_by_hand():
    edges = edge_masks(two_heads(), TwoTokens(), pairs=4)
    nodes = node_masks(two_heads(), TwoTokens(), pairs=4)
    wanted = edge_effects() != 0
    assert torch.equal(edges.kept, wanted)
    assert edges.values[wanted].min() > edges.values[~wanted].max()
    assert nodes.kept.all()


@pytest.mark.parametrize("ablation", ["zero", "resample"])
def test_a_program_is_found_and_what_its_output_ignores_is_left_out(ablation):
    """`distractor`: this token. A frequency is computed and read, but changes nothing."""
    model, task = program("distractor")
    config = MaskConfig(steps=150, batch=8)
    nodes = node_masks(model, task, pairs=16, ablation=ablation, config=config)
    edges = edge_masks(model, task, pairs=16, ablation=ablation, config=config)
    matters = patch_nodes(model, task, pairs=16, ablation=ablation).values > 0.01
    assert torch.equal(nodes.kept, matters)
    assert set(edges.kept.nonzero()[:, 1].tolist()) == set(matters.nonzero().flatten().tolist())


@pytest.mark.parametrize("ablation", ["zero", "mean", "position", "resample"])
def test_a_proposed_circuit_meets_its_target(ablation):
    model, task = program("hist")
    config = MaskConfig(steps=10, batch=4)  # badly learned
    batch, pool = draw(model, task, 8, 0)
    replaced = fills(model, batch, ablation, pool)
    edges = edge_masks(model, task, pairs=8, ablation=ablation, config=config)
    nodes = node_masks(model, task, pairs=8, ablation=ablation, config=config)
    keep = nodes.kept.float().expand(len(batch), -1)
    for tap in (EdgeTap(model.config, replaced, edges.kept.float()), KeepNodes(model, replaced, keep)):
        assert task.loss(all_logits(model, batch, tap), batch).mean() <= config.target + 1e-4


def test_where_nothing_matters_nothing_is_kept():
    model, task, config = small(), Anything(same=True), MaskConfig(steps=20, batch=2)
    task.loss = lambda logits, batch: torch.zeros(len(batch)) * logits.sum()
    for method in (edge_masks, node_masks):
        assert not method(model, task, pairs=3, config=config).kept.any()


def test_it_learns_though_gradients_are_off():
    with torch.no_grad():
        quiet = node_masks(two_heads(), TwoTokens(), pairs=2, config=MaskConfig(steps=5))
    loud = node_masks(two_heads(), TwoTokens(), pairs=2, config=MaskConfig(steps=5))
    assert torch.equal(quiet.values, loud.values)


def test_a_bad_config_is_refused():
    with pytest.raises(ValueError, match="steps must be positive, got 0"):
        MaskConfig(steps=0)
    with pytest.raises(ValueError, match="penalties must name at least one try"):
        MaskConfig(penalties=())


@pytest.mark.parametrize("method", [edge_masks, acdc])
def test_what_lengths_alone_say_is_found_too(method):
    """The count of `length` comes from how many keys there are, and from nothing that the embedding says."""
    model, task = program("length")
    table = edge_table(model.config)
    kept = method(model, task, pairs=16).kept
    names = {(table.writers[w][0], table.readers[r][0]) for r, w in kept.nonzero().tolist()}
    assert names == {("0.attn.head", "0.mlp.read"), ("0.mlp.out", "final.read")}
