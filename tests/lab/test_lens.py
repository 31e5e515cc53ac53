import pytest
import torch

from pellucid import LayerConfig, ModelConfig, Transformer
from pellucid.bench.task import ProgramTask
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import compile_program
from pellucid.lab.lens import lens
from tests.lab.toy import ToyTask, toy_model
from tests.lab.two_heads import TwoTokens


def case(name):
    found = PROGRAMS[name]
    made = compile_program(found.program, found.vocab, found.max_len, causal=found.causal)
    return made.transformer, ProgramTask(made, name)


@pytest.mark.parametrize(
    ("name", "first"), [("copy", "embed"), ("hist", "0.resid.post"), ("max", "1.resid.mid")]
)
def test_the_output_is_read_from_where_it_is_written_and_not_before(name, first):
    model, task = case(name)
    found = lens(model, task, pairs=16)
    at = found.sites.index(first)
    torch.testing.assert_close(found.scores[0, at:], torch.ones(len(found.sites) - at))
    assert bool((found.scores[0, :at] <= 0.01).all())


def test_a_task_with_one_position_a_row():
    found = lens(toy_model(), ToyTask(), pairs=32)
    assert found.features == ("output",)
    assert found.scores[0, -1] == 1
    assert abs(found.scores[0, 0]) < 0.2


def test_a_model_that_knows_nothing_is_an_error():
    model = toy_model()
    with torch.no_grad():
        model.head.weight.zero_()
    with pytest.raises(ValueError, match=r"toy: the model's loss .* is no better than"):
        lens(model, ToyTask(), pairs=8)


class FourTimes(TwoTokens):
    """The logit should be 4 on token 0 and -4 on token 1."""

    def loss(self, logits, batch):
        return (logits[:, -1, 0] - 4 * (1 - 2 * batch.tokens[:, 0])).square()


def test_shares_worked_out_by_hand():
    """Channel 0 holds s, which is 1 on token 0 and -1 on token 1; channel 1 is the logit, and holds -s at first. A head in
    each layer, alike to all positions, adds 3 s and then 2 s to it.

    The logit is -s, 2 s, 4 s: squared errors of 25, 4 and 0. The mean logit is 0, with an error of 16. So the shares are
    (16 - 25) / 16, (16 - 4) / 16 and 1.
    """
    config = ModelConfig(
        vocab_size=2, d_model=2, n_ctx=3, layers=(LayerConfig(heads=(1,)),) * 2, norm="none", causal=False,
        output_vocab=1, linear_bias=False, dtype="float64",
    )  # fmt: skip
    model = Transformer(config, device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.wte.weight[:] = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
        for block, factor in zip(model.blocks, (3, 2), strict=True):
            block.attn.qkv.weight[2, 0] = 1  # the value
            block.attn.proj.weight[1, 0] = factor
        model.head.weight[0, 1] = 1
    found = lens(model, FourTimes(), pairs=2)
    assert found.sites == ("embed", "0.resid.mid", "1.resid.mid")
    assert found.scores[0].tolist() == [-9 / 16, 3 / 4, 1]
