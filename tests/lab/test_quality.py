"""What is said of a node is what a pass over the whole corpus, all kept in memory, would say."""

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from pellucid import record
from pellucid.core.checkpoint import content_hash
from pellucid.core.circuit import channel_circuit
from pellucid.core.sites import node_sites
from pellucid.lab import examples, quality
from pellucid.lab.examples import extreme_examples, record_nodes, stream
from pellucid.lab.quality import NodeQuality, kurtosis_by_site, node_quality
from pellucid.training.optim import kurtosis
from tests.core.strategies import scrambled
from tests.lab.toy import toy_model

TEXT = np.random.default_rng(0).integers(0, 12, 2001).astype(np.uint16)
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
HOW = {"quantiles": QUANTILES, "n": 3, "seq_len": 10, "window": 3, "away": 1.5}


@pytest.fixture(scope="module")
def model():
    model = scrambled(toy_model().config)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p[torch.rand(p.shape, generator=draw) < 0.4] = 0
    return model


@pytest.fixture(scope="module")
def circuit(model):
    draw = torch.Generator().manual_seed(2)
    kept = {site: torch.rand(w, generator=draw) < 0.5 for site, w in node_sites(model.config).items()}
    return channel_circuit(model, kept, task="toy", model_hash=content_hash(model))


@pytest.fixture(scope="module")
def everything(model, circuit):
    """All 200 windows of the corpus and every node's activations on them, (nodes, 200, 10)."""
    windows = torch.from_numpy(TEXT[:2000].astype(np.int64)).view(200, 10)
    return windows, record_nodes(model, windows, circuit.nodes)


@pytest.fixture(scope="module", params=[64, 7])
def found(request, model, circuit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examples, "ROWS", request.param)
        return node_quality(model, TEXT, circuit, **HOW)


def test_moments_and_densities_are_those_of_the_whole_corpus(found, circuit, everything):
    assert [q.node for q in found] == list(circuit.nodes)
    for q, x in zip(found, everything[1].flatten(1).double(), strict=True):
        mean, std = x.mean(), x.std(correction=0)
        assert q.mean == pytest.approx(mean.item(), abs=1e-6)
        assert q.std == pytest.approx(std.item(), abs=1e-6)
        assert q.nonzero == (x != 0).double().mean().item()
        assert q.active == pytest.approx(((x - mean).abs() > 1.5 * std).double().mean().item(), abs=1e-3)
        if x.min() == x.max():
            assert q.kurtosis is None
        else:
            assert q.kurtosis == pytest.approx((((x - mean) / std) ** 4).mean().item(), rel=1e-4)


def test_quantiles_are_exact_where_the_sample_holds_the_corpus(found, everything):
    for q, x in zip(found, everything[1].flatten(1), strict=True):
        ranked = x.sort().values
        for at in q.quantiles:
            assert at.activation == ranked[round(at.quantile * (len(x) - 1))]


def test_examples_are_the_nearest_of_different_sequences(found, everything):
    windows, values = everything
    texts = ["".join(chr(65 + t) for t in row) for row in windows.tolist()]
    for q, x in zip(found, values, strict=True):
        for at in q.quantiles:
            best = (x - at.activation).abs().amin(-1).sort().values[: len(at.examples)].tolist()
            assert len(at.examples) == 3
            focused = [abs(e.activations[e.focus] - at.activation) for e in at.examples]
            assert focused == pytest.approx(best, abs=1e-6)
            homes = [
                [i for i, t in enumerate(texts) if "".join(chr(65 + c) for c in e.tokens) in t]
                for e in at.examples
            ]
            assert len({tuple(home) for home in homes}) == 3
            for e, (home, *_) in zip(at.examples, homes, strict=True):
                start = texts[home].index("".join(chr(65 + c) for c in e.tokens))
                assert e.activations == pytest.approx(x[home, start : start + 6].tolist(), abs=1e-5)


