"""Learned pruning finds a circuit that is known, says when there is none, and measures what it claims to."""

import math

import numpy as np
import pytest
import torch

from pellucid import Ablate, Circuit, Edge, Node, Patch, Tap, chain, record
from pellucid.core.checkpoint import content_hash, save_model
from pellucid.core.circuit import channel_circuit, count_edges, kept_masks, matrices
from pellucid.core.sites import node_sites
from pellucid.lab.ablate import keep_only, last_logits, random_others, remove, task_loss
from pellucid.lab.config import PruneConfig
from pellucid.lab.discretize import Probe, calibrate, discretize, top_nodes
from pellucid.lab.examples import extreme_examples, record_nodes
from pellucid.lab.gates import Heaviside
from pellucid.lab.means import node_means, stored_means
from pellucid.lab.prune import prune
from pellucid.lab.rank import learn_masks
from tests.core.strategies import scrambled
from tests.lab.toy import CIRCUIT, EDGES, ToyTask, toy_model

SEARCH = PruneConfig(steps=300, pairs=16, pool=64, measure=64, k_coefs=(3e-4, 1e-3))
TEXT = np.random.default_rng(0).integers(0, 12, 4000).astype(np.uint16)


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def means(model):
    return node_means(model, TEXT, seq_len=15)


@pytest.fixture(scope="module")
def circuit(model, means):
    return prune(model, ToyTask(), means, config=SEARCH)


def test_the_known_circuit_is_found_and_nothing_else(circuit):
    assert {(str(e.writer), str(e.reader)) for e in circuit.edges} == EDGES
    kept = {}
    for node in circuit.nodes:
        kept.setdefault(node.site, []).append(node.channel)
    assert kept == {site: channels for site, channels in CIRCUIT.items() if channels}


def test_it_is_sufficient_and_necessary_and_random_nodes_are_not(circuit, model, means):
    m = circuit.metrics
    assert m["reached"]
    assert m["calibrated_task_loss"] <= 0.15
    assert m["circuit_accuracy"] == 1
    assert m["full_task_loss"] < 0.05
    assert m["ablated_task_loss"] > 0.65  # chance is ln 2
    assert m["random_ablated_task_loss"] < 0.1
    assert m["edges"] == len(circuit.edges)
    assert m["nodes"] == len(circuit.nodes)
    assert circuit.model == content_hash(model)
    batch = ToyTask().pairs(64, seed=0, split="test")
    kept = kept_masks(circuit, model)
    assert task_loss(model, ToyTask(), batch, keep_only(kept, means)) == pytest.approx(m["circuit_task_loss"])
    assert task_loss(model, ToyTask(), batch, remove(kept, means)) == pytest.approx(m["ablated_task_loss"])


def test_pruning_leaves_the_model_as_it_was():
    model = toy_model().train()
    means = node_means(model, TEXT, seq_len=15)
    prune(model, ToyTask(), means, config=PruneConfig(steps=2, pairs=4, pool=16, measure=16))
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


def test_the_same_seed_finds_the_same_circuit(circuit, model, means):
    assert prune(model, ToyTask(), means, config=SEARCH) == circuit


def test_a_task_that_no_circuit_can_do_is_said_to_be_unreachable(model, means):
    search = PruneConfig(steps=20, pairs=16, pool=64, measure=64)
    missed = prune(model, ToyTask(nonsense=True), means, config=search)
    assert missed.metrics["reached"] is False
    assert missed.metrics["calibrated_task_loss"] > 0.5


def test_tries_stacked_on_the_batch_axis_equal_tries_one_at_a_time():
    model = toy_model().double()
    means = node_means(model, TEXT, seq_len=15)

    def learned(*k_coefs, **fields):
        search = PruneConfig(
            steps=15, pairs=8, pool=16, lr=2e-2, k_coefs=k_coefs, precision="float32", **fields
        )
        return learn_masks(model, ToyTask(), means, search)

    together = learned(1e-3, 1e-1, init_noise=0.0)
    for i, k_coef in enumerate((1e-3, 1e-1)):
        for site, alone in learned(k_coef, init_noise=0.0).items():
            torch.testing.assert_close(together[site][i : i + 1], alone, atol=1e-7, rtol=1e-5)
    noisy = learned(1e-3, 1e-3)
    assert any(not torch.equal(t[0], t[1]) for t in noisy.values())  # each try begins at its own noise


