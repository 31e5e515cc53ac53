"""How well a run predicts held-out text: perplexity a token, and bits a byte, which compare across tokenizers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from tokenizers import Tokenizer

from pellucid.core.checkpoint import load_model, load_tokenizer
from pellucid.core.likelihood import loglikelihoods, windows
from pellucid.core.transformer import Transformer
from pellucid.data.corpora import documents
from pellucid.data.tokenizer import end_of_text_id
from pellucid.recipes.workbench import load_recipe
from pellucid.training.progress import StepProgress

TOKENS = 65_536


@dataclass(frozen=True)
class Perplexity:
    """What a model's tokens of some documents cost, each document read on its own after one end of text."""

    documents: int
    tokens: int
    bytes: int
    """Of the text in UTF-8."""
    nats: float
    """Of all tokens together; ends of text are not predicted."""

    @property
    def perplexity(self) -> float:
        """Of a token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Does not depend on how the text is cut into tokens."""
        return self.nats / math.log(2) / self.bytes

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self) | {"perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


def perplexity(
    model: Transformer,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    tokens: int = TOKENS,
    batch_size: int = 16,
    label: str = "perplexity",
) -> Perplexity:
    """Over as many whole `texts` as make `tokens` tokens, fewer if they end before. `ValueError` if they are empty."""
    pairs, n, n_tokens, n_bytes = [], 0, 0, 0
    end = end_of_text_id(tokenizer)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        pairs += windows(ids, end, model.config.n_ctx)
        n, n_tokens, n_bytes = n + 1, n_tokens + len(ids), n_bytes + len(text.encode())
        if n_tokens >= tokens:
            break
    if not n_tokens:
        raise ValueError("there is no text to measure perplexity on")
    with StepProgress(label, len(pairs)) as bar:
        results = loglikelihoods(model, pairs, batch_size=batch_size, progress=bar.reach)
    return Perplexity(n, n_tokens, n_bytes, -math.fsum(logprob for logprob, _ in results))


def held_out(run: str | Path, sources: Sequence[str]) -> dict[str, Iterable[str]]:
    """The texts of each source: a file, or a corpus, of which the validation split is taken.

    No source is the corpora that the run at `run` was trained on.
    """
    seed = 0
    if not sources:
        data = load_recipe(run).data
        sources, seed = [corpus.name for corpus in data.corpora], data.seed
    return {
        source: [Path(source).read_text(encoding="utf-8")]
        if Path(source).is_file()
        else documents(source, "validation", seed=seed)
        for source in sources
    }


def measure(
    run: str | Path,
    sources: Sequence[str] = (),
    *,
    tokens: int = TOKENS,
    batch_size: int = 16,
    device: str = "auto",
) -> dict[str, Perplexity]:
    """Perplexity of the model at `run` on each of the `sources` of `held_out`."""
    if tokens < 1:
        raise ValueError(f"tokens must be 1 or more, got {tokens}")
    texts = held_out(run, sources)
    tokenizer, model = load_tokenizer(run), load_model(run, device=device)
    return {
        source: perplexity(
            model, tokenizer, text, tokens=tokens, batch_size=batch_size, label=f"perplexity on {source}"
        )
        for source, text in texts.items()
    }


def perplexity_table(found: dict[str, Perplexity]) -> Table:
    """A row for each source."""
    table = Table(Column("text", overflow="fold"))
    for column in ("documents", "tokens", "bytes", "perplexity", "bits a byte"):
        table.add_column(column, justify="right")
    for source, p in found.items():
        table.add_row(
            source,
            f"{p.documents:,}",
            f"{p.tokens:,}",
            f"{p.bytes:,}",
            f"{p.perplexity:.3f}",
            f"{p.bits_per_byte:.4f}",
        )
    return table
