"""Edges between components: keeping all is the model, cutting all is the corrupt run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid import ActivationSparsity, EdgeTap, LayerConfig, ModelConfig, edge_table
from pellucid.core.edges import record_writes
from tests.core.strategies import configs, scrambled, some_tokens

additive = configs(residual_activation="identity", bigram=False).filter(
    lambda c: not (c.keeps("resid.mid") or c.keeps("resid.post"))
)


@settings(max_examples=30, deadline=None)
@given(additive, st.integers(0, 99))
def test_all_kept_is_the_model_and_all_cut_is_the_corrupt_run(config, seed):
    model = scrambled(config, seed)
    clean, corrupt = some_tokens(seed, 2, 6), some_tokens(seed + 1000, 2, 6)
    writes, shape = record_writes(model, corrupt), edge_table(config).exists.shape
    kept = model(clean, tap=EdgeTap(config, writes, torch.ones(shape)))
    cut = model(clean, tap=EdgeTap(config, writes, torch.zeros(shape)))
    torch.testing.assert_close(kept, model(clean), atol=1e-8, rtol=1e-7)
    torch.testing.assert_close(cut, model(corrupt), atol=1e-8, rtol=1e-7)


@settings(max_examples=15, deadline=None)
@given(additive, st.integers(0, 99))
def test_masks_stacked_on_the_batch_axis_equal_one_mask_at_a_time(config, seed):
    model, table = scrambled(config, seed), edge_table(config)
    clean, corrupt = some_tokens(seed, 1, 6), some_tokens(seed + 1000, 1, 6)
    keep = torch.rand(3, *table.exists.shape, generator=torch.Generator().manual_seed(seed))
    writes = record_writes(model, corrupt)
    together = model(clean.expand(3, -1), tap=EdgeTap(config, writes, keep))
    for i in range(3):
        alone = model(clean, tap=EdgeTap(config, writes, keep[i]))
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-8, rtol=1e-7)


def test_cutting_one_edge_moves_only_its_reader():
    """Direct path embed -> final of a one-layer model, by hand."""
    config = ModelConfig(
        vocab_size=11, d_model=8, n_ctx=9, layers=(LayerConfig(d_mlp=5),), norm="none", dtype="float64"
    )
    model, table = scrambled(config, 4), edge_table(config)
    clean, corrupt = some_tokens(1, 1, 3), some_tokens(2, 1, 3)
    assert table.writers == (("embed", None), ("0.mlp.out", None))
    assert table.readers == (("0.mlp.read", None), ("final.read", None))
    assert table.n_edges == 3
    keep = torch.ones(2, 2)
    keep[1, 0] = 0
    got = model(clean, tap=EdgeTap(config, record_writes(model, corrupt), keep))
    swap = (model.wte(corrupt) - model.wte(clean)) @ model.head.weight.T
    torch.testing.assert_close(got, model(clean) + swap)


def test_a_head_is_no_writer_where_abs_topk_follows_attention():
    fields = {"vocab_size": 11, "d_model": 8, "n_ctx": 9, "layers": (LayerConfig(heads=(4, 4)),)}
    plain = edge_table(ModelConfig(**fields))
    sparse = edge_table(ModelConfig(**fields, activation_sparsity=ActivationSparsity(fraction=0.5)))
    assert plain.writers == (("embed", None), ("0.attn.head", 0), ("0.attn.head", 1))
    assert sparse.writers == (("embed", None), ("0.attn.out", None))


def test_a_residual_stream_that_is_no_sum_and_a_mask_of_the_wrong_shape_are_refused():
    fields = {"vocab_size": 11, "d_model": 8, "n_ctx": 9, "layers": (LayerConfig(d_mlp=5),)}
    with pytest.raises(ValueError, match="plain sum"):
        edge_table(ModelConfig(**fields, residual_activation="relu"))
    with pytest.raises(ValueError, match=r"keep must end in \(2, 2\), got \(3, 2\)"):
        EdgeTap(ModelConfig(**fields), {}, torch.ones(3, 2))