def test_the_ends_are_the_extreme_examples(found, model, circuit):
    top, bottom = extreme_examples(model, TEXT, circuit.nodes, n=3, seq_len=10, window=3)
    for i, q in enumerate(found):
        assert [e.activations[e.focus] for e in q.quantiles[-1].examples] == [
            e.activations[e.focus] for e in top[i]
        ]
        assert [e.activations[e.focus] for e in q.quantiles[0].examples] == [
            e.activations[e.focus] for e in bottom[i]
        ]


def test_edges_are_counted_in_the_circuit_and_in_the_model(found, model, circuit):
    names = {"q": (0, 8), "k": (8, 16), "v": (16, 24)}
    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
    for q in found:
        kind, c = q.node.site.removeprefix("0."), q.node.channel
        assert q.edges_in == sum(e.reader == q.node for e in circuit.edges) <= q.model_edges_in
        assert q.edges_out == sum(e.writer == q.node for e in circuit.edges) <= q.model_edges_out
        into = {"attn.out": attn.proj.weight, "mlp.act": mlp.fc.weight, "mlp.out": mlp.proj.weight}
        into |= {f"attn.{n}": attn.qkv.weight[a:b] for n, (a, b) in names.items()}
        out = {
            "attn.in": attn.qkv.weight,
            "attn.v": attn.proj.weight,
            "mlp.in": mlp.fc.weight,
            "mlp.act": mlp.proj.weight,
        }
        assert q.model_edges_in == (int((into[kind][c] != 0).sum()) if kind in into else 0)
        assert q.model_edges_out == (int((out[kind][:, c] != 0).sum()) if kind in out else 0)
    assert sum(q.edges_in for q in found) == len(circuit.edges) < sum(q.model_edges_in for q in found)


def test_a_sample_gives_quantiles_near_the_true_ones(model, circuit, everything, monkeypatch):
    monkeypatch.setattr(quality, "SAMPLE", 400)
    for q, x in zip(node_quality(model, TEXT, circuit, **HOW), everything[1].flatten(1), strict=True):
        for at in q.quantiles[1:-1]:
            assert (
                (x < at.activation).float().mean() - 0.1
                <= at.quantile
                <= (x <= at.activation).float().mean() + 0.1
            )
        assert (q.quantiles[0].activation, q.quantiles[-1].activation) == (x.min(), x.max())  # of every token


def test_it_comes_back_from_json(found):
    kind = TypeAdapter(list[NodeQuality])
    assert kind.validate_json(kind.dump_json(found)) == found


@pytest.mark.parametrize("rows", [64, 7])
def test_kurtosis_is_streamed_and_equal_to_that_of_the_whole(model, everything, rows, monkeypatch):
    monkeypatch.setattr(examples, "ROWS", rows)
    found = kurtosis_by_site(model, TEXT, seq_len=10)
    assert list(found) == ["0.resid.pre", "0.resid.mid", "0.resid.post", "final"]
    for site, x in record(model, everything[0], found).items():
        assert found[site] == pytest.approx(kurtosis(x), abs=1e-5)
    with pytest.raises(ValueError, match=r"unknown site '0\.resid\.mod'; did you mean '0\.resid\.mid'"):
        kurtosis_by_site(model, TEXT, ["0.resid.mod"])


def test_windows_differ_and_none_is_left_out():
    tokens = np.arange(1001)
    seen = torch.cat(list(stream(tokens, sequences=1000, seq_len=7)))
    assert sorted(seen.flatten().tolist()) == list(range(142 * 7))
    assert len(torch.cat(list(stream(tokens, sequences=70, seq_len=7))).unique(dim=0)) == 70


def test_bad_input_is_named(model, circuit):
    with pytest.raises(ValueError, match=r"the circuit is of model \w+, this is model \w+"):
        node_quality(toy_model(), TEXT, circuit)
    with pytest.raises(ValueError, match=r"quantiles must lie in 0\.\.1, got \(0\.5, 1\.5\)"):
        node_quality(model, TEXT, circuit, quantiles=(0.5, 1.5))
    with pytest.raises(ValueError, match="7 tokens are too few for 4 examples"):
        node_quality(model, TEXT[:7], circuit)
    assert node_quality(model, TEXT, circuit.model_copy(update={"nodes": (), "edges": ()})) == []
