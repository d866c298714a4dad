"""`RefitExtension`: what runs of ours in each rank of a vLLM engine, which mixes it into the class of its workers; and
`RankRefit`, which receives new weights there.

Methods of the first are called by name from `VllmEngine`, through vLLM's `collective_rpc`. Every rank receives all
weights by itself, whole, under the names of the Hugging Face model, and vLLM's loaders take the rank's part of them.
vLLM reloads layer by layer: a layer keeps what comes for it, and is fused and packed anew when it is whole. So vLLM's
own tensors cannot be compared with anybody's: fingerprints are of what came, and of what its loaders were given.
Invariant: between `begin_reload` and `finish_reload` nothing may be generated.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from transformers import PreTrainedModel
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from nemo_rl.config.generation import DROPS_WEIGHTS
from nemo_rl.errors import WorkerError, name_some
from nemo_rl.models.generation.interfaces import RankMemoryChange
from nemo_rl.models.generation.vllm.adapters import WorkerAdapters
from nemo_rl.models.generation.vllm.sites import VllmRecorder, VllmSites
from nemo_rl.models.generation.vllm.turns import draw_by_position, force_rows
from nemo_rl.models.hf.files import FileNames, as_stored
from nemo_rl.models.hf.loading import DTYPES, load_model_config, model_without_weights
from nemo_rl.models.weight_sync.buckets import RefitPlan, WeightSlot, free_bytes
from nemo_rl.models.weight_sync.receipt.fingerprint import Fingerprints
from nemo_rl.models.weight_sync.shard_loader import PartPrints, ShardLoader
from nemo_rl.models.weight_sync.shard_plan import Boxes, ShardPart, whole_boxes
from nemo_rl.models.weight_sync.target import RefitReceiver
from nemo_rl.models.weight_sync.transport import IpcHandle, RefitGroupSpec, device_id

__all__ = ["RankRefit", "RefitExtension", "expected_weights", "one_answer", "remove_names", "same_on_all_ranks"]


def expected_weights(folder: str | Path, *, precision: str) -> PreTrainedModel:
    """Return the model whose weights are expected: names, shapes and dtypes, without memory for them."""
    model = model_without_weights(load_model_config(folder), folder)
    return model.to(DTYPES[precision])  # type: ignore[arg-type]


class RankRefit:
    """The receiving side of a refit in one rank of an engine, which hands new weights to the loaders of vLLM.

    Args:
        rank: of this worker among those of the engine.
        device: of this rank.
    """

    def __init__(self, model: PreTrainedModel, loader: RefitExtension, *, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._loader, self._file_names = loader, FileNames(model)
        names: dict[int, str] = {}
        state = model.state_dict(keep_vars=True)
        self._first = {name: names.setdefault(id(weight), name) for name, weight in state.items()}
        """Name of a weight -> its first name, which vLLM is told: a tied weight has several."""
        self._fingerprints, self._parts = Fingerprints(), Fingerprints()
        self._files: dict[str, tuple[str, ...]] = {}
        """Names in files of each weight that was handed over."""
        self._taken: set[str] = set()
        self._receiver = RefitReceiver(model, device, take=self._take)
        self._recorded = ShardLoader(device, self._take_part)
        """Loader of the parts that were recorded last."""
        self._shards: ShardLoader | None = None
        """Loader of the parts of weights in a refit by shards; None where weights came whole."""

    def device_id(self) -> str:
        return device_id(self._device)

    def free_bytes(self, *, on_device: bool) -> int:
        """Return memory that a buffer may take a part of: of this rank's device, or of its machine."""
        return free_bytes(self._device if on_device else torch.device("cpu"))

    def record_parts(self, slots: tuple[WeightSlot, ...], kind: Literal["weights", "adapter"]) -> Boxes:
        """Return the boxes that vLLM's loaders take of each weight in this rank; no weight changes. An adapter is taken
        whole."""
        if kind == "adapter":
            return whole_boxes(slots)
        self._taken, self._recorded = set(), ShardLoader(self._device, self._take_part)
        with self._loader.dry_reload():
            return self._recorded.record(slots)

    def keep_part(self, parts: Sequence[ShardPart], kind: Literal["weights", "adapter"]) -> None:
        self._receiver.take_part(parts[self._rank], kind)

    def receive_shards(self, kind: Literal["weights", "adapter"]) -> None:
        """Receive the parts of all weights, while every rank of the policy sends them."""
        if kind == "adapter":
            self._receiver.receive_shards(kind)
            return
        self.begin_weights()
        self._shards = self._recorded
        self._shards.begin()
        self._taken = {self._first[name] for name in self._shards.left_out}
        self._receiver.receive_shards(kind, place=self._shards.place)

    def _take_part(self, name: str, weight: torch.Tensor) -> None:
        """Give a placeholder of a weight, or the weight, to vLLM's loaders."""
        first = self._first[name]
        if first not in self._taken:
            self._taken.add(first)
            self._loader.load_parts(list(as_stored(first, weight, self._file_names)))

    def part_prints(self) -> PartPrints | None:
        """Return the hash of each box of a weight in this rank's parameters; None where weights came whole."""
        return None if self._shards is None else self._shards.prints()

    def begin_weights(self) -> None:
        self._taken, self._shards = set(), None
        self._fingerprints, self._parts, self._files = Fingerprints(), Fingerprints(), {}
        self._loader.begin_reload()

    def take_weight(self, name: str, weight: torch.Tensor) -> None:
        """Take one of the new weights, which may still change afterwards."""
        self._take(name, weight.to(self._device, copy=True))

    def _take(self, name: str, weight: torch.Tensor) -> None:
        """Take one of them, in the engine's dtype; it must not change from here on."""
        self._fingerprints.add(name, weight)
        first = self._first[name]
        if first not in self._taken:
            self._taken.add(first)
            stored = list(as_stored(first, weight, self._file_names))
            self._files[first] = tuple(file_name for file_name, _ in stored)
            for file_name, part in stored:
                self._parts.add(file_name, part)
            self._loader.load(stored)

    def finish_weights(self) -> None:
        """Finish the weights: vLLM computes with them from here on.

        Raises:
            RuntimeError: some have not come.
        """
        missing = set(self._first.values()) - self._taken
        if missing:
            raise RuntimeError(f"{len(missing)} weights were not received, first {min(missing)!r}")
        self._loader.finish_reload()

    def fingerprints(self) -> dict[str, str]:
        """Return name -> fingerprint of what came last; of what vLLM has loaded in its place, where that is something
        else."""
        handed, found, loaded = self._parts.result(), self._fingerprints.result(), self._loader.loaded_fingerprints()
        for name in found:
            files = self._files.get(self._first[name], ())
            wrong = [file for file in files if loaded.get(file) != handed[file]]
            if wrong:
                is_whole = len(files) == 1
                got = loaded.get(wrong[0], "nothing")
                found[name] = got if is_whole else f"{got} in vLLM as {name_some(wrong)}"
        return found | self.stale_copies()

    def stale_copies(self) -> dict[str, str]:
        """Name of a weight -> what is wrong with vLLM's packed copy of it; a tied weight under its first name."""
        layers = self._loader.stale_copies()
        return {
            self._first.get(f"{layer}.weight", f"{layer}.weight"): f"other values in the packed copy of vLLM's {layer}"
            for layer in layers
        }

    def delta_base(self) -> int:
        """Return version that a delta can build on; -1: none."""
        return self._receiver.delta_base

    def forget_base(self) -> None:
        """Forget the base of deltas: the weights were replaced by another way."""
        self._receiver.forget_base()

    def begin(self, plan: RefitPlan, handles: Sequence[IpcHandle]) -> None:
        """Get ready for the first bucket; with handles buckets come through the memory of this rank's own GPU."""
        if plan.kind == "weights":
            self.begin_weights()
        self._receiver.begin(plan, handles[self._rank] if handles else None)

    def load(self, bucket: np.ndarray | None) -> None:
        """Load the next bucket, given as uint8, or read from the shared memory."""
        self._receiver.load(bucket)

    def join(self, spec: RefitGroupSpec) -> None:
        """(collective over the refit group) Join it; `spec.rank` is the number of the engine's first rank."""
        self._receiver.join(replace(spec, rank=spec.rank + self._rank))

    def receive(self) -> None:
        """(collective over the refit group) Receive all buckets, while the policy sends them."""
        self._receiver.receive()

    def finish(self) -> dict[str, torch.Tensor] | None:
        """End the refit, when all buckets have come; return the adapter that has come, or None for weights."""
        self._receiver.finish()
        adapter = self._receiver.take_adapter()
        if adapter is None:
            self.finish_weights()
        return adapter

    def close(self) -> None:
        """Leave the refit group. Idempotent."""
        self._receiver.close()


