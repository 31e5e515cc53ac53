"""All tasks by name. To add one: write a `Question` and list it where its module lists the others."""

from tokenizers import Tokenizer

from pellucid.core.errors import unknown
from pellucid.tasks import python
from pellucid.tasks.pairs import PairTask, Question
from pellucid.tasks.task import Task

TASKS: dict[str, Question] = {question.name: question for question in python.QUESTIONS}


def make_task(name: str, tokenizer: Tokenizer) -> Task:
    """The task of that name in the tokens of `tokenizer`.

    Raises ValueError for an unknown name, or if an answer is not one token of this tokenizer.
    """
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return PairTask(TASKS[name], tokenizer)
