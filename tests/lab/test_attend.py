import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid import LayerConfig, ModelConfig, Transformer
from pellucid.bench.task import ProgramTask
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import compile_program
from pellucid.lab.attend import agree, attend, common_rules
from tests.lab.toy import ToyTask, toy_model


def test_agreement_by_hand():
    rule = torch.tensor([[[1, 0, 0], [1, 1, 0], [0, 0, 0]]]).bool()
    patterns = torch.tensor([[[[1.0, 0, 0], [0.25, 0.75, 0], [0, 0, 1]], [[0, 0, 1], [0, 0, 1], [0, 0, 1]]]])
    torch.testing.assert_close(agree(patterns, rule), torch.tensor([(1 + 0.75) / 2, 0]))


@given(st.integers(0, 1000))
def test_agreement_is_a_share_and_one_for_the_rule_itself(seed):
    draw = torch.Generator().manual_seed(seed)
    rule = torch.rand(2, 4, 4, generator=draw) < 0.5
    rule[0, 0, 0] = True
    random = torch.rand(2, 3, 4, 4, generator=draw).softmax(-1)
    itself = (rule / rule.sum(-1, keepdim=True).clamp(min=1))[:, None]
    found = agree(torch.cat([random, itself], 1), rule)
    assert bool(((found >= 0) & (found <= 1 + 1e-6)).all())
    torch.testing.assert_close(found[-1], torch.tensor(1.0))


def test_the_heads_of_a_program_are_matched_with_the_rules_that_it_has():
    case = PROGRAMS["detect_pattern"]  # one head looks one token back, one two
    made = compile_program(case.program, case.vocab, case.max_len)

    def rules(batch):
        place = torch.arange(batch.tokens.shape[1])
        two = (place[:, None] - 2 == place).expand(len(batch), -1, -1)
        return common_rules(batch) | {"two before": two & (place > 0)}

    found = attend(made.transformer, ProgramTask(made, "detect_pattern"), rules, pairs=16)
    computes = {tuple(s["head"]): s["computes"] for s in made.truth["selectors"]}
    said = {"1 before": "previous token", "2 before": "two before"}
    assert found.match == {head: said[name] for head, name in computes.items()}


def test_a_rule_that_selects_nothing_is_nan_and_matched_last():
    found = attend(
        toy_model(), ToyTask(), lambda b: {"never": torch.zeros(len(b), 6, 6).bool(), **common_rules(b)}
    )
    assert bool(found.agreement[:, found.rules.index("never")].isnan().all())
    assert "never" not in found.match.values()


def test_bad_input():
    model, task = toy_model(), ToyTask()
    with pytest.raises(ValueError, match="one candidate or more"):
        attend(model, task, lambda b: {})
    with pytest.raises(ValueError, match=r"'r' must have shape \(8, 6, 6\), got \(6, 6\)"):
        attend(model, task, lambda b: {"r": torch.ones(6, 6).bool()}, pairs=4)
    headless = Transformer(
        ModelConfig(vocab_size=12, d_model=4, n_ctx=8, layers=(LayerConfig(d_mlp=2),)), device="cpu"
    )
    with pytest.raises(ValueError, match="no attention heads"):
        attend(headless, task, common_rules)
