"""What a model is asked: seeded batches of paired prompts, and the loss on their answers."""

from pellucid.tasks.pairs import PairTask, Question
from pellucid.tasks.registry import TASKS, make_task
from pellucid.tasks.task import Batch, Task, accuracy, two_way_loss

__all__ = ["TASKS", "Batch", "PairTask", "Question", "Task", "accuracy", "make_task", "two_way_loss"]
