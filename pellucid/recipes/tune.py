"""Tuning: a task pruned with many settings around the table's centres, several at once, and the smallest circuit kept.

Weight-sparse transformers, A.5 and Table 2, with Optuna's TPE where the paper has CARBS. The study lies on disk: a
killed one goes on where it stood, and several processes or machines may work on one at the same time.
"""

import json
import math
import os
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pellucid.core.checkpoint import content_hash, load_model, load_tokenizer
from pellucid.core.circuit import Circuit
from pellucid.core.processes import begin_worker
from pellucid.lab.config import TABLE_2, PruneConfig
from pellucid.lab.prune import prune
from pellucid.recipes.workbench import Workbench
from pellucid.tasks import make_task
from pellucid.training.loop import Interrupted
from pellucid.training.progress import StepProgress

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

CENTRE = replace(PruneConfig(), k_coefs=TABLE_2.k_coefs)
"""The default search at the seed's centres."""

SPACE = {
    "k_coef": (100, math.inf),
    "init_noise": (10, math.inf),
    "init_bias": (10, 1.0),
    "weight_decay": (100, math.inf),
    "lr": (10, math.inf),
    "inv_beta2": (10, 0.9),
    "warmup": (10, 0.9),
    "temperature": (10, math.inf),
}
"""What is tuned, log-uniformly: from centre / spread to centre * spread, (spread, and the most it may be)."""

BEAT = 10.0
"""Seconds between two signs of life of a running trial."""
STALE = 120.0
"""A trial without one for so many seconds was killed, and its settings are tried again."""


@dataclass(frozen=True)
class Sweep:
    """What a worker must know: which run is searched, for what, around which centre, and where circuits go."""

    run_path: str | Path
    means: dict[str, np.ndarray]
    task: str
    config: PruneConfig
    seed: int
    device: str
    folder: Path

    def file(self, trial: int) -> Path:
        return self.folder / f"trial-{trial:04}.json"


def tune(
    run_path: str | Path,
    task: str,
    *,
    config: PruneConfig | None = None,
    trials: int = 32,
    jobs: int = 1,
    storage: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
) -> Circuit:
    """The circuit of fewest edges over `trials` searches for `task` in the run at `run_path`, of which `jobs` run at
    once, each in a process of its own; it becomes the run's latest, as `Workbench.keep` says.

    `config` is the centre and the first trial, `CENTRE` if None. `storage` is a journal's file,
    `circuits/TASK/tune/journal.log` if None, or the URL of a database of Optuna's. Every trial's circuit is written beside the journal as `trial-NNNN.json`.
    Trials that were completed before, or meanwhile by another process on the same storage, count. Raises ValueError
    where the storage holds another search or the run a circuit of another model, `Interrupted` on Ctrl-C.
    """
    config = config or CENTRE
    if trials < 1 or jobs < 1:
        raise ValueError(f"trials and jobs must be at least 1, got {trials} and {jobs}")
    if config.method not in ("learned", "hard_concrete"):
        raise ValueError(f"method {config.method!r} has nothing to tune: use 'learned' or 'hard_concrete'")
    if len(config.k_coefs) > 1:
        raise ValueError(f"tuning starts from one k_coef, got {config.k_coefs}")
    import_optuna()  # before minutes are spent on means
    bench = Workbench.open(run_path, device=device)
    found = bench.task(task)
    place = bench.path / "circuits" / task
    bench.load(place / "circuit.json")  # of another model, it is refused before hours of trials
    storage = storage or place / "tune" / "journal.log"
    url = str(storage) if "://" in str(storage) else None
    folder = place / "tune" if url else Path(storage).resolve().parent
    means = bench.means_for(config)
    plain = {site: mean.float().cpu().numpy() for site, mean in means.items()}
    sweep = Sweep(run_path, plain, task, config, seed, device, folder)
    facts = {"model": content_hash(bench.model), "task": task, "seed": seed, **json.loads(config.key())}
    with quiet():
        study = open_study(url or Path(storage).resolve(), facts)
        best = run_trials(study, sweep, trials, jobs)
    file, settings = sweep.file(best.number), settings_of(config, best.params)
    circuit, search = None, {"search": settings.key(), "seed": seed}
    if file.exists():
        circuit = Circuit.load(file)
    if circuit is None or circuit.model != facts["model"] or not search.items() <= circuit.metrics.items():
        # It was found on another disk, and only its numbers are here.
        circuit = prune(bench.model, found, means, config=settings, seed=seed)
        circuit.save(file)
    bench.keep(circuit)
    return circuit


