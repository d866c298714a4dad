"""Recomputation of decoder layers of the DTensor worker in the backward pass, and their compilation one by one.

Called by `parallelize`: recomputation first, then compilation, both before FSDP takes the layers as units, which
gathers and frees weights outside of what is compiled. With `selective` the outputs of matrix products and of attention
are kept, and all else of a layer is computed again; batched products are not kept: attention that no kernel fuses would
keep its scores. Layers that are alike share what was compiled for the first of them. Invariant: a pass with hooks or
given routes runs the layers as they are written, forward and backward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PretrainedConfig, PreTrainedModel

from nemo_rl.config.backends import Recomputation
from nemo_rl.config.policy import ParallelSizes, PolicyConfig
from nemo_rl.errors import ConfigError, UserError
from nemo_rl.models.attention.varlen import ATTENTION_NAME, Segments
from nemo_rl.models.hf.loading import DTYPES, fit_experts, model_class
from nemo_rl.models.hf.tiny_model import language_config, small_model_config
from nemo_rl.models.policy.fit import attention_problem
from nemo_rl.models.vision import family_of
from nemo_rl.torch_private import Compilations
from nemo_rl.utils.metrics import Max, Reduction

__all__ = ["CompiledLayers", "chooses_compiled", "compile_problem", "recompute_layers"]

logger = logging.getLogger(__name__)

_SDPA = "aten._scaled_dot_product_"
KEPT_OPERATIONS = frozenset(
    {
        *(f"aten.{name}.default" for name in ("mm", "addmm", "_grouped_mm")),
        *(f"{_SDPA}{name}.default" for name in ("flash_attention", "flash_attention_for_cpu", "efficient_attention")),
        *(f"{_SDPA}{name}.default" for name in ("cudnn_attention", "fused_attention_overrideable")),
        "torch_attn._varlen_attn.default",
        "transformers.grouped_mm_fallback.default",
    }
)
"""Operations whose outputs `selective` keeps, besides those of this package: attention differs between devices."""
OWN_OPERATIONS = "nrl."
"""Prefix of the attention of this package."""
WARM_PASSES = 16
"""Passes in which every kind of pass may compile graphs: log-probabilities and training, static and dynamic sizes."""
MOST_RECOMPILATIONS = 3
"""Graphs that later passes may add before no more are made."""
TRIED_LENGTHS, TRIED_VOCABULARY = ((5, 9, 7), (3, 11)), 64
"""Two packings on which `compile_problem` runs a small model, and its vocabulary."""
MAX_REASON = 240
"""Characters that are told of an error."""


def recompute_layers(hf: PreTrainedModel, mode: Recomputation) -> None:
    """Let the layers of a model be computed again in the backward pass of a training step."""
    if mode == "none":
        return
    options: dict[str, object] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # The old name warns where the new one exists.
    is_new = hasattr(hf, "activation_checkpointing_enable")
    enable = hf.activation_checkpointing_enable if is_new else hf.gradient_checkpointing_enable
    enable(options)


def _policy(_: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    """Decide by the operation alone: torch 2.11 asks again while it recomputes, torch 2.13 does not."""
    name = str(operation)
    is_kept = name in KEPT_OPERATIONS or name.startswith(OWN_OPERATIONS)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class CompiledLayers:
    """The compiled layers of a model."""

    def __init__(self, layers: Sequence[torch.nn.Module], *, backend: str = "inductor") -> None:
        self._log, self._reported_s = Compilations(), 0.0
        self._num_passes, self._has_said_so = 0, False
        self.recompilations = 0
        for layer in layers:
            # In place: names of weights stay, and FSDP sees the same module.
            layer.compile(fullgraph=True, dynamic=True, backend=backend)

    @property
    def num_graphs(self) -> int:
        return self._log.num_graphs

    @contextmanager
    def pass_of(self, reason: str | None) -> Iterator[None]:
        """Surround a forward pass with its backward pass; a reason not to run compiled layers in it is logged once."""
        if reason is not None and not self._has_said_so:
            logger.info("layers run as they are written, not compiled, where %s", reason)
            self._has_said_so = True
        before, is_full = self.num_graphs, self.recompilations > MOST_RECOMPILATIONS
        # Beyond the bound a pass takes a graph that fits, or none.
        stance = "force_eager" if reason is not None else "eager_on_recompile" if is_full else None
        with nullcontext() if stance is None else torch.compiler.set_stance(stance):
            yield
        self._num_passes += reason is None
        self.recompilations += self.num_graphs - before if self._num_passes > WARM_PASSES else 0
        if self.recompilations > MOST_RECOMPILATIONS and not is_full:
            logger.warning(
                "layers were compiled %d times after the first %d passes; no more graphs are made, and passes that fit "
                "none run the layers as they are written. TORCH_LOGS=recompiles tells the reasons; "
                "policy.dtensor_cfg.compile=off avoids it",
                *(self.recompilations, WARM_PASSES),
            )

    def metrics(self) -> dict[str, Reduction]:
        """Return seconds of compilation since the last call, and graphs and recompilations so far."""
        seconds, self._reported_s = self._log.seconds - self._reported_s, self._log.seconds
        found = {"compile_s": seconds, "compiled_graphs": self.num_graphs, "recompilations": self.recompilations}
        return {name: Max(float(value)) for name, value in found.items()}


def chooses_compiled(model: PretrainedConfig, config: PolicyConfig, device: str) -> bool:
    """Return whether `policy.dtensor_cfg.compile` means that layers are compiled on this type of device.

    Raises:
        ConfigError: `on`, and the layers cannot be compiled.
    """
    sizes = config.dtensor_cfg
    if sizes.compile == "off":
        return False
    # As the rule that refuses `on` says.
    is_split = sizes.tensor_parallel_size > 1 or sizes.context_parallel_size > 1
    is_refused = is_split or config.router_replay.enabled or config.deterministic
    if sizes.compile == "auto" and (device != "cuda" or is_refused):
        return False
    problem = compile_problem(model, dtype=DTYPES[config.precision], device=device)
    if problem is not None and sizes.compile == "on":
        raise ConfigError(
            f"policy.dtensor_cfg.compile: 'on', and layers of {model.model_type!r} cannot be compiled: {problem}; set "
            "it to auto or off"
        )
    if problem is not None:
        logger.info("policy.dtensor_cfg.compile: auto means off: %s", problem)
    return problem is None


def compile_problem(real: PretrainedConfig, *, dtype: torch.dtype, device: str) -> str | None:
    """Return why decoder layers of a model cannot be compiled, or None where they can: a small model of its class runs
    forward and backward over two packings, with kernels on CUDA and as traced on a CPU."""
    if family_of(real) is not None:
        return "a vision tower takes lists of sizes from its images"
    ones, vocab_size = ParallelSizes(), TRIED_VOCABULARY
    try:
        small = small_model_config(language_config(real), ones, real_sizes=ones, vocab_size=vocab_size)
        with torch.random.fork_rng(devices=[]):
            model = model_class(small).from_config(small).eval().to(device, dtype)
        problem = attention_problem(model)
        if problem is not None:
            return f"it {problem}"
        fit_experts(model, dtype)
        model.set_attn_implementation(ATTENTION_NAME)
        names = set(model._no_split_modules or ())
        layers = [each for each in model.modules() if type(each).__name__ in names]
        # On CUDA a kernel may lack its compiler.
        CompiledLayers(layers, backend="inductor" if device == "cuda" else "eager")
        for lengths in TRIED_LENGTHS:
            ids = torch.zeros(1, sum(lengths), dtype=torch.int64, device=device)
            segments = Segments(lengths=lengths, device=ids.device)
            found = model(ids, position_ids=ids, attention_mask=None, use_cache=False, segments=segments)
            found.logits.float().sum().backward()
    except (UserError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        # Below it torch explains itself.
        return str(error).strip().partition("\n")[0][:MAX_REASON]
    return None
