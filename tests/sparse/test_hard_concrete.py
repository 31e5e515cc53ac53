"""HardConcrete: gates as they are defined, their gradients, and runs that leave an ordinary sparse model."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import functional_call

from pellucid import ModelConfig, Transformer, load_model, uniform
from pellucid.core.checkpoint import read_weights
from pellucid.sparse.hard_concrete import HardConcrete, HardConcreteConfig
from pellucid.training.log import read_log
from pellucid.training.loop import Interrupted, Step, evaluate, train
from pellucid.training.objective import Objective
from tests.training.test_loop import CONFIG, MODEL, TOKENS, weights

GATES = HardConcreteConfig(floor=0.2)
ADAM = replace(CONFIG, eps=1e-8, gradient="none", precision="float32")
TINY = ModelConfig(
    vocab_size=11, d_model=8, n_ctx=8, layers=uniform(1, 2, 4, 12), bigram=True, dtype="float64"
)


def go(out, *, config=ADAM, gates=GATES, **options):
    model = Transformer(MODEL, seed=config.seed, device="cpu")
    constraint = HardConcrete(model, gates, seed=config.seed)
    return train(model, config, TOKENS, out, constraint=constraint, validation={"same": TOKENS}, **options)


def uniforms(shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=20, deadline=None)
@given(st.floats(-4, 4), st.floats(0.3, 1.5), st.floats(-0.5, -0.05), st.floats(1.05, 1.5))
def test_the_expected_l0_is_the_share_of_sampled_gates_that_are_not_zero(log_alpha, temperature, low, high):
    config = HardConcreteConfig(floor=0, temperature=temperature, low=low, high=high)
    n = 40_000
    gates = config.sample(torch.full((n,), log_alpha, dtype=torch.float64), uniforms(n))
    assert 0 <= gates.min() <= gates.max() <= 1
    chance = config.open_chance(torch.tensor(log_alpha, dtype=torch.float64)).item()
    assert (gates > 0).double().mean().item() == pytest.approx(chance, abs=5 * math.sqrt(0.25 / n))


def test_gates_without_noise_are_exactly_closed_or_open_beyond_their_bounds():
    log_alpha = torch.tensor([-3.0, -2.3, 0.0, 2.3, 3.0])
    gates = GATES.settled(log_alpha)
    assert (gates[0], gates[-1]) == (0, 1)
    assert gates[2] == pytest.approx(0.5)
    assert ((gates[1:4] > 0) & (gates[1:4] < 1)).all()


def test_gradients_of_weights_and_log_alphas_are_those_of_one_differentiable_objective():
    """Against autograd through a functional call with the same noise, and against finite differences."""
    model = Transformer(TINY, seed=0, device="cpu")
    constraint = HardConcrete(model, replace(GATES, floor=0.01), seed=4)
    step = Step(model, replace(CONFIG, seq_len=6), constraint)
    windows = torch.arange(14).view(2, 7) % 11
    trained = constraint.trained(model)

    def objective(values):
        noise = torch.Generator().manual_seed(4 * 1_000_003 + 5)
        gated = {name: value for name, value in values.items() if not name.startswith("log_alpha.")}
        count = total = 0
        for name, p in constraint.parameters.items():
            log_alpha = (values[f"log_alpha.{name}"] * GATES.speed).view_as(p)
            u = torch.empty_like(p).uniform_(generator=noise)
            s = torch.sigmoid((torch.log(u / (1 - u)) + log_alpha) / (2 / 3))
            gated[name] = values[name] * (1.2 * s - 0.1).clamp(0, 1)
            total = total + torch.sigmoid(log_alpha - 2 / 3 * math.log(0.1 / 1.1)).sum()
            count += p.numel()
        loss, _ = functional_call(Objective(model), {f"model.{k}": v for k, v in gated.items()}, (windows,))
        return loss + GATES.cost * total / count

    copies = {name: p.detach().clone().requires_grad_() for name, p in trained.items()}
    expected = dict(zip(copies, torch.autograd.grad(objective(copies), list(copies.values())), strict=True))

    constraint.before(5)
    loss, _ = step.objective(windows)
    loss.backward()
    constraint.backward()
    assert trained.keys() == expected.keys()
    for name, p in trained.items():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, expected[name], msg=name)
    assert all(p.grad is None for p in constraint.parameters.values())

    name, shift = "log_alpha.blocks.0.mlp.fc.weight", 1e-5
    gradient = expected[name]
    direction = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    up, down = ({**copies, name: copies[name].detach() + sign * shift * direction} for sign in (1, -1))
    slope = (objective(up) - objective(down)) / (2 * shift)
    assert slope.item() == pytest.approx((gradient * direction).sum().item(), rel=1e-4)


def test_gates_cost_nothing_below_the_floor():
    model = Transformer(TINY, device="cpu")
    for floor, free in ((0.9, True), (0.1, False)):
        constraint = HardConcrete(model, replace(GATES, floor=floor))
        gradients = torch.autograd.grad(constraint.cost(), list(constraint.gates.values()))
        assert all((g == 0).all() == free for g in gradients)


@pytest.mark.parametrize("initial", [0.1, 0.7, 1.0])
def test_gates_begin_open_in_the_given_share_and_the_model_is_gated_at_once(initial):
    model = Transformer(replace(TINY, d_model=40), seed=1, device="cpu")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    constraint = HardConcrete(model, replace(GATES, initial=initial))
    constraint.begin()
    opened = total = 0
    for name, p in model.named_parameters():
        kept = p != 0
        assert torch.equal(p[kept], before[name][kept]), name
        if name == "bigram":
            assert torch.equal(p, before[name])
        elif p.dim() == 2:
            opened, total = opened + int(kept.sum()), total + p.numel()
    assert opened / total == pytest.approx(initial, abs=0.03)


def test_a_run_comes_down_to_its_floor_and_leaves_the_gated_weights_as_an_ordinary_model(tmp_path):
    config = replace(ADAM, steps=400, lr=2e-2, validate_every=0, log_every=50)
    trained = go(tmp_path, config=config, gates=replace(GATES, initial=0.7))
    saved = load_model(tmp_path, device="cpu")
    assert (
        read_weights(tmp_path / "checkpoint").keys() == Transformer(MODEL, device="cpu").state_dict().keys()
    )
    assert evaluate(saved, TOKENS, config) == trained.validation["same"] < 2.0
    last = [line for line in read_log(tmp_path / "log.jsonl") if "nonzero" in line][-1]
    assert last["nonzero"] == pytest.approx(0.2, abs=0.06)
    sparse = [p for name, p in saved.named_parameters() if name != "bigram" and "sink" not in name]
    exact_zeros = sum(int((p == 0).sum()) for p in sparse) / sum(p.numel() for p in sparse)
    assert exact_zeros == pytest.approx(1 - last["nonzero"])


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    go(tmp_path / "whole")
    for stop in (5, 9):
        with pytest.raises(Interrupted, match=f"stopped at step {stop} of 12"):
            go(tmp_path / "parts", resume=True, stop_after=stop)
    go(tmp_path / "parts", resume=True)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    state = "checkpoint/train_state/optimizer.safetensors"
    assert (tmp_path / "whole" / state).read_bytes() == (tmp_path / "parts" / state).read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile raises deprecation warnings of its own
def test_a_compiled_run_trains_the_same_gates(tmp_path):
    runs = [go(tmp_path / str(c), config=replace(ADAM, steps=6, compile=c)) for c in (False, True)]
    for a, b in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-2)
    assert runs[0].validation == pytest.approx(runs[1].validation, abs=1e-3)


@pytest.mark.slow
def test_two_ranks_train_the_same_gates_as_one_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch\n"
        "from tests.sparse.test_hard_concrete import *\n"
        "out = sys.argv[1]\n"
        "trained = go(out)\n"
        "torch.save(trained.model.state_dict(), f'{out}/rank{os.environ.get(\"RANK\", 0)}.pt')\n"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*launch, script, tmp_path / "two"], check=True, env=env, timeout=240)
    subprocess.run([sys.executable, script, tmp_path / "one"], check=True, env=env, timeout=240)
    ranks = [torch.load(tmp_path / "two" / f"rank{r}.pt", weights_only=True) for r in (0, 1)]
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    two, one = (read_log(tmp_path / d / "log.jsonl")[-1] for d in ("two", "one"))
    assert two["validation/same"] == pytest.approx(one["validation/same"], abs=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"floor": 2}, r"floor must be in 0..1, got 2"),
        ({"initial": 0}, r"initial must be in \(0, 1\], got 0"),
        ({"low": 0.0}, "need low < 0 and high > 1, got 0.0 and 1.1"),
        ({"speed": 0}, "speed must be positive, got 0"),
        ({"cost": -1}, "cost must be 0 or more, got -1"),
    ],
)
def test_bad_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        HardConcreteConfig(**{"floor": 0.1, **fields})


def test_a_model_without_anything_to_gate_is_refused():
    with pytest.raises(ValueError, match="nothing is left to make sparse"):
        HardConcrete(Transformer(TINY, device="cpu"), replace(GATES, dense=("*",)))
