"""Methods that read representations rather than rank parts: what each says, against what the program holds.

Each returns numbers by name. `score` is the one that counts: 1 is the truth, 0 chance.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pellucid.bench.labels import counterfactual, directions, labels, presence, selected, site_after, variable
from pellucid.bench.metrics import Number
from pellucid.bench.subject import Subject
from pellucid.compiled.model import CompiledModel
from pellucid.lab.attend import attend, common_rules
from pellucid.lab.das import NothingToSwap, das, overlap
from pellucid.lab.decodability import Decodability
from pellucid.lab.dictionary import learn_dictionary, recovery
from pellucid.lab.lens import lens
from pellucid.lab.probe import probe
from pellucid.lab.shapley import shapley

READ = 0.9
"""From here on a feature counts as read at a site."""
SAME = 1e-6
"""Heads whose agreements are this near cannot be told apart."""

Numbers = dict[str, Number]


class DoesNotApply(ValueError):
    """A method has nothing to say of this model."""


def told_apart(found: Tensor, states: list[list[str]]) -> Numbers:
    """Of (feature, site) cells where the feature is, the share that is `found`, less that of cells where it is not."""
    cells = [
        (bool(f), s)
        for row, kinds in zip(found, states, strict=True)
        for f, s in zip(row, kinds, strict=True)
    ]
    present = [f for f, s in cells if s == "present"]
    absent = [f for f, s in cells if s == "absent"]
    if not present or not absent:
        raise DoesNotApply("no feature is present somewhere and absent elsewhere")
    hit, false = sum(present) / len(present), sum(absent) / len(absent)
    return {"score": hit - false, "present_found": hit, "absent_found": false}


def states_of(subject: Subject, table: Decodability) -> list[list[str]]:
    """The truth of each cell of a table."""
    known = presence(subject.source, subject.task.pairs(128, seed=0))
    at = {
        (feature, site): state
        for feature, row in zip(known.features, known.states, strict=True)
        for site, state in zip(known.sites, row, strict=True)
    }
    return [[at[feature, site] for site in table.sites] for feature in table.features]


def logit_lens(subject: Subject, *, pairs: int, seed: int) -> Numbers:
    """Is the output there, says the unembedding at every layer?"""
    model = known(subject)
    table = lens(subject.model, subject.task, pairs=pairs, seed=seed)
    output = model.truth["output"]
    renamed = Decodability((output,), table.sites, table.scores)
    return told_apart(table.scores > READ, states_of(subject, renamed))


def linear_probes(subject: Subject, *, pairs: int, seed: int) -> Numbers:
    """Which variables are where, says what a linear probe can read; with and without its control."""
    known(subject)
    table = probe(subject.model, subject.task, partial(labels, subject.source), pairs=2 * pairs, seed=seed)
    states = states_of(subject, table)
    found = told_apart(table.scores > READ, states)
    selective = told_apart(table.selectivity > READ / 2, states)
    return {**found, "score_selectivity": selective["score"]}


def attention_patterns(subject: Subject, *, pairs: int, seed: int) -> Numbers:
    """Which head attends by which selector, says the likeness of patterns; rules that are none of the program's are decoys."""
    known(subject)
    rules = {
        f"{layer}:{head}": (layer, head) for layer, head in selected(subject.source, subject.task.pairs(1))
    }

    def candidates(batch: Any) -> dict[str, Tensor]:
        own = selected(subject.source, batch)
        return {**{name: own[place] for name, place in rules.items()}, **common_rules(batch)}

    if not rules:
        raise DoesNotApply("the program selects nothing")
    found = attend(subject.model, subject.task, candidates, pairs=pairs, seed=seed)
    right = []
    for name, place in rules.items():
        row = found.agreement[found.heads.index(place)]
        mine, best = row[found.rules.index(name)], row[found.rules.index(found.match[place])]
        right.append(bool(mine >= best - SAME))
    share, chance = sum(right) / len(right), 1 / len(found.rules)
    return {"score": (share - chance) / (1 - chance), "heads_right": share}


def gradient_times_input(subject: Subject, *, pairs: int, seed: int) -> Numbers:
    """Which tokens matter, says gradient times input, against exact Shapley values."""
    found = shapley(subject.model, subject.task, pairs=max(1, pairs // 8), seed=seed)
    return {"score": found.correlation, "same_top": found.same_top, "passes": found.passes}


def alignment(subject: Subject, *, pairs: int, seed: int) -> Numbers:
    """Where is a variable, says distributed alignment search: the first that a head or an MLP computes and the output is not."""
    model = known(subject)
    inner = [v for v in model.truth["variables"] if v["written"] >= 0 and v["name"] != model.truth["output"]]
    if not inner:
        raise DoesNotApply("the program computes nothing but its output")
    name = inner[0]["name"]
    entry, own = variable(model, name), directions(model, name)
    own = own - own.mean(0) if entry["encoding"] == "categorical" else own[:1]
    k, d = int(torch.linalg.matrix_rank(own)), subject.model.config.d_model
    site = site_after(entry["written"])
    swap = counterfactual(subject.source, name, site)
    try:
        found = das(subject.model, subject.task, swap, site=site, k=k, pairs=pairs, seed=seed, steps=300)
    except NothingToSwap as why:
        raise DoesNotApply(str(why)) from None
    shared = overlap(found.subspace.double(), torch.linalg.svd(own.T, full_matrices=False)[0][:, :k].T)
    return {
        "score": (shared - k / d) / (1 - k / d) if k < d else None,
        "swaps_right": found.test,
        "without_swap": found.idle,
        "control": found.control,
        "active": found.active,
        "dormant": found.dormant,
    }


def dictionary(subject: Subject, *, pairs: int, seed: int) -> Numbers:
    """Which directions hold features, says a TopK dictionary of the last residual stream, against the program's own."""
    model = known(subject)
    last = max(0, 2 * len(subject.model.config.layers) - 1)
    batch = subject.task.pairs(4 * pairs, seed=seed)
    varying = [
        v["name"]
        for v, states in zip(model.truth["variables"], presence(subject.source, batch).states, strict=True)
        if "present" in states and (v["gone"] is None or v["gone"] > last)
    ]
    own = torch.cat([directions(model, name) for name in varying]).float()
    options: Any = {"pairs": 4 * pairs, "seed": seed, "size": 2 * len(own), "k": max(1, len(varying))}

    def recall(frozen: str) -> tuple[float, float]:
        learned = learn_dictionary(subject.model, subject.task, frozen=frozen, steps=600, **options)
        found = recovery(learned, own)
        return found.recall, float(found.cosines.mean())

    (free, cosine), (random, _) = recall("nothing"), recall("decoder")
    return {"score": (free - random) / (1 - random), "frozen_decoder_recall": random, "mean_cosine": cosine}


def known(subject: Subject) -> CompiledModel:
    """The compiled model of the subject's own directions and heads. Raises `DoesNotApply` where these are not known."""
    if not subject.labelled:
        raise DoesNotApply(f"where variables are in a model of the {subject.tier} tier is not known")
    return subject.compiled
