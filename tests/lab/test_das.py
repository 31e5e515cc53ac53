import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid import ModelConfig, Transformer
from pellucid.bench.labels import counterfactual, directions
from pellucid.bench.task import ProgramTask
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import compile_program
from pellucid.compiled.variants import rotated
from pellucid.lab.das import Swaps, das, overlap
from pellucid.tasks.task import Outputs

HIST = PROGRAMS["hist"]
MADE = compile_program(HIST.program, HIST.vocab, HIST.max_len)
WIDTH, SITE = "1/(1+width(same_token))", "0.resid.mid"
QUICK = {"pairs": 32, "steps": 100, "tries": 2}


def sign_task():
    """A model of one token, which is positive or negative, and the swaps of its sign.

    Direction 0 has a number of that sign and is not read; 1 is read, and always 0; 2 has the sign and is read.
    """
    config = ModelConfig(vocab_size=4, d_model=3, n_ctx=1, layers=(), norm="none", output_vocab=1)
    model = Transformer(config, device="cpu")
    with torch.no_grad():
        model.wte.weight.copy_(torch.tensor([[0.9, 0, 1], [-0.9, 0, -1], [1.1, 0, 1], [-1.1, 0, -1]]))
        model.head.weight.copy_(torch.tensor([[0.0, 2, 1]]))

    class Sign:
        name = "sign"

        def pairs(self, n, seed=0, split="train"):
            tokens = torch.arange(2 * n)[:, None] % 4
            there = torch.ones_like(tokens, dtype=torch.bool)
            logits = 1.0 - 2 * (tokens[..., None] % 2)
            return Outputs(
                tokens=tokens,
                corrupt=tokens ^ 1,
                mask=there,
                real=there,
                scored=there,
                wanted=logits,
                other=-logits,
            )

        def metric(self, logits, batch):
            return (logits - batch.wanted).square().sum((1, 2))

        def wrong(self, logits, batch):
            return ((logits - batch.wanted).abs() > 0.5).any((1, 2))

    task = Sign()
    return model, task, Swaps.draw(model, task, swapped, "embed", 4, 0, "test")


def swapped(batch, here, there):
    return Outputs(**{**batch.__dict__, "wanted": batch.other})


def test_the_dormant_direction_trap():
    """Reading the idle copy and driving the dormant direction looks like the variable, until dormant ones are left alone."""
    _, _, swaps = sign_task()
    true = torch.diag(torch.tensor([0.0, 0, 1]))
    trap = torch.tensor([1.0, 1, 0]) / 2**0.5
    trap = torch.outer(trap, trap)
    spread, moving = swaps.spread()
    assert swaps.idle == 0
    assert swaps.accuracy(true) == swaps.accuracy(trap) == 1
    assert float(torch.trace(trap @ moving)) == pytest.approx(0.5)
    assert swaps.accuracy(trap @ moving) == 0
    assert swaps.accuracy(true @ moving) == 1
    torch.testing.assert_close(spread, torch.tensor([[1.01, 0, 1], [0, 0, 0], [1, 0, 1]]))


def test_all_of_the_stream_is_always_right_here_and_says_so():
    model, task, _ = sign_task()
    found = das(model, task, swapped, site="embed", k=3, pairs=4, steps=2)
    assert (found.train, found.test, found.idle, found.active) == (1, 1, 0, 1)
    assert found.variance == pytest.approx(1)
    assert found.dormant == pytest.approx(1 / 3)
    assert found.score == found.active_score == 1


@pytest.mark.parametrize("turned", [False, True])
def test_it_finds_a_variable_of_a_program_in_any_basis(turned):
    made = rotated(MADE) if turned else MADE
    found = das(
        made.transformer,
        ProgramTask(made, "hist"),
        counterfactual(MADE, WIDTH, SITE),
        site=SITE,
        k=1,
        **QUICK,
    )
    assert found.score > 0.9
    assert found.active_score > 0.9
    assert found.control < found.idle
    assert overlap(found.subspace, directions(made, WIDTH)) > 0.9
    torch.testing.assert_close(found.subspace.T @ found.subspace, torch.eye(1))


def test_the_same_call_gives_the_same_subspace():
    model, task, _ = sign_task()
    first, second = (das(model, task, swapped, site="embed", k=1, pairs=4, steps=5, seed=1) for _ in range(2))
    assert torch.equal(first.subspace, second.subspace)


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 4))
def test_overlap_is_a_share_whatever_spans_the_directions(seed, k, n):
    draw = torch.Generator().manual_seed(seed)
    subspace = torch.linalg.qr(torch.randn(6, k, generator=draw))[0]
    known = torch.randn(n, 6, generator=draw)
    found = overlap(subspace, known)
    assert -1e-9 <= found <= 1 + 1e-6
    mixed = torch.randn(n, n, generator=draw).softmax(-1) + torch.eye(n)
    assert overlap(subspace, mixed @ known) == pytest.approx(found, abs=1e-3)
    assert overlap(subspace, subspace.T) == pytest.approx(1, abs=1e-5)


def test_bad_input():
    model, task, _ = sign_task()
    with pytest.raises(ValueError, match="k must be between 1 and 3, got 4"):
        das(model, task, swapped, site="embed", k=4)
    with pytest.raises(ValueError, match="sign: swapping the variable at 'embed' changes no output"):
        das(model, task, lambda batch, here, there: batch, site="embed", k=1)
    with pytest.raises(ValueError, match="unknown site 'embedd'; did you mean 'embed'"):
        das(model, task, swapped, site="embedd", k=1)
