"""The bottleneck: what is active, what comes out, what the moments are, and what taps may change."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid import ModelConfig, Patch, Recorder, Tap, Transformer, generate, load_model, save_model, uniform
from pellucid.parity import ParityBottleneck, ParityConfig, directions, unfold
from pellucid.parity.codebook import TopKCodebook

CONFIGS = [
    ParityConfig(d=16, active=(5,), children=()),
    ParityConfig(d=16, active=(4, 6), children=(8,)),
    ParityConfig(d=32, active=(4, 6, 5), children=(4, 8)),
    ParityConfig(d=16, active=(4, 6), children=(8,), routing="flat"),
]


def example(config, seed=0, train=False):
    """A bottleneck with moments that matter."""
    bottleneck = ParityBottleneck(config).train(train)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        bottleneck.moments.mean.copy_(torch.randn(config.features, generator=draw) * 0.3)
        spread = 0.5 + torch.rand(config.features, generator=draw)
        bottleneck.moments.square.copy_(bottleneck.moments.mean.square() + spread.square())
    return bottleneck


def features(config):
    """All features as vectors (features, d), in float64."""
    i = torch.arange(config.features - config.d)
    return torch.cat([torch.eye(config.d), directions(config.d, i)]).double()


def brute_force(bottleneck, x):
    """The active features of one token x (d,) and their standardised scores, from all explicit vectors."""
    c = bottleneck.config
    mean, scale = (v.double() for v in bottleneck.standards())
    z = ((features(c) @ x.double()) - mean) * scale

    def top(candidates, k):
        return sorted(candidates, key=lambda i: (-round(abs(z[i].item()), 6), i))[:k]

    if c.routing == "flat":
        chosen = top(range(c.features), c.k)
        return [(chosen, z[chosen])]
    found = [top(range(c.d), c.active[0])]
    for level, (children, k) in enumerate(zip(c.children, c.active[1:], strict=True), start=1):
        parents = [p - (c.d if level > 1 else 0) for p in found[-1]]
        first = int(level > 1)
        found.append(
            top([c.d + (p | j << c.shift(level)) for p in parents for j in range(first, children)], k)
        )
    return [(chosen, z[chosen]) for chosen in found]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.routing}-{c.active}")
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_encoding_is_the_brute_force_over_explicit_directions(config, seed):
    bottleneck = example(config, seed)
    x = torch.randn(7, config.d, generator=torch.Generator().manual_seed(seed))
    code = bottleneck.encode(x)
    vectors = features(config)
    for row in range(len(x)):
        expected = brute_force(bottleneck, x[row])
        assert len(expected) == len(code.levels)
        total = torch.zeros(config.d, dtype=torch.float64)
        for (index, score), (chosen, z) in zip(code.levels, expected, strict=True):
            assert index[row].tolist() == chosen
            torch.testing.assert_close(score[row].double(), z, atol=1e-4, rtol=1e-4)
            total += z @ vectors[chosen]
        expected_out = total * x[row].double().norm() / total.norm()
        torch.testing.assert_close(bottleneck.decode(code)[row].double(), expected_out, atol=1e-4, rtol=1e-4)


def test_equal_scores_are_taken_in_the_order_of_features():
    config = ParityConfig(d=16, active=(3, 2), children=(4,))
    bottleneck = ParityBottleneck(config).eval()
    code = bottleneck.encode(torch.ones(1, 16))
    assert code.levels[0][0].tolist() == [[0, 1, 2]]
    again = bottleneck.encode(torch.ones(1, 16))
    assert torch.equal(code.index, again.index)


def test_siblings_are_orthogonal():
    config = CONFIGS[1]
    siblings = directions(16, torch.tensor([5 | j << 4 for j in range(8)]))
    torch.testing.assert_close(siblings @ siblings.T, torch.eye(8))
    assert config.shift(1) == 4


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.routing}-{c.active}")
def test_the_gradient_is_that_of_small_differences_with_moments_and_selection_held(config):
    bottleneck = example(config).double()
    x = torch.randn(3, config.d, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()

    def out(x):
        x_hat, aux = bottleneck(x)
        return x_hat, aux

    assert torch.autograd.gradcheck(out, (x,), eps=1e-7, atol=1e-5)


def test_the_width_may_be_given_by_place():
    assert ParityConfig(256) == ParityConfig(d=256)
    assert ParityConfig(16, active=(4, 6), children=(8,)) == CONFIGS[1]


def test_what_comes_out_has_the_norm_of_what_went_in():
    bottleneck = example(CONFIGS[2])
    x = torch.randn(2, 5, 32)
    x_hat, aux = bottleneck(x)
    torch.testing.assert_close(x_hat.norm(dim=-1), x.norm(dim=-1))
    error = (x - x_hat).square().sum(-1) / x.square().sum(-1)
    torch.testing.assert_close(aux, 0.01 * error.mean())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.routing}-{c.active}")
def test_moments_are_those_of_a_plain_accumulation_over_candidates_alone(config):
    config = replace(config, samples=4, decay=0.9)
    bottleneck = ParityBottleneck(config).train()
    mean, square = torch.zeros(config.features).double(), torch.ones(config.features).double()
    vectors = features(config)
    for batch in range(5):
        x = torch.randn(12, config.d, generator=torch.Generator().manual_seed(batch)) + 0.5
        rows, before = bottleneck.sample(12).tolist(), example(config)
        before.load_state_dict(bottleneck.state_dict())
        seen = {c: [x[row, c].item() for row in range(12)] for c in range(config.d)}
        for row in rows:
            for level, children in enumerate(config.children, start=1):
                first = int(level > 1)
                if config.routing == "flat":
                    parents = range(config.d)
                else:
                    active = before.encode(x[row][None]).levels[level - 1][0][0].tolist()
                    parents = [p - (config.d if level > 1 else 0) for p in active]
                for p in parents:
                    for j in range(first, children):
                        i = config.d + (p | j << config.shift(level))
                        seen.setdefault(i, []).append((vectors[i] @ x[row].double()).item())
        for i, scores in seen.items():
            keep = 0.9 ** len(scores)
            scores = torch.tensor(scores).double()
            mean[i] = keep * mean[i] + (1 - keep) * scores.mean()
            square[i] = keep * square[i] + (1 - keep) * scores.square().mean()
        bottleneck(x)
        torch.testing.assert_close(bottleneck.moments.mean.double(), mean, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(bottleneck.moments.square.double(), square, atol=1e-5, rtol=1e-4)


def test_moments_are_frozen_in_eval_mode():
    bottleneck = ParityBottleneck(CONFIGS[1]).eval()
    before = {name: t.clone() for name, t in bottleneck.state_dict().items()}
    bottleneck(torch.randn(9, 16))
    assert all(torch.equal(before[name], t) for name, t in bottleneck.state_dict().items())


def test_moments_that_are_not_finite_are_neither_taken_in_nor_loaded():
    moments = ParityBottleneck(CONFIGS[1]).moments
    n = len(moments.mean)
    sums = torch.ones(n)
    sums[3] = float("nan")
    moments.update(torch.full((n,), 5.0), sums, torch.ones(n))
    assert moments.mean[3] == 0
    assert moments.square[3] == 1
    assert (moments.mean != 0).sum() == n - 1
    damaged = {name: t.clone() for name, t in moments.state_dict().items()}
    damaged["mean"][2] = float("inf")
    with pytest.raises(ValueError, match="mean is not finite in 1 features"):
        moments.load_state_dict(damaged)


def test_without_standardisation_scores_are_raw():
    bottleneck = ParityBottleneck(ParityConfig(d=16, active=(3,), children=(), standardise=False)).train()
    x = torch.randn(4, 16) + 3
    code = bottleneck.encode(x)
    assert torch.equal(code.score, x.gather(1, code.index))


def explicit(bottleneck):
    """`forward` with the same features active, on vectors that are all written down, by plain products alone."""
    c, basis = bottleneck.config, bottleneck.basis
    codes = torch.arange(c.features - c.d)[:, None]
    vectors = getattr(basis, "vectors", None)
    if vectors is None:
        vectors = basis.decode(torch.ones(codes.shape, dtype=torch.float64), codes)

    def forward(x):
        index = bottleneck.encode(x.detach()).index
        every = torch.cat([torch.eye(c.d, dtype=x.dtype), vectors])
        mean, scale = bottleneck.standards(x.dtype)
        chosen = every[index]
        z = (torch.einsum("nd,nkd->nk", x, chosen) - mean[index]) * scale[index]
        total = torch.einsum("nk,nkd->nd", z, chosen)
        return total * x.norm(dim=-1, keepdim=True) / total.norm(dim=-1, keepdim=True)

    return forward


@pytest.mark.parametrize("basis", ["parity", "random", "gaussian", "learned"])
@pytest.mark.parametrize(
    "shape",
    [
        {"active": (4, 6), "children": (8,)},
        {"active": (4, 6, 5), "children": (4, 4)},
        {"active": (4, 6), "children": (8,), "routing": "flat"},
    ],
    ids=lambda s: s.get("routing", str(s["active"])),
)
def test_every_basis_gives_the_values_and_gradients_of_its_explicit_vectors(basis, shape):
    config = ParityConfig(d=16, basis=basis, **shape)
    bottleneck = example(config).double()
    x = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    weight = torch.randn(7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    found = []
    for forward in (lambda x: bottleneck(x)[0], explicit(bottleneck)):
        leaf = x.clone().requires_grad_()
        out = forward(leaf)
        found.append((out, *torch.autograd.grad((out * weight).sum(), [leaf, *bottleneck.parameters()])))
    assert len(found[0]) == 2 + (basis == "learned")
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("basis", ["random", "gaussian", "learned"])
@pytest.mark.parametrize("routing", ["hierarchical", "flat"])
def test_stored_vectors_compete_as_all_explicit_ones_do(basis, routing):
    config = ParityConfig(d=16, active=(4, 6), children=(8,), basis=basis, routing=routing)
    for dtype in (torch.float32, torch.float64):
        bottleneck = example(config).to(dtype)
        x = torch.randn(9, 16, dtype=dtype, generator=torch.Generator().manual_seed(1))
        code, every = bottleneck.encode(x), torch.cat([torch.eye(16), bottleneck.basis.vectors]).double()
        mean, scale = (v.double() for v in bottleneck.standards())
        z = ((x.double() @ every.T - mean) * scale).abs()
        for row in range(9):
            candidates = range(config.features)
            if routing == "hierarchical":
                parents = code.levels[0][0][row].tolist()
                candidates = [16 + (p | j << 4) for p in parents for j in range(8)]
            chosen = code.levels[-1][0][row].tolist()
            assert chosen == sorted(candidates, key=lambda i: -z[row, i])[: len(chosen)]


def test_directions_of_random_masks_are_a_linear_code():
    bottleneck = ParityBottleneck(ParityConfig(d=16, active=(4, 6), children=(8,), basis="random"))
    sign = bottleneck.basis.vectors * 4
    i, j = torch.arange(128)[:, None], torch.arange(128)
    assert torch.equal(sign[i ^ j], sign[i] * sign[j])


@pytest.mark.parametrize("part", [{"basis": b} for b in ("random", "gaussian", "learned")] + [None], ids=str)
def test_every_layer_draws_its_own_vectors_from_the_seed_and_keeps_them_with_its_weights(part, tmp_path):
    part = {"kind": "topk", "features": 40, "k": 5} if part is None else {**(MODEL.mlp_input or {}), **part}
    config = replace(MODEL, mlp_input=part)

    def vectors(model):
        return [v for name, v in model.state_dict().items() if name.endswith("basis.vectors")]

    def drawn(seed):
        model = Transformer(config, seed=seed, device="cpu")
        return model, vectors(model)

    (model, one), (_, again), (_, other) = drawn(3), drawn(3), drawn(4)
    assert not torch.equal(one[0], one[1])
    for a, b, c in zip(one, again, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        torch.testing.assert_close(a.norm(dim=1), torch.ones(len(a)))
    save_model(model, tmp_path / "m")
    loaded = load_model(tmp_path / "m", device="cpu")
    assert torch.equal(vectors(loaded)[1], one[1])
    plain = Transformer(MODEL, seed=3, device="cpu").state_dict()
    assert all(torch.equal(plain[n], p) for n, p in model.named_parameters() if n in plain)


def test_unfolding_names_each_sign():
    bottleneck = example(CONFIGS[1])
    code = bottleneck.encode(torch.randn(6, 16))
    two = unfold(code)
    assert (two.score >= 0).all()
    assert torch.equal(two.index // 2, code.index)
    assert torch.equal(two.index % 2, (code.score < 0).long())


def test_child_0_of_higher_levels_is_left_out_also_with_stored_vectors():
    """All scores are equal here, so that the lowest features would be chosen."""
    config = ParityConfig(d=16, active=(3, 4, 5), children=(4, 4), basis="gaussian")
    bottleneck = ParityBottleneck(config).eval()
    parents, (index, _) = (bottleneck.encode(torch.zeros(2, 16)).levels[level] for level in (1, 2))
    assert not (index[..., None] == parents[0][:, None]).any()


PARTS = [
    {"kind": "parity", "active": [4, 6], "children": [8], "basis": basis, "routing": routing}
    for basis in ("parity", "random", "gaussian", "learned")
    for routing in ("hierarchical", "flat")
] + [{"kind": "topk", "features": 40, "k": 5}]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "autocast"])
@pytest.mark.parametrize("part", PARTS, ids=lambda p: "-".join(str(p.get(k)) for k in ("basis", "routing")))
def test_every_part_trains_in_every_precision(part, dtype):
    config = replace(MODEL, mlp_input=part, dtype="float32" if dtype == "autocast" else dtype)
    model = Transformer(config, seed=0, device="cpu")
    tokens = torch.arange(9)[None]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        logits, aux = model.outputs(tokens)
    (logits.float().square().sum() + aux).backward()
    assert torch.isfinite(logits).all()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
    if part["kind"] == "parity":
        state = model.state_dict()
        mean = state["blocks.0.mlp.input.moments.mean"]
        assert mean.dtype == (torch.float64 if dtype == "float64" else torch.float32)
        assert mean.count_nonzero() > 0
        assert state["blocks.0.mlp.input.moments.batches"] == 1


def test_autocast_does_not_touch_which_features_are_active():
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    for basis in ("parity", "random", "gaussian"):
        bottleneck = ParityBottleneck(ParityConfig(d=16, active=(4, 6), children=(8,), basis=basis)).eval()
        plain, _ = bottleneck(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(bottleneck(x)[0], plain)


@pytest.mark.parametrize("train", [False, True])
def test_no_tokens_are_coded_as_nothing(train):
    bottleneck = ParityBottleneck(CONFIGS[2]).train(train)
    x_hat, aux = bottleneck(torch.zeros(0, 3, 32))
    assert (x_hat.shape, aux.item()) == ((0, 3, 32), 0)
    assert (bottleneck.moments.mean == 0).all()
    assert (bottleneck.moments.square == 1).all()


def test_tokens_observed_differ_between_batches_and_are_in_the_batch():
    bottleneck = ParityBottleneck(replace(CONFIGS[1], samples=4))
    for n in (1, 3, 4, 10, 17):
        seen = set()
        for batch in range(n):
            bottleneck.moments.batches.fill_(batch)
            rows = bottleneck.sample(n).tolist()
            assert len(set(rows)) == min(n, 4)
            assert all(0 <= row < n for row in rows)
            seen.update(rows)
        assert len(seen) == min(n, 4) * (n // min(n, 4))


MODEL = ModelConfig(
    vocab_size=13,
    d_model=16,
    n_ctx=12,
    layers=uniform(2, 2, 8, 24),
    positions="learned",
    mlp_input={"kind": "parity", "active": [4, 6], "children": [8]},
)


def test_a_model_shows_and_takes_edited_codes_also_while_it_generates(tmp_path):
    model = Transformer(MODEL, seed=0, device="cpu").eval()
    tokens = torch.randint(0, 13, (2, 9), generator=torch.Generator().manual_seed(0))
    recorder = Recorder({"1.mlp.code", "1.mlp.code.index"})
    plain = model(tokens, tap=recorder)
    score, index = recorder.values["1.mlp.code"], recorder.values["1.mlp.code.index"]
    assert score.shape == index.shape == (2, 9, 10)
    assert index.dtype == torch.int64
    assert torch.equal(model(tokens, tap=Patch(recorder.values)), plain)

    feature = int(index[0, 0, 7])
    steer = Tap.at(lambda site, x: torch.full_like(x, feature), {"1.mlp.code.index"})
    assert not torch.allclose(model(tokens, tap=steer), plain)
    assert generate(model, [[1, 2]], 6, tap=steer) == generate(model, [[1, 2]], 6, tap=steer, use_cache=False)

    save_model(model, tmp_path / "m")
    assert torch.equal(load_model(tmp_path / "m", device="cpu")(tokens), plain)


def test_a_config_with_a_part_equals_itself_as_json():
    config = replace(MODEL, mlp_input={"kind": "parity", "active": (4, 6), "children": (8,)})
    assert ModelConfig.from_json(config.to_json()) == config


def test_zeroing_all_scores_leaves_the_mlp_nothing_to_read():
    model = Transformer(MODEL, seed=0, device="cpu").eval()
    recorder, tokens = Recorder({"0.mlp.decoded"}), torch.arange(9)[None]
    from pellucid.core.taps import chain

    model(tokens, tap=chain(Tap.at(lambda site, x: x * 0, {"0.mlp.code"}), recorder))
    assert recorder.values["0.mlp.decoded"].abs().max() == 0


BOTH = pytest.mark.parametrize(
    "part", [MODEL.mlp_input, {"kind": "topk", "features": 144, "k": 5}], ids=["parity", "topk"]
)


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x + 1000, r"mlp.code.index: feature \d+ is not in 0..143"),
        (lambda x: x - 1000, r"mlp.code.index: feature -\d+ is not in 0..143"),
        (lambda x: x.float(), "a tap must give torch.int64 at '0.mlp.code.index', got torch.float32"),
        (lambda x: x.int(), "a tap must give torch.int64 at '0.mlp.code.index', got torch.int32"),
        (lambda x: x[..., :3], "changed the shape of '0.mlp.code.index'"),
    ],
)
def test_features_that_a_tap_cannot_give_are_named(part, change, message):
    model = Transformer(replace(MODEL, mlp_input=part), seed=0, device="cpu").eval()
    with pytest.raises(ValueError, match=message):
        model(torch.arange(5)[None], tap=Tap.at(lambda site, x: change(x), {"0.mlp.code.index"}))


@BOTH
def test_sites_of_the_code_are_listed_in_the_order_in_which_they_are_reached(part):
    model, seen = Transformer(replace(MODEL, mlp_input=part), seed=0, device="cpu").eval(), []

    def note(site, x):
        seen.append(site)
        return x

    mlp = [site for site in model.sites if ".mlp." in site and not site.endswith(".read")]
    model(torch.arange(5)[None], tap=Tap.at(note, mlp))
    assert seen == mlp
    assert model.blocks[0].mlp.input.sites == ("mlp.code.index", "mlp.code")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d": 48}, "d must be a power of two in 8..65536, got 48; the nearest is 32"),
        ({"d": 16, "children": (32,)}, r"need indices of 9 bits; d=16 has 2 t = 8"),
        (
            {"d": 16, "active": (17, 2), "children": (4,)},
            r"active\[0\] must be in 1..16, its candidates, got 17",
        ),
        (
            {"d": 16, "active": (2, 9), "children": (4,)},
            r"active\[1\] must be in 1..8, its candidates, got 9",
        ),
        ({"d": 16, "active": (2, 2, 7), "children": (4, 4)}, r"active\[2\] must be in 1..6"),
        ({"d": 16, "active": (2,), "children": (4,)}, "active needs one number for level 0"),
        ({"d": 16, "active": (2, 2), "children": (3,)}, "children must be powers of two"),
        ({"d": 16, "active": (2, 2, 2), "children": (4, 4), "routing": "flat"}, "flat routing has one level"),
        ({"d": 16, "active": (2,), "children": (), "routing": "flatt"}, "did you mean 'flat'"),
        ({"d": 16, "active": (2,), "children": (), "decay": 1.0}, "decay must be between 0 and 1, got 1.0"),
        ({"d": True}, "d must be a power of two in 8..65536, got True"),
        ({"d": 16, "active": (True, 3), "children": (4,)}, r"active\[0\] must be in 1..16, .*, got True"),
        ({"d": 16, "active": (2, True), "children": (4,)}, r"active\[1\] must be in 1..8, .*, got True"),
        ({"d": 16, "active": (2, 2), "children": (True,)}, r"children must be powers of two .*True"),
        ({"d": 16, "active": (2,), "children": (), "samples": True}, "samples must be .*, got True"),
        (
            {"d": 16, "active": (2,), "children": (), "samples": 0},
            "samples must be a positive integer, got 0",
        ),
    ],
)
def test_configs_that_cannot_be_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        ParityConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"features": 40, "k": True}, "k must be in 1..40, the number of features, got True"),
        ({"features": 40, "k": 41}, "k must be in 1..40, the number of features, got 41"),
        ({"features": True, "k": 1}, "features must be a positive integer, got True"),
        ({"features": 0, "k": 1}, "features must be a positive integer, got 0"),
    ],
)
def test_codebooks_that_cannot_be_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        TopKCodebook(16, **fields)


def test_unknown_fields_of_the_part_are_named():
    with pytest.raises(ValueError, match=r"mlp_input: .*'activ'"):
        Transformer(replace(MODEL, mlp_input={"kind": "parity", "activ": [1]}), device="cpu")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_input_that_is_not_finite_is_named(value):
    x = torch.randn(3, 16)
    x[1, 5] = value
    with pytest.raises(ValueError, match=rf"not finite: {value} at token 1, channel 5, one of 1"):
        ParityBottleneck(CONFIGS[1])(x)


def test_input_of_another_width_is_named():
    with pytest.raises(ValueError, match="the bottleneck codes 16 channels, got 8"):
        ParityBottleneck(CONFIGS[1])(torch.zeros(2, 8))
