"""`make model-support`: docs/model_support.md, which causal language models of transformers run here, and in which way.

    python -m tests.repo.model_support docs/model_support.md [TYPE ...]

Every type is checked as preflight checks a recipe's model (`check_config`). Types that are named are run again, and the
others keep their lines. What the page says of a type is what its tiny model did.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from nemo_rl.algorithms.preflight.model_check import Trial, check_config, trials_of
from nemo_rl.config.backends import DTensorConfig
from nemo_rl.config.policy import PolicyConfig, SequencePackingConfig
from nemo_rl.models.adapters.lora import router_layers
from nemo_rl.models.hf.tiny_model import language_config
from nemo_rl.models.megatron.architecture import SUPPORTED
from nemo_rl.utils.memory import package_versions

__all__ = ["HEAD", "WAYS", "config_of", "line_of", "trials"]

WAYS: Mapping[str, str] = {
    "padded": "padded in one worker",
    "packed": "with packed rows",
    "TP 2": "tensor parallel",
    "CP 2": "context parallel",
    "engine": "in the embedded engine",
    "saved": "after saving",
}
"""Columns of the page, and the trial behind each."""
EXPERTS = {"num_experts_per_tok": 2}
GIVEN: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {**EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "dots1": {**EXPERTS, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 8, "num_hidden_layers": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 1},
}
"""What released models of a type say and its config class leaves open."""
NOISE = (
    r"^policy\.[\w.]+: '[\w-]+' ",
    r"policy\.[\w.]+: ",
    r"; (set|use|take) .*",
    r"has other numbers (?=.* in Hugging Face)",
    r" than in Hugging Face",
    r"rank \d+: ",
    r" \(internal error.*",
    r"a small '[\w-]+' cannot be built: ",
    r"transformers stores its weights in another order: .*",
)
"""Parts of a reason that say what the row and the column say."""
HEAD = """# Models

Which causal language models of transformers {transformers} run, and in which way. `make model-support` writes this
page: it makes a tiny random model of every type, and compares each way with the plain Hugging Face model, row by row,
with eager attention in float64, forward and backward. Preflight does the same with the config of a recipe's own model,
which may have other kinds of layers than the type's default. A way that has other numbers is refused before a run
starts.

- padded: the DTensor worker on one rank, with padded rows, in training and evaluation mode.
- packed: the same with rows laid end to end (`policy.sequence_packing.enabled`).
- TP 2, CP 2: two tensor-parallel or context-parallel ranks.
- engine: the embedded generation engine. vLLM has its own list of models.
- saved: a checkpoint has the names and values that transformers reads.
- routers: linear layers that score experts, which `policy.lora.targets: all-linear` leaves without an adapter.

The Megatron worker trains {megatron}, and no other types.

| type | {columns} | routers | why not |
| --- |{rules} --- | --- |
"""


def config_of(model_type: str) -> PretrainedConfig:
    """Return a config of a type as its models are loaded: that of the language model where it is a part of a larger."""
    return language_config(AutoConfig.for_model(model_type, **GIVEN.get(model_type, {})))


def trials() -> dict[str, Trial]:
    """Return the trial of every column."""
    policies = [
        PolicyConfig(model_name="model", sequence_packing=SequencePackingConfig(enabled=True)),
        PolicyConfig(model_name="model", dtensor_cfg=DTensorConfig(tensor_parallel_size=2)),
        PolicyConfig(model_name="model", dtensor_cfg=DTensorConfig(context_parallel_size=2)),
    ]
    by_name = {trial.name: trial for policy in policies for trial in trials_of(policy)}
    return {way: by_name[name] for way, name in WAYS.items()}


def line_of(model_type: str, ways: Mapping[str, Trial]) -> str:
    """Return the page's line about a type: what its tiny model did."""
    try:
        problems = check_config(config_of(model_type), list(ways.values()))
    except Exception as error:  # noqa: BLE001  (classes fail in ways of their own)
        return f"| {model_type} |{' no |' * len(ways)} | no tiny model runs: {_short(str(error))} |"
    reasons = {way: next((text for text in problems if trial.name in text), None) for way, trial in ways.items()}
    words = " | ".join("no" if reasons[way] else "yes" for way in ways)
    why = dict.fromkeys(_short(text) for text in reasons.values() if text)
    return f"| {model_type} | {words} | {routers_of(model_type)} | {'; '.join(why)} |"


def routers_of(model_type: str) -> str:
    """Return the names of the linear layers of a type's routers, without the numbers of layers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(model_type))
    names = {re.sub(r"\.\d+", "", name) for name in router_layers(model)}
    return ", ".join(name.partition("layers.")[2] or name for name in sorted(names))


def _short(text: str) -> str:
    """The reason alone, on one line, without what would end a cell."""
    for noise in NOISE:
        text = re.sub(noise, "", text)
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'")[:160]


def main(page: Path, *names: str) -> None:
    """Write the page."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    held = {}
    if names and page.is_file():
        rows = [line for line in page.read_text().splitlines() if line.startswith("| ")]
        held = {row.split("|")[1].strip(): row for row in rows}
    ways = trials()
    lines = []
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        lines.append(line_of(name, ways) if not names or name in names else held[name])
        if not names or name in names:
            sys.stderr.write(f"{lines[-1]}\n")
    head = HEAD.format(
        transformers=package_versions()["transformers"],
        megatron=", ".join(SUPPORTED),
        columns=" | ".join(WAYS),
        rules=" --- |" * len(WAYS),
    )
    page.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
