"""Linear probes: is a feature linearly readable from the residual stream, and is the probe what knows it?

Classes are read by logistic regression, numbers by ridge regression. Control labels as in Hewitt and Liang (2019).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pellucid.core.sites import stream_sites
from pellucid.core.transformer import Transformer
from pellucid.lab.decodability import Decodability, streams
from pellucid.tasks.task import Pairs, Task

Labels = Callable[[Any], dict[str, Tensor]]
"""A batch -> for each feature (b, t): integers are classes, and -1 no label; floats are numbers, and NaN no label."""


@dataclass(frozen=True)
class Rows:
    """Labelled positions: the stream at each site, the labels, and each position's token and place as one number."""

    streams: dict[str, np.ndarray]
    labels: np.ndarray
    kinds: np.ndarray


def probe(
    model: Transformer,
    task: Task,
    labels: Labels,
    *,
    pairs: int = 128,
    seed: int = 0,
    rows: int = 1000,
    strength: float = 100.0,
) -> Decodability:
    """How well a linear probe reads each feature at each site of the residual stream, on inputs that it was not fitted to.

    Classes score balanced accuracy, (accuracy - 1/n) / (1 - 1/n) for the n classes that occur; numbers R^2, about the test mean and
    not below 0. Each probe is fitted to at most `rows` positions, with L2 penalty |w|^2 / (2 `strength`) beside the summed
    loss. The control draws a label for each token at each position, from those of the feature.
    Raises `ValueError` where a feature has labels in no position, `ImportError` without scikit-learn.
    """
    found = [gather(model, task, labels, pairs, seed, split, rows) for split in ("train", "test")]
    sites = stream_sites(model.config)
    scores, control = np.empty((2, len(found[0]), len(sites)))
    for number, name in enumerate(found[0]):
        train, test = found[0][name], found[1][name]
        drawn = draw_control(train, test, np.random.default_rng([seed, number]))
        for column, site in enumerate(sites):
            x = train.streams[site], test.streams[site]
            scores[number, column] = fit_and_score(*x, train.labels, test.labels, strength)
            control[number, column] = fit_and_score(*x, drawn[0], drawn[1], strength)
    return Decodability(tuple(found[0]), sites, torch.from_numpy(scores), torch.from_numpy(control))


def gather(
    model: Transformer, task: Task, labels: Labels, pairs: int, seed: int, split: str, rows: int
) -> dict[str, Rows]:
    """For each feature, at most `rows` of the positions that have a label."""
    batch = task.pairs(pairs, seed=seed, split=split).to(model.device)
    stream = {site: x[batch.mask].double().cpu().numpy() for site, x in streams(model, batch).items()}
    kinds = position_kinds(batch)
    out = {}
    for name, label in labels(batch).items():
        label = label[batch.mask].cpu().numpy()
        there = np.flatnonzero(~np.isnan(label) if label.dtype.kind == "f" else label >= 0)
        if not len(there):
            raise ValueError(f"feature {name!r} has a label in no position of the {split} inputs")
        rng = np.random.default_rng([seed, len(out)])
        some = np.sort(rng.permutation(there)[:rows])
        out[name] = Rows({s: x[some] for s, x in stream.items()}, label[some], kinds[some])
    return out


def position_kinds(batch: Pairs) -> np.ndarray:
    """For each real position a number for its token and its place."""
    places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    return (batch.tokens * batch.tokens.shape[1] + places)[batch.mask].cpu().numpy()


def draw_control(train: Rows, test: Rows, rng: np.random.Generator) -> list[np.ndarray]:
    """Labels for train and test rows: one for each token at each place, drawn from the train labels."""
    kinds, place = np.unique(np.concatenate([train.kinds, test.kinds]), return_inverse=True)
    drawn = rng.choice(train.labels, len(kinds))[place]
    return np.split(drawn, [len(train.kinds)])


def fit_and_score(
    x: np.ndarray, x_test: np.ndarray, y: np.ndarray, y_test: np.ndarray, strength: float
) -> float:
    """The score on test rows of a probe fitted to the others. NaN where either has labels that never vary.

    Classes that the fit never saw are left out of the test.
    """
    linear, numbers = sklearn_linear(), y.dtype.kind == "f"
    seen = np.isin(y_test, y) | numbers
    x_test, y_test = x_test[seen], y_test[seen]
    if len(np.unique(y)) < 2 or len(np.unique(y_test)) < 2:
        return float("nan")
    if numbers:
        fitted = linear.Ridge(alpha=1 / strength).fit(x, y)
        error = np.square(fitted.predict(x_test) - y_test).sum()
        return max(0.0, 1 - error / np.square(y_test - y_test.mean()).sum())
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # where classes are separable, 200 steps do not converge, and need not
        fitted = linear.LogisticRegression(C=strength, max_iter=200, class_weight="balanced").fit(x, y)
    return balanced_accuracy(fitted.predict(x_test), y_test)


def balanced_accuracy(said: np.ndarray, right: np.ndarray) -> float:
    """Accuracy averaged over the classes that occur, scaled so that a guess scores 0 and perfection 1."""
    classes = np.unique(right)
    accuracy = np.mean([(said[right == c] == c).mean() for c in classes])
    return float((accuracy - 1 / len(classes)) / (1 - 1 / len(classes)))


def sklearn_linear() -> Any:
    """scikit-learn's linear models. Raises `ImportError` that names the extra."""
    try:
        from sklearn import linear_model
    except ImportError:
        raise ImportError("probes need scikit-learn: pip install 'pellucid[probe]'") from None
    return linear_model
