"""From a program of the library to a compiled model: summary, verification, trace, files."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pellucid.compiled.compiler.causal import CausalWarning
from pellucid.compiled.library import PROGRAMS
from pellucid.compiled.library.case import ProgramCase
from pellucid.compiled.model import CompiledModel, compile_program
from pellucid.compiled.rasp.values import Value, show
from pellucid.compiled.verify import Verification, verify
from pellucid.core.errors import unknown


def get_program(name: str) -> ProgramCase:
    """The library's program of that name. Raises `ValueError` with near names."""
    if name not in PROGRAMS:
        raise unknown("program", name, PROGRAMS)
    return PROGRAMS[name]


def program_table() -> Table:
    """The library's programs."""
    table = Table()
    table.add_column("program", no_wrap=True)
    for column in ("meaning", "vocabulary", "length", "causal"):
        table.add_column(column)
    for name, case in PROGRAMS.items():
        vocab = " ".join(map(show, case.vocab))
        cells = (name, case.meaning, vocab, str(case.max_len), "yes" if case.causal else "no")
        table.add_row(*map(Text, cells))
    return table


def parse_vocab(text: str, like: Sequence[Value]) -> list[Value]:
    """Words as a vocabulary: ints where all of them are ints and so is the vocabulary that they replace."""
    words = text.split()
    if all(type(v) is int for v in like):
        try:
            return [int(word) for word in words]
        except ValueError:
            pass
    return list(words)


def parse_sequence(text: str, vocab: Sequence[Value]) -> list[Value]:
    """Words as values of `vocab`, by how these are written; without spaces also letter by letter.

    Words that are not in the vocabulary stay text, for the model to refuse.
    """
    by_text = {show(v): v for v in vocab}
    words = text.split()
    if len(words) == 1 and words[0] not in by_text and all(len(t) == 1 for t in by_text):
        words = list(words[0])
    return [by_text.get(word, word) for word in words]


def default_sequence(vocab: Sequence[Value], max_len: int) -> list[Value]:
    """A sequence to show: the vocabulary in turn, and at most eight tokens of it."""
    return [vocab[i % len(vocab)] for i in range(min(max_len, 8))]


def compile_named(
    name: str,
    console: Console,
    *,
    vocab: str | None = None,
    max_len: int | None = None,
    causal: bool | None = None,
    schedule: str = "asap",
    reuse: bool = False,
    dtype: str = "float32",
    out: Path | None = None,
    trace: str | None = None,
) -> Verification:
    """Compile a program of the library, print what came out, and write it to `out`; what is None is the library's."""
    case = get_program(name)
    words = list(case.vocab) if vocab is None else parse_vocab(vocab, case.vocab)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CausalWarning)
        model = compile_program(
            case.program,
            words,
            case.max_len if max_len is None else max_len,
            causal=case.causal if causal is None else causal,
            schedule=schedule,
            reuse=reuse,
            dtype=dtype,
        )
    for warning in caught:
        console.print(Text(f"warning: {warning.message}", style="yellow"), soft_wrap=True)
    console.print(Text(f"{name}: {case.meaning}", style="bold"), soft_wrap=True)
    console.print(summary_table(model))
    sequence = None
    if trace is not None:
        sequence = parse_sequence(trace, model.vocab.values)
    elif out is not None:
        sequence = default_sequence(model.vocab.values, model.max_len)
    made = (
        None if sequence is None else model.trace(sequence)
    )  # a bad sequence is refused before the longer work
    verified = verify(model)
    console.print(Text(sentence(verified, model)), soft_wrap=True)
    if made is not None and trace is not None:
        made.show(console)
    if out is not None:
        model.save(out)
        console.print(Text(f"{out}"), soft_wrap=True)
        try:
            console.print(Text(str(made.draw(out / "residual.svg"))), soft_wrap=True)  # type: ignore[union-attr]
        except ImportError as error:
            console.print(Text(f"no picture: {error}", style="yellow"), soft_wrap=True)
    return verified


def summary_table(model: CompiledModel) -> Table:
    """The sizes of a compiled model."""
    table = Table(show_header=False)
    rows: dict[str, Any] = {
        "vocabulary": " ".join(map(show, model.vocab.values)),
        "length": model.max_len,
        "causal": "yes" if model.causal else "no",
        **model.summary(),
    }
    for what, value in rows.items():
        table.add_row(what, Text(f"{value:.3g}" if isinstance(value, float) else str(value)))
    return table


def sentence(found: Verification, model: CompiledModel) -> str:
    """What verification found, in words."""
    which = "all" if found.exhaustive else "a sample of"
    text = (
        f"checked against the interpreter on {which} {found.checked:,} inputs: {found.failures:,} failures; "
    )
    text += f"largest error {found.max_error:.1e}, bound {model.error_bound:.1e}"
    if found.undefined:
        text += f"; {found.undefined:,} more on which the program is undefined"
    if found.first_failure is not None:
        given, wanted, got = (" ".join(map(show, x)) for x in found.first_failure)
        text += f"\nfirst failure: {given} gives {got} instead of {wanted}"
    return text
