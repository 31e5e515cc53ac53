"""Harder variants of compiled models still equal their programs, and their ground truth is still true."""

import functools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.compiled import CausalWarning, CompiledModel, CompileError, compare, compile_program, verify
from pellucid.compiled.compiler.truth import edges_from_weights
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.library.counting import frac_prevs
from pellucid.compiled.rasp import (
    RaspError,
    Undefined,
    aggregate,
    geq,
    indices,
    map,
    neq,
    numerical,
    select,
    tokens,
)
from pellucid.compiled.rasp.interpreter import Interpreter
from pellucid.compiled.variants import rotated, with_distractors
from pellucid.compiled.verify import inputs
from pellucid.core.record import record
from pellucid.core.taps import Tap
from tests.compiled.strategies import Case, programs
from tests.compiled.test_random_programs import QUIET

SOME = ("copy", "hist", "frac_prevs", "sort", "induction", "shuffle_dyck2", "key_value_lookup", "distractor")


@functools.cache
def compiled(name: str, **options) -> CompiledModel:
    case = PROGRAMS[name]
    return compile_program(case.program, case.vocab, case.max_len, causal=case.causal, **options)


def check(model: CompiledModel, limit: int = 300, seed: int = 1) -> None:
    found = verify(model, limit=limit, seed=seed)
    assert found, found.first_failure
    assert found.max_error <= model.error_bound < model.margin / 2


def sequences(model: CompiledModel, limit: int = 300):
    return list(inputs(model, limit, seed=2)[0])


# Coldness.


@pytest.mark.parametrize("name", PROGRAMS)
def test_at_30_every_program_compiles_and_equals_its_program(name):
    model = compiled(name, inverse_temperature=30)
    check(model)
    assert {s["inverse_temperature"] for s in model.truth["selectors"]} <= {30.0}


@pytest.mark.parametrize("degrees", [1, 3, 7.3, 10, 15])
def test_a_warmer_model_is_refused_or_within_its_bound(degrees):
    refusals = []
    for name in PROGRAMS:
        try:
            check(compiled(name, inverse_temperature=degrees), limit=50)
        except CompileError as error:
            refusals.append(str(error))
    assert bool(refusals) == (degrees < 15)
    assert all("cannot be exact in float32: " in r for r in refusals)
    assert all(
        r.endswith(f"; try an inverse_temperature above {degrees:g} or dtype='float64'") for r in refusals
    )


def hold_at_any_temperature(examples: int, derandomize: bool) -> None:
    """Random programs are refused, or exact within their bound; with a cold softmax most are exact."""
    compiled_when_cold = []

    @settings(max_examples=examples, derandomize=derandomize, **QUIET)
    @given(programs(), st.one_of(st.floats(0.5, 25), st.floats(25, 200)))
    def exact_or_refused(case: Case, degrees: float) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CausalWarning)
            try:
                model = compile_program(
                    case.program, case.vocab, case.max_len, causal=case.causal, inverse_temperature=degrees
                )
            except CompileError:
                compiled_when_cold.extend([False] * (degrees > 25))
                return
        compiled_when_cold.extend([True] * (degrees > 25))
        found = compare(model, case.sequences)
        assert found.failures == 0, found.first_failure
        assert found.max_error <= model.error_bound < model.margin / 2

    exact_or_refused()
    assert np.mean(compiled_when_cold) > 0.7


def test_random_programs_are_refused_or_within_their_bound_at_any_temperature():
    hold_at_any_temperature(60, True)


@pytest.mark.slow
def test_500_random_programs_are_refused_or_within_their_bound_at_any_temperature():
    hold_at_any_temperature(500, False)


def test_noise_in_whether_a_number_is_none_moves_steps_and_does_not_widen_them():
    mean = aggregate(select(indices, tokens, geq), numerical(2 * tokens))
    program = map(lambda mean, token: (mean, token), mean, tokens)
    model = compile_program(program, [0, 1], 1, inverse_temperature=10)
    check(model)


def test_selected_keys_exceed_the_others_by_the_inverse_temperature_and_bos_by_half():
    case = PROGRAMS["shift"]
    model = compile_program(case.program, case.vocab, 4, dtype="float64", inverse_temperature=12)
    (pattern,) = (p.weights for p in model.trace("abcd").patterns)
    logits = np.log(pattern[2:])  # queries with a position before
    for query, row in enumerate(logits, 1):
        best = row[query]
        others = [row[k] for k in range(1, 5) if k != query]
        np.testing.assert_allclose(best - np.array(others), 12, atol=1e-9)
        assert best - row[0] == pytest.approx(6)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), 1e6, True, "30"])
def test_an_inverse_temperature_is_a_positive_number(bad):
    with pytest.raises(CompileError, match="inverse_temperature must be above 0 and at most 10,000"):
        compile_program(tokens, "ab", 3, inverse_temperature=bad)


