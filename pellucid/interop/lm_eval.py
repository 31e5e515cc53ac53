"""Pellucid's models in the LM Evaluation Harness. Needs the extra `eval`."""

import contextlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from tokenizers import Tokenizer

from pellucid.core.checkpoint import load_model, load_tokenizer
from pellucid.core.errors import unknown
from pellucid.core.generate import generate
from pellucid.core.likelihood import Pair, check_language_model, loglikelihoods, windows
from pellucid.core.transformer import Transformer
from pellucid.data.tokenizer import end_of_text_id
from pellucid.training.progress import StepProgress

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise ImportError(
        "pellucid.interop.lm_eval needs the package `lm-eval`: pip install pellucid[eval]"
    ) from error

KEPT = ("results", "groups", "group_subtasks", "versions", "n-shot", "higher_is_better", "n-samples")
BOOTSTRAP = 1000
CHUNK = 32  # tokens generated before stop strings are looked for


class PellucidLM(TemplateLM):
    """A Transformer as the harness asks for it. An empty context is one end of text.

    `truncated` counts requests whose context lost its beginning because it did not fit into `n_ctx`.
    """

    def __init__(
        self,
        model: Transformer | str | Path,
        tokenizer: Tokenizer | None = None,
        *,
        batch_size: int = 16,
        device: str = "auto",
    ):
        """A run's directory, `pellucid:NAME`, or a model with its tokenizer, which is put in evaluation mode.

        Raises `ValueError` for a model without a tokenizer, or one that does not predict its own tokens.
        """
        super().__init__()
        if isinstance(model, str | Path):
            if tokenizer is None:
                tokenizer = load_tokenizer(model)
            model = load_model(model, device=device)
        if tokenizer is None:
            raise ValueError("a model that reads text needs a tokenizer, and none was given")
        check_language_model(model)
        if tokenizer.get_vocab_size() > model.config.vocab_size:
            raise ValueError(
                f"the tokenizer's {tokenizer.get_vocab_size()} tokens do not fit the model's vocabulary "
                f"of {model.config.vocab_size}"
            )
        self.model, self.tokenizer, self.batch_size = model.eval(), tokenizer, batch_size
        self.end_of_text = end_of_text_id(tokenizer)
        self._device = model.device
        self.truncated = 0

    @property
    def eot_token_id(self) -> int:
        return self.end_of_text

    @property
    def max_length(self) -> int:
        return self.model.config.n_ctx

    @property
    def max_gen_toks(self) -> int:
        """Tokens that are generated where a task does not say how many, or says more than fit."""
        return min(256, max(1, self.max_length // 2))

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs) -> list[int]:
        return self.tokenizer.encode(string, add_special_tokens=False).ids

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs):
        for (context, continuation), _, tokens in requests:
            if not tokens:
                raise ValueError(
                    f"no token of {context!r} followed by {continuation!r} belongs to the continuation alone"
                )
        pairs = [(before or [self.end_of_text], after) for _, before, after in requests]  # all spaces: empty
        self.note_truncated(sum(len(a) + len(b) > self.max_length + 1 for a, b in pairs), len(pairs))
        results = self.score(pairs)
        for (text, _, _), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", text, result)
        return results

    def score(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """`loglikelihoods` with a bar."""
        with StepProgress("log-likelihoods", len(pairs)) as bar:
            return loglikelihoods(self.model, pairs, batch_size=self.batch_size, progress=bar.reach)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        parts = [windows(self.tok_encode(text), self.end_of_text, self.max_length) for text in texts]
        pairs = [pair for text_pairs in parts for pair in text_pairs]
        scores = iter(self.score(pairs))
        totals = [sum((next(scores)[0] for _ in text_pairs), 0.0) for text_pairs in parts]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        asked: list[Any] = [request.args for request in requests]
        prompts = [self.tok_encode(context) or [self.end_of_text] for context, _ in asked]
        groups: dict[str, list[int]] = {}  # of the same settings, those of like lengths together
        for i in sorted(range(len(asked)), key=lambda i: -len(prompts[i])):
            groups.setdefault(repr(asked[i][1]), []).append(i)
        out = [""] * len(asked)
        for group in groups.values():
            settings = dict(normalize_gen_kwargs(asked[group[0]][1], self.max_gen_toks))
            for start in range(0, len(group), self.batch_size):
                batch = group[start : start + self.batch_size]
                texts = self.continue_texts([prompts[i] for i in batch], settings)
                for i, text in zip(batch, texts, strict=True):
                    out[i] = text
                    self.cache_hook.add_partial("generate_until", asked[i], text)
        return out

    def continue_texts(self, prompts: list[list[int]], settings: dict[str, Any]) -> list[str]:
        """What the model says after each prompt, up to the first stop string, end of text or number of tokens."""
        n = settings["max_gen_toks"]
        if n >= self.max_length:
            warnings.warn(
                f"{n} new tokens do not fit into n_ctx = {self.max_length}: {self.max_gen_toks} are generated",
                stacklevel=2,
            )
            n = self.max_gen_toks
        room = self.max_length - n
        self.note_truncated(sum(len(p) > room for p in prompts), len(prompts))
        prompts = [p[-room:] for p in prompts]
        temperature = settings.get("temperature", 1.0) if settings["do_sample"] else 0.0
        if temperature and settings.get("top_p", 1.0) != 1.0:
            raise ValueError(f"top_p is not supported, got {settings['top_p']}")
        stops = [stop for stop in settings["until"] if stop]
        said: list[list[int]] = [[] for _ in prompts]
        going = list(range(len(prompts)))
        for done in range(0, n, CHUNK):
            new = generate(
                self.model,
                [prompts[i] + said[i] for i in going],
                min(CHUNK, n - done),
                temperature=temperature,
                top_k=settings.get("top_k") or None,
                seed=done,
                stop=self.end_of_text,
            )
            for i, tokens in zip(going, new, strict=True):
                said[i] += tokens
            full = [len(tokens) == min(CHUNK, n - done) for tokens in new]
            going = [
                i
                for i, more in zip(going, full, strict=True)
                if more and not any(stop in self.tokenizer.decode(said[i]) for stop in stops)
            ]
            if not going:
                break
        return [until(self.tokenizer.decode(tokens), stops) for tokens in said]

    def note_truncated(self, n: int, of: int) -> None:
        """Count contexts that lost their beginning, and warn."""
        self.truncated += n
        if n:
            warnings.warn(
                f"{n} of {of} contexts do not fit into n_ctx = {self.max_length}: their beginnings are left out",
                stacklevel=3,
            )


def until(text: str, stops: Sequence[str]) -> str:
    """`text` up to the first of the strings `stops`."""
    for stop in stops:
        text = text.split(stop)[0]
    return text


def evaluate(
    model: PellucidLM | Transformer | str | Path,
    tasks: Sequence[str],
    *,
    tokenizer: Tokenizer | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | Path | None = None,
    batch_size: int = 16,
    device: str = "auto",
) -> dict[str, Any]:
    """The harness' results for `tasks`, as it names them: `results[task]["acc,none"]`, `["acc_stderr,none"]`.

    `include_path` holds task files of your own, `limit` is the most items of a task. `truncated` counts contexts that
    were cut. Raises `ValueError` for unknown tasks, and where a task's data cannot be had.
    """
    if not tasks:
        raise ValueError("name at least one task")
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be 1 or more, got {limit}")
    lm = model
    if not isinstance(lm, PellucidLM):
        lm = PellucidLM(lm, tokenizer, batch_size=batch_size, device=device)
    manager = find_tasks(tasks, include_path)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the harness prints what it does
            found: Any = simple_evaluate(
                lm,
                tasks=list(tasks),
                num_fewshot=num_fewshot,
                limit=limit,
                bootstrap_iters=BOOTSTRAP,
                log_samples=False,
                task_manager=manager,
            )
    except OSError as error:
        raise ValueError(
            f"the data of {', '.join(tasks)} cannot be loaded: {error}. "
            "A data set on a hub needs a network the first time"
        ) from error
    kept = {key: found[key] for key in KEPT if key in found}
    return {**kept, "limit": limit, "truncated": lm.truncated}


def find_tasks(tasks: Sequence[str], include_path: str | Path | None) -> TaskManager:
    """A manager that knows all `tasks`; the harness' own, which take seconds to list, only where they are asked for."""
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ValueError(f"there is no directory {include_path}")
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if set(tasks) <= set(manager.all_tasks):
            return manager
    manager = TaskManager(include_path=include_path)
    for task in tasks:
        if task not in manager.all_tasks:
            raise unknown("task", task, manager.all_tasks)
    return manager


def task_table(found: dict[str, Any]) -> Table:
    """What `evaluate` found: a row for each metric of each task, with its standard error."""
    table = Table(Column("task", overflow="fold"), "shots", "items", "metric", "value", "standard error")
    for name, metrics in {**found["results"], **found.get("groups", {})}.items():
        items = found["n-samples"].get(name, {}).get("effective", "")
        first = (metrics.get("alias", name).strip(" -"), str(found["n-shot"].get(name, "")), str(items))
        for key, value in metrics.items():
            metric, comma, how = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{how}")
            label = metric if how == "none" else f"{metric} ({how})"
            table.add_row(*first, label, number(value), number(error))
            first = ("", "", "")
    return table


def number(value: Any) -> str:
    """Four digits after the point; nothing where there is no number."""
    return f"{value:.4f}" if isinstance(value, float | int) else ""