def same_on_all_ranks(of_ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the fingerprints of an engine: those of its ranks where all agree, else which rank holds what."""
    first, *others = of_ranks
    found = dict(first)
    for rank, prints in enumerate(others, start=1):
        for name in first.keys() | prints.keys():
            if prints.get(name) != first.get(name):
                found[name] = f"{prints.get(name, 'nothing')} in rank {rank}, {first.get(name, 'nothing')} in rank 0"
    return found


def one_answer(of_ranks: Sequence[int], *, what: str) -> int:
    """Return the answer of all ranks of an engine.

    Raises:
        WorkerError: they differ.
    """
    if len(set(of_ranks)) > 1:
        raise WorkerError(f"the ranks of the engine differ in {what}: {list(of_ranks)}", stage="refit")
    return of_ranks[0]


SHARED_BY_RANKS = re.compile(r"/dev/shm/\S*-cpushm_\d+$")
"""Memory by which vLLM's ranks on CPUs exchange tensors, among the mappings of a process."""
MET_BY = "VLLM_DIST_IDENT"
"""Variable of a rank on CPUs: the name of the file by which the ranks have met, or a port."""


def remove_names() -> None:
    """Remove the names of the shared memory, the sockets and the file of vLLM that this process has open: what they
    name ends with the processes of the engine, however they end. All of them have opened theirs when they have answered
    once."""
    # vLLM hides what it has made at its start from the garbage collector.
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    queues = [each for each in gc.get_objects() if type(each) is ShmRingBuffer and each.is_creator]
    if is_frozen:
        gc.freeze()
    for queue in queues:
        queue.shared_memory.unlink()
        queue.is_creator = False
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = [found[0] for line in maps if (found := SHARED_BY_RANKS.search(line))]
    bound = (each.laddr for each in psutil.Process().net_connections(kind="unix"))
    names += [name for name in bound if os.path.dirname(name) == envs.VLLM_RPC_BASE_PATH]
    if MET_BY in os.environ:
        names.append(f"{tempfile.gettempdir()}/{os.environ[MET_BY]}")
    for name in names:
        Path(name).unlink(missing_ok=True)


COLUMNS = 8
"""Columns of a packed weight that are compared, at least, where it has as many."""


def _storages(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    """Return the memory of these tensors, each piece once, with its size."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage, storage.nbytes()
    return list(found.values())


class RefitExtension:
    """The methods that `collective_rpc` calls on every worker."""

    model_runner: Any
    vllm_config: Any
    use_v2_model_runner: bool
    rank: int
    device: torch.device | None
    is_reloading = False
    loaded = Fingerprints()
    adapters: WorkerAdapters
    recorder: VllmRecorder | None = None
    rank_refit: RankRefit
    put_aside: dict[str, list[tuple[torch.UntypedStorage, int]]]
    """Memory that was freed on a CPU, with its size, by vLLM's tags."""

    def remove_names(self) -> None:
        """Remove the names of shared memory, as `remove_names` does."""
        remove_names()

    def free_memory(self, level: int) -> RankMemoryChange:
        """Free caches, and with level 2 weights; with level 1 weights go to the CPU."""
        if not current_platform.is_cpu():
            before = self._used_bytes()
            self.sleep(level)  # type: ignore[attr-defined]
            return self._changed_from(before)
        # vLLM's own sleep does nothing here, so the memory of tensors that can be had again is freed under them.
        before = self._used_bytes()
        weights = list(self.model_runner.get_model().parameters()) if level >= DROPS_WEIGHTS else []
        self.put_aside = {"kv_cache": _storages(self.model_runner.kv_caches), "weights": _storages(weights)}
        for parts in self.put_aside.values():
            for storage, _ in parts:
                storage.resize_(0)
        note = "weights stay, they are on the CPU" if level < DROPS_WEIGHTS else "packed copies of matrices stay"
        return self._changed_from(before, note)

    def wake(self, tag: str) -> RankMemoryChange:
        """Take memory for `weights` or `kv_cache` again."""
        before = self._used_bytes()
        if not current_platform.is_cpu():
            self.wake_up([tag])  # type: ignore[attr-defined]
            return self._changed_from(before)
        for storage, size in self.put_aside.pop(tag, []):
            storage.resize_(size)
        if tag == "kv_cache":
            # Attention multiplies what is masked by 0, which must not be NaN.
            for cache in self.model_runner.kv_caches:
                cache.zero_()
        return self._changed_from(before)

    def _used_bytes(self) -> int:
        """Return the bytes in use on the GPU, by all processes, or those of weights and caches on a CPU."""
        if not current_platform.is_cpu():
            free, total = torch.cuda.mem_get_info(self.device)
            return int(total - free)
        tensors = [*self.model_runner.get_model().parameters(), *self.model_runner.kv_caches]
        return sum(size for _, size in _storages(tensors))

    def _changed_from(self, before: int, note: str = "") -> RankMemoryChange:
        return RankMemoryChange(device=self.rank_refit.device_id(), before=before, after=self._used_bytes(), note=note)

    def prepare_rows(self, forced: str) -> None:
        """Prepare the model runner, once, before the first request. vLLM's second model runner draws by seed and
        position, and replays given responses, by itself.

        Args:
            forced: name of the extra argument of a request that has the tokens of its response.
        """
        runner = self.model_runner
        if self.use_v2_model_runner:
            return
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            # vLLM makes them when it warms a model up, which it leaves out on CPUs, and later stages need them.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        draw_by_position(runner)
        force_rows(runner, name=forced)

    def prepare_refit(self, folder: str, precision: str) -> None:
        """Get ready to receive weights of the model of this folder, in this precision."""
        # A Hugging Face model that vLLM itself computes with is built in its setting alone.
        with set_current_vllm_config(self.vllm_config):
            model, device = expected_weights(folder, precision=precision), self.device or torch.device("cpu")
        self.rank_refit = RankRefit(model, self, rank=self.rank, device=device)

    def on_refit(self, method: str, arguments: Sequence[object], named: dict[str, object]) -> object:
        """Call a method of this rank's `RankRefit`."""
        return getattr(self.rank_refit, method)(*arguments, **named)

    def begin_reload(self) -> None:
        """Begin new weights, anew after a refit that broke off."""
        model = self.model_runner.get_model()
        if self.is_reloading:
            self._finalize(model)
        if current_platform.is_cpu():
            # vLLM packs experts for CPUs only where it makes their kernel; a kernel that is kept computes with weights
            # that are not packed, without an error. Needed until vLLM packs in a reload as well.
            for module in model.modules():
                if isinstance(module, RoutedExperts):
                    module.quant_method.moe_kernel = None
        self.is_reloading, self.loaded = True, Fingerprints()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def load(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Take some weights, named as the files of the model name them; the tensors are kept and must not change."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(self.loaded.passing(named))

    @contextmanager
    def dry_reload(self) -> Iterator[None]:
        """Let `load_parts` run over placeholders that copy nothing: vLLM's layers stay incomplete, and get their own
        tensors back."""
        model = self.model_runner.get_model()
        if self.is_reloading:
            self._finalize(model)
            self.is_reloading = False
        # It warns of each layer that got nothing.
        log = logging.getLogger(layerwise.__name__)
        level = log.level
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            try:
                yield
            finally:
                log.setLevel(logging.ERROR)
                finalize_layerwise_reload(model, self.model_runner.model_config)
                log.setLevel(level)

    def load_parts(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Let the model's loaders run over placeholders, named as the files of the model name them."""
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(named)

    def finish_reload(self) -> None:
        self._finalize(self.model_runner.get_model())
        self.is_reloading = False
        self.model_runner.reset_encoder_cache()

    def prepare_adapters(self, shapes: dict[str, tuple[int, ...]]) -> list[str]:
        """Find the place of each of these tensors of adapters; return those that have none."""
        self.adapters = WorkerAdapters(self.model_runner.lora_manager._adapter_manager)
        return self.adapters.prepare(shapes)

    def take_adapter(self, number: int, tensors: dict[str, torch.Tensor], rank: int, gone: list[int]) -> None:
        self.adapters.take(number, tensors, rank, gone)

    def adapter_fingerprints(self, number: int, rank: int) -> dict[str, str]:
        """Return name -> fingerprint of each tensor in the slot of an adapter."""
        return self.adapters.fingerprints(number, rank)

    def recorded_sites(self) -> dict[str, object]:
        """Return the sites of this worker as `[kind, layer]`, and reasons by the names of those that it has not."""
        sites = VllmSites.of(self.model_runner)
        return {
            "sites": [[point.kind.value, point.layer] for point in sites.hook_points],
            "unobserved": {kind.value: why for kind, why in sites.unobserved.items()},
        }

    def begin_recording(self, folder: str, first_rank: int, selector: str) -> None:
        """Record the requests that name their row (`ROW_KEY`).

        Args:
            first_rank: number of the engine's first worker among all that write to the folder.
        """
        self.end_recording(False)
        self.recorder = VllmRecorder.of(self.model_runner, Path(folder), first_rank=first_rank, selector=selector)

    def record_logprobs(self, keys: list[str], tokens: list[list[int]], logprobs: list[float]) -> None:
        """Record log-probabilities of sampled tokens, `tokens` being row, position and id of each."""
        if self.recorder is not None:
            self.recorder.logprobs(keys, tokens, logprobs)

    def end_recording(self, is_complete: bool = True) -> str | None:
        """End the records; return why they are not whole, or None."""
        recorder, self.recorder = self.recorder, None
        return None if recorder is None else recorder.close(is_complete=is_complete)

    def loaded_fingerprints(self) -> dict[str, str]:
        """Name in files -> fingerprint of what the model's loaders were given since `begin_reload`."""
        return self.loaded.result()

    def stale_copies(self) -> list[str]:
        """Return layers whose packed copy has other values than the weight that they keep beside it, as a tied head
        does.

        A product with a unit vector is a column of the weight, to the last bit.
        """
        found = []
        for name, layer in self.model_runner.get_model().named_modules():
            if not hasattr(layer, "cpu_linear") or layer.weight.dim() != 2:
                # Not packed, or the packed one is all that there is.
                continue
            weight = layer.weight
            columns = torch.arange(0, weight.shape[1], max(1, weight.shape[1] // COLUMNS))
            units = torch.nn.functional.one_hot(columns, weight.shape[1]).to(weight.dtype)
            if not torch.equal(layer.quant_method.apply(layer, units), weight[:, columns].T):
                found.append(name.removesuffix(".base_layer"))
        return found

    def _finalize(self, model: torch.nn.Module) -> None:
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_runner.model_config)
        if current_platform.is_cpu():
            # No weight comes for a head that is tied to the embedding, so vLLM leaves it packed from the old one.
            for module in model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
