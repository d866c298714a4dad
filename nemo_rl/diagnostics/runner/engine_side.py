"""`probe_engine`: a generation engine on given rows: it reads the first tokens of each and decodes the others.

Called by `run_probe` in a process of its own, since vLLM changes the process that it is in. The tokens that follow the
prompt are forced, so that the engine computes what it would have computed had it drawn them. Invariant: all tokens of a
row but the last one are fed, each once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict

from nemo_rl.config.parts import ENGINE_CAPABILITIES, ENGINES
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.diagnostics.runner.layout_text import LayoutText
from nemo_rl.diagnostics.runner.rank import STEP, RankResult, RankWork
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.errors import UserError, boundary
from nemo_rl.models.generation.interfaces import (
    EngineSpec,
    GenerationInterface,
    GenerationRequest,
    RecordedEngine,
    SamplingParams,
)

__all__ = ["engine_policy", "probe_engine"]


def engine_policy(policy: PolicyConfig, layout: LayoutText, *, longest: int) -> PolicyConfig:
    """Return the policy with the engine that the layout names.

    Args:
        longest: tokens of the longest row.

    Raises:
        UserError: the layout has an axis that an engine has not, or the engine cannot be recorded.
    """
    name, generation = layout.engine or "", policy.generation
    capabilities = ENGINE_CAPABILITIES.get(name)
    if capabilities is None or not capabilities.records_decoding:
        known = ", ".join(each for each, found in ENGINE_CAPABILITIES.items() if found.records_decoding)
        raise UserError(f"engine={name}: expected an engine that can be recorded: {known}")
    words = asdict(layout)
    given = [axis for axis in ("cp", "pp", "ep") if words[axis] != 1]
    given += [axis for axis in ("dp", "etp", "mbs", "worker") if words[axis] is not None]
    given += [axis for axis in ("sp", "packed", "recompute") if words[axis]]
    if name == "torch" and layout.tp > 1:
        given.append("tp")
    if given:
        raise UserError(f"engine={name}: an engine has no {', '.join(given)}; leave that out")
    sizes = generation.vllm_cfg.model_dump() | {
        "tensor_parallel_size": layout.tp,
        "pipeline_parallel_size": 1,
        "enforce_eager": True,
        # Rows with the same beginning are each read from it on.
        "enable_prefix_caching": False,
    }
    changes = {
        "backend": name,
        "precision": layout.precision or generation.precision or policy.precision,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "vllm_cfg": sizes,
    }
    record = policy.model_dump()
    record["generation"] |= changes
    record["lora"] |= {"enabled": False}
    record["router_replay"] = {}
    # What the workers need is of no matter here.
    record["dtensor_cfg"], record["megatron_cfg"], record["sequence_packing"] = {}, {}, {}
    record["max_total_sequence_length"] = max(policy.max_total_sequence_length, longest + 1)
    return PolicyConfig(**json.loads(json.dumps(record, default=str)))


def probe_engine(spec: RankSpec, work: RankWork, prompt: int | None) -> RankResult:
    """Run the rows through one engine.

    Args:
        prompt: tokens of a row that are read at once; None: half of each row.

    Raises:
        UserError: the engine cannot be started with this model, or the disk does not take the records.
    """
    del spec
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    name = work.policy.generation.backend
    build: Callable[..., GenerationInterface] = ENGINES.load(name, key="engine")
    with boundary(UserError, f"engine={name}"):
        engine = build(spec=EngineSpec(policy=work.policy, use_gpu=work.use_gpu, weight_version=0, record=work.record))
    try:
        cuts = [min(len(ids) - 1, prompt or max(1, len(ids) // 2)) for ids in work.rows.ids]
        responses = tuple(ids[cut:] for ids, cut in zip(work.rows.ids, cuts, strict=True))
        request = GenerationRequest(
            prompt_ids=tuple(ids[:cut] for ids, cut in zip(work.rows.ids, cuts, strict=True)),
            seeds=(0,) * len(responses),
            sampling=SamplingParams(
                temperature=1.0, max_new_tokens=max(map(len, responses)), stop_token_ids=(), stop_strings=()
            ),
            forced=responses,
            keys=work.rows.keys,
        )
        if work.record is not None and isinstance(engine, RecordedEngine):
            engine.begin_recording(STEP)
        output = engine.generate(request)
        if work.record is not None and isinstance(engine, RecordedEngine):
            engine.end_recording()
    finally:
        engine.shutdown()
    found = output.logprobs.split(output.lengths.tolist())
    nothing = float("nan")
    return RankResult(
        logprobs=tuple((nothing,) * cut + tuple(row.tolist()) for cut, row in zip(cuts, found, strict=True))
    )
