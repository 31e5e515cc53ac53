"""What methods that read representations say, held against the program."""

import pytest
import torch

from pellucid.bench import readings
from pellucid.bench.readings import DoesNotApply, told_apart
from pellucid.bench.subject import make_subject


def test_cells_where_a_feature_is_constant_count_for_nothing():
    found = torch.tensor([[True, False, True], [True, True, False]])
    states = [["present", "present", "constant"], ["absent", "constant", "absent"]]
    assert told_apart(found, states) == {"score": 0.0, "present_found": 0.5, "absent_found": 0.5}
    with pytest.raises(DoesNotApply, match="present somewhere"):
        told_apart(found[:1], states[:1])


@pytest.mark.parametrize("tier", ["raw", "rotated"])
def test_patterns_and_the_lens_tell_the_truth_and_gradients_miss_a_count(tier):
    subject = make_subject("hist", tier)
    for reading in (readings.attention_patterns, readings.logit_lens):
        assert reading(subject, pairs=16, seed=0)["score"] == pytest.approx(1)
    assert readings.gradient_times_input(subject, pairs=32, seed=0)["score"] < 0.5


def test_what_does_not_apply_says_why():
    with pytest.raises(DoesNotApply, match="randomised tier is not known"):
        readings.linear_probes(make_subject("hist", "randomised"), pairs=8, seed=0)
    with pytest.raises(DoesNotApply, match="nothing but its output"):
        readings.alignment(make_subject("shift", "raw"), pairs=8, seed=0)
    with pytest.raises(DoesNotApply, match="selects nothing"):
        readings.attention_patterns(make_subject("inc_mod", "raw"), pairs=8, seed=0)
    with pytest.raises(DoesNotApply, match="changes no output"):
        readings.alignment(make_subject("distractor", "raw"), pairs=8, seed=0)
