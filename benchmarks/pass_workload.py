"""Workloads of the passes that benchmarks count and time: shapes, rows, a worker, and a plain loop of the same model.

Called by `train_pass.py` on a CPU and `gpu_report.py` on a GPU; imports no Ray. The plain loop is what somebody writes
without a framework: the transformers model with FSDP2, whole logits, torch's cross-entropy and a clipped ratio loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM
from transformers.masking_utils import AttentionMaskInterface

from nemo_rl.algorithms.losses.policy_loss import PolicyLoss
from nemo_rl.config.backends import DTensorConfig, MegatronConfig, MegatronOptimizerConfig, OptimizerConfig
from nemo_rl.config.generation import DeviceSharing
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.policy import PolicyConfig, SequencePackingConfig
from nemo_rl.data.generated import problems
from nemo_rl.data.tokenizer import build_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.distributed.packing import PackPlan, plan_packs
from nemo_rl.models.attention.varlen import varlen_on_device
from nemo_rl.models.policy.workers.compose import compose_worker
from nemo_rl.models.policy.workers.policy_worker import PolicyWorker

__all__ = [
    "PEAK_FLOPS",
    "PROMPT_TOKENS",
    "SHAPES",
    "ModelShape",
    "PlainLoop",
    "Work",
    "loss_of_recipe",
    "make_worker",
    "varied_lengths",
    "write_model",
]

PEAK_FLOPS = 989e12
"""Dense bfloat16 operations per second of an H100 or H200."""
FIRST_TOKEN = 7
"""Smaller ids are special tokens."""
PROMPT_TOKENS = 4
ROW_TOKENS = (128, 2048)
"""Least and most tokens of a row, where a microbatch has room for rows of all lengths."""
LEARNING_RATE = 1e-6
TIMEOUT_S = 120.0
VARLEN = "benchmark_varlen"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A Qwen2 of random weights."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    mlp: int
    vocab: int = 151_936
    tied: bool = True

    @property
    def config(self) -> Qwen2Config:
        return Qwen2Config(
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            intermediate_size=self.mlp,
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
            max_position_embeddings=32_768,
            rope_theta=1e6,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
        )

    def flops(self, lengths: list[int], trained: int) -> float:
        """Return operations of a forward and a backward pass: 6 N T of the layers, 6 V D M of the head for the M
        trained tokens alone, 6 L h d sum s^2 of causal attention; nothing for what is computed again."""
        width = self.hidden // self.heads
        matrices = self.hidden * (self.heads + 2 * self.key_heads) * width + self.hidden**2 + 3 * self.hidden * self.mlp
        attention = self.layers * self.hidden * sum(length**2 for length in lengths)
        return 6.0 * (self.layers * matrices * sum(lengths) + self.vocab * self.hidden * trained + attention)


SHAPES = {
    "0.5B": ModelShape(hidden=896, layers=24, heads=14, key_heads=2, mlp=4864),
    "1.5B": ModelShape(hidden=1536, layers=28, heads=12, key_heads=2, mlp=8960),
    "7Bx8": ModelShape(hidden=3584, layers=8, heads=28, key_heads=4, mlp=18_944, vocab=152_064, tied=False),
    "narrow": ModelShape(hidden=32, layers=28, heads=4, key_heads=2, mlp=64),
    "tiny": ModelShape(hidden=64, layers=2, heads=4, key_heads=2, mlp=128, vocab=1024),
}
"""Name -> shape; `7Bx8` is eight layers of a 7B, `narrow` has many operations and little arithmetic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The rows of one optimizer step."""

    lengths: list[int]
    vocab: int
    tokens: int
    """Most tokens of a microbatch."""

    @property
    def batch(self) -> BatchedDataDict:
        """Return right-padded rows with all columns of GRPO, on the CPU."""
        count, width = len(self.lengths), max(self.lengths)
        generator = torch.Generator().manual_seed(1)
        lengths, columns = torch.tensor(self.lengths), torch.arange(width)
        is_real = columns < lengths[:, None]
        ids = torch.randint(FIRST_TOKEN, self.vocab - 10, (count, width), generator=generator, dtype=torch.int32)
        noise = torch.randn(3, count, width, generator=generator) * 0.1 - 11.9
        return BatchedDataDict(
            {
                "input_ids": torch.where(is_real, ids, 0),
                "input_lengths": lengths,
                "token_mask": is_real & (columns >= PROMPT_TOKENS),
                "sample_mask": torch.ones(count),
                "generation_logprobs": noise[0],
                "prev_logprobs": noise[1],
                "reference_policy_logprobs": noise[2],
                "advantages": torch.randn(count, 1, generator=generator).expand(count, width).contiguous(),
                "keys": [f"row_{number}" for number in range(count)],
            }
        )

    @property
    def plan(self) -> PackPlan:
        return plan_packs(self.lengths, capacity=self.tokens, dp_world=1).for_rank(0)


def varied_lengths(tokens: int) -> list[int]:
    """Return lengths of 128 to 2,048 tokens, of smaller microbatches of 8 to a quarter, that fill one microbatch."""
    low, high = ROW_TOKENS if tokens >= 4 * ROW_TOKENS[1] else (8, max(9, tokens // 4))
    generator = torch.Generator().manual_seed(7)
    lengths: list[int] = []
    while True:
        length = int(torch.randint(low, high + 1, (1,), generator=generator))
        if sum(lengths) + length > tokens:
            return lengths
        lengths.append(length)


def write_model(folder: Path, shape: ModelShape, *, device: str) -> Path:
    """Write the model in bfloat16 with a tokenizer, unless the folder has it."""
    if (folder / "config.json").exists():
        return folder
    texts = [f"user\n{problem.prompt}\nassistant\n{problem.answer}" for problem in problems(200, seed=1)]
    build_tokenizer(texts).save_pretrained(str(folder))
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM._from_config(shape.config, dtype=torch.bfloat16)
    model.save_pretrained(str(folder), max_shard_size="20GB")
    return folder


def loss_of_recipe() -> PolicyLoss:
    """Return the loss of a recipe that says nothing about it."""
    return PolicyLoss(config=LossConfig())


def make_worker(
    folder: Path,
    *,
    tokens: int,
    engine: str = "dtensor",
    device: str = "cpu",
    is_packed: bool = True,
    is_checkpointed: bool = False,
    is_compiled: bool = False,
    sharing: DeviceSharing = "alone",
    **changes: object,
) -> PolicyWorker:
    """Return a single rank in bfloat16 with float32 weights and AdamW.

    Args:
        tokens: most of a microbatch.
        engine: `dtensor` or `megatron`.
        sharing: the other users of the device.
        changes: of the section `policy`.
    """
    values: dict[str, object] = {
        "model_name": str(folder),
        "precision": "bfloat16",
        "train_global_batch_size": 4096,
        "max_total_sequence_length": ROW_TOKENS[1],
        "sequence_packing": SequencePackingConfig(
            enabled=is_packed, **({"train_mb_tokens": tokens, "logprob_mb_tokens": tokens} if is_packed else {})
        ),
    }
    if engine == "megatron":
        adam = MegatronOptimizerConfig(lr=LEARNING_RATE, min_lr=0.0, weight_decay=0.0, use_distributed_optimizer=False)
        values |= {
            "dtensor_cfg": DTensorConfig(enabled=False),
            "megatron_cfg": MegatronConfig(enabled=True, optimizer=adam),
        }
    else:
        values |= {
            "dtensor_cfg": DTensorConfig(
                activation_checkpointing="full" if is_checkpointed else "none", compile="on" if is_compiled else "off"
            ),
            "optimizer": OptimizerConfig(kwargs={"lr": LEARNING_RATE, "weight_decay": 0.0}),
        }
    config = PolicyConfig(**{**values, **changes})
    return compose_worker(
        config,
        rank=0,
        world_size=1,
        num_steps=100,
        collective_timeout_s=TIMEOUT_S,
        seed=0,
        keep_reference=False,
        device=device,
        sharing=sharing,
    )


class PlainLoop:
    """A loop around the transformers model, on one rank.

    Args:
        attention: `sdpa`, or `varlen` for rows that do not see each other (CUDA).
    """

    def __init__(
        self,
        shape: ModelShape,
        work: Work,
        *,
        device: str,
        attention: str = "sdpa",
        is_compiled: bool = False,
        is_checkpointed: bool = False,
    ) -> None:
        self._is_own_group = not dist.is_initialized()
        if self._is_own_group:
            backend = "nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        lengths = work.lengths
        ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
        if attention == "varlen":
            AttentionInterface.register(VARLEN, _attend_with(ends, most=max(ROW_TOKENS[1], *lengths)))
            AttentionMaskInterface.register(VARLEN, lambda *_, **__: None)
        config = shape.config
        torch.manual_seed(0)
        with torch.device(device):
            name = VARLEN if attention == "varlen" else attention
            model = Qwen2ForCausalLM._from_config(config, attn_implementation=name).float().train()
        if is_checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if is_compiled:
            for layer in model.model.layers:
                layer.compile()
        mesh = init_device_mesh(device, (1,))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=precision)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=device == "cuda"
        )
        self._model, self._vocab = model, shape.vocab
        generator = torch.Generator().manual_seed(1)
        self._ids = torch.randint(FIRST_TOKEN, shape.vocab - 10, (1, sum(lengths)), generator=generator).to(device)
        # On a CPU the model takes one long row as it is: the least that a plain loop can dispatch.
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
        self._extra = {"position_ids": positions} if attention == "varlen" else {}
        self._advantages = torch.randn(sum(lengths), generator=generator).to(device)

    def step(self) -> None:
        """Run one optimizer step over one microbatch."""
        logprobs = self._logprobs()
        ratio = (logprobs - logprobs.detach()).exp()
        clipped = ratio.clamp(0.8, 1.2) * self._advantages
        (-torch.minimum(ratio * self._advantages, clipped).mean()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def score(self) -> torch.Tensor:
        """Return log-probabilities on the CPU."""
        return self._logprobs().cpu()

    def close(self) -> None:
        """Leave the process group, if it is this loop's."""
        if self._is_own_group:
            dist.destroy_process_group()

    def _logprobs(self) -> torch.Tensor:
        logits = self._model(input_ids=self._ids, use_cache=False, **self._extra).logits.reshape(-1, self._vocab)
        return -F.cross_entropy(logits.float(), self._ids.reshape(-1).roll(-1), reduction="none")


def _attend_with(ends: torch.Tensor, *, most: int) -> Callable[..., tuple[torch.Tensor, None]]:
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: None,
        *,
        scaling: float | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        return varlen_on_device(query, key, value, ends, most=most, window=0, scale=scaling), None

    return attend
