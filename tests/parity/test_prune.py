"""A parity model is pruned to a circuit as any other model is."""

import numpy as np
import pytest
import torch

from pellucid import ModelConfig, Transformer, uniform
from pellucid.core.circuit import kept_masks
from pellucid.lab.ablate import keep_only, last_logits
from pellucid.lab.config import PruneConfig
from pellucid.lab.extract import extract
from pellucid.lab.means import node_means
from pellucid.lab.prune import prune
from tests.lab.toy import ToyTask

SEARCH = PruneConfig(steps=30, pairs=8, pool=32, measure=16, k_coefs=(3e-3,), lr=1e-2)
TEXT = np.random.default_rng(0).integers(0, 12, 1000).astype(np.uint16)


@pytest.fixture(scope="module")
def model():
    """It has learned to tell which token began the sequence."""
    config = ModelConfig(
        vocab_size=12,
        d_model=16,
        n_ctx=16,
        layers=uniform(1, 2, 8, 32),
        positions="learned",
        mlp_input={"kind": "parity", "active": [4, 8], "children": [8], "samples": 16},
    )
    model, task = Transformer(config, seed=0, device="cpu").train(), ToyTask()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        batch = task.pairs(16, seed=step)
        task.metric(last_logits(model, batch), batch.last()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_a_circuit_is_found_and_runs_alone_and_the_moments_stay(model):
    means = node_means(model.eval(), TEXT, seq_len=15, n_tokens=1000)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    circuit = prune(model.train(), ToyTask(), means, config=SEARCH)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    m = circuit.metrics
    assert m["verdict"] == "reached"
    assert m["nodes"] < m["total_nodes"] / 2
    assert m["calibrated_task_loss"] < 0.3 < m["ablated_task_loss"]
    batch, model = ToyTask().pairs(8, seed=1, split="test"), model.eval()
    alone = extract(model, circuit, means)(batch.tokens, only=batch.only)
    masked = last_logits(model, batch, keep_only(kept_masks(circuit, model), means))
    torch.testing.assert_close(alone, masked, atol=1e-5, rtol=1e-4)
