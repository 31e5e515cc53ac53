"""What a program of the library comes with."""

from dataclasses import dataclass

from pellucid.compiled.rasp.language import SOp
from pellucid.compiled.rasp.values import Value


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramCase:
    """A program, and inputs that it is compiled for and tested on. It can be compiled for others."""

    program: SOp
    """The s-op that is the output."""

    vocab: tuple[Value, ...]
    """The tokens."""

    max_len: int
    """The most tokens in a sequence; the least is one."""

    causal: bool = False
    """Whether positions see only those at or before them."""

    meaning: str
    """What the output says at every position, in one line."""