def centre(config: PruneConfig) -> dict[str, float]:
    """What `config` says of the settings that are tuned; those at 0 stay there, and HardConcrete has no temperature."""
    values = {name: getattr(config, name) for name in SPACE if name not in ("k_coef", "inv_beta2")}
    values = {**values, "k_coef": config.k_coefs[0], "inv_beta2": 1 - config.beta2}
    if config.method == "hard_concrete":
        values["temperature"] = 0.0
    return {name: values[name] for name in SPACE if values[name] > 0}


def settings_of(config: PruneConfig, params: Mapping[str, float]) -> PruneConfig:
    """`config` with tuned settings, by the names of `SPACE`."""
    changed: dict[str, Any] = dict(params)
    if "k_coef" in changed:
        changed["k_coefs"] = (changed.pop("k_coef"),)
    if "inv_beta2" in changed:
        changed["beta2"] = 1 - changed.pop("inv_beta2")
    return replace(config, **changed)


def objective(metrics: Mapping[str, Any]) -> float:
    """What trials minimise, of a circuit's metrics: log(edges + 1); of one that is short of the target its loss, on top
    of what the whole model has."""
    if metrics["reached"]:
        return math.log1p(metrics["edges"])
    return math.log1p(metrics["total_edges"]) + metrics["calibrated_task_loss"]


# The study


@contextmanager
def quiet() -> Iterator[None]:
    """Optuna without its lines of log, which the progress bar replaces."""
    optuna = import_optuna()
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            # constant_liar is marked as experimental before Optuna 5.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


def import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise ImportError('tuning needs Optuna: pip install "pellucid[sweep]"') from None
    return optuna


def open_study(storage: Path | str, facts: dict[str, Any]) -> "Study":
    """The study of the search that `facts` describe, new or as it was left. A journal's file holds one search only."""
    optuna = import_optuna()
    name = "{model}-{task}-{target:g}-{ablation}".format(**facts)
    place = open_journal(storage) if isinstance(storage, Path) else optuna.storages.get_storage(storage)
    names = optuna.get_all_study_names(place)
    for other in names:
        there = optuna.load_study(study_name=other, storage=place).user_attrs.get("search", facts)
        if there != facts and (other == name or isinstance(storage, Path)):
            said = ", ".join(
                f"{key} ({there.get(key)!r} there, {value!r} here)"
                for key, value in facts.items()
                if there.get(key) != value
            )
            raise ValueError(f"{storage} holds another search, which differs in {said}; name another storage")
    if name in names:
        study = optuna.load_study(study_name=name, storage=place)
    else:
        study = optuna.create_study(study_name=name, storage=place, load_if_exists=True)
    if "search" not in study.user_attrs:
        study.set_user_attr("search", facts)
    return study


def open_journal(file: Path) -> "BaseStorage":
    """The journal in `file`. What a crash in the middle of a line left of it is cut off."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    file.parent.mkdir(parents=True, exist_ok=True)
    lock = JournalFileOpenLock(str(file))  # unlike a symbolic link, it means the same on every machine
    try:
        if file.exists():
            lock.acquire()
            try:
                data = file.read_bytes()
                whole = data.rfind(b"\n") + 1
                if data and not data[:whole].startswith(b'{"op_code"'):
                    raise ValueError("its first line is of something else")
                if whole < len(data):
                    os.truncate(file, whole)
            finally:
                lock.release()
        return JournalStorage(JournalFileBackend(str(file), lock_obj=lock))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not a journal of Optuna's, or is damaged: {error!r}") from None


def queue(study: "Study", params: dict[str, float]) -> None:
    """Have `params` tried next, unless they were, are or will be."""
    from optuna.trial import TrialState

    for trial in study.get_trials(
        deepcopy=False, states=(TrialState.COMPLETE, TrialState.RUNNING, TrialState.WAITING)
    ):
        if params in (trial.params, trial.system_attrs.get("fixed_params")):
            return
    study.enqueue_trial(params)


def release(study: "Study", number: int) -> None:
    """Give up a running trial; its settings are tried again."""
    from optuna.trial import TrialState

    trial = study.get_trials(deepcopy=False)[number]
    study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
    if params := trial.system_attrs.get("fixed_params", trial.params):
        queue(study, params)


def release_stale(study: "Study", own: set[int]) -> None:
    """Give up the trials whose process was killed."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        started = trial.datetime_start.timestamp() if trial.datetime_start else 0.0
        if trial.number not in own and time.time() - trial.user_attrs.get("alive", started) > STALE:
            release(study, trial.number)


