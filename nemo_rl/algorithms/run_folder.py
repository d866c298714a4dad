"""The folders of a run: what it writes there, whether one is used already, and how a resumed run goes on in it.

`open_run_folders` is entered before a run writes anything. Invariant: a folder holds one run: a second one is refused,
continues it, or removes what it wrote first. Nothing else in the folder is ever touched.

`RunIdentity`: what a run learns from and is scored by, as digests; a resumed run and a replay compare it.

Checkpoints and kept steps hold it. Digests are of contents, so that a folder may be moved or downloaded again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path

from nemo_rl.config.run import CheckpointingConfig, LoggerConfig
from nemo_rl.data_plane.address import ATTACH_FILE
from nemo_rl.data_plane.ledger.events import EVENTS_FILE
from nemo_rl.data_plane.ledger.journal import JOURNAL_FILE
from nemo_rl.distributed.environment import WORKER_LOGS
from nemo_rl.errors import CheckpointError, RunFolderError, boundary
from nemo_rl.experience.rollout_records import RolloutInfo
from nemo_rl.experience.rollout_worker import REWARD_LOG
from nemo_rl.models.hf.loading import CONFIG_FILE as MODEL_CONFIG_FILE
from nemo_rl.utils.checkpoint import STEP, Checkpoint, checkpoint_paths, is_of_checkpoint
from nemo_rl.utils.exits import CRASH_FILE
from nemo_rl.utils.files import open_plain, read_plain_text, write_text
from nemo_rl.utils.remote_checkpoints import RemoteCheckpoints, open_checkpoints
from nemo_rl.utils.rollout_file import ROLLOUTS, steps_with_rollouts
from nemo_rl.utils.run_lock import OUTCOME_FILE, lock_folder, recorded_outcome
from nemo_rl.utils.trackers import METRICS_FILE

__all__ = [
    "CONFIG_FILE",
    "CURVE_FILE",
    "PROFILES",
    "STEPS",
    "TRACER",
    "date_line",
    "differences",
    "exported_dtype",
    "first_start",
    "identity_of",
    "identity_state",
    "model_digest",
    "model_dtype",
    "open_run_folders",
    "run_folders",
    "run_start",
    "same_or_refused",
    "saved_steps",
    "truncate_rollouts",
    "used_folder_problems",
]

logger = logging.getLogger(__name__)


STATE = "run"
"""Key of `training_info.json`."""
DIGEST_BYTES = 16
MODEL_BYTES = 2**30
"""Weights up to so many bytes are read whole; of larger ones blocks at equal distances are, so many bytes in all."""
BLOCK_BYTES = 2**20
GENERATION_CONFIG = "generation_config.json"
NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Keys of config.json that change when a folder is saved again or downloaded to another place."""


