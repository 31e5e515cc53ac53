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

    layers: int
    """The depth of the compiled model: as long as the longest chain of attention and MLPs that the program asks for."""

    meaning: str
    """What the output says at every position, in one line."""
