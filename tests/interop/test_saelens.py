"""Autoencoders of SAELens are trained on our models and scored as our own dictionaries are."""

import subprocess
import sys
import warnings
from itertools import islice, repeat

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid import record
from pellucid.data.shards import Shard
from pellucid.lab.dictionary import Dictionary, recovery
from tests.lab.test_dictionary import sparse_rows
from tests.lab.toy import ToyTask, toy_model

OPTIONS = {
    "topk": {"k": 2},
    "abstopk": {"k": 2},
    "batchtopk": {"k": 2},
    "matryoshka_batchtopk": {"k": 2, "matryoshka_widths": [4, 8]},
    "standard": {},
    "gated": {},
    "jumprelu": {"l0_coefficient": 0.5, "jumprelu_bandwidth": 0.5},
    "matching_pursuit": {"decoder_init_norm": 1.0},
}


@pytest.fixture(scope="module")
def saelens():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pytest.importorskip("sae_lens", reason="SAELens needs another environment: pip install pellucid[sae]")
    from pellucid.interop import saelens

    return saelens


def draws(rows, batch_size=64):
    draw = torch.Generator().manual_seed(0)
    while True:
        yield rows[torch.randint(len(rows), (batch_size,), generator=draw)]


def distances(rows, others):
    return torch.cdist(rows, others, compute_mode="donot_use_mm_for_euclid_dist")


def test_without_the_package_the_error_names_the_extra():
    code = "import sys, pellucid, pellucid.interop, pellucid.lab.dictionary; assert 'sae_lens' not in sys.modules\n"
    code += "sys.modules['sae_lens'] = None\n"
    code += "try: import pellucid.interop.saelens\nexcept ImportError as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install pellucid[sae]" in done.stdout


@pytest.mark.parametrize("architecture", OPTIONS)
def test_every_architecture_is_trained_and_scored(saelens, architecture):
    known, rows = sparse_rows(8, 8, 2, 1000, seed=0)
    rows = 100 + 10 * rows
    found = saelens.fit(draws(rows), size=8, architecture=architecture, steps=400, **OPTIONS[architecture])
    assert found.decoder.shape == (8, 8)
    assert found.explained(rows) > 0.8
    code = found.encode(rows)
    assert code.shape == (1000, 8)
    torch.testing.assert_close(found.encode(rows[:1]), code[:1], msg="a code depends on the other rows")
    assert 0 <= recovery(found, known).recall <= 1


def test_known_features_are_recovered(saelens):
    known, rows = sparse_rows(24, 16, 2, 3000, seed=0)
    found = saelens.fit(draws(rows, 128), size=24, steps=800, k=2)
    assert recovery(found, known).recall >= 0.7
    assert int((found.encode(rows) != 0).sum(1).max()) <= 2


def test_the_same_seed_gives_the_same_numbers_and_leaves_torch_s_own_alone(saelens):
    _, rows = sparse_rows(8, 4, 2, 200, seed=0)
    before = torch.get_rng_state()
    first, second, other = (saelens.fit(draws(rows), size=6, k=2, steps=20, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.decoder, second.decoder)
    assert not torch.equal(first.decoder, other.decoder)
    assert torch.equal(torch.get_rng_state(), before)


@given(st.integers(0, 1000), st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_our_dictionary_as_theirs_and_back(saelens, tmp_path_factory, seed, k):
    draw = torch.Generator().manual_seed(seed)
    encoder, decoder, x = torch.randn(3, 5, 7, generator=draw)
    ours = Dictionary(encoder, torch.nn.functional.normalize(decoder, dim=1), x[0], k)
    path = tmp_path_factory.mktemp("sae")
    saelens.to_saelens(ours).save_model(path)
    back = saelens.SAEDictionary(saelens.SAE.load_from_disk(path))
    torch.testing.assert_close(back.encode(x), ours.encode(x), atol=1e-5, rtol=0)
    torch.testing.assert_close(back.decode(ours.encode(x)), ours.decode(ours.encode(x)), atol=1e-5, rtol=0)
    assert torch.equal(recovery(back, encoder).cosines, recovery(ours, encoder).cosines)


def test_activations_of_a_task_are_what_passes_the_site(saelens):
    model, task = toy_model(), ToyTask()
    batch = task.pairs(16, seed=0)
    every = record(model, batch.tokens, ["final"], mask=batch.mask)["final"][batch.mask]
    for rows in islice(saelens.activations(model, task, pairs=16, batch_size=32), 3):
        assert rows.shape == (32, 8)
        assert distances(rows, every).min(1).values.max() < 1e-5


def test_activations_of_a_shard_are_what_passes_the_site(saelens, tmp_path):
    model = toy_model()
    n_ctx = model.config.n_ctx
    shard = Shard(tmp_path, np.arange(5 * n_ctx + 1) % model.config.vocab_size, {})
    text = torch.from_numpy(shard.tokens[:-1]).view(-1, n_ctx)
    every = record(model, text, ["final"])["final"].flatten(0, 1)
    rows = torch.cat(list(islice(saelens.activations(model, shard, batch_size=16), 40)))
    distance = distances(rows, every)
    assert distance.min(1).values.max() < 1e-5
    assert distance.min(0).values.max() < 1e-5
    first, second = (
        saelens.fit(saelens.activations(model, shard, batch_size=16), size=6, k=2, steps=5) for _ in range(2)
    )
    assert torch.equal(first.decoder, second.decoder)


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        (repeat(torch.ones(4, 2)), {"architecture": "topkk"}, "did you mean 'topk'"),
        (repeat(torch.ones(4, 2)), {"kk": 1}, "unknown option of topk 'kk'"),
        (repeat(torch.ones(4, 2)), {"k": 4}, "k must be between 1 and size = 3, got 4"),
        (repeat(torch.full((4, 2), float("nan"))), {"k": 1}, "finite rows"),
        (iter([]), {"k": 1}, "finite rows"),
        (repeat(torch.randn(4, 2), 37), {"k": 1}, "the batches ran out after 5 of 9 steps"),
    ],
)
def test_bad_input(saelens, batches, options, message):
    with pytest.raises(ValueError, match=message):
        saelens.fit(batches, size=3, steps=9, **options)
