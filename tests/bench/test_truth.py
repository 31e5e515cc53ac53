"""The benchmark's truth: subsets, agreement with the weights, and the smallest circuits by brute force."""

import itertools

import pytest
import torch

from pellucid.bench.subject import SUITE, make_subject
from pellucid.bench.task import ProgramTask
from pellucid.bench.truth import kept_only, smallest_circuits, structure_of
from pellucid.compiled.compiler.truth import edges_from_weights
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import compile_program
from pellucid.lab.ablate import last_logits
from pellucid.lab.fills import ABLATIONS, fills

SOME = ("reverse", "hist", "redundant_or", "length")


def compiled(name):
    case = PROGRAMS[name]
    return compile_program(case.program, case.vocab, case.max_len, causal=case.causal)


@pytest.mark.parametrize("name", SOME)
def test_what_matters_is_part_of_the_structure(name):
    truth = make_subject(name, "raw").truth
    for effects in truth.effects.values():
        assert not (effects.effective("edge") & ~truth.structure).any()
        assert not (effects.effective("node") & ~truth.used).any()
        assert (effects.edges.abs() <= effects.edge_moves + 1e-4).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tier", "name"),
    [
        (tier, name)
        for tier in ("raw", "rotated", "cold", "distractors", "causal")
        for name in SUITE
        if (tier, name) != ("causal", "length")  # each position's own place, the same on both inputs
    ],
)
def test_every_model_of_the_suite_holds_its_certificate_and_its_structure(tier, name):
    subject = make_subject(name, tier)
    assert subject.certificate["holds"]
    truth = subject.truth
    for effects in truth.effects.values():
        assert not (effects.effective("edge") & ~truth.structure).any()


def test_a_deleted_block_makes_structure_and_weights_disagree():
    model = compiled("reverse")
    truth, transformer = model.truth["edges"]["component"], model.transformer

    def sets(edges):
        return {(tuple(e["writer"]), tuple(e["reader"])) for e in edges}

    assert sets(edges_from_weights(transformer)) == sets(truth)
    with torch.no_grad():
        for p in next(b for b in transformer.blocks if b.mlp is not None).mlp.proj.parameters():
            p.zero_()
    assert sets(edges_from_weights(transformer)) < sets(truth)


@pytest.mark.parametrize("name", ["copy", "hist", "frac_prevs"])
def test_smallest_circuits_by_trying_every_set(name):
    model = compiled(name)
    task, transformer = ProgramTask(model, name), model.transformer.cpu()
    structure = structure_of(transformer, model.truth["edges"]["component"])
    batch = task.pairs(32)
    replaced = fills(transformer, batch, "resample")
    places = structure.nonzero()
    good = []
    for chosen in itertools.product([False, True], repeat=len(places)):
        keep = torch.zeros_like(structure)
        keep[tuple(places[torch.tensor(chosen)].T)] = True
        if not kept_only(transformer, batch, replaced, keep[None], task.wrong).any():
            good.append(keep)
    smallest = [a for a in good if not any((b <= a).all() and not torch.equal(a, b) for b in good)]
    found = smallest_circuits(transformer, task, batch, replaced, structure)
    assert found is not None
    assert {tuple(x.flatten().tolist()) for x in found} == {tuple(x.flatten().tolist()) for x in smallest}


def test_a_redundant_or_has_two_circuits_and_no_edge_of_either_way_is_needed():
    truth = make_subject("redundant_or", "raw").truth
    assert truth.circuits is not None
    assert len(truth.circuits) == 2
    a, b = truth.circuits
    assert (a & ~b).any()
    assert (b & ~a).any()


def test_one_circuit_of_two_edges_among_sixteen_is_found():
    truth = make_subject("constant_branch", "raw").truth
    assert truth.structure.sum() == 16
    assert truth.circuits is not None
    assert [int(c.sum()) for c in truth.circuits] == [2]


@pytest.mark.parametrize("name", ["hist", "induction"])
def test_the_causal_tier_is_the_same_program_the_other_way(name):
    subject, raw = make_subject(name, "causal"), make_subject(name, "raw")
    assert subject.certificate["holds"]
    assert subject.model.config.causal is not raw.model.config.causal
    assert subject.truth.circuits


def test_a_causal_length_cannot_be_asked():
    with pytest.raises(ValueError, match="length: the outputs of clean and corrupt inputs are always equal"):
        make_subject("length", "causal")


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("ablation", ABLATIONS)
def test_all_edges_are_the_model_and_none_is_all_ablated(name, ablation):
    subject = make_subject(name, "raw")
    truth, task = subject.truth, subject.task
    keep = torch.stack([torch.ones_like(truth.structure), torch.zeros_like(truth.structure)])
    all_, none = kept_only(subject.model, truth.batch, truth.replaced[ablation], keep, task.metric)
    torch.testing.assert_close(all_, task.metric(last_logits(subject.model, truth.batch), truth.batch))
    assert all_.abs().max() < 1e-4
    if ablation == "resample" and not task.varies_length:
        torch.testing.assert_close(none, torch.ones_like(none), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", SUITE)
def test_pairs_differ_where_they_are_scored(name):
    task = ProgramTask(compiled(name), name)
    batch = task.pairs(24)
    assert ((batch.wanted != batch.other).any(-1) & batch.scored).any(1).all()
    assert not batch.scored[:, 0].any()
    assert not (batch.scored & ~(batch.mask & batch.real)).any()
    again = task.pairs(8)
    width = again.tokens.shape[1]
    assert torch.equal(batch.tokens[:16, :width], again.tokens)
    if not task.varies_length:
        assert torch.equal(batch.mask, batch.corrupt_mask)


def test_the_metric_is_0_on_the_clean_run_and_1_on_the_corrupt_one():
    model = compiled("sort_unique")
    task = ProgramTask(model, "sort_unique")
    batch, transformer = task.pairs(32), model.transformer.cpu()
    clean = last_logits(transformer, batch)
    corrupt = transformer(batch.corrupt, mask=batch.corrupt_mask)
    for measure in (task.metric, task.loss):
        assert measure(clean, batch).abs().max() < 1e-4
    torch.testing.assert_close(task.metric(corrupt, batch), torch.ones(64), atol=1e-4, rtol=0)
    torch.testing.assert_close(task.loss(corrupt, batch), torch.ones(64), atol=1e-4, rtol=0)
    assert not task.wrong(clean, batch).any()
    assert task.wrong(corrupt, batch).all()


def test_the_truth_is_the_same_in_every_run():
    first, second = make_subject("hist", "raw"), make_subject("hist", "raw")
    assert first.truth.digest() == second.truth.digest()
    assert first.key == second.key


def test_a_program_whose_outputs_never_differ_is_refused():
    from pellucid.compiled.rasp.language import map, tokens

    model = compile_program(map(lambda t: 0, tokens), ["a", "b"], 3)
    with pytest.raises(ValueError, match="always equal"):
        ProgramTask(model, "constant")


def test_names_that_are_not_known():
    with pytest.raises(ValueError, match=r"unknown program 'revers'.*'reverse'"):
        make_subject("revers", "raw")
    with pytest.raises(ValueError, match=r"unknown tier 'rotate'.*'rotated'"):
        make_subject("reverse", "rotate")
