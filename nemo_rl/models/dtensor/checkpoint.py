"""Checkpoints of the DTensor worker: a Hugging Face folder, and sharded optimizer state beside it.

All functions are collective: every rank calls them in the same order. Invariant: a folder appears under its name only
when it is complete; a failure on any rank is raised on every rank.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import PreTrainedTokenizerBase

from nemo_rl.errors import CheckpointError, ModelFolderError
from nemo_rl.models.dtensor.parallelize import PolicyModel, copy_into_shard, full_weight
from nemo_rl.models.loading import load_causal_lm, named_weights

__all__ = ["export", "load_optimizer", "load_weights", "save_optimizer", "save_tokenizer", "save_weights"]

STATE_FILE = "trainer_state.json"


def export(model: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Full weights on the CPU in Hugging Face naming, one at a time, as copies."""
    for name, weight in named_weights(model.hf):
        full = full_weight(weight)
        # On one rank the "gathered" tensor is the shard itself, which the next step changes in place.
        yield name, full.to("cpu", copy=full.device.type != "cpu" or dist.get_world_size() == 1)


def save_weights(model: PolicyModel, folder: Path) -> None:
    """Writes config and safetensors; rank 0 writes.

    Raises:
        CheckpointError: on every rank; what was in `folder` before is left as it was.
    """
    is_writer = dist.get_rank() == 0
    weights = {name: weight for name, weight in export(model) if is_writer}
    with _complete_or_nothing(folder) as target:
        if is_writer:
            model.hf.save_pretrained(str(target), state_dict=weights)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Adds the tokenizer's files to `folder`, which may be the one of the weights; rank 0 writes.

    Raises:
        CheckpointError: on every rank.
    """
    problem = None
    if dist.get_rank() == 0:
        try:
            tokenizer.save_pretrained(str(folder))
        except OSError as error:
            problem = str(error)
    _raise_together(problem, folder)


def save_optimizer(
    model: PolicyModel, optimizer: torch.optim.Optimizer, trainer_state: dict[str, float], folder: Path
) -> None:
    """Writes sharded optimizer state, every rank's random state and `trainer_state`.

    Raises:
        CheckpointError: on every rank.
    """
    state = {"optimizer": get_optimizer_state_dict(model, optimizer), "rng": {str(dist.get_rank()): _rng_state()}}
    with _complete_or_nothing(folder) as target:
        state_dict_saver.save(state, checkpoint_id=target)
        if dist.get_rank() == 0:
            document = {**trainer_state, "world_size": dist.get_world_size()}
            (target / STATE_FILE).write_text(json.dumps(document))


def load_weights(model: PolicyModel, folder: Path) -> None:
    """Reads a Hugging Face folder into the shards.

    Raises:
        CheckpointError: the folder is missing, incomplete or of another architecture.
    """
    try:
        loaded = dict(named_weights(load_causal_lm(folder)))
    except ModelFolderError as error:
        raise CheckpointError(f"checkpoint {str(folder)!r}: {error}") from error
    own = dict(named_weights(model.hf))
    if {n: w.shape for n, w in loaded.items()} != {n: w.shape for n, w in own.items()}:
        different = sorted({*loaded.items()} ^ {*own.items()}, key=lambda item: item[0])
        raise CheckpointError(
            f"checkpoint {str(folder)!r}: weights of another model, first difference at {different[0][0]!r}; "
            "set policy.model_name to the model this checkpoint was trained from"
        )
    for name, weight in own.items():
        copy_into_shard(weight, loaded[name])


def load_optimizer(model: PolicyModel, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, float]:
    """Reads what `save_optimizer` wrote, at any number of ranks; returns the trainer state.

    The random state is restored when the number of ranks is the same; otherwise there is none to restore.

    Raises:
        CheckpointError: the folder is missing, incomplete or of another model or optimizer.
    """
    try:
        trainer_state: dict[str, float] = json.loads((folder / STATE_FILE).read_text())
        state: dict[str, object] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        same_ranks = trainer_state["world_size"] == dist.get_world_size()
        rng = {str(dist.get_rank()): _rng_state()}
        if same_ranks:
            state["rng"] = rng
        state_dict_loader.load(state, checkpoint_id=folder)
    except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {str(folder)!r}: the optimizer state cannot be read: {error}") from error
    set_optimizer_state_dict(model, optimizer, state["optimizer"])  # type: ignore[arg-type]
    if same_ranks:
        _set_rng_state(rng[str(dist.get_rank())])
    return trainer_state


def _rng_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def _complete_or_nothing(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that takes its name when every rank is done; all ranks enter and leave together."""
    target = folder.with_name(f"{folder.name}.part")
    is_writer = dist.get_rank() == 0
    problem = None
    if is_writer:
        try:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
        except OSError as error:
            problem = str(error)
    _raise_together(problem, folder)
    try:
        yield target
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        problem = f"{type(error).__name__}: {error}"
    try:
        _raise_together(problem, folder)
        if is_writer:
            shutil.rmtree(folder, ignore_errors=True)
            target.rename(folder)
    finally:
        if is_writer:
            shutil.rmtree(target, ignore_errors=True)
    dist.barrier()


def _raise_together(problem: str | None, folder: Path) -> None:
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, text in enumerate(problems):
        if text is not None:
            raise CheckpointError(
                f"checkpoint {str(folder)!r}: rank {rank} could not write it: {text}; earlier checkpoints stay valid. "
                "Free disk space or change checkpointing.checkpoint_dir"
            )
