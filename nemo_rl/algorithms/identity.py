"""`RunIdentity`: what a run learns from and is scored by, as digests; a resumed run and a replay compare it.

Checkpoints and kept steps hold it. Digests are of contents, so that a folder may be moved or downloaded again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from nemo_rl.errors import CheckpointError, boundary
from nemo_rl.experience.rollout_records import RolloutInfo
from nemo_rl.models.hf.loading import CONFIG_FILE
from nemo_rl.utils.checkpoint import Checkpoint
from nemo_rl.utils.files import open_plain, read_plain_text

__all__ = [
    "date_line",
    "differences",
    "exported_dtype",
    "first_start",
    "identity_of",
    "identity_state",
    "model_digest",
    "model_dtype",
    "run_start",
    "same_or_refused",
]

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
        for name in (CONFIG_FILE, GENERATION_CONFIG):
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
    path = Path(folder) / CONFIG_FILE
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
    known = None if resume_from is None else run_start(resume_from.state, where=resume_from.path)
    return known or datetime.now()


def date_line(began: datetime, resume_from: Checkpoint | None) -> str:
    """Return what the user is told of a chat template that prints the date."""
    if resume_from is not None and run_start(resume_from.state, where=resume_from.path) is None:
        return (
            f"the chat template prints the date, and {resume_from.path} does not say when its run was started: prompts "
            f"say {began:%Y-%m-%d %H:%M} from here on"
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
        same_or_refused(resume_from.state, identity, allowed=allowed, where=resume_from.path)
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
