"""Exact patching against one run of the model for each edge and node."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.bench.task import ProgramTask
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import compile_program
from pellucid.core.config import ModelConfig, uniform
from pellucid.core.edges import EdgeTap, edge_table
from pellucid.core.taps import Tap
from pellucid.core.transformer import Transformer
from pellucid.lab.ablate import last_logits
from pellucid.lab.fills import ABLATIONS, average, clean_writes, fills
from pellucid.lab.patch import cut_edges, cut_nodes, edges_of, patch_edges, patch_nodes
from pellucid.tasks.task import Pairs


def compiled(name):
    case = PROGRAMS[name]
    model = compile_program(case.program, case.vocab, case.max_len, causal=case.causal)
    return model.transformer.cpu(), ProgramTask(model, name)


def random_model(causal, norm="rms"):
    config = ModelConfig(
        vocab_size=11,
        d_model=12,
        n_ctx=6,
        layers=uniform(2, 2, 4, 10),
        norm=norm,
        causal=causal,
        positions="learned",
    )
    return Transformer(config, seed=1, device="cpu").double().requires_grad_(False)


def random_pairs(n=3, t=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (2 * n, t), generator=draw)
    lengths = torch.randint(2, t + 1, (n,), generator=draw).repeat_interleave(2)
    return Pairs(
        tokens=tokens,
        corrupt=tokens.unflatten(0, (-1, 2)).flip(1).flatten(0, 1),
        mask=torch.arange(t) < lengths[:, None],
    )


def outputs(logits, batch):
    return (logits * batch.mask[..., None]).sum((1, 2))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ablation", ABLATIONS)
def test_each_edge_alone_equals_one_run_of_the_model_with_that_edge_cut(causal, ablation):
    model, batch = random_model(causal), random_pairs()
    replaced = fills(model, batch, ablation, random_pairs(8, seed=1))
    places = edges_of(model)
    found = cut_edges(model, batch, replaced, outputs, places)
    exists = edge_table(model.config).exists
    for each, (reader, writer) in zip(found, places, strict=True):
        keep = torch.ones(exists.shape, dtype=torch.float64)
        keep[reader, writer] = 0
        alone = outputs(last_logits(model, batch, EdgeTap(model.config, replaced, keep)), batch)
        torch.testing.assert_close(each, alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_each_node_alone_equals_one_run_with_its_write_replaced(ablation):
    model, batch = random_model(False), random_pairs()
    replaced = fills(model, batch, ablation, random_pairs(8, seed=1))
    table = edge_table(model.config)
    found = cut_nodes(model, batch, replaced, outputs, range(len(table.writers)))
    for number, (site, head) in enumerate(table.writers):

        def replace(site, x, head=head):
            x = x.clone()
            if head is None:
                return replaced[site]
            x[:, :, head] = replaced[site][:, :, head]
            return x

        alone = outputs(last_logits(model, batch, Tap.at(replace, {site})), batch)
        torch.testing.assert_close(found[number], alone, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", ["reverse", "hist", "redundant_or", "induction"])
def test_an_edge_that_the_weights_do_not_have_changes_nothing(name):
    model, task = compiled(name)
    found = patch_edges(model, task, pairs=16, ablation="resample")
    case = PROGRAMS[name]
    edges = compile_program(case.program, case.vocab, case.max_len, causal=case.causal).truth["edges"][
        "component"
    ]
    table = edge_table(model.config)
    names = {(tuple(e["reader"]), tuple(e["writer"])) for e in edges}
    for r, w in edges_of(model):
        if (table.readers[r], table.writers[w]) not in names:
            assert abs(float(found.values[r, w])) < 1e-5


def test_what_is_cut_is_counted_in_units_of_the_corrupt_run():
    model, task = compiled("copy")
    assert float(patch_edges(model, task, pairs=8).effects[0, 0]) == pytest.approx(1)
    assert float(patch_nodes(model, task, pairs=8).effects[0]) == pytest.approx(1)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.booleans())
def test_ablating_with_the_clean_run_changes_exactly_nothing(seed, causal):
    model, batch = random_model(causal), random_pairs(seed=seed)
    corrupt = batch.tokens.clone()
    corrupt[0, 0] = (corrupt[0, 0] + 1) % 11  # not all rows may be equal: there would be nothing to measure
    same = Pairs(tokens=batch.tokens, corrupt=corrupt, mask=batch.mask)
    whole = outputs(last_logits(model, same), same)[1:]
    found = cut_edges(model, same, fills(model, same, "resample"), outputs, edges_of(model))[..., 1:]
    torch.testing.assert_close(found, whole.expand_as(found), atol=1e-12, rtol=0)


def test_fills_are_what_they_say():
    model, batch, pool = random_model(False), random_pairs(), random_pairs(8, seed=1)
    clean, writes = clean_writes(model, batch), clean_writes(model, pool)
    assert set(clean) == set(writes) == set(fills(model, batch, "zero"))
    bias = model.blocks[0].mlp.proj.bias
    assert torch.equal(fills(model, batch, "zero")["0.mlp.out"][0, 0], bias)
    assert not fills(model, batch, "zero")["0.attn.head"].any()
    rows = writes["embed"][pool.mask]
    torch.testing.assert_close(fills(model, batch, "mean", pool)["embed"][0, 0], rows.mean(0))
    first = writes["embed"][:, 1][pool.mask[:, 1]]
    torch.testing.assert_close(fills(model, batch, "position", pool)["embed"][0, 1], first.mean(0))


def test_positions_that_the_pool_never_has_get_the_overall_mean():
    x, mask = torch.arange(6.0).view(2, 3, 1), torch.tensor([[True, True, False], [True, False, False]])
    found = average(x, mask, True, 4)
    assert found[0, :, 0].tolist() == pytest.approx([1.5, 1, 4 / 3, 4 / 3])


def test_where_the_corrupt_input_is_shorter_the_clean_write_stays():
    model, task = compiled("length")
    assert task.varies_length
    batch = task.pairs(16)
    resampled, clean = fills(model, batch, "resample"), clean_writes(model, batch)
    beyond = batch.mask & ~batch.corrupt_mask
    assert beyond.any()
    for site in clean:
        assert torch.equal(resampled[site][beyond], clean[site][beyond])


def test_bad_ablations():
    model, batch = random_model(True), random_pairs()
    with pytest.raises(ValueError, match=r"unknown ablation 'means'.*'mean'"):
        fills(model, batch, "means")
    with pytest.raises(ValueError, match="give it a pool"):
        fills(model, batch, "mean")
