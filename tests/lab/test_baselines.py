"""Baselines: the graph of the weights, and what is written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.compiled.compiler.truth import edges_from_weights
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import compile_program
from pellucid.core.edges import edge_table
from pellucid.core.weights import weight_graph
from pellucid.lab.baselines import activation_norm, degree, random, reachability
from pellucid.lab.paths import fed, on_a_path
from tests.core.strategies import configs, scrambled
from tests.lab.two_heads import Anything, TwoTokens, edge_effects, two_heads

additive = configs(residual_activation="identity", bigram=False, activation_sparsity=None)


def test_two_heads_by_hand():
    """Four edges: embedding to each head's values, each head to the output."""
    model, task = two_heads(), TwoTokens()
    graph = edge_effects() != 0
    assert torch.equal(weight_graph(model), graph)
    assert torch.equal(reachability(model, task).values, graph.float())
    assert degree(model, task, universe="node").values.tolist() == [2, 2, 2]
    assert torch.equal(degree(model, task).values, 4.0 * graph)
    norms = activation_norm(model, task, pairs=2, ablation="resample").values
    torch.testing.assert_close(norms, torch.tensor([2**0.5, 2.0, 3.0]))


@pytest.mark.parametrize("name", ["hist", "sort", "shuffle_dyck1", "induction", "inc_mod", "copy"])
def test_the_weight_graph_of_a_program_is_what_the_compiler_wrote(name):
    """But for what an MLP writes through its bias alone."""
    case = PROGRAMS[name]
    model = compile_program(case.program, case.vocab, case.max_len, causal=case.causal).transformer
    table = edge_table(model.config)
    wanted = torch.zeros_like(weight_graph(model))
    with torch.no_grad():
        for block in model.blocks:
            if block.mlp is not None:
                block.mlp.proj.bias.zero_()
    for edge in edges_from_weights(model):
        wanted[table.readers.index(tuple(edge["reader"])), table.writers.index(tuple(edge["writer"]))] = True
    assert torch.equal(weight_graph(model), wanted)


@settings(max_examples=10, deadline=None)
@given(additive, st.integers(0, 9))
def test_a_model_with_all_weights_has_all_edges_and_one_without_a_write_has_none_from_it(config, seed):
    model = scrambled(config, seed)
    exists = edge_table(config).exists
    assert torch.equal(weight_graph(model), exists)
    assert torch.equal(reachability(model, Anything()).kept, exists)
    last = model.blocks[-1]
    with torch.no_grad():
        for part in (last.attn, last.mlp):
            if part is not None:
                for p in part.proj.parameters():
                    p.zero_()
    written = sum(site.startswith(f"{len(model.blocks) - 1}.") for site, _ in edge_table(config).writers)
    assert not weight_graph(model)[:, len(exists[0]) - written :].any()
    assert (
        not reachability(model, Anything()).kept[exists.sum(1) > len(exists[0]) - written].any()
        or (reachability(model, Anything()).kept[-1, 0])
    )


def paths_by_search(config, edges):
    """Every edge that some chain from the embedding to the output uses, by listing all chains."""
    feeds, used = fed(config), set()

    def walk(writer, chain):
        for reader in edges[:, writer].nonzero().flatten().tolist():
            step = [*chain, (reader, writer)]
            if feeds[reader] is None:
                used.update(step)
            else:
                walk(feeds[reader], step)

    walk(0, [])
    return used


@settings(max_examples=40, deadline=None)
@given(additive, st.integers(0, 9), st.floats(0.05, 0.6))
def test_edges_on_a_path_are_those_of_some_chain(config, seed, share):
    exists = edge_table(config).exists
    draw = torch.Generator().manual_seed(seed)
    edges = torch.rand(2, *exists.shape, generator=draw) < share
    found = on_a_path(config, edges)
    for one, of in zip(found, edges, strict=True):
        wanted = paths_by_search(config, of & exists)
        assert {tuple(edge) for edge in one.nonzero().tolist()} == wanted
    assert bool((on_a_path(config, edges, from_embedding=False) >= found).all())


def test_random_scores_depend_on_the_seed_alone():
    model, task = two_heads(), TwoTokens()
    assert torch.equal(random(model, task, seed=3).values, random(model, task, seed=3).values)
    assert not torch.equal(random(model, task, seed=3).values, random(model, task, seed=4).values)


def test_an_unknown_universe_is_refused():
    with pytest.raises(ValueError, match="unknown universe 'edges'; did you mean 'edge'"):
        degree(two_heads(), TwoTokens(), universe="edges")