def test_the_step_function_is_strict_and_its_gradient_is_the_sigmoids():
    x = torch.tensor([-1.0, 0.0, 1e-9, 1.0], requires_grad=True)
    y = Heaviside.apply(x, 0.5)
    assert y.tolist() == [0, 0, 1, 1]
    y.sum().backward()
    s = torch.sigmoid(x.detach() / 0.5)
    torch.testing.assert_close(x.grad, s * (1 - s) / 0.5)


def test_edges_are_nonzero_weights_between_kept_nodes(model):
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        sparse = scrambled(model.config)
        for p in sparse.parameters():
            p[torch.rand(p.shape, generator=draw) < 0.7] = 0
    kept = {site: torch.rand(w, generator=draw) < 0.5 for site, w in node_sites(model.config).items()}
    by_hand = set()
    for writer, reader, weight in matrices(sparse):
        for r in range(weight.shape[0]):
            for w in range(weight.shape[1]):
                if weight[r, w] != 0 and kept[reader][r] and kept[writer][w]:
                    by_hand.add((f"{writer}:{w}", f"{reader}:{r}", weight[r, w].item()))
    circuit = channel_circuit(sparse, kept, task="toy", model_hash=content_hash(sparse))
    assert {(str(e.writer), str(e.reader), e.weight) for e in circuit.edges} == by_hand
    assert count_edges(sparse, kept) == len(by_hand) > 10
    assert all(torch.equal(m, kept[site]) for site, m in kept_masks(circuit, sparse).items())


def test_an_edge_between_channels_carries_what_its_weight_says(model):
    """Moving a writer moves its readers by weight times the move, for every matrix."""
    tokens = ToyTask().pairs(2).tokens
    model = scrambled(model.config, 3)
    for writer, reader, weight in matrices(model):
        fill = torch.full((weight.shape[1],), 0.7)
        before = record(model, tokens, [reader, writer, "0.attn.mix", "0.attn.pattern", "0.mlp.in"])
        moved = {}

        def keep(site, x, moved=moved):
            moved[site] = x
            return x

        source = "0.attn.mix" if writer.endswith(".v") else writer  # a constant value is mixed to itself
        freeze = Patch({"0.attn.pattern": before["0.attn.pattern"]})
        model(tokens, tap=chain(freeze, Ablate({writer: [2]}, {writer: fill}), Tap.at(keep, [reader])))
        change = (fill[2] - before[source][..., 2:3]) * weight[:, 2]
        expected = before[reader] + change
        if reader.endswith(".act"):
            fc = model.blocks[0].mlp.fc
            expected = torch.relu(fc(before["0.mlp.in"]) + change)
        torch.testing.assert_close(moved[reader], expected, atol=1e-5, rtol=1e-4)


def test_the_smallest_number_of_nodes_is_found_and_never_one_that_misses(model, means):
    scores = {site: torch.zeros(w) for site, w in node_sites(model.config).items()}
    for rank, (site, channels) in enumerate(CIRCUIT.items()):
        for c in channels:
            scores[site][c] = 10 - rank
    found = discretize(scores, Probe(model, ToyTask(), means, 0.15, pairs=64))
    assert found.reached
    assert found.loss <= 0.15
    assert sum(int(m.sum()) for m in found.kept.values()) == 5
    worst = {site: -s for site, s in scores.items()}
    assert (
        sum(
            int(m.sum())
            for m in discretize(worst, Probe(model, ToyTask(), means, 0.15, pairs=64)).kept.values()
        )
        > 20
    )


