"""Explaining by hand: the toy's known mechanism is found by swaps, and the claims of docs/explained.md hold."""

import pytest
import torch

from pellucid.core.checkpoint import BOX, content_hash, load_model, save_model
from pellucid.core.circuit import channel_circuit
from pellucid.core.sites import node_sites
from pellucid.core.taps import Ablate, Patch, Recorder
from pellucid.lab.ablate import last_logits
from pellucid.lab.discretize import top_nodes
from pellucid.recipes.explain import (
    VARIANTS,
    Case,
    Outcome,
    agreement,
    attack,
    inverse,
    last_open_quote,
    margin,
    masks_of,
    node,
    quote_task,
    swap_scores,
    swapped,
    token_means,
    top_tokens,
)
from pellucid.tasks import make_task
from tests.lab.toy import ToyTask, known_circuit, toy_model

BOXED = "pellucid:sparse-python-4l"


@pytest.fixture(scope="module")
def model():
    return toy_model().eval()


@pytest.fixture(scope="module")
def case():
    return Case.open(BOXED, "single_double_quote")


@pytest.fixture(scope="module")
def batch():
    return ToyTask().pairs(16, split="test")


@pytest.mark.parametrize("site", ["0.attn.v", "0.attn.out", "0.mlp.act", "0.mlp.out"])
def test_a_swap_puts_the_other_prompts_value_in_place(model, batch, site):
    other, own = Recorder([site]), Recorder([site])
    with torch.no_grad():
        model(batch.corrupt, tap=other)
        model(batch.tokens, tap=own)
        for channel in range(node_sites(model.config)[site]):
            value = own.values[site].clone()
            value[..., channel] = other.values[site][..., channel]
            want = margin(last_logits(model, batch, Patch({site: value})), batch)
            torch.testing.assert_close(swapped(model, batch, masks_of(model, [f"{site}:{channel}"])), want)


def test_swapping_nothing_changes_nothing_and_the_known_circuit_carries_the_answer(model, batch):
    kept = known_circuit(model)
    own = margin(last_logits(model, batch), batch)
    torch.testing.assert_close(swapped(model, batch, masks_of(model, [])), own)
    assert (own > 0).all()
    assert (swapped(model, batch, kept) < 0).all()
    assert (swapped(model, batch, inverse(kept)) > 0).all()


