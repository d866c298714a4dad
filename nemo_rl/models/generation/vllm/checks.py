"""What can be said about the settings of vLLM before a run; imports no vLLM, which takes ten seconds.

Called by `preflight` through `ENGINE_TRAITS`. What only vLLM knows is found when the engines start, before training.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from pathlib import Path

from nemo_rl.config.policy import PolicyConfig
from nemo_rl.models.generation.vllm.arguments import KEYS, OWN

__all__ = ["check_vllm", "known_arguments"]

KWARGS = "policy.generation.vllm_kwargs"
LEAST_TEMPERATURE = 0.01
"""vLLM samples at this one where a smaller one is asked for; 0 is greedy."""
NAMES_OFFERED = 3


def check_vllm(config: PolicyConfig) -> list[str]:
    """A line per problem."""
    folder = _folder()
    if folder is None:
        return ["policy.generation.backend=vllm needs vLLM: make vllm"]
    return [*_argument_problems(config, known_arguments(folder)), *_sampling_problems(config), *_size_problems(config)]


def known_arguments(folder: Path) -> frozenset[str]:
    """Names of the engine's arguments, from the text of the package that is installed."""
    tree = ast.parse((folder / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    engine = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = (node.target for node in engine.body if isinstance(node, ast.AnnAssign))
    return frozenset(field.id for field in fields if isinstance(field, ast.Name))


def _folder() -> Path | None:
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent


def _argument_problems(config: PolicyConfig, known: frozenset[str]) -> list[str]:
    lines = []
    for name in config.generation.vllm_kwargs:
        if name in KEYS:
            lines.append(f"{KWARGS}.{name}: has a key of its own; set {KEYS[name]} instead")
        elif name in OWN:
            lines.append(f"{KWARGS}.{name}: cannot be set, because {OWN[name]}; leave it out")
        elif name not in known:
            near = [KEYS.get(each, each) for each in difflib.get_close_matches(name, known, n=NAMES_OFFERED)]
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "; see vLLM's EngineArgs"
            lines.append(f"{KWARGS}.{name}: vLLM's engine has no such argument{hint}")
    return lines


def _sampling_problems(config: PolicyConfig) -> list[str]:
    generation = config.generation
    given = {"temperature": generation.temperature, "val_temperature": generation.val_temperature}
    return [
        f"policy.generation.{name}: vLLM samples at {LEAST_TEMPERATURE} or more, got {value}; raise it"
        for name, value in given.items()
        if value is not None and 0 < value < LEAST_TEMPERATURE
    ]


def _size_problems(config: PolicyConfig) -> list[str]:
    sizes, lines = config.generation.vllm_cfg, list[str]()
    prefix = "policy.generation.vllm_cfg"
    if sizes.max_model_len is not None and sizes.max_model_len < config.max_total_sequence_length:
        lines.append(
            f"{prefix}.max_model_len: {sizes.max_model_len} does not hold policy.max_total_sequence_length "
            f"{config.max_total_sequence_length}; leave it out, or raise it"
        )
    rows, tokens = sizes.max_num_seqs or config.generation.max_batch_size, sizes.max_num_batched_tokens
    if tokens is not None and tokens < rows:
        lines.append(
            f"{prefix}.max_num_batched_tokens: {tokens} is less than a token of each of {rows} rows; raise it, or "
            f"lower {prefix}.max_num_seqs"
        )
    if config.router_replay.enabled and sizes.pipeline_parallel_size > 1:
        lines.append(
            f"{prefix}.pipeline_parallel_size: {sizes.pipeline_parallel_size} does not go with "
            "policy.router_replay.enabled: vLLM returns no routes of a pipeline; set it to 1"
        )
    return lines
