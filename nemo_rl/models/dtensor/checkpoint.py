"""Checkpoints of the DTensor worker: a Hugging Face folder or that of an adapter, with sharded optimizer state.

All functions are collective: every rank calls them in the same order. The invariant is that of `checkpoint_folder`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from nemo_rl.errors import CheckpointError, ModelFolderError, shorten
from nemo_rl.models.adapters.folder import is_adapter_folder
from nemo_rl.models.adapters.lora import named_adapters
from nemo_rl.models.dtensor.parallelize import PolicyModel, full_weight
from nemo_rl.models.dtensor.weights import fill_adapters, fill_shards, name_differences, open_source
from nemo_rl.models.hf.checkpoint_folder import (
    AdapterBase,
    AdapterPart,
    complete_or_nothing,
    raise_together,
    random_state,
    read_adapter_together,
    refuse_code,
    set_random_state,
)
from nemo_rl.models.hf.files import own_copy
from nemo_rl.models.hf.loading import named_weights
from nemo_rl.models.hf.writing import ModelPart
from nemo_rl.models.policy.interfaces import TensorInfo
from nemo_rl.utils.files import read_plain

__all__ = [
    "DTensorSnapshot",
    "adapter_infos_of",
    "export",
    "load_adapter",
    "load_optimizer",
    "load_weights",
    "weight_infos",
]

STATE_FILE = "trainer_state.json"


def export(model: PolicyModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the full weights on the CPU in Hugging Face naming, one at a time, as copies."""
    for name, weight in named_weights(model.hf):
        full = full_weight(weight)
        # On one rank the "gathered" tensor is the shard itself, which the next step changes in place.
        yield name, full.to("cpu", copy=full.device.type != "cpu" or dist.get_world_size() == 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DTensorSnapshot:
    """A rank's part of what is trained and of the optimizer at one moment; see `Snapshot`."""

    part: ModelPart | AdapterPart
    optimizer: dict[str, Any] | None
    """Sharded state and this rank's random state, as torch's checkpoints take them; None: it is not saved."""
    trainer_state: Mapping[str, float]

    @classmethod
    def of(
        cls,
        part: ModelPart | AdapterPart,
        model: PolicyModel,
        optimizer: torch.optim.Optimizer | None,
        trainer_state: Mapping[str, float],
        *,
        copies: bool,
    ) -> DTensorSnapshot:
        """
        Args:
            optimizer: None: its state is not saved.
            copies: in memory of its own; else it is good until the next step.
        """
        state: dict[str, Any] | None = None
        if optimizer is not None:
            held = get_optimizer_state_dict(model, optimizer)
            state = {"optimizer": _copied(held) if copies else held, "rng": {str(dist.get_rank()): random_state()}}
        return cls(part=part, optimizer=state, trainer_state=dict(trainer_state))

    def write(self, *, weights: Path, optimizer: Path | None, group: dist.ProcessGroup) -> None:
        """See `Snapshot`."""
        with complete_or_nothing(weights, group=group) as target:
            self.part.write(target, group=group)
        if self.optimizer is None or optimizer is None:
            return
        with complete_or_nothing(optimizer, group=group) as target:
            state_dict_saver.save(self.optimizer, checkpoint_id=target, process_group=group)
            if group.rank() == 0:
                document = {**self.trainer_state, "world_size": group.size()}
                (target / STATE_FILE).write_text(json.dumps(document))


def weight_infos(model: PolicyModel) -> dict[str, TensorInfo]:
    """Return shapes and dtypes of the full weights, in the order in which they are exported."""
    return {
        name: TensorInfo(shape=tuple(weight.shape), dtype=str(weight.dtype).removeprefix("torch."))
        for name, weight in named_weights(model.hf)
    }


def load_weights(model: PolicyModel, folder: Path) -> None:
    """Read a Hugging Face folder into the shards.

    Raises:
        CheckpointError: the folder is missing, incomplete or of another architecture.
    """
    problem = None
    if is_adapter_folder(folder):
        raise CheckpointError(
            f"checkpoint {str(folder)!r}: expected a whole model, got an adapter; set policy.lora.enabled=true with "
            "the settings that it was trained with, or resume from another checkpoint"
        )
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


def adapter_infos_of(model: PolicyModel) -> dict[str, TensorInfo]:
    """Return shapes and dtypes of whole adapter tensors, in the order in which they are exported."""
    return {name: TensorInfo(shape=tuple(weight.shape), dtype="float32") for name, weight in named_adapters(model.hf)}


def load_adapter(model: PolicyModel, folder: Path, base: AdapterBase) -> None:
    """Read an adapter's folder into the shards of the adapters.

    Raises:
        CheckpointError: see `read_adapter_together`.
    """
    fill_adapters(model.hf, read_adapter_together(folder, adapter_infos_of(model), base))


def load_optimizer(model: PolicyModel, optimizer: torch.optim.Optimizer, folder: Path) -> dict[str, float]:
    """Read what a `DTensorSnapshot` wrote, at any number of ranks; return the trainer state.

    The random state is restored when the number of ranks is the same; otherwise there is none to restore.

    Raises:
        CheckpointError: the folder is missing, incomplete or of another model or optimizer.
    """
    refuse_code(folder)
    try:
        trainer_state: dict[str, float] = json.loads(read_plain(folder / STATE_FILE))
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


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _copied(branch) for name, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copied(branch) for branch in tree)
    return own_copy(tree) if isinstance(tree, torch.Tensor) else tree
