"""An extracted circuit is the masked model: the same logits and node values, from a fraction of the weights."""

from importlib.metadata import EntryPoint

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid import ActivationSparsity, Circuit, ModelConfig, Recorder, chain, uniform
from pellucid.core import parts
from pellucid.core.checkpoint import content_hash
from pellucid.core.circuit import channel_circuit, count_edges
from pellucid.core.sites import node_sites
from pellucid.lab.ablate import keep_only
from pellucid.lab.extract import extract
from tests.core.strategies import CONTEXT, VOCAB, configs, scrambled, some_tokens


@st.composite
def cases(draw, **fixed):
    """A model, a circuit with a share of its nodes, and means; some weights and means are 0."""
    model = scrambled(draw(configs(activation_sparsity=None, **fixed)), draw(st.integers(0, 99)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    nodes, weights = draw(st.sampled_from([0, 0.1, 0.3, 0.6, 0.9, 1])), draw(st.sampled_from([0.1, 0.4, 1]))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(torch.rand(p.shape, generator=generator) < weights)
    kept, means = {}, {}
    for site, width in node_sites(model.config).items():
        kept[site] = torch.rand(width, generator=generator) < nodes
        zero = torch.rand(width, generator=generator) < 0.3
        means[site] = torch.randn(width, generator=generator).to(model.wte.weight).masked_fill(zero, 0)
    return model, kept, means


def some_mask(seed, *shape):
    """Real tokens anywhere, at least one in each row."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    mask[:, -1] = True
    return mask


@given(cases(), st.integers(0, 99), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_logits_and_nodes_are_those_of_the_masked_model(case, seed, masked, only):
    model, kept, means = case
    tokens = some_tokens(seed, 3, 7)
    how = {"mask": some_mask(seed, 3, 7) if masked else None}
    recorder = Recorder(node_sites(model.config))
    tap = chain(keep_only(kept, means), recorder)
    positions = {"only": torch.tensor([6, 2, -3])} if only else {}
    small = extract(model, kept, means)
    with torch.no_grad():
        torch.testing.assert_close(
            small(tokens, **how, **positions),
            model(tokens, tap=tap, **how, **positions),
            atol=1e-9,
            rtol=1e-7,
        )
    for site, x in small.activations(tokens, **how).items():
        assert kept[site][small.nodes[site]].all()
        torch.testing.assert_close(x, recorder.values[site][..., small.nodes[site]], atol=1e-9, rtol=1e-7)


def example(**fields):
    """A two-layer model, a circuit of 0.4 of its nodes, and their means."""
    config = ModelConfig(vocab_size=VOCAB, d_model=8, n_ctx=CONTEXT, layers=uniform(2, 2, 4, 8), **fields)
    draw, sites = torch.Generator().manual_seed(1), node_sites(config)
    kept = {site: torch.rand(width, generator=draw) < 0.4 for site, width in sites.items()}
    return (
        scrambled(config),
        kept,
        {site: torch.randn(width, generator=draw) for site, width in sites.items()},
    )


@given(cases(), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_single_precision_is_good_to_1e_5(case, seed):
    model, kept, means = case
    kept, tokens = dict(kept), some_tokens(seed, 3, 7)
    exact = extract(model, kept, means)(tokens)
    model.float()
    close = extract(model, kept, means)(tokens)
    assert close.dtype == torch.float32
    masked = model(tokens, tap=keep_only(kept, means)).detach()
    # Both round; neither may be further from the truth than the masked model is, beyond 1e-5 of the largest logit.
    error, floor = (close - exact).abs().max(), (masked - exact).abs().max()
    assert error <= 3 * floor + 1e-5 * exact.abs().max()


def test_a_circuit_runs_without_its_model():
    model, kept, means = example(bigram=True, positions="learned")
    tokens = some_tokens(0, 4, 9)
    circuit = channel_circuit(model, kept, task="none", model_hash=content_hash(model))
    small = extract(model, circuit, means)
    expected = model(tokens, tap=keep_only(kept, means)).detach()
    assert small.edges == count_edges(model, kept) == len(circuit.edges)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    torch.testing.assert_close(small(tokens), expected)
    assert all(not x.requires_grad for x in small.state_dict().values())


def test_nothing_is_stored_of_what_the_circuit_leaves_out():
    model, kept, means = example()
    none = {site: torch.zeros_like(mask) for site, mask in kept.items()}
    few = {site: mask.clone() for site, mask in none.items()}
    few["1.mlp.in"][0] = few["1.mlp.act"][0] = few["1.mlp.out"][0] = few["0.attn.q"][0] = True
    assert extract(model, none, means).nodes == {}
    small = extract(model, few, means)
    assert {site: x.tolist() for site, x in small.nodes.items()} == {
        "1.mlp.in": [0],
        "1.mlp.act": [0],
        "1.mlp.out": [0],
    }
    sizes = {name: tuple(x.shape) for name, x in small.sublayers[3].named_buffers()}
    assert sizes["weight"] == sizes["out_weight"] == (1, 1)


def test_only_some_tokens_and_outputs():
    model, kept, means = example(bigram=True, logits_bias=True)
    tokens, outputs = some_tokens(0, 4, 9) % 5, torch.tensor([7, 2])
    small = extract(model, kept, means, tokens=tokens, outputs=outputs)
    expected = model(tokens, tap=keep_only(kept, means))[..., outputs].detach()
    torch.testing.assert_close(small(tokens), expected)
    with pytest.raises(ValueError, match="token 6 is not one that the circuit was extracted for"):
        small(torch.tensor([[0, 6]]))


def test_a_module_before_the_mlp_reads_its_whole_input(halves):
    model, kept, means = example(mlp_input={"kind": "halve"})
    tokens = some_tokens(0, 4, 9)
    small = extract(model, kept, means)
    torch.testing.assert_close(small(tokens), model(tokens, tap=keep_only(kept, means)).detach())


class RollAndHalve(torch.nn.Module):
    def __init__(self, d_in):
        super().__init__()

    @classmethod
    def make(cls, d_in):
        return cls(d_in)

    def forward(self, x, at=None):
        return x.roll(1, -1) / 2, x.new_zeros(())


@pytest.fixture
def halves(monkeypatch):
    point = EntryPoint(name="halve", value="tests.lab.test_extract:RollAndHalve", group="pellucid.parts")
    parts.find_part.cache_clear()
    monkeypatch.setattr(parts, "entry_points", lambda group: [point])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(3, dtype=torch.long), r"integers of shape \(batch, position\)"),
        (torch.zeros(1, 3), r"integers of shape \(batch, position\)"),
        (
            torch.zeros(1, CONTEXT + 1, dtype=torch.long),
            f"{CONTEXT + 1} tokens do not fit into n_ctx = {CONTEXT}",
        ),
        (torch.tensor([[0, -1]]), "token -1 is not one"),
        (torch.tensor([[0, VOCAB]]), f"token {VOCAB} is not one"),
    ],
)
def test_tokens_that_it_cannot_take(tokens, message):
    with pytest.raises(ValueError, match=message):
        extract(*example())(tokens)


def test_abs_topk_is_refused():
    with pytest.raises(ValueError, match=r"AbsTopK cannot be extracted.*attn.q"):
        extract(*example(activation_sparsity=ActivationSparsity(fraction=0.5, sites=("attn.q",))))
    extract(*example(activation_sparsity=ActivationSparsity(fraction=1.0)))


def test_circuits_and_means_that_do_not_fit():
    model, kept, means = example()
    less = {site: mask for site, mask in kept.items() if site != "0.attn.q"}
    circuit = channel_circuit(model, kept, task="none", model_hash="0123")
    wrong: list[tuple[dict, str]] = [
        ({"circuit": less}, "'0.attn.q' has no mask"),
        ({"circuit": {**less, "0.attn.qq": kept["0.attn.q"]}}, "unknown node site '0.attn.qq'; did you mean"),
        ({"circuit": {**kept, "0.attn.q": kept["0.attn.q"].float()}}, "must be of bools, got torch.float32"),
        (
            {"means": {**means, "0.attn.q": torch.zeros(3, 8)}},
            r"'0.attn.q' must have shape \(8,\), got \(3, 8\)",
        ),
        ({"tokens": torch.tensor([VOCAB])}, f"token {VOCAB} is not in the vocabulary of {VOCAB}"),
        ({"outputs": torch.tensor([-1])}, f"output -1 is not in the vocabulary of {VOCAB}"),
        ({"circuit": circuit}, f"of model 0123, this is model {content_hash(model)}"),
        (
            {"circuit": Circuit(universe="component", task="", model="", nodes=(), edges=())},
            "must be channels, not of the universe 'component'",
        ),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            extract(**({"model": model, "circuit": kept, "means": means} | arguments))
