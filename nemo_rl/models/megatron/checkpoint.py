"""Optimizer checkpoints of the Megatron worker, in megatron-core's `torch_dist` format.

A folder holds weights, main weights and moments as parts of whole tensors, so that a job of any layout can read it, and
each rank's random state. Called by the Megatron worker, which writes the Hugging Face folder as well. All functions are
collective: every rank calls them in the same order. The invariant is that of `checkpoint_folder`.

Settings are not in it: betas, weight decay and schedule follow the config of the run that resumes.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from nemo_rl.errors import CheckpointError
from nemo_rl.models.checkpoint_folder import (
    WRITE_ERRORS,
    cause_text,
    close_part,
    open_part,
    raise_together,
    random_state,
    refuse_code,
    set_random_state,
)
from nemo_rl.models.megatron.cpu_compat import as_if_cuda
from nemo_rl.models.megatron.mcore import (
    COMMON_STATE_FNAME,
    CheckpointingConfig,
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    async_save,
    async_utils,
    dist_checkpointing,
    get_cuda_rng_tracker,
    save_config,
    save_preprocess,
    torch_strategy,
)
from nemo_rl.models.megatron.optim import PolicyOptimizer
from nemo_rl.models.megatron.setup import MegatronModel

__all__ = ["PendingSave", "load_optimizer", "save_optimizer"]

FORMAT, FORMAT_VERSION = "torch_dist", 1
STATE_FILE = "trainer_state.json"
READ_ERRORS = (
    *WRITE_ERRORS,
    AssertionError,
    AttributeError,
    CheckpointError,
    CheckpointingException,
    EOFError,
    KeyError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingSave:
    """A checkpoint whose tensors are being written during the training; its folder has no name yet."""

    folder: Path
    writers: Any
    """megatron-core's queue of writing processes."""

    def finish(self) -> None:
        """(collective) Waits for the writers and names the folder: before the next save, and before the ranks end.

        Raises:
            CheckpointError: on every rank; what was in the folder before is left as it was.
        """
        problem = None
        try:
            self.writers.close()
        except (*WRITE_ERRORS, CheckpointingException) as error:
            problem = cause_text(error)
        close_part(self.folder, problem)


def save_optimizer(
    model: MegatronModel,
    optimizer: PolicyOptimizer,
    trainer_state: dict[str, float],
    folder: Path,
    *,
    is_async: bool = False,
) -> PendingSave | None:
    """Writes model and optimizer state, every rank's random state and `trainer_state`.

    Args:
        is_async: write the tensors in processes of their own, and return what has to be finished later.

    Raises:
        CheckpointError: on every rank; what was in `folder` before is left as it was.
    """
    target = open_part(folder)
    writers = None
    problem = None
    try:
        # Whatever only one rank writes comes last: its failure must not leave the others waiting in a collective.
        shards, _ = save_preprocess(_Places.of(model, optimizer, is_loading=False).shards)
        if is_async:
            writers = async_utils.AsyncCallsQueue()
            request = async_save(shards, target, form=FORMAT, version=FORMAT_VERSION)
            writers.schedule_async_request(request)
        else:
            _write(shards, target)
        _write_own(target, trainer_state, optimizer)
    except (*WRITE_ERRORS, CheckpointingException) as error:
        problem = cause_text(error)
    if writers is None:
        close_part(folder, problem)
        return None
    try:
        raise_together(problem, folder, doing="write")
    except CheckpointError:
        writers.close(abort=True)
        raise
    return PendingSave(folder=folder, writers=writers)


def load_optimizer(model: MegatronModel, optimizer: PolicyOptimizer, folder: Path) -> dict[str, float]:
    """Reads what `save_optimizer` wrote, in any layout; returns the trainer state.

    Weights and buffers of the model are read, too. The random state is restored when the number of ranks is the same;
    otherwise there is none to restore.

    Raises:
        CheckpointError: on every rank: the folder is missing, incomplete or of another model or optimizer.
    """
    problem = None
    trainer_state: dict[str, float] = {}
    try:
        document = json.loads((folder / STATE_FILE).read_text())
        trainer_state, updates_done = document["trainer_state"], int(document["updates_done"])
        own = _random_file(folder)
        states = torch.load(own, weights_only=True) if document["world_size"] == dist.get_world_size() else None
        refuse_code(folder)
    except READ_ERRORS as error:
        problem = cause_text(error)
    raise_together(problem, folder, doing="read")
    try:
        places = _Places.of(model, optimizer, is_loading=True)
        with as_if_cuda(), warnings.catch_warnings():
            # megatron-core loads by a name that torch will drop.
            warnings.simplefilter("ignore", FutureWarning)
            loaded = dist_checkpointing.load(places.shards, str(folder))
            model.module.load_state_dict(loaded["model"], strict=False)
        # Without momentum SGD has no tensors at all.
        optimizer.load_sharded_state_dict(places.filled(loaded.get("optimizer", {})), updates_done=updates_done)
        if states is not None:
            set_random_state(states["torch"])
            get_cuda_rng_tracker().set_states(states["megatron"])
    except READ_ERRORS as error:
        problem = cause_text(error)
    raise_together(problem, folder, doing="read")
    return trainer_state