def test_swap_scores_are_exact_where_the_margin_is_linear_and_find_the_known_circuit(model, batch):
    scores = swap_scores(model, batch)
    own = margin(last_logits(model, batch), batch).mean()
    for channel in range(8):  # no norm: the logits are linear in the last write
        change = swapped(model, batch, masks_of(model, [f"0.mlp.out:{channel}"])).mean() - own
        torch.testing.assert_close(scores["0.mlp.out"][channel], change.detach(), atol=1e-5, rtol=1e-4)
    best = top_nodes({site: s.abs() for site, s in scores.items()}, 4)
    path = masks_of(
        model, ["0.attn.in:0", "0.attn.v:0", "0.attn.out:3", "0.mlp.in:3"]
    )  # the MLP reads it too
    assert all(best[site].equal(mask) for site, mask in path.items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_top_tokens_are_the_largest_weights_and_leave_zeros_out(case):
    tokenizer = case.tokenizer
    weights = torch.zeros(tokenizer.get_vocab_size())
    weights[[7, 300, 5]] = torch.tensor([0.5, -2.0, 1.0])
    assert [w for _, w in top_tokens(weights, tokenizer)] == [-2.0, 1.0, 0.5]
    assert top_tokens(weights, tokenizer, 1) == [(tokenizer.decode([300]), -2.0)]


def test_token_means_are_the_means_at_each_token(model):
    tokens = torch.tensor([[0, 4, 5, 4], [1, 4, 4, 6]])
    recorder = Recorder(["0.attn.in"])
    model(tokens, tap=recorder)
    for rows in (1, 2):
        (found,) = token_means(model, ["0.attn.in:1"], tokens, rows=rows, least=2)
        values = recorder.values["0.attn.in"][..., 1]
        assert found[4].item() == pytest.approx(values[tokens == 4].mean().item())
        assert found[[0, 1, 5, 6, 7]].isnan().all()  # they occur once or never


@pytest.mark.parametrize("name", ["0.attn.v", "v:1", "0.attn.v:x", "", ":3", "0.attn.w:1", "0.attn.v:8"])
def test_a_node_that_is_not_there_is_named(model, name):
    with pytest.raises(ValueError, match=r"SITE:CHANNEL|unknown node site|has 8 channels"):
        masks_of(model, [name])


def test_nodes_are_written_as_they_print(case):
    assert all(node(str(n)) == n for n in case.circuit.nodes)


@pytest.mark.parametrize(
    ("correct", "prompts", "low", "high"),
    [(0, 200, 0, 0.0188), (200, 200, 0.9812, 1), (100, 200, 0.4314, 0.5686), (1, 2, 0.0945, 0.9055)],
)
def test_intervals_are_wilsons(correct, prompts, low, high):
    assert Outcome(prompts, correct, 0.0).interval == pytest.approx((low, high), abs=1e-4)


def test_an_attack_counts_each_kind_of_prompt_apart(model):
    with torch.no_grad():
        backwards = toy_model().eval()
        backwards.head.weight.neg_()
    for run, right in ((model, 12), (backwards, 0)):
        sides = attack(run, ToyTask(), pairs=12)
        assert [(o.prompts, o.correct) for o in sides] == [(12, right)] * 2
        assert all((o.margin > 0) == bool(right) for o in sides)
    one_sided = Ablate({"0.attn.out": None}, {"0.attn.out": torch.full((8,), 1.0)})  # always says "it was A"
    positive, negative = attack(model, ToyTask(), pairs=12, tap=one_sided)
    assert (positive.correct, negative.correct) == (12, 0)


def test_variants_differ_in_the_quotes_alone(case):
    flip = str.maketrans("\"'", "'\"")
    for name in VARIANTS:
        batch = quote_task(name, case.tokenizer).pairs(8, split="test")
        rows = zip(batch.tokens, batch.mask, strict=True)
        texts = [case.tokenizer.decode(row[mask].tolist()) for row, mask in rows]
        assert all(a != b and a.translate(flip) == b for a, b in zip(texts[::2], texts[1::2], strict=True))
    with pytest.raises(ValueError, match='did you mean "red\'s box"'):
        quote_task("red's bx", case.tokenizer)


def test_the_rule_sees_quotes_that_do_not_close():
    assert last_open_quote(['("', "red", "'", "s"]) == "'"
    assert last_open_quote(["('", "red", "')", "\n", '("', "box"]) == '"'
    assert last_open_quote(["x", "')"]) is None


def test_a_rule_that_says_nothing_or_the_contrary_never_agrees(case):
    task = make_task("single_double_quote", case.tokenizer)
    contrary = {'"': "'", "'": '"'}
    assert agreement(case.model, task, lambda _: None, pairs=4) == 0
    assert agreement(case.model, task, lambda t: contrary[last_open_quote(t)], pairs=4) == 0


def test_a_circuit_that_is_not_there_and_one_of_another_model_are_refused(tmp_path, case):
    with pytest.raises(ValueError, match="did you mean 'single_double_quote'"):
        Case.open(BOXED, "single_double_quotes")
    other = load_model(BOXED, device="cpu")
    with torch.no_grad():
        other.wte.weight[0, 0] += 1
    save_model(other, tmp_path / "run", tokenizer=case.tokenizer)
    with pytest.raises(ValueError, match="explained circuit"):
        Case.open(tmp_path / "run", "single_double_quote")
    case.circuit.save(tmp_path / "run" / "explained" / "single_double_quote.json")
    with pytest.raises(ValueError, match=f"circuit is of model {content_hash(case.model)}"):
        Case.open(tmp_path / "run", "single_double_quote")


def test_the_stored_circuit_is_small_and_all_its_edges_are_the_models(case):
    file = BOX / "sparse-python-4l" / "explained" / "single_double_quote.json"
    assert file.stat().st_size < 50_000
    edges = channel_circuit(case.model, case.kept, task="t", model_hash="h").edges
    assert case.circuit.edges == edges


def test_the_claims_of_the_page_hold(case):
    """docs/explained.md on other prompts than it shows: what carries the answer, the clock, and where it fails."""
    model, circuit = case.model, case.circuit
    look = [
        n
        for n in circuit.nodes
        if n.site.endswith((".q", ".k")) or str(n) in {f"3.attn.in:{c}" for c in (39, 50, 241, 250)}
    ]
    carry = masks_of(model, set(circuit.nodes) - set(look))
    batch = case.task.pairs(8, seed=5, split="test")
    assert (swapped(model, batch, carry) < 0).all()
    assert (swapped(model, batch, inverse(carry)) > 0).all()
    assert (swapped(model, batch, masks_of(model, look)) > 0).all()
    for name in ("0.attn.in:112", "0.attn.v:104", "3.attn.out:72"):
        assert swapped(model, batch, masks_of(model, [name])).mean() < -1
    best = top_nodes({s: x.abs() for s, x in swap_scores(model, case.task.pairs(32)).items()}, 60)
    assert all((carry[site] <= best[site]).all() for site in carry)

    stopped = Ablate({"3.attn.in": [250]}, case.means)
    for name, (says, _) in VARIANTS.items():
        task = quote_task(name, case.tokenizer)
        double, single = attack(model, task, pairs=8, seed=5)
        if says == "weaken":
            assert double.accuracy == 1
            assert single.margin < double.margin - 2
        elif says == "mend":  # the same prompt without the second quote is at 0
            assert double.accuracy > 0.6
            assert single.accuracy > 0.3
        else:
            assert {double.accuracy, single.accuracy} <= ({0, 1 / 8} if says == "fail" else {1})
            assert agreement(model, task, last_open_quote, pairs=8) > 0.9
        if "calls" in name or name == "red box":
            double, single = attack(model, task, pairs=8, seed=5, tap=stopped)
            assert (double.accuracy + single.accuracy < 1) == ("other" in name)
