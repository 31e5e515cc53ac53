"""Compressed models of a program, for the benchmark: narrower than its variables need, so that features share directions."""

import json
from dataclasses import asdict
from typing import Any

from pellucid.bench.cache import code_of, kept_at
from pellucid.compiled.batched import CompressConfig
from pellucid.compiled.compress import compress
from pellucid.compiled.interchange import as_model, interchange, truth_holds
from pellucid.compiled.model import CompiledModel
from pellucid.core.checkpoint import content_hash
from pellucid.core.files import atomic_directory

SHARES = (0.8, 0.9)
"""Widths that are tried, as shares of the compiled width; the narrowest whose truth holds is taken."""
SEEDS = (0, 1)
CONFIG = CompressConfig(steps=1500)


def squeezed(compiled: CompiledModel) -> tuple[CompiledModel, dict[str, Any]]:
    """A compressed model of the program and its certificate, kept under a hash of everything that they depend on.

    Where no width is faithful, the most accurate model is taken, and its truth is void.
    """
    place = kept_at(code_of(squeeze), content_hash(compiled.transformer), SHARES, SEEDS, asdict(CONFIG))
    if not (place / "certificate.json").exists():
        model, certificate = squeeze(compiled)
        with atomic_directory(place) as fresh:  # other processes may make the same
            model.save(fresh)
            (fresh / "certificate.json").write_text(json.dumps(certificate) + "\n")
    model = CompiledModel.load(place, device="cpu")
    model.transformer.requires_grad_(False)
    return model, json.loads((place / "certificate.json").read_text())


def squeeze(compiled: CompiledModel) -> tuple[CompiledModel, dict[str, Any]]:
    """Compress to all widths and seeds at once, and choose."""
    full = compiled.transformer.config.d_model
    widths = sorted({max(1, round(share * full)) for share in SHARES})
    made = compress(compiled, widths, SEEDS, CONFIG)
    held = [interchange(compiled, x) for x in made]
    faithful = [i for i in range(len(made)) if made[i].scores.accuracy == 1 and truth_holds(held[i])]
    chosen = faithful[0] if faithful else max(range(len(made)), key=lambda i: made[i].scores.accuracy)
    worst = min((h.interchange for h in held[chosen] if h.interchange is not None), default=1.0)
    certificate = {
        "width": made[chosen].d,
        "of": full,
        "inputs_right": made[chosen].scores.accuracy,
        "worst_interchange": worst,
        "holds": bool(faithful),
    }
    return as_model(compiled, made[chosen], held[chosen]), certificate