def suggest(trial: "Trial", centres: Mapping[str, float]) -> dict[str, float]:
    """The settings that the study's sampler wants tried."""
    out = {}
    for name, value in centres.items():
        spread, most = SPACE[name]
        high = max(value, min(value * spread, most))
        out[name] = trial.suggest_float(name, value / spread, high, log=True)
    return out


# The workers


class Worker:
    """A process that has the run open and makes one trial after the other."""

    def __init__(self, sweep: Sweep, threads: int):
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, sweep, threads), daemon=True)
        self.process.start()
        theirs.close()
        self.sweep = sweep
        self.trial: Trial | None = None

    def begin(self, study: "Study") -> None:
        """Start a trial."""
        from optuna.samplers import TPESampler

        self.trial = trial = study.ask()
        # Numbers are unique over all processes: no two draw alike, and one alone draws the same again.
        study.sampler = TPESampler(seed=self.sweep.seed + trial.number, constant_liar=True)
        params = suggest(trial, centre(self.sweep.config))
        try:
            self.pipe.send((settings_of(self.sweep.config, params), self.sweep.file(trial.number)))
        except ConnectionError:
            raise self.death(trial.number) from None

    def finish(self, study: "Study") -> bool:
        """Tell the study what came out; false where the model cannot do the task. Errors of the worker are raised."""
        from optuna.trial import TrialState

        assert self.trial is not None
        try:
            metrics = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise self.death(self.trial.number) from None
        trial, self.trial = self.trial, None
        if isinstance(metrics, Exception):
            study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            raise metrics
        for key in ("edges", "verdict"):
            trial.set_user_attr(key, metrics[key])
        study.tell(trial, objective(metrics), skip_if_finished=True)
        return metrics["searched"]

    def death(self, number: int) -> ChildProcessError:
        """Why a worker that ended on its own did."""
        self.process.join()
        return ChildProcessError(
            f"the process of trial {number} ended with code {self.process.exitcode}: run again to go on, with fewer"
            " jobs if memory was short"
        )

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()
        self.pipe.close()


def serve(pipe: Connection, sweep: Sweep, threads: int) -> None:
    """A worker's life: (settings, file) in, the circuit's metrics or an error out, until the pipe is closed."""
    begin_worker(threads)
    try:
        model = load_model(sweep.run_path, device=sweep.device)
        means = {site: torch.from_numpy(mean).to(model.wte.weight) for site, mean in sweep.means.items()}
        task = make_task(sweep.task, load_tokenizer(sweep.run_path))
        while True:
            config, file = pipe.recv()
            circuit = prune(model, task, means, config=config, seed=sweep.seed)
            circuit.save(file)
            pipe.send(circuit.metrics)
    except (EOFError, ConnectionError):
        return
    except ValueError as error:
        pipe.send(ValueError(str(error)))
    except Exception:
        pipe.send(RuntimeError(traceback.format_exc()))


def run_trials(study: "Study", sweep: Sweep, trials: int, jobs: int) -> "FrozenTrial":
    """Work on the study until `trials` of it are complete, or the model has shown that it cannot do the task: the best
    one."""
    from optuna.trial import TrialState

    team: list[Worker] = []
    able, shown = True, -1

    def complete() -> int:
        return len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))

    if not complete():
        queue(study, centre(sweep.config))
    with StepProgress(f"tune {sweep.task}", trials, start=complete()) as bar:
        try:
            while True:
                busy = [worker for worker in team if worker.trial is not None]
                release_stale(study, {worker.trial.number for worker in busy if worker.trial is not None})
                if (done := complete()) > max(0, shown):
                    shown = done
                    bar.reach(done, "best {edges} edges, {verdict}".format(**study.best_trial.user_attrs))
                while able and len(busy) < min(jobs, trials - done):
                    idle = [worker for worker in team if worker.trial is None]
                    if not idle:
                        team.append(Worker(sweep, max(1, torch.get_num_threads() // jobs)))
                        idle = team[-1:]
                    idle[0].begin(study)
                    busy.append(idle[0])
                if not busy:
                    return study.best_trial
                ready = wait([worker.pipe for worker in busy], timeout=BEAT)
                for worker in busy:
                    if worker.pipe in ready:
                        able &= worker.finish(study)
                    elif worker.trial is not None:
                        worker.trial.set_user_attr("alive", time.time())
        except KeyboardInterrupt:
            raise Interrupted(f"stopped at {complete()} of {trials} trials; run again to go on") from None
        finally:
            for worker in team:
                worker.stop()
                if worker.trial is not None:
                    release(study, worker.trial.number)
