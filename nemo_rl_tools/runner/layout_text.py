"""`LayoutText`: a layout as people write it, `worker=megatron tp=2 sp pp=2`, put into the settings of a policy.

What it does not name is 1 or off. Invariant: settings that are made here have passed the schema, and the model fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from nemo_rl.config.policy import ParallelSizes, PolicyConfig, RouterReplayConfig
from nemo_rl.errors import UserError

__all__ = ["LayoutText", "smallest_world"]

SIZES = ("tp", "cp", "pp", "ep", "etp", "dp")
SWITCHES = ("sp", "packed", "recompute")
WORDS = ("worker", "precision", "weights", "engine")
CHOICES = {
    "worker": ("dtensor", "megatron"),
    "engine": ("torch", "vllm"),
    "precision": ("float32", "bfloat16", "float16"),
}
KNOWN = (
    f"{'=N, '.join(SIZES)}=N, {', '.join(SWITCHES)}, worker=dtensor|megatron, engine=torch|vllm, prompt=N, "
    "precision=..., mbs=N, weights=DIR"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutText:
    """Sizes of the axes, and how rows become passes."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    """Expert tensor parallel size; None: 1 where experts are split over ranks, else that of the dense weights."""
    dp: int | None = None
    """Data-parallel size; None: as many as the experts need."""
    sp: bool = False
    packed: bool = False
    recompute: bool = False
    worker: str | None = None
    """The worker, or None for that of the recipe."""
    precision: str | None = None
    mbs: int | None = None
    """Rows per microbatch; None puts all rows of a rank in one."""
    engine: str | None = None
    """A generation engine in place of a worker; `tp` is then its tensor parallel size."""
    prompt: int | None = None
    """Tokens of a row that the engine reads at once, the others being decoded one by one; None: half of the row."""
    weights: str | None = None
    """Folder of the model or of a checkpoint; None: that of the recipe."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Example:
            >>> LayoutText.parse("worker=megatron tp=2 sp").tp
            2

        Raises:
            UserError: an unknown word, or a size that is none.
        """
        given: dict[str, object] = {}
        for word in text.split():
            name, has_value, value = word.partition("=")
            if name in given:
                raise UserError(f"layout {text!r}: {name} is given twice")
            if name in SWITCHES and (not has_value or value in ("1", "true", "0", "false")):
                given[name] = not has_value or value in ("1", "true")
            elif name in (*SIZES, "mbs", "prompt") and value.isdecimal() and 0 < int(value) < 1 << 20:
                given[name] = int(value)
            elif name in WORDS and value:
                given[name] = value
            else:
                raise UserError(f"layout {text!r}: {word!r} is unknown; expected one of {KNOWN}")
        for name, known in CHOICES.items():
            if given.get(name, known[0]) not in known:
                raise UserError(f"layout {text!r}: {name}: expected {' or '.join(known)}, got {given[name]!r}")
        if "prompt" in given and "engine" not in given:
            raise UserError(f"layout {text!r}: prompt is for an engine; name one (engine=vllm), or leave it out")
        return cls(**given)  # type: ignore[arg-type]

    @property
    def expert_tensor(self) -> int:
        return self.etp or (1 if self.ep > 1 else self.tp)

    @property
    def data(self) -> int:
        return self.dp or _data_for_experts(self.ep * self.expert_tensor, self.tp * self.cp)

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.data

    def put_into(self, policy: PolicyConfig, *, num_rows: int, replays_routes: bool) -> PolicyConfig:
        """Return the policy in this layout, for so many rows.

        Raises:
            UserError: the worker that is meant has no such axis.
        """
        is_megatron = policy.megatron_cfg.enabled if self.worker is None else self.worker == "megatron"
        if not is_megatron and (self.pp > 1 or self.ep > 1 or self.etp is not None):
            raise UserError(
                "layout: pipeline and expert parallel sizes are for worker=megatron; the DTensor worker splits experts "
                "over its tensor axis"
            )
        sizes = policy.megatron_cfg if is_megatron else policy.dtensor_cfg
        given = policy.model_dump()
        given["dtensor_cfg"]["enabled"] = given["megatron_cfg"]["enabled"] = False
        given["megatron_cfg" if is_megatron else "dtensor_cfg"] |= {
            "enabled": True,
            "sequence_parallel": self.sp,
            "context_parallel_size": self.cp,
            "activation_checkpointing": True if self.recompute else sizes.activation_checkpointing,
            **(self._of_megatron() if is_megatron else {"tensor_parallel_size": self.tp}),
        }
        given["sequence_packing"]["enabled"] = self.packed
        given["dynamic_batching"]["enabled"] = False
        given["precision"] = self.precision or policy.precision
        given["train_global_batch_size"] = num_rows
        given["train_micro_batch_size"] = self.mbs or max(1, num_rows // self.data)
        given["logprob_batch_size"] = None
        replay = RouterReplayConfig(enabled=True, source="prev_logprobs") if replays_routes else RouterReplayConfig()
        given["router_replay"] = replay.model_dump()
        return PolicyConfig(**given)

    def _of_megatron(self) -> dict[str, object]:
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.expert_tensor if self.ep > 1 else self.etp,
        }


def smallest_world(sizes: ParallelSizes) -> int:
    """Return the number of ranks that hold one model: several data shards where its experts need more ranks."""
    stage = sizes.tensor * sizes.context
    experts = sizes.expert * sizes.expert_tensor if sizes.expert > 1 else 1
    return sizes.pipeline * stage * _data_for_experts(experts, stage)


def _data_for_experts(experts: int, stage: int) -> int:
    return -(-experts // stage)
