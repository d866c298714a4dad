"""The kinds of `WeightSync`, of which `build_weight_sync` makes the configured one, and `receipt_spec`.

Engines read buckets out of memory that they share with policy workers, on the CPU (`payload`) or on a GPU (`ipc`). By
broadcast, policy rank 0 and all engines are one process group, and every bucket goes to all at once. Both sides are
called once and walk the buckets by themselves; when either fails the error that caused it is raised.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from types import MappingProxyType
from typing import TypeVar

from nemo_rl.config.generation import RefitTransport
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.distributed.worker_groups import WorkerFleet, WorkerGroup, ask
from nemo_rl.errors import WorkerError, WorkerLost
from nemo_rl.models.hf.loading import load_model_config
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker
from nemo_rl.models.weight_sync.base import STAGE, RefitParties, WeightSync
from nemo_rl.models.weight_sync.buckets import NUM_SLOTS, RefitPlan
from nemo_rl.models.weight_sync.receipt import ReceiptSpec, Sent, make_probe
from nemo_rl.models.weight_sync.receipt.fingerprint import summed
from nemo_rl.models.weight_sync.shard_plan import ShardPlan, plan_shards
from nemo_rl.models.weight_sync.shard_transport import NUM_BUFFERS
from nemo_rl.models.weight_sync.target import RefitTarget
from nemo_rl.models.weight_sync.transport import ChannelOffer, ChannelRequest, RefitGroupSpec
from nemo_rl.utils.flops import TransformerShape

__all__ = [
    "BroadcastWeightSync",
    "IpcWeightSync",
    "PayloadWeightSync",
    "ShardWeightSync",
    "build_weight_sync",
    "choose_backend",
    "group_ranks",
    "receipt_spec",
    "weight_sync_of",
]


logger = logging.getLogger(__name__)

_T = TypeVar("_T")

LOOPBACK = "127.0.0.1"


class ChannelWeightSync(WeightSync):
    """Refit by channels: engines read the buckets of policy workers by themselves, see `BucketSender`.

    Args:
        address: of the machine of policy rank 0, as the engines reach it.
    """

    num_slots = NUM_SLOTS

    def __init__(self, parties: RefitParties, *, address: str = LOOPBACK) -> None:
        super().__init__(parties)
        self._address = address

    def _offers(self, plan: RefitPlan, *, holds_all: bool = False) -> dict[int, ChannelOffer]:
        """Let the policy open its channels; return those of the ranks that have one."""
        request = ChannelRequest(
            address=self._address,
            on_device=self.buffer_is_on_device,
            timeout_s=self._parties.timeout_s,
            holds_all=holds_all,
        )
        found = self._parties.run_policy(ask(PolicyWorker.open_refit_channel, plan=plan, request=request))
        return {rank: offer for rank, offer in enumerate(found) if offer is not None}

    def _walk(
        self,
        plan: RefitPlan,
        all_sent: Callable[[], None],
        ranks: Mapping[int, Sequence[int]],
        offers: Mapping[int, ChannelOffer],
        version: int,
    ) -> dict[int, int]:
        """Let both sides walk the buckets, and return engine -> version that it holds.

        Args:
            ranks: engine -> the policy's rank from which each of its ranks reads.
        """
        parties = self._parties
        begun = parties.run_engines(
            {
                engine: ask(
                    RefitTarget.begin_reading,
                    plan=plan,
                    channels=[offers[rank].spec for rank in dict.fromkeys(of_engine)],
                    handles=[handle for rank in of_engine if (handle := offers[rank].handle) is not None],
                )
                for engine, of_engine in ranks.items()
            }
        )
        readers = Counter(rank for engine in begun for rank in set(ranks[engine]))

        def send() -> None:
            parties.run_policy(ask(PolicyWorker.send_buckets, num_readers=readers))
            all_sent()

        receive = dict.fromkeys(begun, ask(RefitTarget.receive_buckets, version=version))
        return _both(send, lambda: parties.run_engines(receive))


class PayloadWeightSync(ChannelWeightSync):
    """Refit through memory of policy rank 0 on the CPU, which engines of its machine map, and others get over the
    network; in one process buckets are handed over."""

    def _move(self, plan: RefitPlan, all_sent: Callable[[], None], to: Collection[int], version: int) -> dict[int, int]:
        parties = self._parties
        if not parties.policy.is_local:
            return self._walk(plan, all_sent, {engine: [0] for engine in to}, self._offers(plan), version)
        num_buckets = parties.run_policy(ask(PolicyWorker.begin_refit, plan=plan, on_device=False))[0]
        parties.run_engines(dict.fromkeys(to, ask(RefitTarget.begin_refit, plan=plan)))
        for number in range(1, num_buckets + 1):
            [bucket] = parties.run_policy(ask(PolicyWorker.next_bucket))
            if number == num_buckets:
                all_sent()
            parties.run_engines(dict.fromkeys(to, ask(RefitTarget.load_bucket, bucket=bucket)))
        return parties.run_engines(dict.fromkeys(to, ask(RefitTarget.finish_refit, version=version)))

    @property
    def _is_rolling(self) -> bool:
        # A bucket in one process is the buffer itself, which the next one overwrites.
        return self._parties.one_by_one and not self._parties.policy.is_local

    def _roll(self, plan: RefitPlan, all_sent: Callable[[], None], version: int) -> dict[int, int]:
        """The policy holds all buckets meanwhile: the bytes of the whole model once."""
        parties, held = self._parties, dict[int, int]()
        spec = self._offers(plan, holds_all=True)[0].spec
        parties.run_policy(ask(PolicyWorker.hold_buckets))
        all_sent()
        request = ask(RefitTarget.read_buckets, plan=plan, channels=[spec], version=version)
        for number in parties.engines.numbers:
            try:
                held[number] = parties.run_engine(number, request)
            except WorkerLost as error:
                logger.warning("engine %d is lost in a refit: %s", number, error)
        if not held:
            raise parties.engines.none_left(STAGE)
        return held


class IpcWeightSync(ChannelWeightSync):
    """Refit through GPU memory: buckets stay on the GPU, and each rank of an engine reads those of the policy worker on
    its own GPU by a CUDA-IPC handle."""

    buffer_is_on_device = True

    def _move(self, plan: RefitPlan, all_sent: Callable[[], None], to: Collection[int], version: int) -> dict[int, int]:
        offers = self._offers(plan)
        by_device = {offer.handle.device_id: rank for rank, offer in offers.items() if offer.handle is not None}
        devices = self._devices_of(to)
        alone = [
            f"engine {engine}, rank {rank}, on {device}"
            for engine, ranks in devices.items()
            for rank, device in enumerate(ranks)
            if device not in by_device
        ]
        if alone:
            raise WorkerError(
                f"no policy worker shares a GPU with {', '.join(alone)}; set policy.generation.refit_transport=payload",
                stage=STAGE,
            )
        ranks = {engine: [by_device[device] for device in ids] for engine, ids in devices.items()}
        return self._walk(plan, all_sent, ranks, offers, version)

    def _devices_of(self, engines: Collection[int]) -> dict[int, tuple[str, ...]]:
        """Return the devices of the ranks of engines, which are asked once in the life of their processes."""
        incarnations = self._parties.engines.incarnations
        self._known = {number: known for number, known in self._known.items() if known[0] == incarnations.get(number)}
        new = [number for number in engines if number not in self._known]
        if new:
            found = self._parties.run_engines(dict.fromkeys(new, ask(RefitTarget.report_device_ids)))
            self._known = {
                **self._known,
                **{number: (incarnations[number], devices) for number, devices in found.items()},
            }
        return {number: self._known[number][1] for number in engines if number in self._known}

    _known: Mapping[int, tuple[int, tuple[str, ...]]] = MappingProxyType({})


LOST = "lost the other members"
"""Text in an error that another member's failure causes."""


