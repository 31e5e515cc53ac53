"""Random programs: what is compiled equals what is interpreted, or compilation refuses with a message."""

import re
import warnings
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from pellucid.compiled import CausalWarning, CompileError, compile_program
from pellucid.compiled.rasp import Undefined
from pellucid.compiled.rasp.values import key
from tests.compiled.strategies import Case, programs

QUIET = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


def check(case: Case, reasons: Counter) -> None:
    """Compile, run as one batch, compare with the interpreter; a refusal is counted by its reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CausalWarning)
        try:
            model = compile_program(case.program, case.vocab, case.max_len, causal=case.causal)
        except CompileError as refusal:
            reasons[reason(str(refusal))] += 1
            return
    reasons["compiled"] += 1
    assert model.error_bound < model.margin / 2
    for sequence, out in zip(case.sequences, model.batch(case.sequences), strict=True):
        try:
            right = case.program.evaluate(sequence, causal=case.causal)
        except Undefined:
            continue
        assert [key(v) for v in out] == [key(v) for v in right], (sequence, right, out)


def reason(message: str) -> str:
    """The kind of a refusal: its message without names and numbers."""
    for kind in (
        "cannot be exact in float32",
        "too many to enumerate",
        "too large to enumerate",
        "no one head's attention",
        "in one head",
    ):
        if kind in message:
            return kind
    return re.sub(r"[\d.]+", "#", message)[:80]


def run(examples: int, derandomize: bool) -> Counter:
    reasons: Counter = Counter()

    @settings(max_examples=examples, derandomize=derandomize, **QUIET)
    @given(programs())
    def equal_or_refused(case: Case) -> None:
        check(case, reasons)

    equal_or_refused()
    return reasons


def test_random_programs_compile_to_what_the_interpreter_says():
    reasons = run(100, derandomize=True)
    assert reasons["compiled"] >= 0.9 * reasons.total(), reasons


@pytest.mark.slow
def test_two_thousand_random_programs_compile_to_what_the_interpreter_says():
    reasons = run(2000, derandomize=False)
    print(dict(reasons))
    assert reasons["compiled"] >= 0.9 * reasons.total(), reasons
