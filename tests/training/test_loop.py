"""Training: it learns, resumes bit for bit, stops cleanly, shares work between ranks, and compiles."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pellucid import ActivationSparsity, ModelConfig, Transformer, load_model, uniform
from pellucid.sparse.projection import Projection, SparsityConfig
from pellucid.training.config import TrainConfig
from pellucid.training.constraint import Constraint
from pellucid.training.log import read_log
from pellucid.training.loop import Interrupted, Step, evaluate, train
from pellucid.training.objective import Objective
from pellucid.training.optim import kurtosis, scale_gradients
from pellucid.training.schedules import warmup_decay

MODEL = ModelConfig(
    vocab_size=16, d_model=16, n_ctx=16, layers=uniform(1, 2, 8, 32), bigram=True, sink=True, norm_gain=False
)
CONFIG = TrainConfig(steps=12, batch_size=4, seq_len=8, lr=1e-2, log_every=2, validate_every=4, seed=3)
SPARSITY = SparsityConfig(fraction=0.2)
# A repeating pattern with noise: something a small model can learn.
TOKENS = ((np.arange(2000) * 3 + np.random.default_rng(0).integers(0, 2, 2000)) % 16).astype(np.uint16)


def go(out, *, sparse=True, config=CONFIG, sparsity=SPARSITY, **options):
    model = Transformer(MODEL, seed=config.seed, device="cpu")
    constraint = Projection(model, sparsity) if sparse else None
    return train(model, config, TOKENS, out, constraint=constraint, validation={"same": TOKENS}, **options)


def weights(out):
    return load_model(out, device="cpu").state_dict()


def test_training_lowers_the_loss_and_leaves_a_checkpoint_a_log_and_the_exact_number_of_nonzeros(tmp_path):
    config = replace(CONFIG, steps=150, lr=3e-2, validate_every=0)
    before = evaluate(Transformer(MODEL, seed=3, device="cpu"), TOKENS, config)
    trained = go(tmp_path, config=config)
    assert before > 2.5
    assert trained.validation["same"] < 1.7
    assert evaluate(load_model(tmp_path, device="cpu"), TOKENS, config) == trained.validation["same"]
    for name, p in trained.model.named_parameters():
        if name != "bigram" and not name.endswith("sink"):
            assert int(p.count_nonzero()) == round(0.2 * p.numel()), name
    lines = read_log(tmp_path / "log.jsonl")
    assert {"loss", "lr", "gradient_rms", "tokens_per_second", "nonzero", "churn", "dead"} <= lines[0].keys()
    assert {"validation/same", "kurtosis"} <= lines[-1].keys()


@pytest.mark.parametrize(("sparse", "every"), [(False, 1), (True, 1), (True, 3)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, sparse, precision, every):
    options = {
        "sparse": sparse,
        "config": replace(CONFIG, precision=precision),
        "sparsity": replace(SPARSITY, every=every),
    }
    go(tmp_path / "whole", **options)
    for stop in (5, 9):
        with pytest.raises(Interrupted, match=f"stopped at step {stop} of 12"):
            go(tmp_path / "parts", **options, resume=True, stop_after=stop)
    trained = go(tmp_path / "parts", **options, resume=True)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    logs = [read_log(tmp_path / d / "log.jsonl") for d in ("whole", "parts")]
    for line in (*logs[0], *logs[1]):
        line.pop("tokens_per_second", None)
    assert logs[0] == logs[1]
    again = go(tmp_path / "parts", **options, resume=True)
    assert again.validation == trained.validation  # a finished run is not trained further
    assert all(torch.equal(p, parts[name]) for name, p in again.model.state_dict().items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_batch_in_parts_has_the_loss_and_the_gradient_of_the_whole(sparse, optimizer):

    def first_step(parts):
        model = Transformer(replace(MODEL, dtype="float64"), seed=0, device="cpu")
        config = replace(CONFIG, micro_batches=parts, optimizer=optimizer, precision="float32")
        step, grads = Step(model, config, Projection(model, SPARSITY) if sparse else None), []

        def remember(optimizer, *_):
            grads.extend(p.grad.clone() for group in optimizer.param_groups for p in group["params"])

        for each in step.optimizers:
            each.register_step_pre_hook(remember)
        return [*step(0, torch.from_numpy(TOKENS[:36].astype(np.int64)).view(4, 9)), *grads]

    whole = first_step(1)
    for parts in (2, 4):
        for a, b in zip(first_step(parts), whole, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)


def test_how_a_batch_is_cut_may_change_when_a_run_is_resumed(tmp_path):
    with pytest.raises(Interrupted):
        go(tmp_path / "parts", stop_after=5)
    go(tmp_path / "parts", config=replace(CONFIG, micro_batches=2), resume=True)
    go(tmp_path / "whole")
    assert read_log(tmp_path / "parts" / "log.jsonl")[-1]["validation/same"] == pytest.approx(
        read_log(tmp_path / "whole" / "log.jsonl")[-1]["validation/same"], abs=1e-2
    )


def test_a_run_is_neither_overwritten_nor_mixed_with_another(tmp_path):
    go(tmp_path)
    with pytest.raises(ValueError, match="already holds a run"):
        go(tmp_path)
    with pytest.raises(ValueError, match=r"holds another run: train\.lr differ"):
        go(tmp_path, config=replace(CONFIG, lr=2e-2), resume=True)
    with pytest.raises(ValueError, match=r"holds another run: data\.tokens differ"):
        go(tmp_path, resume=True, made_from={"tokens": "other"})


def test_damaged_training_state_is_named(tmp_path):
    with pytest.raises(Interrupted):
        go(tmp_path, stop_after=4)
    file = tmp_path / "checkpoint" / "train_state" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"optimizer\.safetensors is damaged or truncated"):
        go(tmp_path, resume=True)


def test_an_interrupt_signal_writes_a_checkpoint_that_can_be_resumed(tmp_path):
    config = replace(CONFIG, steps=6)
    model = Transformer(MODEL, seed=3, device="cpu")

    class Interrupting(Constraint):
        """Presses Ctrl-C in the middle of the third step."""

        def apply(self, progress):
            if round(progress * 6) == 3:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="stopped at step 3 of 6"):
        train(model, config, TOKENS, tmp_path, constraint=Interrupting())
    model = Transformer(MODEL, seed=3, device="cpu")
    train(model, config, TOKENS, tmp_path, resume=True)
    model = Transformer(MODEL, seed=3, device="cpu")
    train(model, config, TOKENS, tmp_path / "whole")
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.slow
def test_two_ranks_train_as_one_process_does(tmp_path):
    """`torchrun` with two gloo processes: the same batches, so the same losses up to rounding, and equal ranks."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "from tests.training.test_loop import *\n"
        "out, config = sys.argv[1], replace(CONFIG, precision='float32')\n"
        "trained = go(out, config=config)\n"
        "import os\n"
        "torch.save(trained.model.state_dict(), f'{out}/rank{os.environ.get(\"RANK\", 0)}.pt')\n"
    )
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*launch, script, tmp_path / "two"], check=True, env=env, timeout=240)
    subprocess.run([sys.executable, script, tmp_path / "one"], check=True, env=env, timeout=240)
    ranks = [torch.load(tmp_path / "two" / f"rank{r}.pt", weights_only=True) for r in (0, 1)]
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    logs = [read_log(tmp_path / d / "log.jsonl") for d in ("two", "one")]
    assert len(logs[0]) == len(logs[1])
    for two, one in zip(*logs, strict=True):
        assert two["step"] == one["step"]
        for key in ("loss", "validation/same"):
            if key in one:
                assert two[key] == pytest.approx(one[key], abs=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile raises deprecation warnings of its own
@pytest.mark.parametrize("topk", [False, True])
def test_a_training_step_compiles_to_one_graph_and_gives_the_same_gradients(topk):
    sparsity = ActivationSparsity(fraction=0.25) if topk else None
    model = Transformer(replace(MODEL, activation_sparsity=sparsity, dtype="float64"), seed=0, device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    windows = torch.from_numpy(TOKENS[:36].astype(np.int64)).view(4, 9)
    objective = Objective(model)
    loss, _ = objective(windows)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    compiled = torch.compile(objective, fullgraph=True)
    loss_compiled, _ = compiled(windows)
    torch.testing.assert_close(loss_compiled, loss)
    for a, b in zip(torch.autograd.grad(loss_compiled, list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(a, b)


def test_the_objective_is_next_token_cross_entropy():
    model = Transformer(MODEL, seed=0, device="cpu")
    windows = torch.arange(10)[None] % 16
    loss, nll = Objective(model)(windows)
    logp = F.log_softmax(model(windows[:, :-1]), dim=-1)
    by_hand = -sum(logp[0, i, windows[0, i + 1]] for i in range(9)) / 9
    torch.testing.assert_close(nll, by_hand)
    assert loss == nll


def test_gradients_are_normalised_or_clipped_to_a_root_mean_square_of_one():
    def grads(scope, rule, *values):
        parameters = [torch.nn.Parameter(torch.zeros(len(v))) for v in values]
        for p, v in zip(parameters, values, strict=True):
            p.grad = torch.tensor(v)
        rms = scale_gradients(parameters, replace(CONFIG, gradient=rule, gradient_scope=scope))
        return rms.item(), [p.grad.tolist() for p in parameters]

    # RMS of (3, 4, 0, 0) is 2.5.
    assert grads("global", "normalize", [3.0, 4.0], [0.0, 0.0]) == (
        2.5,
        [[pytest.approx(1.2), pytest.approx(1.6)], [0, 0]],
    )
    assert grads("global", "clip", [3.0, 4.0], [0.0, 0.0])[1][0] == [pytest.approx(1.2), pytest.approx(1.6)]
    assert grads("global", "clip", [0.3, 0.4], [0.0, 0.0])[1][0] == [pytest.approx(0.3), pytest.approx(0.4)]
    assert grads("global", "normalize", [0.3, 0.4], [0.0, 0.0])[1][0] == [
        pytest.approx(1.2),
        pytest.approx(1.6),
    ]
    assert grads("tensor", "normalize", [3.0, 3.0], [0.5, 0.5])[1] == [
        [pytest.approx(1)] * 2,
        [pytest.approx(1)] * 2,
    ]
    assert grads("global", "none", [3.0, 4.0], [0.0, 0.0])[1] == [[3, 4], [0, 0]]
    assert grads("global", "normalize", [0.0, 0.0])[1] == [[0, 0]]


def test_the_schedule_warms_up_then_falls_linearly_to_its_end():
    lr = [warmup_decay(step, 100, warmup=0.1, final=0.0) for step in range(100)]
    assert lr[:10] == [pytest.approx((i + 1) / 10) for i in range(10)]
    assert lr[10] == pytest.approx(1)
    assert lr[55] == pytest.approx(0.5)
    assert lr[99] == pytest.approx(1 / 90)
    assert warmup_decay(100, 100, warmup=0.1, final=0.3) == pytest.approx(0.3)


def test_the_learning_rate_follows_the_sharkfin():
    """Warm-up times decay times sqrt(final L0 / current L0): at half of training, half of the peak (Figure 11)."""
    config = replace(CONFIG, steps=200, lr=1.0)
    model = Transformer(MODEL, device="cpu")
    step = Step(model, config, Projection(model, SparsityConfig(fraction=0.04)))
    assert step.learning_rate(99) == pytest.approx(0.5, abs=0.02)
    assert step.learning_rate(2) == pytest.approx(0.2, abs=0.01)
    assert max(range(200), key=step.learning_rate) in range(97, 102)


def test_kurtosis_of_a_gaussian_is_the_log_of_three_and_of_a_spike_large():
    x = torch.randn(2000, 500, generator=torch.Generator().manual_seed(0))
    assert kurtosis(x) == pytest.approx(np.log(3), abs=0.01)
    assert kurtosis(torch.eye(100)) == pytest.approx(np.log(100), abs=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be 1 or more, got 0"),
        ({"micro_batches": 3}, "micro_batches must divide the batch_size 4, got 3"),
        ({"lr": -1.0}, "lr must be positive, got -1.0"),
        ({"warmup": 2.0}, r"warmup must be in 0..1, got 2.0"),
        ({"validation_tokens": -5}, "validation_tokens must be 1 or more, got -5"),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or more"),
        ({"beta2": 1.0}, "beta2 must be less than 1"),
        ({"gradient": "normalise"}, "unknown gradient 'normalise'; did you mean 'normalize'"),
        ({"precision": "float16"}, "unknown precision 'float16'; did you mean 'bfloat16' or 'float32'"),
    ],
)
def test_bad_settings_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)


def test_tensorboard_gets_the_same_numbers_and_clipping_logs_whether_it_acted(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    go(tmp_path, config=replace(CONFIG, gradient="clip"), tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    lines = [line for line in read_log(tmp_path / "log.jsonl") if "loss" in line]
    shown = events.Scalars("loss")
    assert [e.step for e in shown] == [line["step"] for line in lines]
    assert [e.value for e in shown] == pytest.approx([line["loss"] for line in lines])
    assert all(line["clipped"] == 0 for line in lines)  # at mean loss an RMS of 1 is never reached
    steep = Transformer(replace(MODEL, norm="none"), seed=0, device="cpu")
    with torch.no_grad():
        steep.wte.weight.mul_(1e6)
    train(steep, replace(CONFIG, gradient="clip", steps=2, log_every=1), TOKENS, tmp_path / "steep")
    line = read_log(tmp_path / "steep" / "log.jsonl")[0]
    assert line["gradient_rms"] > 1
    assert line["clipped"] == 1


def test_a_log_that_a_crash_cut_short_is_read_up_to_there(tmp_path):
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "lo')
    assert read_log(tmp_path / "log.jsonl") == [{"step": 1}]
