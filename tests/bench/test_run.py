"""Running the benchmark: failures stay in the table, results are kept, and everything repeats."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint

import pytest
import torch

from pellucid.bench import cache, run, squeezed
from pellucid.bench import methods as registry
from pellucid.bench.methods import Method, Reading, find_methods, pick_methods
from pellucid.bench.readings import logit_lens
from pellucid.bench.report import markdown, page, sheets, write_leaderboard
from pellucid.bench.run import BenchConfig, Cell, bench, describe, read_cell, save_results
from pellucid.bench.subject import make_subject
from pellucid.cli import main
from pellucid.core.edges import edge_table
from pellucid.core.record import record
from pellucid.lab.baselines import random
from pellucid.lab.patch import patch_edges
from pellucid.lab.scores import Scores

FAST = BenchConfig(
    methods=("patch-edges", "patch-nodes"), programs=("hist", "shift"), tiers=("raw",), pairs=8
)


def shape(model):
    return edge_table(model.config).exists.shape


def raises(model, task, *, pairs, seed, ablation):
    raise RuntimeError("no luck with <b>this</b> program")


def wrong_universe(model, task, *, pairs, seed, ablation):
    return Scores("edge", torch.zeros(3), 1.0)


def not_a_number(model, task, *, pairs, seed, ablation):
    return Scores("edge", torch.full(shape(model), torch.nan), 1.0)


@pytest.fixture
def add(monkeypatch):
    """Methods of a user's own, as if by entry points."""

    def adds(**functions):
        class Point:
            def __init__(self, name, value):
                self.name, self.value = name, value

            def load(self):
                return self.value

        points = [Point(name.replace("_", "-"), f) for name, f in functions.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: points)

    return adds


def test_a_method_that_fails_is_reported_with_its_reason_and_the_rest_goes_on(tmp_path, add):
    add(raises=raises, wrong_universe=wrong_universe, not_a_number=not_a_number)
    config = BenchConfig(
        methods=("raises", "wrong-universe", "not-a-number", "patch-edges"),
        programs=("hist",),
        tiers=("raw",),
        pairs=4,
    )
    found = {c.method: c for c in bench(config, tmp_path)}
    assert found["raises"].failed == "RuntimeError: no luck with <b>this</b> program"
    assert "must have shape" in found["wrong-universe"].failed
    assert "not finite" in found["not-a-number"].failed
    assert found["patch-edges"].failed is None
    assert found["patch-edges"].metrics["auroc_E"] == 1
    tables = write_leaderboard(list(found.values()), tmp_path)
    text, html = markdown(tables), page(tables)
    assert "no luck with" in text
    assert "<b>this</b>" not in html
    assert "&lt;b&gt;this&lt;/b&gt;" in html


def one(program="hist", **options):
    return BenchConfig(programs=(program,), tiers=("raw",), pairs=4, **options)


def test_what_a_method_does_to_its_model_harms_no_other(tmp_path, add):
    def vandal(model, task, *, pairs, seed, ablation):
        scores = patch_edges(model, task, pairs=pairs, seed=seed, ablation=ablation)
        with torch.no_grad():
            for p in model.requires_grad_(True).parameters():
                p.zero_()
        return scores

    add(vandal=vandal)
    alone = bench(one(methods=("patch-edges",)), tmp_path / "alone")
    first, after = bench(one(methods=("vandal", "patch-edges")), tmp_path / "both")
    assert first.metrics == after.metrics == alone[0].metrics


def test_a_method_that_exits_stops_nothing(tmp_path, add):
    def exits(model, task, *, pairs, seed, ablation):
        sys.exit(3)

    add(exits=exits)
    after, first = bench(one(methods=("exits", "random")), tmp_path)
    assert first.failed == "SystemExit: 3"
    assert after.failed is None


