import pytest
import torch

from pellucid.bench.labels import (
    counterfactual,
    directions,
    labels,
    presence,
    selected,
    unread,
    variables,
)
from pellucid.bench.task import ProgramTask
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.model import compile_program
from pellucid.compiled.rasp.values import show
from pellucid.compiled.variants import rotated
from pellucid.core.sites import stream_sites
from pellucid.core.taps import Tap

SOME = (
    "hist",
    "reverse",
    "frac_prevs",
    "first_occurrence",
    "shift",
    "induction",
    "key_value_lookup",
    "shuffle_dyck2",
)


def compiled(name, **options):
    case = PROGRAMS[name]
    return compile_program(case.program, case.vocab, case.max_len, causal=case.causal, **options)


def sequences(made, batch):
    return [
        [made.vocab.values[i] for i in row[m][1:].tolist()]
        for row, m in zip(batch.tokens, batch.mask, strict=True)
    ]


@pytest.mark.parametrize("options", [{}, {"reuse": True}], ids=["plain", "reuse"])
@pytest.mark.parametrize("name", SOME)
def test_tokens_and_output_are_what_the_program_says(name, options):
    made = compiled(name, **options)
    batch = ProgramTask(made, name).pairs(8)
    found, by_name = variables(made, batch), {v["name"]: v for v in made.truth["variables"]}
    inputs = sequences(made, batch)
    for variable, wanted in ((made.truth["output"], made.batch(inputs)), ("tokens", inputs)):
        if variable not in by_name:
            continue
        for codes, values in zip(found[variable].tolist(), wanted, strict=True):
            said = [by_name[variable]["values"][c] for c in codes[1 : 1 + len(values)]]
            assert said == [show(v) for v in values]
    for codes in found.values():
        assert bool((codes[:, 0] == -1).all())
        assert bool((codes[~batch.mask] == -1).all())


@pytest.mark.parametrize("name", ["hist", "reverse", "shuffle_dyck2"])
def test_a_rotated_model_says_the_same(name):
    made = compiled(name)
    turned = rotated(made)
    batch = ProgramTask(made, name).pairs(8)
    for first, second in zip(variables(made, batch).values(), variables(turned, batch).values(), strict=True):
        assert torch.equal(first, second)
    for s, t in zip(made.truth["selectors"], turned.truth["selectors"], strict=True):
        one, other = selected(made, batch)[tuple(s["head"])], selected(turned, batch)[tuple(t["head"])]
        assert torch.equal(one, other)


def test_numerical_variables_are_numbers():
    made = compiled("frac_prevs")
    batch = ProgramTask(made, "frac_prevs").pairs(8)
    found = labels(made, batch)["frac_prevs"]
    for row, values in zip(found, made.batch(sequences(made, batch)), strict=True):
        said = row[1 : 1 + len(values)]
        torch.testing.assert_close(said, torch.tensor([float(v) for v in values], dtype=torch.float64))
    assert bool(found[:, 0].isnan().all())
    assert labels(made, batch)["tokens"].dtype == torch.int64


def test_presence():
    made = compiled("constant_branch")
    found = presence(made, ProgramTask(made, "constant_branch").pairs(32))
    table = {
        name: dict(zip(found.sites, row, strict=True))
        for name, row in zip(found.features, found.states, strict=True)
    }
    assert table["tokens"] == dict.fromkeys(found.sites, "present")
    assert table["always"]["embed"] == "absent"
    assert table["always"][found.sites[-1]] == "constant"
    assert table[made.truth["output"]][found.sites[-1]] == "present"


def test_reused_directions_end_a_presence():
    made = compiled("sort", reuse=True)
    found = presence(made, ProgramTask(made, "sort").pairs(8))
    assert any(row[-1] == "absent" and "present" in row for row in found.states)


def test_selected_keys_are_the_selector_s():
    made = compiled("hist")
    batch = ProgramTask(made, "hist").pairs(8)
    found = selected(made, batch)[0, 0]
    tokens, real = batch.tokens[:, 1:], batch.mask[:, 1:]
    same = (tokens[:, :, None] == tokens[:, None]) & real[:, :, None] & real[:, None]
    assert torch.equal(found[:, 1:, 1:], same)
    assert torch.equal(found[:, 1:, 0], real)  # a head that counts also attends to BOS
    shift = compiled("shift")
    batch = ProgramTask(shift, "shift").pairs(8)
    found = selected(shift, batch)[0, 0]
    before = torch.arange(found.shape[1])[:, None] - 1 == torch.arange(found.shape[1])
    before[0, 0] = True
    assert torch.equal(found, before & batch.mask[:, :, None])
    assert selected(compiled("copy"), ProgramTask(compiled("copy"), "copy").pairs(2)) == {}


@pytest.mark.parametrize("name", ["hist", "reverse", "shift", "sort_unique"])
def test_swapping_a_token_is_running_another_sequence(name):
    made = compiled(name)
    batch = ProgramTask(made, name).pairs(8)
    here = batch.scored.float().argmax(1)
    there = batch.mask.sum(1) - 1
    found = counterfactual(made, "tokens", "embed")(batch, here, there)
    rows = torch.arange(len(batch))
    mixed = batch.tokens.clone()
    mixed[rows, here] = batch.corrupt[rows, there]
    ideal = ProgramTask(made, name).ideal
    codes, _ = made.run(sequences(made, type(batch)(**{**batch.__dict__, "tokens": mixed})))
    wanted = ideal[torch.from_numpy(codes)]
    assert torch.equal(found.wanted[:, 1:][batch.mask[:, 1:]], wanted[batch.mask[:, 1:]])
    assert torch.equal(found.scored, batch.scored)


def test_directions_turn_with_the_model():
    made = compiled("hist")
    turned = rotated(made)
    own = directions(turned, "tokens")
    torch.testing.assert_close(own @ own.T, torch.eye(len(own), dtype=torch.float64))
    basis = torch.from_numpy(turned.basis)
    assert torch.equal(own, basis[made.truth["variables"][0]["directions"]])


UNREAD = {
    "copy": ["BOS"],
    "copy_first": ["indices:1", "indices:2", "indices:3", "indices:4"],
    "max": ["greater:1", "greater:2", "greater:3", "greater:4"],
    "hist": [],
}


@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize("name", UNREAD)
def test_what_no_weight_reads_can_be_anything(name, turn):
    made = rotated(compiled(name)) if turn else compiled(name)
    named = {made.truth["bos"]["directions"][0]: "BOS"}
    for v in made.truth["variables"]:
        named.update(zip(v["directions"], v["labels"], strict=True))
    found, model = unread(made), made.transformer
    assert [named[i] for i in found] == UNREAD[name]
    own = torch.eye(len(named)) if made.basis is None else torch.from_numpy(made.basis).float()
    batch = ProgramTask(made, name).pairs(4)

    def logits(direction):
        tap = Tap.at(lambda _, x: x + 5 * own[direction].to(x), stream_sites(model.config))
        return model(batch.tokens, mask=batch.mask, tap=tap)[batch.mask]

    plain = model(batch.tokens, mask=batch.mask)[batch.mask]
    for direction in found:
        torch.testing.assert_close(logits(direction), plain, atol=1e-3, rtol=0)


def test_bad_names():
    made = compiled("hist")
    with pytest.raises(ValueError, match="unknown variable 'histt'; did you mean 'hist'"):
        counterfactual(made, "histt", "embed")
    with pytest.raises(ValueError, match=r"'hist' is not held at 'embed', only at 0\.resid\.post"):
        counterfactual(made, "hist", "embed")