def model_digest(folder: str | Path) -> str:
    """Return a digest of the weights and the config of a model folder.

    Raises:
        CheckpointError: a file cannot be read.
    """
    path = Path(folder)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with boundary(CheckpointError, f"model folder {str(path)!r}: cannot be compared"):
        for name in (MODEL_CONFIG_FILE, GENERATION_CONFIG):
            if (path / name).is_file():
                config = json.loads(read_plain_text(path / name))
                kept = {key: value for key, value in config.items() if key not in NOT_OF_THE_MODEL}
                digest.update(json.dumps(kept, sort_keys=True).encode())
        files = sorted(path.glob("*.safetensors"))
        sizes = [file.stat().st_size for file in files]
        step = max(1, -(-sum(sizes) // MODEL_BYTES)) * BLOCK_BYTES
        for file, size in zip(files, sizes, strict=True):
            digest.update(f"{size}\n".encode())
            with open_plain(file) as stream:
                for start in range(0, size, step):
                    stream.seek(start)
                    digest.update(stream.read(BLOCK_BYTES))
    return digest.hexdigest()


def identity_state(started: datetime, identity: Mapping[str, str], *, dtype: str | None) -> dict[str, object]:
    """Return what a checkpoint holds of a run's identity.

    Args:
        started: the first start of the run, which its chat template may print.
        dtype: of the model folder, as `model_dtype` reads it.
    """
    started_at = started.isoformat(timespec="seconds")
    return {STATE: {"started": started_at, "identity": dict(identity), "model_dtype": dtype}}


def model_dtype(folder: str | Path) -> str | None:
    """Return the dtype that config.json of a model folder names, such as `bfloat16`; None where it names none."""
    path = Path(folder) / MODEL_CONFIG_FILE
    with boundary(CheckpointError, f"{path}: cannot be read"):
        config = json.loads(read_plain_text(path))
        dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if isinstance(dtype, str) else None


def exported_dtype(state: Mapping[str, object]) -> str | None:
    """The dtype of the model that a run has started from; None where its checkpoint does not say it."""
    dtype = _section(state).get("model_dtype")
    return dtype if isinstance(dtype, str) else None


def run_start(state: Mapping[str, object], *, where: object) -> datetime | None:
    """The first start of the run that wrote this state; None for one that does not say it.

    Raises:
        CheckpointError: it says no time.
    """
    given = _section(state).get("started")
    if given is None:
        return None
    with boundary(CheckpointError, f"{where}: time of the run's first start"):
        return datetime.fromisoformat(str(given))


def first_start(resume_from: Checkpoint | None) -> datetime:
    """Return when the run that goes on was started; a chat template may print it."""
    known = None if resume_from is None else run_start(resume_from.state, where=resume_from.place)
    return known or datetime.now()


def date_line(began: datetime, resume_from: Checkpoint | None) -> str:
    """Return what the user is told of a chat template that prints the date."""
    if resume_from is not None and run_start(resume_from.state, where=resume_from.place) is None:
        return (
            f"the chat template prints the date, and {resume_from.place} does not say when its run was started: "
            f"prompts say {began:%Y-%m-%d %H:%M} from here on"
        )
    return f"the chat template prints the date: prompts keep that of the run's first start, {began:%Y-%m-%d %H:%M}"


def identity_of(
    info: RolloutInfo, resume_from: Checkpoint | None, *, model_name: str, allowed: Sequence[str]
) -> dict[str, str]:
    """Return the digests of what this run learns from.

    Args:
        allowed: `checkpointing.allow_changed`.

    Raises:
        CheckpointError: the run that it resumes had something else, which is not allowed.
    """
    identity = {**info.identity, "model": model_digest(model_name)}
    if resume_from is not None:
        same_or_refused(resume_from.state, identity, allowed=allowed, where=resume_from.place)
    return identity


def same_or_refused(
    state: Mapping[str, object], identity: Mapping[str, str], *, allowed: Sequence[str], where: object
) -> None:
    """
    Args:
        state: of the checkpoint that is resumed from; one without an identity says nothing.
        identity: of this start: the parts that are known by now.
        allowed: `checkpointing.allow_changed`.

    Raises:
        CheckpointError: something else has changed.
    """
    before = _section(state).get("identity")
    if not isinstance(before, Mapping):
        return
    changed = differences(before, identity, allowed=allowed)
    if changed:
        words = sorted({name.partition(".")[0] for name in changed})
        raise CheckpointError(
            f"{where}: was written by a run with other {', '.join(changed)}: expected the same contents, got changed "
            f"ones; restore them, or set checkpointing.allow_changed=[{','.join(words)}] to go on with the changed ones"
        )


def differences(before: Mapping[str, object], now: Mapping[str, str], *, allowed: Sequence[str]) -> list[str]:
    """Names of the parts that differ, such as `data.train`; a part is allowed by the word before its first dot."""
    sections = {name.partition(".")[0] for name in now}
    names = sorted(set(now) | {name for name in before if name.partition(".")[0] in sections})
    return [name for name in names if before.get(name) != now.get(name) and name.partition(".")[0] not in allowed]


def _section(state: Mapping[str, object]) -> Mapping[str, object]:
    found = state.get(STATE)
    return found if isinstance(found, Mapping) else {}


CONFIG_FILE, CURVE_FILE = "config.yaml", "reward_curve.png"
STEPS = "steps"
"""Folder of what a run keeps and records of its steps."""
PROFILES = "profile"
"""Folder of the traces of torch's profiler, one for each policy worker."""
TRACER = "tracer"
"""Folder of the live tracer: address, tokens, and what its page has shown."""
WRITTEN = (
    METRICS_FILE,
    CONFIG_FILE,
    CURVE_FILE,
    OUTCOME_FILE,
    ATTACH_FILE,
    EVENTS_FILE,
    JOURNAL_FILE,
    *(REWARD_LOG, "reward.*.log", "verdicts.jsonl", "verdicts.*.jsonl"),
    CRASH_FILE,
    f"{ROLLOUTS}/*.jsonl",
    f"{STEPS}/step_[0-9]*",
    f"{PROFILES}/step_[0-9]*",
    "records/step_[0-9]*",  # of earlier releases
    *(f"{TRACER}/{name}" for name in ("stream_[0-9]*.nrt", "*.token", "hub.json", "hub.log", "open.html")),
    f"{WORKER_LOGS}/*.log",
    "tensorboard/events.out.tfevents.*",
    *("wandb/run-*", "wandb/offline-run-*", "wandb/latest-run", "wandb/debug*.log"),
    *("mlflow/[0-9]*", "mlflow/.trash", "mlflow/models"),
    CRASH_FILE,
    # Of files that were being written when a run was killed, named by its process.
    *(".*.[0-9]*.tmp*", f"{ROLLOUTS}/.*.[0-9]*.tmp*"),
)
"""All that a run writes to its log folder, as patterns. What a new part of a run writes belongs here."""


@contextmanager
def open_run_folders(
    logger: LoggerConfig, checkpointing: CheckpointingConfig, *, durable: Path | None = None
) -> Iterator[None]:
    """Locks the folders of a run until the block ends, and makes sure that they hold no other run. How the block ends
    is written to the log folder.

    Args:
        durable: `data_plane.durable.path`.

    Raises:
        RunFolderError: another run uses one of them, or has left its results there.
        CheckpointError: the URL of the checkpoints cannot be listed.
    """
    with ExitStack() as stack:
        for folder in run_folders(logger, checkpointing, durable=durable):
            stack.enter_context(lock_folder(folder))
        problems = used_folder_problems(logger, checkpointing)
        if problems:
            raise RunFolderError("\n".join(problems))
        if logger.overwrite:
            _remove_earlier_run(logger.log_dir, checkpointing)
        with recorded_outcome(logger.log_dir, resumes=bool(checkpointing.resume)):
            yield


def write_config(log_dir: Path, text: str) -> Path:
    """Write `config.yaml`, the resolved recipe, next to the logs of the run."""
    return write_text(log_dir / CONFIG_FILE, text)


def used_folder_problems(logger: LoggerConfig, checkpointing: CheckpointingConfig) -> list[str]:
    """Return why a run may not start in its folders; empty where it may. Changes nothing."""
    log_dir = logger.log_dir
    if checkpointing.resume:
        return []
    try:
        if logger.overwrite:
            return [
                f"logger.overwrite: {path} is named like a checkpoint and holds none, so it stays; move it, or set "
                "another checkpointing.checkpoint_dir"
                for path in _checkpoints(log_dir, checkpointing)
                if STEP.fullmatch(path.name) and not is_of_checkpoint(path)
            ]
        found, steps = _recorded(log_dir), saved_steps(checkpointing, log_dir)
    except OSError as error:
        return [f"logger.log_dir: {log_dir} cannot be read: {error}"]
    if not found and not steps:
        return []
    ways = ["logger.overwrite=true to remove what the earlier run wrote"]
    if steps:
        place = checkpointing.url or checkpointing.folder(log_dir)
        where = "" if _are_together(log_dir, checkpointing) else f" in {place}"
        found.append(f"{len(steps)} checkpoints{where}, the newest step_{max(steps)}")
        ways.insert(0, "checkpointing.resume=true to continue it")
    others = (
        "logger.log_dir" if _are_together(log_dir, checkpointing) else "logger.log_dir and checkpointing.checkpoint_dir"
    )
    return [
        f"logger.log_dir: {log_dir} already holds a run ({', '.join(found)}); set "
        f"{', '.join(ways)}, or another {others}"
    ]


def truncate_rollouts(log_dir: Path, *, resume_step: int) -> None:
    """Removes rollouts and profiles of steps after the one that a run resumes from: it makes them again."""
    for path in (log_dir / ROLLOUTS).glob("*.jsonl"):
        if _step_of(path) > resume_step:
            path.unlink(missing_ok=True)
    for path in (log_dir / PROFILES).glob("step_*"):
        if _step_of(path) > resume_step:
            shutil.rmtree(path)


def _step_of(path: Path) -> int:
    """The step in its name; -1 where there is none."""
    number = re.fullmatch(r"(?:val_)?step_([0-9]{1,18})(?:\.jsonl)?", path.name)
    return int(number[1]) if number is not None else -1


def run_folders(logger: LoggerConfig, checkpointing: CheckpointingConfig, *, durable: Path | None = None) -> list[Path]:
    """Each once, in an order that is the same for every run."""
    folders = {_real(logger.log_dir)}
    if checkpointing.enabled:
        folders.add(_real(checkpointing.folder(logger.log_dir)))
    if durable is not None:
        folders.add(_real(durable))
    return sorted(folders)


def _recorded(log_dir: Path) -> list[str]:
    """Return what an earlier run has recorded, in words; a start that came to nothing has recorded nothing."""
    metrics = log_dir / METRICS_FILE
    rollouts = len(steps_with_rollouts(log_dir))
    found = [METRICS_FILE] if metrics.is_file() and metrics.stat().st_size > 0 else []
    return found + ([f"rollouts of {rollouts} steps"] if rollouts else [])


def saved_steps(checkpointing: CheckpointingConfig, log_dir: Path) -> list[int]:
    """Return the steps of which there are checkpoints, damaged ones included.

    Raises:
        CheckpointError: the URL of the checkpoints cannot be listed.
    """
    if checkpointing.enabled and (manager := _remote(checkpointing, log_dir)) is not None:
        return manager.steps()
    names = [path.name for path in _checkpoints(log_dir, checkpointing)]
    return [int(name.removeprefix("step_")) for name in names if STEP.fullmatch(name)]


def _remote(checkpointing: CheckpointingConfig, log_dir: Path) -> RemoteCheckpoints | None:
    manager = open_checkpoints(checkpointing, log_dir)
    return manager if isinstance(manager, RemoteCheckpoints) else None


def _are_together(log_dir: Path, checkpointing: CheckpointingConfig) -> bool:
    return checkpointing.url is None and _real(checkpointing.folder(log_dir)).is_relative_to(_real(log_dir))


def _real(path: Path) -> Path:
    """Return the path without links; a loop of them is left in it, and the first write says so."""
    return Path(os.path.realpath(path))


def _checkpoints(log_dir: Path, checkpointing: CheckpointingConfig) -> list[Path]:
    """Return what checkpoints have written; without checkpointing only where that is a part of the log folder."""
    if checkpointing.enabled or checkpointing.url is not None or _are_together(log_dir, checkpointing):
        return checkpoint_paths(checkpointing.folder(log_dir))
    return []


def _remove_earlier_run(log_dir: Path, checkpointing: CheckpointingConfig) -> None:
    paths = [path for pattern in WRITTEN for path in log_dir.glob(pattern)] + _checkpoints(log_dir, checkpointing)
    if checkpointing.enabled and (manager := _remote(checkpointing, log_dir)) is not None:
        manager.remove_all()
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    for folder in {path.parent for path in paths} - {log_dir, checkpointing.folder(log_dir)}:
        if not any(folder.iterdir()):
            folder.rmdir()
    if paths:
        logger.info("logger.overwrite: removed what an earlier run wrote to %s", log_dir)