class BroadcastWeightSync(WeightSync):
    """Refit by broadcast: the group is made at the first sync and lives as long as its members; when one was replaced,
    it is made anew.

    Args:
        address: of the machine of policy rank 0, as the engines reach it.
    """

    def __init__(self, parties: RefitParties, *, address: str) -> None:
        super().__init__(parties)
        self._address = address
        self._members: Mapping[int, int] = {}

    sends_to_all = True

    def _prepare(self) -> None:
        members = self._parties.engines.incarnations
        if members != self._members:
            self.buffer_is_on_device = self._join() == "nccl"
            self._members = members

    def _move(self, plan: RefitPlan, all_sent: Callable[[], None], to: Collection[int], version: int) -> dict[int, int]:
        parties = self._parties
        assert set(to) >= set(parties.engines.numbers), "every member of the group takes part"
        parties.run_policy(ask(PolicyWorker.begin_refit, plan=plan, on_device=self.buffer_is_on_device))
        held = _both(
            lambda: parties.run_policy(ask(PolicyWorker.broadcast_weights)),
            lambda: parties.run_engines(ask(RefitTarget.receive_refit, plan=plan, version=version)),
        )
        all_sent()
        return held

    @property
    def _senders(self) -> Sequence[int]:
        """Return the ranks of the policy that are members; they are the first ones of the group."""
        return [0]

    def _join(self) -> str:
        parties, senders = self._parties, self._senders
        own = parties.run_policy(ask(PolicyWorker.report_device_id), ranks=senders)
        devices = parties.run_engines(ask(RefitTarget.report_device_ids))
        backend = choose_backend([*own, *chain.from_iterable(devices.values())])
        self._first_ranks = first_ranks = group_ranks(devices, num_senders=len(senders))
        world_size = len(senders) + sum(map(len, devices.values()))
        opening = ask(
            PolicyWorker.open_refit_store, address=self._address, world_size=world_size, timeout_s=parties.timeout_s
        )
        port = parties.run_policy(opening, ranks=[0])[0]

        def member(rank: int) -> RefitGroupSpec:
            return RefitGroupSpec(
                address=self._address,
                port=port,
                rank=rank,
                world_size=world_size,
                backend=backend,
                timeout_s=parties.timeout_s,
            )

        engines = {
            engine: ask(RefitTarget.join_refit_group, spec=member(first)) for engine, first in first_ranks.items()
        }
        of_policy = [ask(PolicyWorker.join_refit_group, spec=member(rank)) for rank in range(parties.policy.world_size)]
        _both(lambda: parties.run_policy(of_policy, ranks=senders), lambda: parties.run_engines(engines))
        return backend

    _first_ranks: Mapping[int, int] = MappingProxyType({})


