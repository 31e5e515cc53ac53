"""What a compiled model is: equal to its program, within its bounds, of the size that it must be, with its weights known."""

import itertools
import json
import random
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from pellucid.compiled import CausalWarning, CompiledModel, CompileError, compare, compile_program, verify
from pellucid.compiled.compiler.schedule import asap
from pellucid.compiled.compiler.truth import edges_from_weights
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.rasp import (
    Undefined,
    aggregate,
    categorical,
    eq,
    indices,
    leq,
    lt,
    map,
    numerical,
    select,
    selector_width,
    tokens,
    true,
)
from pellucid.compiled.rasp.interpreter import Interpreter
from pellucid.core.checkpoint import unpack

same, before, smaller = select(tokens, tokens, eq), select(indices, indices, lt), select(tokens, tokens, lt)
prevs = select(indices, indices, leq)
length = selector_width(select(tokens, tokens, true))
reverse = aggregate(select(indices, length - 1 - indices, eq), tokens)
hist = selector_width(same)
frac_x = aggregate(prevs, numerical(tokens == "x"))
key = map(lambda count, index: (-count, index), hist, indices)
sort_freq = aggregate(select(selector_width(select(key, key, lt)), indices, eq), tokens)


def balance(opening, closing):
    return aggregate(prevs, numerical(map(lambda t: (t == opening) - (t == closing), tokens)))


def shuffle_dyck(*kinds):
    """Every kind of bracket is balanced, whatever the others do."""
    everywhere = select(indices, indices, true)
    parts = []
    for opening, closing in kinds:
        total = aggregate(
            everywhere, numerical(map(lambda t, a=opening, b=closing: (t == a) - (t == b), tokens))
        )
        below = aggregate(everywhere, numerical(balance(opening, closing) < 0))
        parts.append((total == 0) & (below == 0))
    out = parts[0]
    for part in parts[1:]:
        out = out & part
    return out