def test_top_nodes_breaks_ties_in_order():
    kept = top_nodes({"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([1.0, 1.0])}, 2)
    assert kept["a"].tolist() == [True, False]
    assert kept["b"].tolist() == [True, False]


def test_calibration_undoes_a_wrong_scale_and_shift(model):
    task, batch = ToyTask(), ToyTask().pairs(64, seed=3)
    logits = last_logits(model, batch).detach()
    spoilt = logits / 3
    spoilt[..., 2] += 5.0
    before = task.metric(spoilt, batch.last()).mean().item()
    fitted = task.metric(calibrate(task, spoilt, batch.last())(spoilt), batch.last()).mean().item()
    assert before > 1
    assert fitted < 0.05
    constant = torch.zeros_like(logits)
    assert task.metric(
        calibrate(task, constant, batch.last())(constant), batch.last()
    ).mean().item() == pytest.approx(math.log(2))


def test_means_are_over_tokens_and_positions_and_are_kept_with_the_model(model, tmp_path):
    tokens = np.arange(1 + 4 * 8).astype(np.uint16) % 12
    means = node_means(model, tokens, seq_len=8)
    windows = torch.from_numpy(tokens[:32].astype(np.int64)).view(4, 8)
    values = record(model, windows, node_sites(model.config))
    for site, mean in means.items():
        torch.testing.assert_close(mean, values[site].mean((0, 1)), atol=1e-6, rtol=1e-5)
    save_model(model, tmp_path / "m")
    first = stored_means(tmp_path / "m", model, tokens, seq_len=8)
    elsewhere = stored_means(tmp_path / "m", model, tokens[::-1].copy(), seq_len=8)  # read, not computed
    other = stored_means(tmp_path / "m", scrambled(model.config), tokens, seq_len=8)  # another model's
    (tmp_path / "m" / "means.safetensors").write_bytes(b"rubbish")
    again = stored_means(tmp_path / "m", model, tokens, seq_len=8)
    for site in means:
        assert torch.equal(first[site], elsewhere[site])
        assert torch.equal(first[site], again[site])
    assert any(not torch.equal(first[site], other[site]) for site in means)


def test_random_others_are_as_many_and_outside(model):
    kept = {site: torch.arange(w) < 2 for site, w in node_sites(model.config).items()}
    others = random_others(kept, torch.Generator().manual_seed(0))
    for site in kept:
        assert int(others[site].sum()) == 2
        assert not (others[site] & kept[site]).any()


def test_a_circuit_comes_back_from_json_and_nonsense_is_named(circuit, tmp_path):
    circuit.save(tmp_path / "c.json")
    assert Circuit.load(tmp_path / "c.json") == circuit
    (tmp_path / "bad.json").write_text('{"task": "toy"}')
    with pytest.raises(
        ValueError,
        match=r"bad\.json is not a circuit: model: Field required; nodes: Field required; edges: Field required$",
    ):
        Circuit.load(tmp_path / "bad.json")
    stray = Circuit(
        task="toy", model=content_hash(toy_model()), nodes=(Node(site="0.mlp.act", channel=99),), edges=()
    )
    with pytest.raises(ValueError, match=r"the model has no node 0\.mlp\.act:99"):
        kept_masks(stray, toy_model())
    with pytest.raises(ValueError, match="the circuit is of model x, this is model"):
        kept_masks(stray.model_copy(update={"model": "x"}), toy_model())
    edge = Edge(writer=Node(site="0.attn.in", channel=1), reader=Node(site="0.attn.q", channel=2), weight=0.5)
    assert Edge.model_validate_json(edge.model_dump_json()) == edge


def test_examples_are_where_the_node_is_highest_and_lowest(model):
    node = Node(site="0.attn.v", channel=0)
    top, bottom = extreme_examples(model, TEXT, [node], n=3, sequences=50, seq_len=12, window=3)
    values = torch.cat([torch.tensor(e.activations) for e in (*top[0], *bottom[0])])
    for example in top[0]:
        assert example.activations[example.focus] == values.max()
        assert example.tokens[example.focus] in {0, *range(4, 12, 2)}  # where residual channel 0 is +1
    for example in bottom[0]:
        assert example.activations[example.focus] == values.min()
        assert example.tokens[example.focus] in {1, *range(5, 12, 2)}
    assert len(top[0]) == len(bottom[0]) == 3
    assert all(len(e.tokens) == 6 for e in top[0])
    batch = ToyTask().pairs(2)
    assert record_nodes(model, batch.tokens, [node]).shape == (1, *batch.tokens.shape)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k_coefs": ()}, "k_coefs must name at least one try"),
        ({"target": 0}, "target must be positive, got 0"),
        ({"pool": 3}, "pool must hold pairs = 32 in each of its parts, got 3"),
        ({"pairs": 5, "pool": 5}, "pool must hold pairs = 5"),
        ({"measure": 15}, "measure must be at least 16 pairs, got 15"),
    ],
)
def test_bad_settings_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        PruneConfig(**fields)
