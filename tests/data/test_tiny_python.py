import ast
import re
import subprocess
import sys
from collections import Counter
from random import Random

import pytest

from pellucid.data import words
from pellucid.data.idioms import BLOCKS, FUNCTIONS
from pellucid.data.tiny_python import MAX_LINES, MIN_LINES, document, fill, variants

GRAMMAR = {
    "i",
    "j",
    "k",
    "self",
    "print",
    "range",
    "enumerate",
    "open",
    "set",
    "append",
    "add",
    "read",
    "write",
} | {
    "close",
    "__init__",
}


def many(split: str, n: int = 1500) -> list[str]:
    return [document(index, split=split) for index in range(n)]


def names_and_strings(text: str) -> tuple[set[str], set[str]]:
    names, strings = set(), set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Constant(value=str(string)) if string.strip():
                strings.add(string.strip())
    return names, strings


@pytest.mark.parametrize("split", words.SPLITS)
def test_documents_are_valid_python_of_the_stated_size(split):
    for text in many(split):
        ast.parse(text)
        assert MIN_LINES <= text.count("\n") <= MAX_LINES
        assert text.endswith("\n")


def test_a_document_depends_on_seed_split_and_index_alone():
    assert document(7) == document(7)
    different = {document(7), document(8), document(7, seed=1), document(7, split="validation")}
    assert len(different) == 4
    assert len(set(many("train"))) > 1490


def test_documents_do_not_depend_on_the_hash_seed():
    code = "from pellucid.data.tiny_python import document; print([document(i) for i in range(20)])"
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "1"}, capture_output=True, check=True
    )
    assert run.stdout.decode() == repr([document(i) for i in range(20)]) + "\n"


def test_names_and_strings_of_the_splits_are_disjoint():
    train, validation = ([names_and_strings(text) for text in many(split)] for split in words.SPLITS)
    for kind, shared in ((0, GRAMMAR), (1, {"r", "w", "and"})):
        common = set().union(*(t[kind] for t in train)) & set().union(*(v[kind] for v in validation))
        assert common <= shared


def test_a_quarter_of_the_variants_is_validations_alone():
    for source in (*BLOCKS.values(), FUNCTIONS):
        train, validation = variants(source, "train"), variants(source, "validation")
        assert train
        assert validation
        assert not set(train) & set(validation)
        assert len(train) == 3 * len(validation)


def test_both_quotes_are_equally_common_and_independent():
    text = "".join(many("train"))
    double, single = text.count('("'), text.count("('")
    assert abs(double - single) < 0.15 * (double + single)
    neighbours = Counter(re.findall(r"\(([\"'])[^\n]*\n *\w+\(([\"'])", text))
    assert min(neighbours.values()) > 0.15 * neighbours.total()


def test_every_construct_of_the_tasks_occurs():
    text = "".join(many("train"))
    for construct in (
        r"\w+\(\"[a-z ]+\"\)\n",
        r"def \w+\(\w+, \w+=None\):",
        r"= set\(\)",
        r"\.add\(",
        r" = (\"\"|'')\n",
        r"\+= \w+",
        r"self\.(\w+) = \1\n",
        r"with open\(.* as \w+:",
        r"\w+ = open\(\w*input\w*|\w+ = open\(source",
        r"[\"']w[\"']\)",
        r"= \{[\"']\w+[\"']: ",
        r"= \[[\"']\w+[\"'], ",
        r"\[\[\d+, \d+\], \[\d+, \d+\]\]\n",
        r"\[\d+, \d+\]\n",
        r"for \w+ in \w+:\n    ",
        r"while \w+:\n    ",
        r"elif \w+",
        r"else:\n",
        r"print\(f[\"'][a-z ]*\{\w+\}",
        r"= \w+ if \w+ else \w+",
        r"(\w+), (\w+) = \2, \1\n",
        r"= lambda \w+: ",
        r"if \w+ == True:\n",
        r"\w+ = True\n",
        r"for \w+, \w+ in enumerate\(",
        r"for \w+ in range\(",
        r"while True:\n",
        r"return True\n",
    ):
        assert len(re.findall(construct, text)) >= 10, construct


def test_fill_gives_a_role_the_same_name_and_a_literal_a_new_value():
    text = fill('$x = $f("$text")\n$f($x)', Random(0))
    name, function = re.split(r"\W+", text)[:2]
    assert text.endswith(f"\n{function}({name})")
    assert len({fill("$n $n $n", Random(seed)) for seed in range(20)}) > 10


def test_unknown_names_are_named():
    with pytest.raises(ValueError, match="unknown split 'valid'; did you mean 'validation'"):
        document(0, split="valid")
    with pytest.raises(ValueError, match="unknown hole 'txt'; did you mean 'text'"):
        fill("$txt", Random(0))