@dataclass(frozen=True, kw_only=True, slots=True)
class _Places:
    """What a rank has of model and optimizer, and where that lies in the whole."""

    model: dict[str, Any]
    """megatron-core's sharded tensors by name of the weight."""
    tree: dict[Any, Any]
    """The optimizer's nested state, with sharded tensors for leaves."""

    @classmethod
    def of(cls, model: MegatronModel, optimizer: PolicyOptimizer, *, is_loading: bool) -> _Places:
        with as_if_cuda():
            tensors = model.module.sharded_state_dict()
        # What is left out is the 8-bit state of Transformer Engine, an opaque object that these models do not use.
        tensors = {name: place for name, place in tensors.items() if not isinstance(place, ShardedObject)}
        return cls(model=tensors, tree=optimizer.sharded_state_dict(tensors, is_loading=is_loading))

    @property
    def shards(self) -> dict[str, dict[str, Any]]:
        """All tensors, in flat dicts: megatron-core loses its place in nested lists of which a rank has only some."""
        own = {path: leaf for path, leaf in _leaves(self.tree) if isinstance(leaf, ShardedBase)}
        return {"model": dict(self.model), "optimizer": own}

    def filled(self, loaded: dict[str, torch.Tensor]) -> dict[Any, Any]:
        """The tree with loaded tensors for leaves; all that is no tensor stays as it is in this run."""

        def fill(path: str, leaf: Any) -> Any:
            if isinstance(leaf, LocalNonpersistentObject):
                return leaf.unwrap()
            return loaded[path] if isinstance(leaf, ShardedBase) else leaf

        tree: dict[Any, Any] = _mapped(self.tree, fill)
        return tree


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts and lists by their path."""
    if not isinstance(tree, dict | list):
        yield path, tree
        return
    for key, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _leaves(branch, f"{path}/{key}")


def _mapped(tree: Any, function: Callable[[str, Any], Any], path: str = "") -> Any:
    """The tree with other leaves."""
    if isinstance(tree, dict):
        return {key: _mapped(branch, function, f"{path}/{key}") for key, branch in tree.items()}
    if isinstance(tree, list):
        return [_mapped(branch, function, f"{path}/{key}") for key, branch in enumerate(tree)]
    return function(path, tree)


def _write(shards: dict[str, Any], target: Path) -> None:
    """(collective) Writes this rank's tensors here and now.

    megatron-core's own writer is made for asynchronous saves: it starts a manager and two writing processes per rank,
    which takes seconds for a small model and cannot be done by a daemon.
    """
    named, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(shards, keep_only_main_replica=True)
    save_tensors(
        torch_strategy.mcore_to_pyt_state_dict(named),
        storage_writer=FileSystemWriter(target),
        planner=torch_strategy.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )


def _write_own(target: Path, trainer_state: dict[str, float], optimizer: PolicyOptimizer) -> None:
    """What is no tensor of the model: without collectives."""
    states = {"torch": random_state(), "megatron": get_cuda_rng_tracker().get_states()}
    torch.save(states, _random_file(target))
    if dist.get_rank() == 0:
        # megatron-core's own way to write what is no tensor differs between its releases; each reads this one.
        torch.save({}, target / COMMON_STATE_FNAME)
        save_config(CheckpointingConfig(FORMAT, FORMAT_VERSION), str(target))
        document = {
            "trainer_state": trainer_state,
            "updates_done": optimizer.updates_done,
            "world_size": dist.get_world_size(),
        }
        (target / STATE_FILE).write_text(json.dumps(document))


def _random_file(folder: Path) -> Path:
    return folder / f"random_state_{dist.get_rank()}.pt"