# Rotated.


def check_rotated(name: str, limit: int) -> None:
    raw, turned = compiled(name), rotated(compiled(name), seed=3)
    check(turned, limit, seed=11)
    assert turned.error_bound > raw.error_bound
    assert edges_from_weights(turned.transformer, 1e-5) == turned.truth["edges"]["component"]
    width = raw.transformer.config.d_model
    assert np.abs(turned.basis @ turned.basis.T - np.eye(width)).max() < 1e-12
    for ours, theirs in zip(raw.transformer.config.layers, turned.transformer.config.layers, strict=True):
        assert sorted(ours.heads) == sorted(theirs.heads)
        assert ours.d_mlp == theirs.d_mlp


@pytest.mark.parametrize("name", SOME)
def test_a_rotated_model_equals_its_program_and_its_edges_are_in_its_weights(name):
    check_rotated(name, 300)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_can_be_rotated(name):
    check_rotated(name, 10_000)


@pytest.mark.parametrize("name", SOME)
def test_through_its_basis_a_rotated_model_has_the_same_stream_heads_and_neurons(name):
    raw, turned = compiled(name), rotated(compiled(name))
    tokens_, mask = raw.encode(sequences(raw, 20))
    layers = [n for n, layer in enumerate(raw.transformer.config.layers) if layer.d_mlp]
    heads = [n for n, layer in enumerate(raw.transformer.config.layers) if layer.heads]
    sites = ["final", *(f"{n}.mlp.act" for n in layers), *(f"{n}.attn.pattern" for n in heads)]
    ours = record(raw.transformer, tokens_, sites, mask=mask)
    theirs = record(turned.transformer, tokens_, sites, mask=mask)
    real = mask.numpy()

    stream = theirs["final"].double().numpy() @ turned.basis.T
    np.testing.assert_allclose(stream[real], ours["final"].double().numpy()[real], atol=2e-5)
    for before, after in zip(raw.truth["selectors"], turned.truth["selectors"], strict=True):
        assert before["computes"] == after["computes"]
        (layer, old), (_, new) = before["head"], after["head"]
        pattern = f"{layer}.attn.pattern"
        old_, new_ = ours[pattern][:, old].numpy()[real], theirs[pattern][:, new].numpy()[real]
        np.testing.assert_allclose(old_, new_, atol=1e-4)
    for model, found in ((raw, ours), (turned, theirs)):
        for neuron in model.truth["neurons"]:
            neuron["acts"] = found[f"{neuron['layer']}.mlp.act"][..., neuron["neuron"]].numpy()[real]
    kinds = [
        sorted(
            ({**n, "neuron": 0, "acts": float(n["acts"].sum())} for n in model.truth["neurons"]),
            key=lambda n: (
                n["layer"],
                str(n.get("computes")),
                str(n.get("case", n.get("erases"))),
                n["acts"],
            ),
        )
        for model in (raw, turned)
    ]
    for model in (raw, turned):
        for neuron in model.truth["neurons"]:
            del neuron["acts"]
    for before, after in zip(*kinds, strict=True):
        assert after.pop("acts") == pytest.approx(before.pop("acts"), rel=1e-3, abs=1e-2)
        assert before == after


def test_a_rotation_moves_directions_heads_and_neurons():
    raw, turned = compiled("shuffle_dyck2"), rotated(compiled("shuffle_dyck2"))
    assert [s["head"] for s in raw.truth["selectors"]] != [s["head"] for s in turned.truth["selectors"]]
    assert raw.truth["neurons"] != turned.truth["neurons"]
    assert all(bool((block.attn.qkv.weight != 0).all()) for block in turned.transformer.blocks if block.attn)
    assert turned.truth["edges"]["channel"] is None
    assert raw.basis is None
    assert "basis" not in raw.truth


def test_a_rotated_models_trace_reads_through_the_basis_and_its_directions_have_no_labels():
    raw, turned = compiled("sort"), rotated(compiled("sort"))
    ours, theirs = raw.trace([3, 0, 0, 2]), turned.trace([3, 0, 0, 2])
    assert str(ours) == str(theirs)
    assert ours.labels == theirs.labels
    for step in range(len(ours.steps)):
        a, b = ours.rows(step), theirs.rows(step)
        assert [r[:2] for r in a] == [r[:2] for r in b]
        np.testing.assert_allclose([r[2] for r in a], [r[2] for r in b], atol=1e-5)
    with pytest.raises(RaspError, match=r"no labels: stream @ model\.basis\.T"):
        turned.labels(1)