class ShardWeightSync(BroadcastWeightSync):
    """Refit from shard to shard: every rank of the policy sends the parts of weights that it holds to the ranks of
    engines that take them, as a `ShardPlan` has it, which is made when the group is."""

    num_slots = NUM_BUFFERS

    def __init__(self, parties: RefitParties, *, address: str) -> None:
        super().__init__(parties, address=address)
        self.plans: dict[str, ShardPlan] = {}
        """Plan of the last refit of weights, and of an adapter, by the kind."""

    @property
    def _senders(self) -> Sequence[int]:
        return range(self._parties.policy.world_size)

    def _prepare(self) -> None:
        if self._parties.engines.incarnations != self._members:
            self.plans = {}
        super()._prepare()

    def _move(self, plan: RefitPlan, all_sent: Callable[[], None], to: Collection[int], version: int) -> dict[int, int]:
        parties, known = self._parties, self.plans.get(plan.kind)
        if known is None or known.slots != plan.slots:
            self._share(plan)
        try:
            held = _both(
                lambda: parties.run_policy(ask(PolicyWorker.send_shards, kind=plan.kind)),
                lambda: parties.run_engines(ask(RefitTarget.refit_by_shards, kind=plan.kind, version=version)),
            )
        except BaseException:
            # Some have left the group.
            self._members = {}
            raise
        all_sent()
        return held

    def _share(self, plan: RefitPlan) -> None:
        """Make the plan, and tell everybody its part."""
        parties, slots, kind = self._parties, plan.slots, plan.kind
        names = tuple(slot.name for slot in slots)
        held = parties.run_policy(ask(PolicyWorker.report_shards, names=names, kind=kind))
        taken = parties.run_engines(ask(RefitTarget.report_parts, slots=slots, kind=kind))
        first = self._first_ranks
        of_ranks = {first[engine] + place: boxes for engine, own in taken.items() for place, boxes in enumerate(own)}
        self.plans[kind] = made = plan_shards(slots, held, of_ranks, bucket_bytes=plan.bucket_bytes)
        parties.run_policy([ask(PolicyWorker.take_shard_part, part=made.of(rank), kind=kind) for rank in self._senders])
        parties.run_engines(
            {
                engine: ask(
                    RefitTarget.take_parts, parts=tuple(made.of(first[engine] + n) for n in range(len(own))), kind=kind
                )
                for engine, own in taken.items()
            }
        )

    def _joined(self, plan: RefitPlan, sent: list[Sent]) -> list[Sent]:
        prints = {
            slot.name: summed((each.parts.get(slot.name, 0) for each in sent), dtype=slot.dtype, shape=slot.shape)
            for slot in plan.slots
            if any(each.parts for each in sent)
        }
        return [Sent(num_bytes=sum(each.num_bytes for each in sent), fingerprints=prints)]


