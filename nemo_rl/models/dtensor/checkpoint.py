"""Checkpoints of the DTensor worker: a Hugging Face folder, and sharded optimizer state next to it.

All functions are collective: every rank calls them in the same order. The invariant is that of `checkpoint_folder`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from nemo_rl.errors import CheckpointError, ModelFolderError, shorten
from nemo_rl.models.checkpoint_folder import (
    complete_or_nothing,
    raise_together,
    random_state,
    refuse_code,
    save_model,
    set_random_state,
)
from nemo_rl.models.dtensor.parallelize import PolicyModel, full_weight
from nemo_rl.models.dtensor.weights import fill_shards, name_differences, open_source
from nemo_rl.models.loading import named_weights

__all__ = ["export", "load_optimizer", "load_weights", "save_optimizer", "save_weights"]

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
    # What gathers only is not copied: the writer's shards of files take copies, one weight at a time.
    whole = ((name, full_weight(weight)) for name, weight in named_weights(model.hf))
    save_model(folder, model.hf.config, whole, generation_config=model.hf.generation_config)


def save_optimizer(
    model: PolicyModel, optimizer: torch.optim.Optimizer, trainer_state: dict[str, float], folder: Path
) -> None:
    """Writes sharded optimizer state, every rank's random state and `trainer_state`.

    Raises:
        CheckpointError: on every rank.
    """
    state = {"optimizer": get_optimizer_state_dict(model, optimizer), "rng": {str(dist.get_rank()): random_state()}}
    with complete_or_nothing(folder) as target:
        state_dict_saver.save(state, checkpoint_id=target)
        if dist.get_rank() == 0:
            document = {**trainer_state, "world_size": dist.get_world_size()}
            (target / STATE_FILE).write_text(json.dumps(document))


def load_weights(model: PolicyModel, folder: Path) -> None:
    """Reads a Hugging Face folder into the shards.

    Raises:
        CheckpointError: the folder is missing, incomplete or of another architecture.
    """
    problem = None
    try:
        source = open_source(folder, model.hf)
        different = name_differences(model.hf, source)
        if different:
            problem = (
                f"weights of another model, first difference at {different[0]!r}; set policy.model_name to the model "
                "this checkpoint was trained from"
            )
        else:
            fill_shards(model.hf, source)
    except ModelFolderError as error:
        problem = str(error)
    raise_together(problem, folder, doing="read")


def load_optimizer(model: PolicyModel, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, float]:
    """Reads what `save_optimizer` wrote, at any number of ranks; returns the trainer state.

    The random state is restored when the number of ranks is the same; otherwise there is none to restore.

    Raises:
        CheckpointError: the folder is missing, incomplete or of another model or optimizer.
    """
    refuse_code(folder)
    try:
        trainer_state: dict[str, float] = json.loads((folder / STATE_FILE).read_text())
        state: dict[str, object] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        same_ranks = trainer_state["world_size"] == dist.get_world_size()
        rng = {str(dist.get_rank()): random_state()}
        if same_ranks:
            state["rng"] = rng
        state_dict_loader.load(state, checkpoint_id=folder)
    except (OSError, ValueError, KeyError, RuntimeError, CheckpointException) as error:
        raise CheckpointError(
            f"checkpoint {str(folder)!r}: the optimizer state cannot be read: {_first_cause(error)}; resume with the "
            f"optimizer that it was made with (this one is {type(optimizer).__name__}), or from another checkpoint"
        ) from error
    set_optimizer_state_dict(model, optimizer, state["optimizer"])  # type: ignore[arg-type]
    if same_ranks:
        set_random_state(rng[str(dist.get_rank())])
    return trainer_state


def _first_cause(error: BaseException) -> str:
    """Torch's own text holds a traceback of every rank."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return shorten(" ".join(str(error).split()) or type(error).__name__)