@pytest.mark.parametrize("where", ["make_subject", "describe"])
def test_a_model_that_fails_is_reported_with_its_reason_and_the_rest_goes_on(tmp_path, monkeypatch, where):
    whole = getattr(run, where)

    def fails(*args):
        if "hist" in (args[0], getattr(args[0], "program", None)):
            raise MemoryError("too large")
        return whole(*args)

    monkeypatch.setattr(run, where, fails)
    config = BenchConfig(methods=("random", "degree"), programs=("hist", "copy"), tiers=("raw",), pairs=4)
    found = bench(config, tmp_path)
    assert {(c.program, c.failed) for c in found} == {("hist", "MemoryError: too large"), ("copy", None)}
    (failed,) = (s for s in sheets(found) if s.title == "What failed")
    assert [row[1:] for row in failed.rows] == [
        ("hist", name, "0", "MemoryError: too large") for name in ("random", "degree")
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_wish_to_stop_is_none_of_a_model_s_failures(tmp_path, monkeypatch, error):
    def stops(*args):
        raise error

    monkeypatch.setattr(run, "make_subject", stops)
    with pytest.raises(error):
        bench(one(methods=("random",)), tmp_path)


def test_what_fails_is_tried_again(tmp_path, add):
    """A package that was missing may have come since; the method's own file says nothing of it."""
    ready = []

    def waits(model, task, *, pairs, seed, ablation):
        if not ready:
            raise ImportError("install it first")
        return patch_edges(model, task, pairs=pairs, seed=seed, ablation=ablation)

    add(waits=waits)
    assert bench(one(methods=("waits",)), tmp_path)[0].failed == "ImportError: install it first"
    ready.append(True)
    assert bench(one(methods=("waits",)), tmp_path)[0].failed is None


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_truth_file_is_written_anew(tmp_path, text):
    bench(one(methods=("random",)), tmp_path)
    file = tmp_path / "raw" / "hist" / "truth.json"
    whole = file.read_text()
    file.write_text(text)
    bench(one(methods=("random",)), tmp_path)
    assert file.read_text() == whole


def test_scores_of_other_types_are_refused_or_mean_what_they_say(tmp_path, add):
    def gives(values, **options):
        def method(model, task, *, pairs, seed, ablation):
            return Scores("edge", values(torch.rand(shape(model), generator=torch.manual_seed(0))), **options)

        return method

    def kept_as_numbers(model, task, *, pairs, seed, ablation):
        return Scores("edge", torch.zeros(shape(model)), 1.0, kept=torch.ones(shape(model), dtype=torch.long))

    def other_name(model, task, *, pairs, seed, ablation):
        return Scores("Edges", torch.zeros(shape(model)), 1.0)

    add(
        plain=gives(lambda x: x, passes=1.0),
        attached=gives(lambda x: x.requires_grad_(), passes=1.0),
        costless=gives(lambda x: x, passes=None),
        array=gives(lambda x: x.numpy(), passes=1.0),
        kept_as_numbers=kept_as_numbers,
        other_name=other_name,
        nothing=lambda *_, **__: None,
    )
    names = ("plain", "attached", "costless", "array", "kept-as-numbers", "other-name", "nothing")
    found = {c.method: c for c in bench(one(methods=names), tmp_path)}
    assert found["plain"].metrics == found["attached"].metrics == found["costless"].metrics
    assert found["array"].failed == "ValueError: values must be a tensor, got ndarray"
    assert found["kept-as-numbers"].failed == "ValueError: kept must be bool, got torch.int64"
    assert "unknown universe 'Edges'" in found["other-name"].failed
    assert "must return Scores, got NoneType" in found["nothing"].failed
    alone = [found["costless"]]
    board = write_leaderboard(alone, tmp_path)[0]
    assert dict(zip(board.head, board.rows[0], strict=True))["passes"] == ""


def test_partial_functions_and_callable_objects_are_methods_too(tmp_path, add):
    class Finds:
        def __call__(self, model, task, **options):
            return patch_edges(model, task, **options)

    add(partly=partial(patch_edges), finds=Finds())
    config = one(methods=("patch-edges", "partly", "finds"))
    a, b, c = bench(config, tmp_path)
    assert a.metrics == b.metrics == c.metrics


def test_an_entry_point_that_does_not_load_fails_with_the_reason_and_the_rest_goes_on(
    monkeypatch, tmp_path, add
):
    class Broken:
        name, value = "broken", "package:method"

        def load(self):
            raise AttributeError("no such thing")

    monkeypatch.setattr(registry, "entry_points", lambda group: [Broken()])
    found = {c.method: c for c in bench(one(methods=("broken", "random")), tmp_path)}
    assert found["broken"].failed == "ImportError: cannot be loaded from package:method: no such thing"
    assert found["random"].failed is None
    add(number=3)
    assert find_methods()["number"].meaning == "cannot be loaded from 3: 3 is no function"


def test_a_package_can_add_a_reading_and_a_method_with_options(tmp_path, add):
    add(lens=Reading("other", logit_lens), nodes=Method("nodes", random, {"universe": "node"}))
    lens, nodes = bench(one(methods=("lens", "nodes")), tmp_path)
    assert (lens.method, lens.universe, nodes.method, nodes.universe) == ("lens", "reading", "nodes", "node")


def test_what_is_named_twice_is_run_once():
    config = BenchConfig(
        methods=("eap", "eap"), programs=("hist", "hist"), tiers=("raw", "raw"), seeds=(0, 0)
    )
    assert (config.methods, config.programs, config.tiers, config.seeds) == (
        ("eap",),
        ("hist",),
        ("raw",),
        (0,),
    )


def test_a_method_that_does_not_apply_is_listed_with_its_reason(tmp_path):
    cells = bench(replace(one("shift", methods=("das", "random")), seeds=(0, 1)), tmp_path)
    (sheet,) = [s for s in sheets(cells) if s.title == "Does not apply"]
    assert sheet.rows == (("raw", "shift", "das", cells[-1].skipped),)
    assert "nothing but its output" in (cells[-1].skipped or "")


def test_reasons_are_text_in_markdown_too():
    reason = "RuntimeError: <script>a|b\nc"
    text = markdown(sheets([Cell(program="p", tier="raw", method="m", seed=0, key="", failed=reason)]))
    assert "&lt;script>a\\|b c" in text


def test_a_compressed_model_is_kept_with_its_certificate_or_not_at_all(tmp_path, monkeypatch):
    compiled = make_subject("copy", "raw").compiled
    monkeypatch.setenv("PELLUCID_CACHE", str(tmp_path))
    monkeypatch.setattr(squeezed, "squeeze", lambda model: (model, {"holds": object()}))
    with pytest.raises(TypeError, match="not JSON serializable"):
        squeezed.squeezed(compiled)
    assert list((tmp_path / "bench").iterdir()) == []
    monkeypatch.setattr(squeezed, "squeeze", lambda model: (model, {"holds": True}))
    assert squeezed.squeezed(compiled)[1] == {"holds": True}


def test_results_are_kept_and_a_changed_method_is_run_again(tmp_path, add):
    calls = []

    def counted(model, task, *, pairs, seed, ablation):
        calls.append(seed)
        return patch_edges(model, task, pairs=pairs, seed=seed, ablation=ablation)

    add(counted=counted)
    config = BenchConfig(methods=("counted",), programs=("hist",), tiers=("raw",), seeds=(0, 1), pairs=4)
    first = bench(config, tmp_path)
    assert calls == [0, 1]
    assert bench(config, tmp_path) == first
    assert calls == [0, 1]
    file = tmp_path / "raw" / "hist" / "resample-4" / "counted-1.json"
    file.write_text(file.read_text()[:40])  # a file cut short is no result
    assert [c.metrics for c in bench(config, tmp_path)] == [c.metrics for c in first]
    assert calls == [0, 1, 1]
    for other in (replace(config, pairs=5), replace(config, ablation="mean")):
        bench(other, tmp_path)
    assert calls == [0, 1, 1, 0, 1, 0, 1]
    bench(config, tmp_path)  # results of other configurations lie beside it
    assert len(calls) == 7


def test_a_leaderboard_is_of_all_that_earlier_calls_made_by_the_same_code(tmp_path, add):
    add(counted=patch_edges)
    first = bench(one(methods=("random", "counted")), tmp_path)
    second = bench(one("shift", methods=("random",), seeds=(0, 1)), tmp_path)
    other = replace(one(methods=("random",)), ablation="mean")
    third = bench(other, tmp_path)
    assert run.stored(tmp_path, one()) == [*second, *first]
    assert run.stored(tmp_path, other) == third
    place = tmp_path / "raw" / "hist" / "resample-4"
    (place / "random-0.json").write_text("{")
    add(counted=raises)
    assert run.stored(tmp_path, one()) == second
    command = [
        "bench",
        "--out",
        str(tmp_path),
        "--programs",
        "hist",
        "--methods",
        "random",
        "--tiers",
        "raw",
        "--pairs",
        "4",
    ]
    main(command)
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert [(c["program"], c["seed"]) for c in cells] == [("shift", 0), ("shift", 1), ("hist", 0)]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_run_whose_parent_is_stopped_ends_with_its_workers_and_goes_on_later(tmp_path, stop):
    command = [sys.executable, "-m", "pellucid", "bench", "--out", str(tmp_path), "--methods", "random", "das",
               "--programs", "sort_freq", "induction", "--tiers", "raw", "--jobs", "2", "--seeds", "3"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        while not (kept := list(tmp_path.glob("raw/*/*/random-2.json"))):
            assert parent.poll() is None
            time.sleep(0.1)
        parent.send_signal(stop)
        parent.communicate(timeout=10)  # until the last worker, which has its end of the pipe, is gone
    assert parent.returncode != 0
    assert not (tmp_path / "results.json").exists()
    before = kept[0].stat().st_mtime_ns
    subprocess.run(command, check=True, capture_output=True)
    assert kept[0].stat().st_mtime_ns == before
    cells = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert len(cells) == 2 * 2 * 3
    assert not [c["failed"] for c in cells if c["failed"]]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A user's package: `method` imports `near`, which imports `far`; `apart` is imported by none."""
    files = {
        "method": "from . import near\ndef flow(): return near.f()\n",
        "near": "def f():\n    from theirs.far import g\n    return g()\n",
        "far": "from pellucid.lab.patch import patch_edges\ndef g(): return 1\n",
        "apart": "def h(): return 1\n",
        "__init__": "",
    }
    home = tmp_path / "theirs"
    home.mkdir()
    for name, text in files.items():
        (home / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield home
    for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
        del sys.modules[name]


def version_of(function):
    """As another process would see it."""
    cache.parsed.cache_clear()
    return cache.code_of(function)


def test_a_version_follows_all_that_a_method_imports_and_nothing_else(package):
    flow = importlib.import_module("theirs.method").flow
    first = version_of(flow)
    for name, changes in {"method": True, "near": True, "far": True, "apart": False}.items():
        file = package / f"{name}.py"
        text = file.read_text()
        file.write_text(f"# said otherwise\n\n{text}")
        assert version_of(flow) == first
        file.write_text(f"{text}\nmore = 1\n")
        assert (version_of(flow) != first) == changes
        file.write_text(text)
    assert version_of(flow) == first


@pytest.mark.parametrize(
    ("module", "changes"),
    [
        ("pellucid.lab.patch", True),
        ("pellucid.lab.fills", True),
        ("pellucid.bench.score", True),
        ("pellucid.bench.truth", True),
        ("pellucid.core.transformer", True),
        ("pellucid.lab.acdc", False),
        ("pellucid.bench.report", False),
        ("pellucid.data.idioms", False),
    ],
)
def test_a_version_follows_the_lab_the_model_and_the_scores(monkeypatch, module, changes):
    """As if one of our files were edited."""
    method, whole = Method("x", patch_edges), cache.parsed
    first, edited = method.version, cache.source(module)
    assert edited is not None

    def parsed(file, package):
        code, imported = whole(file, package)
        return f"{code} edited" if file == edited else code, imported

    monkeypatch.setattr(cache, "parsed", parsed)
    assert (Method("x", patch_edges).version != first) == changes


def test_a_method_s_version_follows_its_options_and_file():
    one, other = Method("x", patch_edges), Method("x", patch_edges, {"steps": 3})
    assert one.version != other.version
    assert one.version == Method("x", patch_edges).version
    assert one.version != Method("x", raises).version
    assert one.meaning.startswith("The exact effect")


def test_two_methods_of_one_name_are_refused(add):
    add(patch_edges=raises)
    with pytest.raises(
        ValueError, match=r"two methods are called 'patch-edges': .* and one of Pellucid's own"
    ):
        find_methods()


def test_two_packages_with_methods_of_one_name_are_both_named(monkeypatch):
    points = [EntryPoint("flow", f"{package}.flow:flow", registry.GROUP) for package in ("one", "other")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    monkeypatch.setattr(EntryPoint, "load", lambda self: raises)
    with pytest.raises(ValueError, match=r"'flow': other\.flow:flow and one\.flow:flow"):
        find_methods()


def test_unknown_names_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match=r"unknown method 'patch-edge'.*'patch-edges'"):
        BenchConfig(methods=("patch-edge",))
    with pytest.raises(ValueError, match="unknown program 'hits'"):
        BenchConfig(programs=("hits",))
    with pytest.raises(ValueError, match="unknown tier"):
        BenchConfig(tiers=("turned",))
    with pytest.raises(ValueError, match=r"pairs must be at least 1 and seeds at least 0, got 0 and \(0,\)"):
        BenchConfig(pairs=0)
    with pytest.raises(ValueError, match=r"got 64 and \(-1,\)"):
        BenchConfig(seeds=(-1,))
    with pytest.raises(ValueError, match="no seeds: at least one is needed"):
        BenchConfig(seeds=())
    with pytest.raises(ValueError, match="no tiers: at least one is needed"):
        BenchConfig(tiers=())
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        bench(BenchConfig(), "nowhere", jobs=0)
    assert {m.name for m in pick_methods(())} == set(find_methods())


def cells_of_a_process(out, *args, hash_seed):
    """What the command finds on `hist`, but for how long it took."""
    command = [
        sys.executable,
        "-m",
        "pellucid",
        "bench",
        "--out",
        str(out),
        "--programs",
        "hist",
        "--pairs",
        "8",
    ]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([*command, *args], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cells = json.loads((out / "results.json").read_text())["cells"]
    return [{k: v for k, v in c.items() if k != "seconds"} for c in cells]


def test_two_processes_and_another_hash_seed_give_the_same_results(tmp_path):
    options = ("--methods", *FAST.methods, "--tiers", "raw", "rotated")
    one = cells_of_a_process(tmp_path / "a", *options, hash_seed="1")
    two = cells_of_a_process(tmp_path / "b", *options, "--jobs", "2", hash_seed="2")
    assert one == two
    assert (tmp_path / "a" / "raw" / "hist" / "truth.json").read_bytes() == (
        tmp_path / "b" / "raw" / "hist" / "truth.json"
    ).read_bytes()


@pytest.mark.slow
def test_all_methods_give_the_same_results_with_another_hash_seed(tmp_path):
    one, two = (cells_of_a_process(tmp_path / x, "--tiers", "raw", hash_seed=x) for x in "12")
    assert {c["method"] for c in one} == set(find_methods())
    assert not [c["failed"] for c in one if c["failed"]]
    assert one == two


@pytest.mark.parametrize("tier", ["raw", "rotated"])
def test_the_truth_names_what_each_neuron_computes_and_what_nothing_reads(tier):
    """`inc_mod` has a neuron for each token, and one for nothing else; no part of it reads BOS."""
    subject = make_subject("inc_mod", tier)
    truth, batch = describe(subject), subject.task.pairs(8)
    active = record(subject.model, batch.tokens, ["0.mlp.act"])["0.mlp.act"] > 0.1
    assert [n["computes"] for n in truth["neurons"]] == ["inc_mod"] * 5
    for neuron in truth["neurons"]:
        here = batch.tokens == subject.compiled.vocab.values.index(int(neuron["case"]))
        assert torch.equal(active[..., neuron["neuron"]] & batch.mask, here & batch.mask)
    assert truth["unread"] == subject.compiled.truth["bos"]["directions"]


def test_cells_come_back_from_their_files(tmp_path):
    cells = bench(FAST, tmp_path)
    for cell in cells:
        file = tmp_path / cell.tier / cell.program / FAST.group / f"{cell.method}-{cell.seed}.json"
        assert read_cell(file, cell.key) == cell
        assert read_cell(file, "another") is None
    save_results(cells, FAST, tmp_path / "results.json")
    kept = json.loads((tmp_path / "results.json").read_text())
    assert [Cell.model_validate(c) for c in kept["cells"]] == cells


def cell(method, program, value, seed=0, values=(0.0, 1.0)):
    return Cell(
        program=program, tier="raw", method=method, seed=seed, key="", universe="edge", seconds=1.0, passes=2.0,
        metrics={"ap_E": value, "recall_1pc": None}, values=list(values),
    )  # fmt: skip


def test_the_leaderboard_is_a_mean_over_programs_of_means_over_seeds():
    cells = [cell("a", "p", 1.0), cell("a", "p", 0.0, seed=1, values=(1.0, 0.0)), cell("a", "q", 1.0),
             cell("b", "p", 0.25), cell("b", "q", 0.25)]  # fmt: skip
    board, programs, paired = sheets(cells)
    assert [row[0] for row in board.rows] == ["a", "b"]
    assert board.rows[0][1].startswith("0.75 [")
    assert dict(zip(board.head, board.rows[0], strict=True))["stability"] == "-1.00"
    assert dict(zip(board.head, board.rows[1], strict=True))["recall at 1%"] == ""
    assert programs.rows == (("p", "0.50", "0.25"), ("q", "1.00", "0.25"))
    assert paired.rows[0][:4] == ("a", "b", "0.500", "2")


def test_tiers_are_compared_and_void_truths_are_left_out_of_means():
    cells = [cell("a", "p", 1.0), cell("a", "q", 0.5)]
    other = [c.model_copy(update={"tier": "rotated"}) for c in cells]
    other[0] = other[0].model_copy(update={"certified": False})
    tables = {s.title: s for s in sheets([*cells, *other])}
    overview = tables["AP, E, edges, by tier"]
    assert overview.head == ("method by tier", "raw", "rotated")
    assert overview.rows == (("a", "0.75", "0.50"),)
    assert tables["Left out of the means"].rows == (("rotated", "p", "truth void"),)
