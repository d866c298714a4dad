"""Checkpoints of the Megatron worker: a Hugging Face folder, and megatron-core's `torch_dist` format next to it.

The latter holds weights, main weights and moments as parts of whole tensors, so that a job of any layout can read it,
and each rank's random state. Of a model with adapters it holds what is trained, and the folder is one of peft. All
functions are collective: every rank calls them in the same order. The invariant is that of `checkpoint_folder`.

Settings are not in it: betas, weight decay and schedule follow the config of the run that resumes.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from nemo_rl.errors import CheckpointError
from nemo_rl.models.hf.checkpoint_folder import (
    WRITE_ERRORS,
    AdapterPart,
    cause_text,
    complete_or_nothing,
    raise_together,
    random_state,
    refuse_code,
    set_random_state,
)
from nemo_rl.models.hf.files import own_copy
from nemo_rl.models.hf.loading import ADAPTER_PART
from nemo_rl.models.hf.writing import ModelPart
from nemo_rl.models.megatron.cpu_compat import as_if_cuda
from nemo_rl.models.megatron.mcore import (
    COMMON_STATE_FNAME,
    CheckpointingConfig,
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    dist_checkpointing,
    get_cuda_rng_tracker,
    save_config,
    save_preprocess,
    torch_strategy,
)
from nemo_rl.models.megatron.optim import PolicyOptimizer
from nemo_rl.models.megatron.setup import MegatronModel
from nemo_rl.utils.files import read_plain

__all__ = ["MegatronSnapshot", "OptimizerSnapshot", "load_optimizer"]

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
class OptimizerSnapshot:
    """A rank's part of model and optimizer at one moment, as megatron-core's format has it."""

    tensors: Any
    """State dict as torch's checkpoints take it."""
    random_states: dict[str, Any]
    document: dict[str, Any]

    @classmethod
    def of(
        cls, model: MegatronModel, optimizer: PolicyOptimizer, trainer_state: Mapping[str, float], *, copies: bool
    ) -> OptimizerSnapshot:
        """(collective)

        Args:
            copies: in memory of its own; else it is good until the next step.
        """
        shards, _ = save_preprocess(_Places.of(model, optimizer, is_loading=False).shards)
        named, _, _ = torch_strategy._replace_state_dict_keys_with_sharded_keys(shards, keep_only_main_replica=True)
        if copies:
            named = _mapped(named, lambda _, leaf: _with_own_copy(leaf))
        return cls(
            tensors=torch_strategy.mcore_to_pyt_state_dict(named),
            random_states={"torch": random_state(), "megatron": dict(get_cuda_rng_tracker().get_states())},
            document={
                "trainer_state": dict(trainer_state),
                "updates_done": optimizer.updates_done,
                "world_size": dist.get_world_size(),
            },
        )

    def write(self, folder: Path, *, group: dist.ProcessGroup) -> None:
        """(collective over `group`: the ranks of the job)

        megatron-core's own writer starts a manager and two writing processes per rank, which takes seconds for a small
        model and cannot be done by a daemon.

        Raises:
            CheckpointError: on every rank; what was in `folder` before is left as it was.
        """
        with complete_or_nothing(folder, group=group) as target:
            save_tensors(
                self.tensors,
                storage_writer=FileSystemWriter(target),
                planner=torch_strategy.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
                process_group=group,
            )
            # What only one rank writes comes last: its failure must not leave the others waiting in a collective.
            self._write_own(target)

    def _write_own(self, target: Path) -> None:
        """Write what is no tensor of the model, without collectives."""
        torch.save(self.random_states, _random_file(target))
        if dist.get_rank() == 0:
            # megatron-core's own way to write what is no tensor differs between its releases; each reads this one.
            torch.save({}, target / COMMON_STATE_FNAME)
            save_config(CheckpointingConfig(FORMAT, FORMAT_VERSION), str(target))
            (target / STATE_FILE).write_text(json.dumps(self.document))


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronSnapshot:
    """A `Snapshot` of a Megatron rank."""

    part: ModelPart | AdapterPart
    optimizer: OptimizerSnapshot | None

    def write(self, *, weights: Path, optimizer: Path | None, group: dist.ProcessGroup) -> None:
        """See `Snapshot`."""
        if self.optimizer is not None and optimizer is not None:
            self.optimizer.write(optimizer, group=group)
        with complete_or_nothing(weights, group=group) as target:
            self.part.write(target, group=group)


def load_optimizer(model: MegatronModel, optimizer: PolicyOptimizer, folder: Path) -> dict[str, float]:
    """Read what an `OptimizerSnapshot` wrote, in any layout; return the trainer state.

    Weights and buffers of the model are read, too. The random state is restored when the number of ranks is the same;
    otherwise there is none to restore.

    Raises:
        CheckpointError: on every rank: the folder is missing, incomplete or of another model or optimizer.
    """
    problem = None
    trainer_state: dict[str, float] = {}
    try:
        document = json.loads(read_plain(folder / STATE_FILE))
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
    """The parts of model and optimizer that a rank has, and their places in the whole."""

    model: dict[str, Any]
    """megatron-core's sharded tensors by name of the weight."""
    tree: dict[Any, Any]
    """The optimizer's nested state, with sharded tensors for leaves."""

    @classmethod
    def of(cls, model: MegatronModel, optimizer: PolicyOptimizer, *, is_loading: bool) -> _Places:
        # With adapters layers may differ, and then megatron-core must not stack them to one tensor of all layers.
        metadata = {"non_homogeneous_layers": True} if model.adapters else None
        with as_if_cuda():
            tensors = model.module.sharded_state_dict(metadata=metadata)
        if model.adapters:
            tensors = {name: place for name, place in tensors.items() if f".{ADAPTER_PART}." in name}
        # What is left out is the 8-bit state of Transformer Engine, an opaque object that these models do not use.
        tensors = {name: place for name, place in tensors.items() if not isinstance(place, ShardedObject)}
        return cls(model=tensors, tree=optimizer.sharded_state_dict(tensors, is_loading=is_loading))

    @property
    def shards(self) -> dict[str, dict[str, Any]]:
        """Return all tensors, in flat dicts: megatron-core loses its place in nested lists of which a rank has only
        some."""
        own = {path: leaf for path, leaf in _leaves(self.tree) if isinstance(leaf, ShardedBase)}
        return {"model": dict(self.model), "optimizer": own}

    def filled(self, loaded: dict[str, torch.Tensor]) -> dict[Any, Any]:
        """Return the tree with loaded tensors for leaves; all that is no tensor stays as it is in this run."""

        def fill(path: str, leaf: Any) -> Any:
            if isinstance(leaf, LocalNonpersistentObject):
                return leaf.unwrap()
            return loaded[path] if isinstance(leaf, ShardedBase) else leaf

        return _mapped(self.tree, fill)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict | list):
        yield path, tree
        return
    for key, branch in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _leaves(branch, f"{path}/{key}")


def _mapped(tree: Any, function: Callable[[str, Any], Any], path: str = "") -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(branch, function, f"{path}/{key}") for key, branch in tree.items()}
    if isinstance(tree, list):
        return [_mapped(branch, function, f"{path}/{key}") for key, branch in enumerate(tree)]
    return function(path, tree)


def _with_own_copy(leaf: Any) -> Any:
    """The record of a sharded tensor was made for this save; its data are those of the model."""
    if isinstance(leaf, ShardedBase) and leaf.data is not None:
        leaf.data = own_copy(leaf.data)
    return leaf


def _random_file(folder: Path) -> Path:
    return folder / f"random_state_{dist.get_rank()}.pt"