def test_a_rotated_model_survives_being_saved(tmp_path):
    turned = rotated(compiled("induction"), seed=4)
    turned.save(tmp_path / "m")
    loaded = CompiledModel.load(tmp_path / "m", device="cpu")
    assert loaded.truth == turned.truth
    assert loaded.error_bound == turned.error_bound
    assert str(loaded.trace("abcab")) == str(turned.trace("abcab"))
    assert loaded.batch(["abcabca"]) == turned.batch(["abcabca"])
    with pytest.raises(RaspError, match="no labels"):
        loaded.labels(0)
    again = rotated(loaded, seed=5)
    assert again.batch(["abcabca"]) == turned.batch(["abcabca"])


def test_rotations_compose_and_come_from_their_seed():
    raw = compiled("hist")
    twice = rotated(rotated(raw, seed=1), seed=2)
    check(twice)
    assert str(twice.trace("abab")) == str(raw.trace("abab"))
    assert edges_from_weights(twice.transformer, 1e-5) == twice.truth["edges"]["component"]
    weights = [rotated(raw, seed=s).transformer.wte.weight for s in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])


def test_a_rotation_in_float64_costs_nothing_to_speak_of():
    raw = compiled("frac_prevs", dtype="float64")
    turned = rotated(raw)
    check(turned)
    assert turned.error_bound - raw.error_bound < 1e-12


def test_a_rotation_that_could_decode_wrongly_is_refused():
    model = compile_program(frac_prevs("x"), "xa", 110)
    with pytest.raises(
        RaspError, match=r"may be off by .*e-05, and its nearest values are 8\.3e-05 apart; .*float64"
    ):
        rotated(model, limit=100)


def test_inputs_on_which_the_program_is_undefined_do_not_count():
    program = aggregate(select(tokens, tokens, neq), tokens) == "b"
    model = compile_program(program, "abc", 4)
    with pytest.raises(Undefined):
        program("abc")
    turned = rotated(model)
    check(turned)
    assert turned.error_bound < 1e-4


# Distractors.


@torch.no_grad()
def check_distractors(name: str, count: int, seed: int, limit: int) -> None:
    """Same values, same encoding; every distractor is read last, and may be anything without effect."""
    case = PROGRAMS[name]
    program = with_distractors(case.program, case.vocab, count, seed)
    model = compile_program(program, case.vocab, case.max_len, causal=case.causal)
    check(model, limit)
    asked = sequences(model, limit)
    assert model.batch(asked) == Interpreter(case.program, causal=case.causal)(asked)
    assert (model.encoding, model.outputs) == (compiled(name).encoding, compiled(name).outputs)
    assert edges_from_weights(model.transformer) == model.truth["edges"]["component"]

    read = f"{len(model.transformer.config.layers) - 1}.mlp.read"
    names = [x.name for x in program.inputs[1:]]
    held = [v for v in model.truth["variables"] if v["name"] in names]
    assert len(held) == count
    tokens_, mask = model.encode(asked[:50])
    logits, rng = model.transformer(tokens_, mask=mask), np.random.default_rng(0)
    for variable in held:
        assert read in variable["readers"]
        size = len(variable["directions"])

        def anything(site, x, at=variable["directions"], size=size):
            x = x.clone()
            x[..., at] = torch.eye(size)[torch.from_numpy(rng.integers(size, size=x.shape[:2]))]
            return x

        edited = model.transformer(tokens_, mask=mask, tap=Tap.at(anything, {read}))
        assert float((edited - logits)[:, 1:][mask[:, 1:]].abs().max()) <= 2 * model.error_bound


@pytest.mark.parametrize("name", SOME)
def test_distractors_are_read_and_change_nothing(name):
    check_distractors(name, 2, 0, 300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", PROGRAMS)
def test_distractors_change_nothing_in_any_program(name, seed):
    check_distractors(name, 3, seed, 2000)


def test_distractors_come_from_their_seed():
    names = [[x.name for x in with_distractors(tokens, "abcd", 3, s).inputs[1:]] for s in (0, 0, 1, 2, 3)]
    assert names[0] == names[1]
    assert len({tuple(n) for n in names}) > 1


def test_no_distractor_is_computed_by_the_program():
    case = PROGRAMS["induction"]
    names = [x.name for x in with_distractors(case.program, "abc", 3).inputs[1:]]
    assert not {"previous token", "seen before"} & set(names)
    with pytest.raises(ValueError, match="count must be between 1 and 3, got 4"):
        with_distractors(case.program, "abc", 4)


@pytest.mark.parametrize("count", [0, -1, True, 1.5, 6])
def test_a_count_of_distractors_is_one_to_five(count):
    with pytest.raises(ValueError, match=f"count must be between 1 and 5, got {count}"):
        with_distractors(tokens, "abc", count)


def test_tiers_combine():
    case = PROGRAMS["count_less_freq"]
    program = with_distractors(case.program, case.vocab)
    model = compile_program(program, case.vocab, case.max_len, inverse_temperature=30)
    check(rotated(model))
