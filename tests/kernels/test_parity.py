"""Every path of the parity kernels against directions that are written out.

With TRITON_INTERPRET=1 the same tests run on the Triton path, in Triton's interpreter.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.kernels import parity

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
EXAMPLES = settings(max_examples=3 if INTERPRET else 100, deadline=None)


@pytest.fixture(autouse=INTERPRET)
def triton_path(monkeypatch):
    """CPU tensors take the path of a GPU."""
    from pellucid.kernels import parity_triton

    monkeypatch.setattr(parity, "_path", lambda name, device: getattr(parity_triton, name))


def make_masks(d, seed=0):
    """Nothing here depends on which bijection stands for the inverse."""
    draw = torch.Generator().manual_seed(seed)
    return torch.arange(d) | torch.randperm(d, generator=draw) << d.bit_length() - 1


def directions(masks):
    """(d^2, d) all of them, from the definition; float64."""
    d = len(masks)
    rows = [[(-1) ** (i & m).bit_count() for m in masks.tolist()] for i in range(d * d)]
    return torch.tensor(rows, dtype=torch.float64) / d**0.5


def best(score, mean, scale, numbers, k):
    """The k feature numbers that the rule selects, from the raw scores and moments of all features."""
    z = ((score[: len(mean)] - mean.double()) * scale.double()).abs().tolist()
    return sorted(numbers, key=lambda i: (-round(z[i], 5), i))[:k]


@st.composite
def cases(draw, largest=6):
    """masks, x of small integers (many ties) and moments that keep equal scores equal or not."""
    t = draw(st.integers(3, largest))
    masks = make_masks(1 << t, draw(st.integers(0, 99)))
    n = draw(st.sampled_from([1, 3] if INTERPRET else [1, 3, 17, 35]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randint(-2, 3, (n, 1 << t), generator=generator).float()
    plain = draw(st.booleans())

    def moments(features):
        if plain:
            return torch.zeros(features), torch.ones(features)
        mean = torch.randint(-1, 2, (features,), generator=generator).float()
        return mean, 2.0 ** torch.randint(-1, 2, (features,), generator=generator)

    return masks, x, moments


def check(found, score, mean, scale, numbers, k):
    """The selection is the rule's, of each token's `numbers`, and its scores are the raw ones."""
    index, raw = found
    assert index.tolist() == [best(s, mean, scale, own, k) for s, own in zip(score, numbers, strict=True)]
    torch.testing.assert_close(raw.double(), score.gather(1, index), atol=1e-5, rtol=1e-5)


@EXAMPLES
@given(cases(), st.data())
def test_channels_are_the_largest(case, data):
    _, x, moments = case
    d = x.shape[1]
    k, (mean, scale) = data.draw(st.integers(1, d)), moments(d)
    check(parity.select_channels(x, mean, scale, k), x.double(), mean, scale, [range(d)] * len(x), k)


@EXAMPLES
@given(cases(5), st.data())
def test_children_of_three_levels_are_the_largest(case, data):
    masks, x, moments = case
    d = x.shape[1]
    phi, t = directions(masks), d.bit_length() - 1
    score = x.double() @ phi.T
    shift, parents = t, parity.select_channels(x, *moments(d), k=data.draw(st.integers(1, min(d, 19))))[0]
    for level in range(1, 4):
        left = 2 * t - shift
        if not left:
            break
        bits = data.draw(st.integers(1, left))
        first, (mean, scale) = int(level > 1), moments(1 << shift + bits)
        own = [[p | j << shift for p in row for j in range(first, 1 << bits)] for row in parents.tolist()]
        k = data.draw(st.integers(1, min(len(own[0]), 40)))
        found = parity.select_children(x, parents, masks, mean, scale, shift=shift, children=1 << bits, k=k)
        check(found, score, mean, scale, own, k)
        raw = parity.child_scores(x, parents, masks, shift=shift, children=1 << bits)
        every = parents[..., None] | torch.arange(1 << bits) << shift
        torch.testing.assert_close(
            raw.double(), score.gather(1, every.flatten(1)).view_as(every), atol=1e-5, rtol=1e-5
        )
        shift, parents = shift + bits, found[0]


@EXAMPLES
@given(cases(5), st.data())
def test_flat_selection_is_the_largest_of_all(case, data):
    masks, x, moments = case
    d = x.shape[1]
    children = 1 << data.draw(st.integers(1, d.bit_length() - 1))
    features = d + d * children
    k, (mean, scale) = data.draw(st.integers(1, min(features, 60))), moments(features)
    score = torch.cat([x.double(), x.double() @ directions(masks)[: d * children].T], dim=1)
    found = parity.select_flat(x, masks, mean, scale, children=children, k=k)
    check(found, score, mean, scale, [range(features)] * len(x), k)


@pytest.mark.parametrize("d", [8, 16])
def test_every_direction_is_scored_and_summed(d):
    masks, draw = make_masks(d), torch.Generator().manual_seed(0)
    phi, every = directions(masks), torch.arange(d * d)
    x = torch.randn(3, d, generator=draw)
    scores = parity.score(x, every.expand(3, -1), masks)
    torch.testing.assert_close(scores.double(), x.double() @ phi.T, atol=1e-5, rtol=1e-5)
    alone = parity.decode(torch.ones(d * d, 1), every[:, None], masks)
    torch.testing.assert_close(alone.double(), phi)
    z = torch.randn(3, d * d, generator=draw)
    torch.testing.assert_close(
        parity.decode(z, every.expand(3, -1), masks).double(), z.double() @ phi, atol=1e-4, rtol=1e-4
    )


@EXAMPLES
@given(
    st.integers(3, 6 if INTERPRET else 9),
    st.integers(1, 4 if INTERPRET else 40),
    st.integers(0, 50),
    st.integers(0, 99),
)
def test_decoding_is_the_adjoint_of_scoring(t, n, k, seed):
    d, draw = 1 << t, torch.Generator().manual_seed(seed)
    masks = make_masks(d, seed)
    index = torch.randint(-1, d * d, (n, k), generator=draw)
    x, z = torch.randn(n, d, generator=draw), torch.randn(n, k, generator=draw)
    score, sums = parity.score(x, index, masks), parity.decode(z, index, masks)
    assert (score[index < 0] == 0).all()
    torch.testing.assert_close((score * z).sum(1), (sums * x).sum(1), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(score, parity.score_reference(x, index, masks), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sums, parity.decode_reference(z, index, masks), atol=1e-4, rtol=1e-4)


def calls(d, n=5, seed=0, dtype=torch.float32):
    """Each public function of its differentiable input, by name, and that input; (fast, reference)."""
    draw = torch.Generator().manual_seed(seed)
    masks, t = make_masks(d), d.bit_length() - 1

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

    def moments(features):
        return normal(features) / 9, normal(features).abs() + 0.5

    x, z = normal(n, d), normal(n, 6)
    parents = torch.rand(n, d, generator=draw).argsort(1)[:, :3]
    index = torch.randint(-1, d * d, (n, 6), generator=draw)
    channels, children, flat = moments(d), moments(4 * d), moments(5 * d)
    out = {}
    for suffix in ("", "_reference"):
        f = {name: getattr(parity, name + suffix) for name in NAMES}
        out[suffix] = {
            "select_channels": lambda x, f=f: f["select_channels"](x, *channels, 4),
            "select_children": lambda x, f=f: f["select_children"](
                x, parents, masks, *children, shift=t, children=4, k=5
            ),
            "select_flat": lambda x, f=f: f["select_flat"](x, masks, *flat, children=4, k=7),
            "score": lambda x, f=f: f["score"](x, index, masks),
            "decode": lambda z, f=f: f["decode"](z, index, masks),
        }
    return {name: (out[""][name], out["_reference"][name], z if name == "decode" else x) for name in NAMES}


NAMES = ("select_channels", "select_children", "select_flat", "score", "decode")


def value(result):
    return result[1] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("d", [8, 64])
def test_the_gradient_is_the_references(name, d):
    fast, reference, x = calls(d)[name]
    gradients = []
    for f in (fast, reference):
        leaf = x.clone().requires_grad_()
        y = value(f(leaf))
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(value(fast(x)), value(reference(x)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_differences(name):
    fast, _, x = calls(8, n=2, dtype=torch.float64)[name]
    assert torch.autograd.gradcheck(lambda x: value(fast(x)), x.requires_grad_())


def test_a_gradient_flows_through_a_gradient():
    fast, _, x = calls(8)["score"]
    (g,) = torch.autograd.grad(fast(x.requires_grad_()).square().sum(), x, create_graph=True)
    g.square().sum().backward()
    assert x.grad.abs().sum() > 0


def operators():
    """The arguments of every operator."""
    d, n = 16, 5
    masks, x = make_masks(d), torch.randn(n, d)
    parents, index = torch.randint(0, d, (n, 3)), torch.randint(-1, d * d, (n, 6))

    def moments(features):
        return torch.zeros(features), torch.ones(features)

    leaf = x.clone().requires_grad_()
    return {
        "select_channels": (leaf, *moments(d), 4),
        "select_children": (leaf, parents, masks, *moments(4 * d), 4, 4, 5),
        "select_flat": (leaf, masks, *moments(5 * d), 4, 7),
        "child_scores": (x, parents, masks, 4, 4),
        "score": (leaf, index, masks),
        "decode": (torch.randn(n, 6, requires_grad=True), index, masks),
    }


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("name", operators())
def test_operators_are_well_formed(name):
    """But for what opcheck cannot do with an integer as the first output: the next test does that."""
    checks = CHECKS if name.startswith("select") else (*CHECKS, "test_aot_dispatch_dynamic")
    operator = getattr(torch.ops.pellucid, f"parity_{name}").default
    torch.library.opcheck(operator, operators()[name], test_utils=checks)


@pytest.mark.filterwarnings("ignore")  # torch.compile raises deprecation warnings of its own
@pytest.mark.parametrize("name", NAMES)
def test_compiled_whole(name):
    """One graph, also backward; `aot_eager` is all of torch.compile but the code of other operators."""
    fast, _, x = calls(16)[name]

    def loss(x):
        return value(fast(2 * x)).square().sum()

    gradients = []
    for f in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        f(leaf).backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_shapes_on_the_meta_device():
    with torch.device("meta"):
        masks, index = torch.arange(1024), torch.arange(1024).view(64, 16)
        x, features = torch.empty(64, 1024), torch.empty(32 * 1024)
    found = parity.select_children(x, index, masks, features, features, shift=10, children=32, k=32)
    assert [(y.shape, y.device.type) for y in found] == [((64, 32), "meta")] * 2
    assert parity.decode(found[1], found[0], masks).shape == (64, 1024)
    assert parity.score(x, index, masks).shape == (64, 16)


def test_not_a_number_ranks_first_on_every_path():
    fast, reference, x = calls(16)["select_flat"]
    x[1, 3] = torch.nan
    assert torch.equal(fast(x)[0], reference(x)[0])
    fast, reference, x = calls(16)["select_channels"]
    x[1, 3] = torch.nan
    assert fast(x)[0][1, 0] == 3
    assert torch.equal(fast(x)[0], reference(x)[0])


def test_a_parent_given_twice_has_its_children_twice():
    masks, parents = make_masks(8), torch.tensor([[2, 2, 5]])
    x, moments = torch.randn(1, 8), (torch.zeros(32), torch.ones(32))
    both = [
        f(x, parents, masks, *moments, shift=3, children=4, k=12)
        for f in (parity.select_children, parity.select_children_reference)
    ]
    assert torch.equal(both[0][0], both[1][0])
    torch.testing.assert_close(both[0][1], both[1][1])


def test_no_tokens_give_nothing():
    for name, (fast, _, x) in calls(8, n=0).items():
        assert len(value(fast(x))) == 0, name


def test_as_given_or_as_a_view():
    """Strides do not matter."""
    masks = make_masks(16)
    x, index = torch.randn(16, 7).T, torch.randint(0, 256, (9, 7)).T
    moments = torch.ones(2 * 16).view(16, 2)[:, 0], torch.ones(1).expand(16)
    for a, b in zip(
        parity.select_channels(x, *moments, 3),
        parity.select_channels(x.contiguous(), *moments, 3),
        strict=True,
    ):
        assert torch.equal(a, b)
    assert torch.equal(parity.score(x, index, masks), parity.score(x.contiguous(), index.contiguous(), masks))


ones = torch.ones
WRONG = {
    "d must be a power of two in 8..65536, got x with 12": lambda x, m: parity.select_channels(
        ones(2, 12), ones(12), ones(12), 3
    ),
    "got x with 4 channels": lambda x, m: parity.score(ones(2, 4), m[:2, None], m[:4]),
    "x must be float32 or float64, got torch.bfloat16; cast it first": lambda x, m: parity.select_channels(
        x.bfloat16(), ones(8), ones(8), 3
    ),
    "z must be float32 or float64, got torch.float16": lambda x, m: parity.decode(
        x.half(), m.expand(2, 8), m
    ),
    "x must have two axes": lambda x, m: parity.select_channels(x[None], ones(8), ones(8), 3),
    "k must be in 1..8, the candidates, got 9": lambda x, m: parity.select_channels(x, ones(8), ones(8), 9),
    "k must be in 1..8, the candidates, got 0": lambda x, m: parity.select_channels(x, ones(8), ones(8), 0),
    r"mean must be torch.float32 of shape \(8,\), got torch.float32 of shape \(7,\)": (
        lambda x, m: parity.select_channels(x, ones(7), ones(8), 3)
    ),
    "scale must be torch.float32": lambda x, m: parity.select_channels(x, ones(8), ones(8).double(), 3),
    "k must be in 1..12, the candidates, got 13": lambda x, m: children(x, m, k=13),
    # above the first level, child 0 is no candidate
    "k must be in 1..9, the candidates, got 10": lambda x, m: children(x, m, shift=4, k=10),
    "children must be a power of two from 2 on, got 3": lambda x, m: children(x, m, many=3),
    "children must be a power of two from 2 on, got 1": lambda x, m: children(x, m, many=1),
    "children=4 at shift=5 do not fit": lambda x, m: children(x, m, shift=5),
    "children=4 at shift=2 do not fit": lambda x, m: children(x, m, shift=2),
    r"parents must be int64 of shape \(2, 3\), got torch.int64 of shape \(1, 3\)": lambda x, m: children(
        x, m, torch.zeros(1, 3).long()
    ),
    r"parents must be int64 of shape \(2, 3\), got torch.int32": lambda x, m: children(
        x, m, torch.zeros(2, 3).int()
    ),
    r"parents must be of shape \(2, P\), P >= 1": lambda x, m: children(x, m, torch.zeros(2, 0).long()),
    "masks must be int64": lambda x, m: children(x, m.int()),
    "parents must be in 0..7, got 0..8": lambda x, m: children(x, m, torch.tensor([[0, 1, 2], [3, 4, 8]])),
    "parents must be in 0..7, got -1..4": lambda x, m: children(x, m, torch.tensor([[0, 1, 2], [3, 4, -1]])),
    "index must be in -1..63, got 0..64": lambda x, m: parity.score(x, torch.tensor([[0], [64]]), m),
    "index must be in -1..63, got -2..0": lambda x, m: parity.decode(
        ones(2, 1), torch.tensor([[0], [-2]]), m
    ),
    r"index must be int64 of shape \(2, 3\)": lambda x, m: parity.decode(
        ones(2, 3), torch.zeros(2, 4).long(), m
    ),
    "k must be in 1..40, the candidates": lambda x, m: parity.select_flat(
        x, m, ones(40), ones(40), children=4, k=41
    ),
}


def children(x, masks, parents=None, *, shift=3, many=4, k=3):
    parents = torch.zeros(2, 3).long() if parents is None else parents
    moments = torch.ones(many << shift)
    return parity.select_children(x, parents, masks, moments, moments, shift=shift, children=many, k=k)


@pytest.mark.parametrize("message", WRONG)
def test_bad_input_is_named(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message](torch.ones(2, 8), make_masks(8))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class TestOnTheCPU:
    def test_threads_do_not_matter(self, two_threads):
        """Neither torch's own nor those of callers."""
        both = {name: fast(x) for name, (fast, _, x) in calls(64, n=77).items()}
        torch.set_num_threads(1)
        alone = {name: fast(x) for name, (fast, _, x) in calls(64, n=77).items()}
        torch.set_num_threads(2)
        for name in NAMES:
            assert torch.equal(value(both[name]), value(alone[name]))
        with ThreadPoolExecutor(4) as pool:
            jobs = [(name, pool.submit(fast, x)) for name, (fast, _, x) in calls(64, n=77).items()] * 8
            for name, job in jobs:
                assert torch.equal(value(job.result()), value(alone[name]))

    def test_a_fork_has_threads_of_its_own(self):
        code = (
            "import os, torch; from pellucid.kernels.parity import select_channels as f; torch.set_num_threads(2);"
            "x = torch.randn(64, 8); o = torch.ones(8); a = f(x, o, o, 3)[0]; pid = os.fork();"
            "same = torch.equal(a, f(x, o, o, 3)[0]);"
            "os._exit(not same) if pid == 0 else print(os.waitpid(pid, 0)[1], same)"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        assert run.stdout == "0 True\n"

    def test_without_a_place_for_its_cache_it_compiles_anew(self):
        from pellucid.kernels import parity_cpu

        space = {}
        exec("def double(x): return 2 * x", space)  # code without a file has no place either
        assert parity_cpu.kernel(space["double"])(21) == 42

    def test_the_compiler_is_imported_when_it_is_needed(self):
        code = "import sys, pellucid, pellucid.kernels.parity; print({'numba', 'llvmlite', 'triton'} & set(sys.modules))"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout == "set()\n"

    @pytest.mark.slow
    def test_all_of_this_on_the_triton_path(self):
        pytest.importorskip("triton")
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-k",
                "not TestOnTheCPU",
                __file__,
            ],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stdout[-3000:]
