"""Scores against truth. In rankings ties are broken against the method; None where a number has no meaning."""

from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import mean

import numpy as np
import torch
from torch import Tensor

Number = float | None


def auroc(scores: Tensor, truth: Tensor) -> Number:
    """The chance that a true part outranks another, ties counted as misses. None if all or none are true."""
    positive, negative = scores[truth], scores[~truth]
    if not len(positive) or not len(negative):
        return None
    return (positive[:, None] > negative).double().mean().item()


def average_precision(scores: Tensor, truth: Tensor) -> Number:
    """The mean over true parts of the precision down to each; a tie puts the others first. None if all or none are true."""
    if not bool(truth.any()) or bool(truth.all()):
        return None
    order = np.lexsort((truth.numpy(), -scores.double().numpy()))
    hits = truth.numpy()[order]
    precision = hits.cumsum() / np.arange(1, len(hits) + 1)
    return float(precision[hits].mean())


def precision_at_size(scores: Tensor, truth: Tensor) -> Number:
    """Of as many top parts as are true, the share that is; a tie puts the others first. None if all or none are true."""
    n = int(truth.sum())
    if n in (0, len(truth)):
        return None
    order = np.lexsort((truth.numpy(), -scores.double().numpy()))
    return float(truth.numpy()[order][:n].mean())


def top(scores: Tensor, n: int) -> Tensor:
    """The `n` highest, as a bool mask; among equals the first."""
    kept = torch.zeros(len(scores), dtype=torch.bool)
    kept[scores.argsort(descending=True, stable=True)[:n]] = True
    return kept


def recall_precision(found: Tensor, truth: Tensor) -> tuple[Number, Number]:
    """Of the true parts the share that is found, of the found the share that is true."""
    both = int((found & truth).sum())
    return (
        both / int(truth.sum()) if bool(truth.any()) else None,
        both / int(found.sum()) if bool(found.any()) else None,
    )


def jaccard(a: Tensor, b: Tensor) -> float:
    """Shared parts over all parts of two sets; 1 for two empty ones."""
    either = int((a | b).sum())
    return int((a & b).sum()) / either if either else 1.0


def nearest(found: Tensor, circuits: Sequence[Tensor]) -> Number:
    """The Jaccard index with the nearest of some equivalent circuits."""
    return max((jaccard(found, c) for c in circuits), default=None)


def spearman(a: Tensor, b: Tensor) -> Number:
    """The rank correlation; None where either is constant."""
    from scipy.stats import spearmanr

    if len(a) < 2 or a.unique().numel() < 2 or b.unique().numel() < 2:
        return None
    return float(np.asarray(spearmanr(a.numpy(), b.numpy()))[0])


def calibration(estimated: Tensor, exact: Tensor, threshold: float) -> dict[str, Number]:
    """How right estimated effects are: median relative error and share of right signs where the exact effect is above
    `threshold`, and the rank correlation over all parts."""
    large = exact.abs() > threshold
    if not bool(large.any()):
        return {"relative_error": None, "sign": None, "spearman": spearman(estimated, exact)}
    error = ((estimated - exact).abs() / exact.abs())[large]
    return {
        "relative_error": error.median().item(),
        "sign": (estimated.sign() == exact.sign())[large].double().mean().item(),
        "spearman": spearman(estimated, exact),
    }


def grid(n: int, points: int = 20) -> list[int]:
    """Sizes of circuits from 0 to `n`, all of them if they are few, else `points` with the small ones denser."""
    if n <= points:
        return list(range(n + 1))
    return sorted({round(n * x) for x in np.linspace(0, 1, points + 1) ** 2} | {0, n})


def curve_areas(sizes: Sequence[int], faithfulness: Sequence[float]) -> dict[str, float]:
    """CPR and CMD of a faithfulness curve, f(k) = (m(k) - m(nothing)) / (m(model) - m(nothing)), over the share of parts
    kept: the area under f, and that between f and 1 (Mueller et al. 2025, MIB)."""
    x, f = np.array(sizes) / max(sizes), np.array(faithfulness)
    return {"cpr": float(np.trapezoid(f, x)), "cmd": float(np.trapezoid(np.abs(1 - f), x))}


def between(items: Sequence, compare: Callable[..., Number]) -> Number:
    """The mean of `compare` over all pairs of runs with different seeds: stability."""
    found = [x for a, b in combinations(items, 2) if (x := compare(a, b)) is not None]
    return mean(found) if found else None


def bootstrap(values: Sequence[float], draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """A 95% interval of the mean over programs, by resampling programs."""
    drawn = np.random.default_rng(seed).choice(np.array(values), (draws, len(values))).mean(1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def sign_flip_p(differences: Sequence[float], draws: int = 10_000, seed: int = 0) -> float:
    """The chance of a mean paired difference as large as this, if signs were random (two-sided): all sign flips where
    they are at most `draws`, else so many drawn."""
    d = np.array(differences, dtype=float)
    if len(d) and 2 ** len(d) <= draws:
        signs = 1 - 2 * ((np.arange(2 ** len(d))[:, None] >> np.arange(len(d))) & 1)
    else:
        signs = np.random.default_rng(seed).choice([-1, 1], (draws, len(d)))
    means = np.abs((signs * d).mean(1)) if len(d) else np.zeros(1)
    return float((means >= abs(d.mean() if len(d) else 0.0) - 1e-12).mean())