def group_ranks(devices: Mapping[int, Sequence[str]], *, num_senders: int = 1) -> dict[int, int]:
    """Return engine -> number in the refit group of its first rank; the policy's come before, and all ranks of an
    engine follow each other.

    Args:
        devices: of the ranks of each engine.
        num_senders: ranks of the policy in the group.
    """
    sizes = [len(ranks) for ranks in devices.values()]
    return dict(zip(devices, accumulate(sizes, initial=num_senders), strict=False))


def choose_backend(devices: Sequence[str]) -> str:
    """Return `nccl` where every member has a GPU of its own, which NCCL wants; else `gloo` over CPU buffers."""
    is_distinct = len(set(devices)) == len(devices)
    return "nccl" if is_distinct and all(device.startswith("GPU-") for device in devices) else "gloo"


def _both(send: Callable[[], object], receive: Callable[[], _T]) -> _T:
    """Run both sides at once, and return what the receiving one gives; of two failures raises the one that is not the
    other's consequence."""
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="refit") as pool:
        sending, receiving = pool.submit(send), pool.submit(receive)
        failures = [error for error in (sending.exception(), receiving.exception()) if error is not None]
    causes = [error for error in failures if LOST not in str(error)]
    for error in causes or failures:
        raise error
    return receiving.result()


FULL = "float32"


def build_weight_sync(transport: RefitTransport, parties: RefitParties, *, address: str) -> WeightSync:
    """Return the chosen transport between `parties`.

    Args:
        address: of the machine of policy rank 0, as the engines reach it.
    """
    if transport == "broadcast":
        return BroadcastWeightSync(parties, address=address)
    if transport == "shards":
        return ShardWeightSync(parties, address=address)
    kind = IpcWeightSync if transport == "ipc" else PayloadWeightSync
    return kind(parties, address=address)


def weight_sync_of(
    config: PolicyConfig,
    transport: RefitTransport,
    *,
    policy: WorkerGroup,
    engines: WorkerFleet,
    address: str,
    timeout_s: float,
    on_new_engines: Callable[[WorkerFleet], None],
    one_by_one: bool,
    sleep_level: int,
) -> WeightSync:
    """Return the refit of a recipe's engines; the arguments are those of `RefitParties` and `build_weight_sync`."""
    generation = config.generation
    parties = RefitParties(
        policy=policy,
        engines=engines,
        timeout_s=timeout_s,
        buffer_ratio=generation.refit_buffer_ratio,
        delta_full_every=generation.refit_delta.period,
        on_new_engines=on_new_engines,
        one_by_one=one_by_one,
        receipt=receipt_spec(config, load_model_config(config.model_name).to_dict()),
        sends_adapters=config.lora.is_native,
        rows_finish=generation.in_flight == "finish",
        sleep_level=sleep_level,
    )
    return build_weight_sync(transport, parties, address=address)


def receipt_spec(config: PolicyConfig, model: Mapping[str, object]) -> ReceiptSpec | None:
    """Return how refits of this policy are proved, or None where they are not.

    Args:
        model: the dictionary of its Hugging Face config.
    """
    section, engines = config.generation.receipt, config.generation.precision or config.precision
    if not section.enabled:
        return None
    text = model.get("text_config")
    decoder = text if isinstance(text, Mapping) else model
    shape = TransformerShape.from_config(decoder)
    numbers = {**model, **decoder}
    return ReceiptSpec(
        probe=make_probe(
            vocab_size=shape.vocab_size,
            max_length=config.max_total_sequence_length,
            num_tokens=section.num_tokens,
            left_out={value for key, value in numbers.items() if key.endswith("token_id") and isinstance(value, int)},
        ),
        every=section.every,
        tolerance=section.tolerance,
        precision=config.precision if engines == FULL else engines,
        has_experts=shape.num_experts > 0,
    )
