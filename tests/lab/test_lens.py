import pytest
import torch

from pellucid.bench.task import ProgramTask
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import compile_program
from pellucid.lab.lens import lens
from tests.lab.toy import ToyTask, toy_model


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