def exact(program, vocab, max_len, **options):
    """The model of a program, verified on all inputs or 3,000."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CausalWarning)
        model = compile_program(program, vocab, max_len, **options)
    found = verify(model, limit=3000)
    assert found.failures == 0, found.first_failure
    assert found.checked > 0
    assert found.max_error <= model.error_bound
    assert model.error_bound < model.margin / 2
    return model


SELECTORS = {
    "not": ~same,
    "and": same & before,
    "nor": ~same & ~before,
    "nor, as not or": ~(same | before),
    "or of one pair of s-ops": same | smaller,
    "or of disjoint selects": smaller
    | select(map(lambda t: 10 * t, tokens), tokens, lambda k, q: k == 10 * q),
    "query or key": select(1, tokens, eq) | select(indices, 2, eq),
    "three": same & before & select(indices, indices, lambda k, q: k % 2 == q % 2),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SELECTORS)
def test_a_boolean_combination_is_one_head(name, causal):
    for program in (
        selector_width(SELECTORS[name]),
        aggregate(SELECTORS[name], numerical(indices), default=-1),
    ):
        model = exact(program, [1, 2, 3], 5, causal=causal)
        assert sum(len(heads) for heads in model.summary()["heads"]) == 1


def test_the_rank_one_disjunction_of_the_lemma_is_one_head():
    either = select(1, tokens, eq) | select(3, indices, eq)  # two conditions on the query alone
    model = exact(aggregate(either, numerical(indices)), [1, 2, 3], 5)
    assert sum(len(heads) for heads in model.summary()["heads"]) == 1


def test_the_lemmas_counterexample_is_refused_with_what_to_write_instead():
    with pytest.raises(CompileError, match="no one head's attention") as refused:
        compile_program(aggregate(same | before, numerical(tokens)), [1, 2], 4)
    text = str(refused.value)
    assert "select(tokens, tokens, eq)" in text
    assert "select(indices, indices, lt)" in text
    assert "allow_products=True" in text
    exact(aggregate(same | before, numerical(tokens)), [1, 2], 4, allow_products=True)


def test_a_disjunction_is_counted_by_inclusion_and_exclusion():
    model = exact(selector_width(same | before), [1, 2, 3], 5)
    assert sum(len(heads) for heads in model.summary()["heads"]) == 3


@pytest.mark.parametrize("causal", [False, True])
def test_none_is_a_value_of_its_own(causal):
    maybe = aggregate(same & before, numerical(tokens))
    exact(maybe, [1, -2, 3], 5, causal=causal)
    exact(map(lambda a, b: (a is None, b), maybe, tokens), [1, -2, 3], 4, causal=causal)
    exact(selector_width(select(maybe, tokens, lambda k, q: k is None)), [1, -2, 3], 4, causal=causal)
    pointers = select(indices, tokens, eq)
    twice = exact(aggregate(pointers, aggregate(pointers, indices)), [1, 2, 3, 4], 4, causal=causal)
    if not causal:
        assert twice([1, 2, 3, 4]) == [2, 3, None, None]


def test_negative_and_mixed_values_are_kept_apart():
    vocab = [1, True, 1.0, "1", None, -1, (1, 2)]
    model = exact(tokens, vocab, 3)
    assert [type(v) for v in model(vocab[:3])] == [int, bool, float]
    exact(numerical(map(lambda t: -t, tokens)), [-3, 0, 2], 4)
    exact(aggregate(prevs, numerical(tokens)) * -2 + 1, [-3, 0, 2], 4)
    exact(
        map(lambda t, f: t if f > 0.5 else "no", tokens, aggregate(prevs, numerical(tokens == 1))),
        [1, "a", None],
        4,
    )


def test_a_constant_may_be_called_tokens():
    exact(aggregate(before, numerical(map(lambda t: 7, tokens).named("tokens"))), [1, 2], 3)
    exact((indices * 0 + 1).named("indices"), [1, 2], 3)


def test_programs_that_read_no_tokens_or_compute_nothing():
    for program in (
        indices,
        length,
        tokens * 0,
        aggregate(prevs, numerical(indices)),
        map(lambda i: i % 2, indices),
    ):
        exact(program, [1, 2], 6)
        exact(program, [1, 2], 6, causal=True)


def test_nonlinear_functions_of_two_means():
    a, b = (aggregate(prevs, numerical(tokens == t)) for t in (1, 2))
    exact(map(lambda x, y: x * y, a, b) == 0, [1, 2, 3], 5)
    exact(map(lambda x, y: x > y, a, b), [1, 2, 3], 6)
    exact((a - b) * 3 + a, [1, 2, 3], 6)


def test_length_200_and_a_threshold_at_length_100_are_exact():
    for program, max_len in ((length, 200), (aggregate(prevs, numerical(tokens == "x")) > 0.6, 100)):
        model = compile_program(program, "xa", max_len)
        rng = random.Random(0)
        found = compare(model, [rng.choices("xa", k=max_len) for _ in range(100)])
        assert (found.checked, found.failures) == (100, 0)
        assert found.max_error <= model.error_bound < model.margin / 2


def test_what_float32_cannot_hold_is_refused_and_float64_can():
    program = aggregate(prevs, numerical(map(lambda t: 100_000_001 if t else 100_000_000, tokens)))
    with pytest.raises(CompileError, match=r"cannot be exact in float32.*float64"):
        compile_program(program, [False, True], 4)
    assert exact(program, [False, True], 4, dtype="float64").summary()["dtype"] == "float64"


@pytest.mark.parametrize("factor", [10**60, 10**400, Fraction(1, 10**50)])
def test_numbers_beyond_the_range_of_floats_are_refused(factor):
    with pytest.raises(CompileError, match=r"cannot be exact in float32.*beyond what its range"):
        compile_program(numerical(indices) * factor, "ab", 4)


def test_a_batch_of_mixed_lengths_equals_one_at_a_time():
    model = compile_program(reverse, "abc", 9)
    rng = random.Random(1)
    sequences = [rng.choices("abc", k=rng.randrange(10)) for _ in range(300)]
    assert model.batch(sequences) == [model(s) for s in sequences] == [s[::-1] for s in sequences]


# Causality.


def test_a_causal_model_equals_the_causal_interpreter_and_a_warning_names_what_is_lost():
    with pytest.warns(CausalWarning, match="everything"):
        model = compile_program(
            selector_width(select(indices, indices, true).named("everything")), "ab", 5, causal=True
        )
    assert model("abab") == [1, 2, 3, 4]
    assert verify(model).failures == 0


@pytest.mark.parametrize("name", [name for name, case in PROGRAMS.items() if not case.causal])
def test_no_program_that_looks_ahead_is_compiled_causally_in_silence(name):
    case, n = PROGRAMS[name], min(4, PROGRAMS[name].max_len)

    def outputs(causal):
        interpreter = Interpreter(case.program, causal=causal)
        for row in itertools.product(case.vocab[:3], repeat=n):
            try:
                yield interpreter([row])
            except Undefined:
                yield None

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CausalWarning)
        compile_program(case.program, case.vocab, n, causal=True)
    assert caught or list(outputs(False)) == list(outputs(True))


def test_a_program_that_looks_back_only_is_not_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_program(aggregate(prevs, numerical(tokens == "a")), "ab", 5, causal=True)
        compile_program(selector_width(same & before), "ab", 5, causal=True)
        compile_program(selector_width(~select(indices, indices, lambda k, q: k >= q)), "ab", 5, causal=True)


# Sizes: (program, vocabulary, length): the peer's width, layers, heads, parameters (google-deepmind/tracr at 9ce2b8c).
PEER = {
    "frac_prevs": (frac_x, "xabc", 5, (14, 2, 1, 1108)),
    "hist": (hist, "abcd", 5, (19, 1, 1, 716)),
    "reverse": (reverse, "abcd", 5, (43, 4, 1, 19_700)),
    "sort_freq": (sort_freq, "abcd", 5, (66, 5, 1, 64_122)),
    "shuffle_dyck2": (shuffle_dyck("()", "[]"), "()[]", 5, (55, 8, 4, 246_884)),
    "shuffle_dyck3": (shuffle_dyck("()", "[]", "{}"), "()[]{}", 6, (73, 9, 6, 725_253)),
}


@pytest.mark.parametrize("name", PEER)
def test_models_are_no_larger_than_the_peers(name):
    program, vocab, max_len, (width, layers, heads, parameters) = PEER[name]
    model = exact(program, vocab, max_len)
    size = model.summary()
    optional = sum("None" in v["values"] for v in model.truth["variables"])
    assert size["residual width"] <= width + optional
    assert size["layers"] <= layers
    assert max(len(h) for h in size["heads"]) <= heads
    assert size["parameters"] <= parameters


def test_reuse_and_a_narrow_schedule_narrow_the_stream_and_stay_exact():
    for name, part in (("shuffle_dyck2", 0.5), ("sort_freq", 0.75)):
        program, vocab, max_len, _ = PEER[name]
        plain = exact(program, vocab, max_len).summary()
        small = exact(program, vocab, max_len, schedule="narrow", reuse=True).summary()
        assert small["residual width"] <= part * plain["residual width"]
        assert small["layers"] == plain["layers"]


def test_head_sizes_are_each_heads_own():
    model = compile_program(reverse, "abcd", 5)
    assert model.summary()["heads"] == [[2], [], [6]]


class Block:
    def __init__(self, kind, target, reads):
        self.kind, self.target, self.reads = kind, target, reads


class Held:
    def __init__(self, node):
        self.node = node


def shallowest(blocks):
    """The fewest slots of any schedule, by trying all."""
    for slots in range(2 * len(blocks) + 1):
        for choice in itertools.product(range(slots), repeat=len(blocks)):
            where = {b.target.node: s for b, s in zip(blocks, choice, strict=True)}
            fits = all(s % 2 == (b.kind == "mlp") for b, s in zip(blocks, choice, strict=True))
            if fits and all(
                where[v.node] < where[b.target.node] for b in blocks for v in b.reads if v.node in where
            ):
                return slots
    raise AssertionError


def test_the_schedule_is_as_shallow_as_any():
    rng = random.Random(0)
    for _ in range(60):
        blocks = []
        for i in range(rng.randrange(1, 5)):
            reads = [b.target for b in blocks if rng.random() < 0.5]
            blocks.append(Block(rng.choice(["mlp", "attention"]), Held(i), reads))
        assert max(asap(blocks)) + 1 == shallowest(blocks)


# The weights.


def replay(path, sequence):
    """Logits by NumPy from the files alone: a norm-free transformer in a dozen lines."""
    config = json.loads((path / "config.json").read_text())
    w = {k: v.double().numpy() for k, v in unpack((path / "model.safetensors").read_bytes()).items()}
    meta = config["metadata"]
    ids = [len(meta["vocab"])] + [meta["vocab"].index(v) for v in sequence]
    x = w["wte.weight"][ids] + w["wpe.weight"][: len(ids)]
    for i, layer in enumerate(config["model"]["layers"]):
        if layer["heads"]:
            q, k, v = np.split(
                x @ w[f"blocks.{i}.attn.qkv.weight"].T + w[f"blocks.{i}.attn.qkv.bias"], 3, axis=1
            )
            ends = np.cumsum(layer["heads"])[:-1]
            mixes = []
            for qh, kh, vh in zip(*(np.split(a, ends, axis=1) for a in (q, k, v)), strict=True):
                logits = qh @ kh.T
                pattern = np.exp(logits - logits.max(1, keepdims=True))
                mixes.append(pattern / pattern.sum(1, keepdims=True) @ vh)
            x = x + np.concatenate(mixes, 1) @ w[f"blocks.{i}.attn.proj.weight"].T
        if layer["d_mlp"]:
            hidden = x @ w[f"blocks.{i}.mlp.fc.weight"].T + w[f"blocks.{i}.mlp.fc.bias"]
            x = (
                x
                + np.maximum(hidden, 0) @ w[f"blocks.{i}.mlp.proj.weight"].T
                + w[f"blocks.{i}.mlp.proj.bias"]
            )
    return (x @ w["head.weight"].T)[1:]


def test_the_answer_comes_from_the_weights_in_the_files(tmp_path):
    model = compile_program(sort_freq, "abcd", 5)
    model.save(tmp_path / "model")
    assert load_file  # safetensors reads the file; small matrices are stored whole
    for sequence in ("abacd", "dd", "c", "abab"):
        outputs = [model.outputs[i] for i in replay(tmp_path / "model", sequence).argmax(1)]
        assert outputs == sort_freq(sequence)


def test_a_saved_model_comes_back_with_its_values_labels_and_truth(tmp_path):
    model = compile_program(aggregate(before, numerical(tokens)), [1, -2, 3], 4)
    model.save(tmp_path / "model")
    loaded = CompiledModel.load(tmp_path / "model")
    assert (
        loaded([1, -2, 3])
        == model([1, -2, 3])
        == [None, 1, aggregate(before, numerical(tokens))([1, -2, 3])[2]]
    )
    assert loaded.labels(1) == model.labels(1)
    assert loaded.truth == json.loads(json.dumps(model.truth))
    with pytest.raises(ValueError, match="no program"):
        verify(loaded)


# The truth.


def matrices(model):
    found = {}
    for n, block in enumerate(model.transformer.blocks):
        if block.attn is not None:
            for side, w in zip("qkv", block.attn.qkv.weight.split(block.attn.width), strict=True):
                found[f"{n}.attn.{side}"] = w
            found[f"{n}.attn.out"] = block.attn.proj.weight
        if block.mlp is not None:
            found[f"{n}.mlp.in"], found[f"{n}.mlp.out"] = block.mlp.fc.weight, block.mlp.proj.weight
    return found


@pytest.mark.parametrize("options", [{}, {"schedule": "narrow", "reuse": True}], ids=["plain", "reuse"])
@pytest.mark.parametrize(
    "program", [reverse, sort_freq, aggregate(same & before, numerical(indices)), hist > 2]
)
def test_the_truths_edges_are_where_products_of_weights_are_not_zero(program, options):
    model = compile_program(program, [0, 1, 2], 5, **options)
    edges = model.truth["edges"]
    assert sorted(map_json(edges["component"])) == sorted(map_json(edges_from_weights(model.transformer)))
    for name, weight in matrices(model).items():
        assert weight.nonzero().tolist() == [list(e) for e in edges["channel"].get(name, [])], name


def map_json(items):
    return [json.dumps(i) for i in items]


def test_the_truth_and_the_weights_disagree_once_a_block_is_gone():
    model = compile_program(reverse, "abc", 4)
    with torch.no_grad():
        model.transformer.blocks[0].attn.proj.weight.zero_()
    assert len(edges_from_weights(model.transformer)) < len(model.truth["edges"]["component"])


def test_the_truth_says_who_writes_and_reads_a_variable():
    model = compile_program(reverse, "abc", 4)
    variables = {v["name"]: v for v in model.truth["variables"]}
    assert variables["tokens"]["writer"] == "embed"
    assert variables["tokens"]["readers"] == ["2.attn.v.read:0"]
    (selector,) = [s for s in model.truth["selectors"] if s["bos"] == "default"]
    assert (selector["head"], selector["keys"], selector["values"]) == ([2, 0], ["indices"], ["tokens"])
    assert json.loads(json.dumps(model.truth)) == model.truth
    for layer in range(4):
        labels = model.labels(layer)
        assert len(labels) == model.summary()["residual width"]
        assert "indices:0" in labels


def test_every_variable_is_where_the_truth_says():
    model = compile_program(sort_freq, "abc", 4)
    tokens_, _ = model.encode(["abca"])
    from pellucid import record

    for variable in model.truth["variables"]:
        site = "embed" if variable["written"] < 0 else f"{variable['written'] // 2}.resid.post"
        held = record(model.transformer, tokens_, [site])[site][0, 1:][:, variable["directions"]]
        if variable["encoding"] == "categorical":
            assert torch.allclose(held.sum(1), torch.ones(4), atol=1e-3), variable["name"]


# Bad input.


@pytest.mark.parametrize(
    ("program", "vocab", "max_len", "message"),
    [
        (5, "ab", 3, "expected a RASP expression, got 5"),
        (same, "ab", 3, "is a selector"),
        (tokens, [], 3, "vocabulary is empty"),
        (tokens, [1, [2]], 3, r"\[2\].*not hashable"),
        (tokens, [1, float("nan")], 3, "nan"),
        (tokens, [1, 1], 3, "1 twice"),
        (tokens, "ab", 0, "max_len must be a positive integer, got 0"),
        (tokens, ["BOS"], 3, "'BOS'.*vocabulary"),
        (tokens, [(1, float("nan"))], 3, "nan"),
        (hist, "ab", 10**9, "max_len 1,000,000,000 is more than can be enumerated"),
        (
            map(lambda t: 1 // t, tokens).named("inverse"),
            [0, 1],
            3,
            r"inverse fails on \(0\): ZeroDivisionError",
        ),
        (selector_width(select(tokens, tokens, lambda k, q: 1).named("odd")), [0, 1], 3, "odd.*not a bool"),
        (selector_width(select(tokens, tokens, lambda k, q: k < q)), [0, "a"], 3, "TypeError"),
    ],
)
def test_what_cannot_be_compiled_is_said_with_the_expression_and_the_value(program, vocab, max_len, message):
    with pytest.raises(ValueError, match=message):
        compile_program(program, vocab, max_len)


def test_all_problems_of_a_program_are_listed():
    first, second = (
        map(lambda t: 1 // t, tokens).named("first"),
        map(lambda t: t.missing, tokens).named("second"),
    )
    with pytest.raises(CompileError, match=r"(?s)2 problems.*first fails.*second fails"):
        compile_program(map(lambda a, b: a, first, second), [0, 1], 3)


def test_value_sets_that_are_too_large_are_refused_by_name():
    mean = numerical(tokens)
    for _ in range(3):
        mean = aggregate(prevs, mean).named("mean of means")
    with pytest.raises(CompileError, match=r"mean of means.*too many to enumerate"):
        compile_program(mean, range(10), 40)


def test_sequences_that_a_model_cannot_take_are_refused():
    model = compile_program(tokens, "ab", 3)
    for sequence, message in (
        ("abab", "at most 3"),
        ("abc", "'c' in"),
        (5, "expected a sequence"),
        ([[1]], "vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            model(sequence)
    assert model.batch(["ab", "", "bab"]) == [["a", "b"], [], ["b", "a", "b"]]
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        verify(model, limit=0)
    with pytest.raises(ValueError, match="lengths"):
        verify(model, lengths=[4])


def test_deep_and_shared_graphs_compile():
    deep = tokens
    for _ in range(2000):
        deep = map(lambda t: (t + 1) % 3, deep)
    shared = categorical(aggregate(prevs, numerical(tokens)))
    for _ in range(30):
        shared = shared + shared
    for program in (deep, shared):
        exact(program, [0, 1, 2], 3)


def test_a_joint_table_that_is_looser_than_a_domain_is_cut_to_it():
    later = (
        selector_width(prevs) - indices
    )  # always 1: known from positions alone, and not once a mean joins in
    mean = aggregate(prevs, numerical(tokens))
    exact(map(lambda a, b: (a, b > 0), later, mean), [0, 1], 3)


def test_shared_selectors_take_linear_time_and_deep_ones_are_refused():
    shared, deep = same, same
    for _ in range(30):
        shared = shared & shared
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CausalWarning)
        model = compile_program(aggregate(shared, tokens), [1, 2], 3)
    assert verify(model).failures == 0
    for _ in range(3000):
        deep = ~deep
    with pytest.raises(CompileError, match="nested too deeply"):
        compile_program(selector_width(deep), [1, 2], 3)
