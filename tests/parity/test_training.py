"""Parity models train: alone, compiled, and over two processes in both ways of sharing."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from pellucid import ModelConfig, Transformer, load_model, uniform
from pellucid.recipes.registry import get_recipe
from pellucid.training.config import TrainConfig
from pellucid.training.loop import Step, train
from pellucid.training.objective import Objective

TOKENS = np.random.default_rng(0).integers(0, 17, 4000, dtype=np.uint16)
PART = {"kind": "parity", "active": [4, 8], "children": [8], "samples": 16}
MODEL = ModelConfig(
    vocab_size=17,
    d_model=16,
    n_ctx=16,
    layers=uniform(2, 2, 8, 64),
    positions="learned",
    tied_embeddings=True,
    mlp_input=PART,
)
TINY = get_recipe("parity-tiny").model
CONFIG = TrainConfig(
    steps=12,
    batch_size=4,
    seq_len=16,
    lr=1e-2,
    optimizer="muon",
    eps=1e-8,
    gradient="none",
    precision="float32",
    log_every=1,
    validation_tokens=192,  # three batches: more than two ranks share evenly
)


def go(out, config=MODEL, **change):
    model = Transformer(config, seed=0, device="cpu")
    return train(model, replace(CONFIG, **change), TOKENS, out, validation={"same": TOKENS})


def losses(out):
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_training_lowers_the_loss_and_a_resumed_run_ends_bit_for_bit_alike(tmp_path):
    whole = go(tmp_path / "a")
    with pytest.raises(Exception, match="stopped at step 5"):
        train(
            Transformer(MODEL, seed=0, device="cpu"),
            CONFIG,
            TOKENS,
            tmp_path / "b",
            validation={"same": TOKENS},
            stop_after=5,
        )
    resumed = train(
        Transformer(MODEL, seed=0, device="cpu"),
        CONFIG,
        TOKENS,
        tmp_path / "b",
        validation={"same": TOKENS},
        resume=True,
    )
    assert losses(tmp_path / "a")[-1] < losses(tmp_path / "a")[0]
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    moments = load_model(tmp_path / "a", device="cpu").state_dict()
    assert moments["blocks.0.mlp.input.moments.batches"] == 12
    assert moments["blocks.0.mlp.input.moments.mean"].count_nonzero() > 0


def test_validation_leaves_the_moments_alone(tmp_path):
    with_validation = go(tmp_path / "a", validate_every=1).model.state_dict()
    without = go(tmp_path / "b").model.state_dict()
    assert all(torch.equal(t, without[name]) for name, t in with_validation.items())


def test_what_training_returns_no_longer_observes(tmp_path):
    model = go(tmp_path / "a").model
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model(torch.from_numpy(TOKENS[:16].astype(np.int64))[None])
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_the_next_token_loss_and_the_reconstruction_loss_are_added():
    model = Transformer(MODEL, seed=0, device="cpu").eval()
    windows = torch.from_numpy(TOKENS[:34].astype(np.int64)).view(2, 17)
    loss, nll = Objective(model)(windows)
    assert loss > nll > 0


@pytest.mark.parametrize("train", [False, True])
def test_a_batch_in_parts_has_the_gradient_of_the_whole_and_each_part_is_observed(train):
    windows = torch.from_numpy(TOKENS[:68].astype(np.int64)).view(4, 17)
    taken = []
    for parts in (1, 4):
        model = Transformer(MODEL, seed=0, device="cpu").train(train)
        nll, rms = Step(model, replace(CONFIG, micro_batches=parts))(0, windows)
        batches = model.state_dict()["blocks.1.mlp.input.moments.batches"]
        assert batches == (parts if train else 0)
        taken.append(torch.stack([nll, rms]))
    torch.testing.assert_close(*taken, rtol=0.2 if train else 1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile raises deprecation warnings of its own
@pytest.mark.parametrize(
    ("basis", "dtype"),
    [("parity", "float32"), ("parity", "float64"), ("random", "float32"), ("learned", "float32")],
)
def test_a_parity_model_compiles_to_one_graph_and_gives_the_same_gradients(basis, dtype):
    model = Transformer(
        replace(MODEL, dtype=dtype, mlp_input={**PART, "basis": basis}), seed=0, device="cpu"
    ).eval()
    windows = torch.from_numpy(TOKENS[:34].astype(np.int64)).view(2, 17)
    objective = Objective(model)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(objective(windows)[0], parameters)
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    for a, b in zip(torch.autograd.grad(compiled(windows)[0], parameters), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def in_two_processes(out, config, **change):
    """The same as `go`, in two processes; returns the moments that each ends with, which are to be alike."""
    script = out.parent / "script.py"
    script.write_text(
        "import os, sys, pathlib, torch\n"
        f"from tests.parity.test_training import {config}, go\n"
        f"trained = go(pathlib.Path(sys.argv[1]), {config}, **{change})\n"
        "moments = {n: t for n, t in trained.model.state_dict().items() if 'moments' in n}\n"
        "torch.save(moments, f'{sys.argv[1]}/rank{os.environ.get(\"RANK\", 0)}.pt')\n"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*launch, script, out], check=True, env=env, timeout=600)
    return [torch.load(out / f"rank{r}.pt", weights_only=True) for r in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("config", "optimizer", "close"),
    [("MODEL", "adamw", 1e-4), ("MODEL", "muon", 2e-2), ("TINY", "adamw", 1e-5)],
)
def test_two_processes_train_as_one_does(tmp_path, parallel, config, optimizer, close):
    """Muon orthogonalises in bfloat16, which makes much of the last bits of a gradient; AdamW with a large epsilon does not."""
    change = {"parallel": parallel, "optimizer": optimizer, "eps": 1e-2}
    if config == "TINY":
        change["steps"] = 3
    ranks = in_two_processes(tmp_path / "two", config, **change)
    one = go(tmp_path / "one", globals()[config], **change)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=close)
    own = one.model.state_dict()
    for name, t in ranks[0].items():
        assert torch.equal(t, ranks[1][name])
        torch.testing.assert_close(t, own[name], atol=10 * close, rtol=10 * close)
    saved = load_model(tmp_path / "two", device="cpu").state_dict()
    for name, t in own.items():
        torch.testing.assert_close(saved[name], t, atol=10 * close, rtol=10 * close)
