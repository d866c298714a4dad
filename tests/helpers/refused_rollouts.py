"""Overrides of the sort demo about rollouts that rules refuse or accept, as in `refused_configs`: columns and records,
asynchronous runs, conversations and adapters."""

from __future__ import annotations

from tests.helpers.refused_configs import (
    APART,
    CORRECTED,
    FORCED,
    GPUS,
    LOCAL,
    ONE_UPDATE,
    OWN_PREV,
    VLLM,
    Refused,
    corrected,
)

ASYNC = ("grpo.async.enabled=true",)
"""The bypass of the demo corrects for the age of a row."""
BOUND_ZERO = (*ASYNC, "grpo.async.max_staleness=0")
IN_FLIGHT = "policy.generation.in_flight"
VLLM_CFG = "policy.generation.vllm_cfg"

REFUSED_ASYNC: Refused = {
    "rule_async_keys_need_their_switch": [
        (("grpo.async.max_staleness=2",), "grpo.async.max_staleness: 2 would be ignored, because grpo.async.enabled"),
        ((f"{IN_FLIGHT}=drain",), f"{IN_FLIGHT}: 'drain' would be ignored, because grpo.async.enabled is false"),
        ((*BOUND_ZERO, f"{IN_FLIGHT}=keep"), f"{IN_FLIGHT}: 'keep' would be ignored, because grpo.async.max_stale"),
        ((*BOUND_ZERO, "grpo.async.overdue=drop"), "grpo.async.overdue: 'drop' would be ignored, because grpo.async"),
    ],
    "rule_lookahead_within_max_staleness": [
        ((*ASYNC, "grpo.async.lookahead=3", "grpo.async.max_staleness=2"), "rows sampled so far ahead would be older"),
        ((*BOUND_ZERO, "grpo.async.lookahead=1"), "lower it to at most 0, or raise max_staleness"),
    ],
    "rule_overdue_needs_a_choice_of_groups": [
        (
            (*ASYNC, "grpo.async.selection=in_order", "grpo.async.overdue=drop"),
            "grpo.async.overdue: 'drop' would be ignored, because grpo.async.selection is 'in_order'",
        ),
        ((*ASYNC, "grpo.async.lookahead=0", "grpo.async.overdue=error"), "ignored, because grpo.async.lookahead is 0"),
    ],
    "rule_stale_rows_need_a_correction": [
        ((*ASYNC, *OWN_PREV), "loss_fn.use_importance_sampling_correction: false, but rows may be 1 updates old"),
        ((*ASYNC, *FORCED, *ONE_UPDATE), "with loss_fn.force_on_policy_ratio=false, or grpo.async.max"),
        ((*ASYNC, "loss_fn.name=reinforce", "~loss_fn.ratio_clip_max"), "has no ratio, and rows may be 1 updates old"),
        ((*ASYNC, *OWN_PREV, f"{IN_FLIGHT}=keep"), f"{IN_FLIGHT}: 'keep' samples from old caches under new weights"),
    ],
    "rule_async_engines_have_their_own_gpus": [
        ((*ASYNC, *GPUS), "policy.generation.colocated.enabled: true lets an engine and a policy worker take turns")
    ],
    "rule_rollout_workers_need_processes": [
        ((*ASYNC, *LOCAL, "experience.num_workers=2"), "experience.num_workers: cluster.launcher 'local' runs one")
    ],
    "rule_rollout_workers_of_a_step_keep_no_groups": [
        (
            ("experience.num_workers=2", "data_plane.durable.path=groups"),
            "experience.num_workers: 2 share each step of a synchronous run, and data_plane.durable.path keeps",
        )
    ],
    "rule_group_fits_the_engine": [
        ((*ASYNC, "policy.generation.max_batch_size=4"), "whole; expected at least grpo.num_generations_per_prompt=8")
    ],
    "rule_kept_groups_need_a_choice": [
        (
            (*ASYNC, "grpo.async.keep_finished=true", "grpo.async.selection=in_order"),
            "grpo.async.keep_finished: true with grpo.async.selection=in_order: prompts that are sampled again come",
        ),
        (
            (*ASYNC, "grpo.async.keep_finished=true", "grpo.async.lookahead=0"),
            "grpo.async.keep_finished: would be ignored, because no group waits between two steps",
        ),
    ],
    "rule_vllm_rows_can_stand_still": [
        ((*ASYNC, *VLLM, f"{VLLM_CFG}.tensor_parallel_size=2"), f"{VLLM_CFG}.tensor_parallel_size: 2 with grpo.async"),
        (
            (*ASYNC, *VLLM, "policy.router_replay.enabled=true", "grpo.use_generation_logprobs_as_prev=true"),
            f"{IN_FLIGHT}: 'recompute' with policy.router_replay.enabled: vLLM forgets the routes",
        ),
        (
            (*ASYNC, *VLLM, "policy.generation.max_batch_size=16", f"{VLLM_CFG}.max_num_batched_tokens=24"),
            f"{VLLM_CFG}.max_num_batched_tokens: 24 is less than a token of each of 32 rows",
        ),
    ],
    "rule_continuous_engine_shows_no_decoding": [
        (
            (*ASYNC, "diagnostics.tracer.enabled=true", f"diagnostics.tracer.selectors=['layer.out | stats | {when}']"),
            f"diagnostics.tracer.selectors: 'layer.out | stats | {when}' watches the engine decode",
        )
        for when in ("generation", "train; generation")
    ],
    "rule_async_dynamic_sampling_has_no_rounds": [
        (
            ("grpo.use_dynamic_sampling=true", *ASYNC, "grpo.batch_multiplier=2.0"),
            "grpo.batch_multiplier: 2.0 would be ignored, because an asynchronous run has no rounds",
        )
    ],
}
"""Refusals by the rules about asynchronous runs."""

ACCEPTED_ASYNC: list[tuple[str, ...]] = [
    ASYNC,
    BOUND_ZERO,
    (*BOUND_ZERO, *OWN_PREV),
    (*BOUND_ZERO, *GPUS),
    (*BOUND_ZERO, "loss_fn.name=reinforce", "~loss_fn.ratio_clip_max"),
    (*BOUND_ZERO, "grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=2"),
    (*ASYNC, "grpo.async.max_staleness=8", "grpo.async.lookahead=8", "grpo.async.overdue=drop"),
    (*ASYNC, "grpo.async.selection=my_package.orders:Shortest", "experience.num_workers=3"),
    (*ASYNC, *corrected("tis", None, 2.0), f"{IN_FLIGHT}=keep"),
    (*ASYNC, *corrected("geo-mask", 0.5, 2.0)),
    (*ASYNC, *CORRECTED),
    (*ASYNC, *GPUS, APART, "policy.generation.colocated.gpus_per_node=2"),
    (*ASYNC, *LOCAL),
    (*ASYNC, "grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=3"),
    (*ASYNC, "diagnostics.tracer.enabled=true"),
    (*ASYNC, "loss_fn.name=my_package.losses:MyLoss", "~loss_fn.ratio_clip_max"),
]
"""Asynchronous runs that no rule refuses."""

TURNS = ("experience.conversation.enabled=true",)
C, TOOL = "experience.conversation", "env.tools.use=[{name: calculator}]"
PROGRAM = (*TURNS, "env.name=program", "+env.options.command=[python, agent.py]")
BY_TURN = (*TURNS, "grpo.adv_estimator.name=outcome_plus_turn")

REFUSED_CONVERSATIONS: Refused = {
    "rule_conversation_keys_need_conversations": [
        ((f"{C}.max_turns=3",), f"{C}.max_turns: 3 would be ignored, because {C}.enabled is false"),
        (("env.tools.timeout_s=3",), f"env.tools.timeout_s: 3.0 would be ignored, because {C}.enabled is false"),
        (("data.history=new_row",), "data.history: 'new_row' would be ignored"),
    ],
    "rule_tool_keys_need_tools": [
        ((*TURNS, "env.tools.format=llama3"), "tools.format: 'llama3' would be ignored, because env.tools.use names"),
        ((*PROGRAM, "env.tools.num_workers=3"), "env.tools.num_workers: 3 would be ignored"),
    ],
    "rule_programs_have_a_command": [
        ((*TURNS, "env.name=program"), "env.options.command: expected program and arguments"),
        ((*PROGRAM, "env.options.command=agent.py"), "env.options.command: expected program and arguments"),
        ((*PROGRAM, "+env.options.shell=true"), "env.options.shell: env.name 'program' takes command only"),
        ((*PROGRAM, TOOL), "env.tools.use: the program of env.name 'program' brings tools of its own"),
    ],
    "rule_keys_of_programs_need_programs": [
        ((*TURNS, f"{C}.max_rows=3"), f"{C}.max_rows: 3 would be ignored, because env.name is 'sort', and no program"),
        ((*TURNS, "data.history=branch"), "data.history: 'branch' would be ignored, because env.name is 'sort'"),
        (
            (*PROGRAM, "data.history=append", f"{C}.side_requests=train"),
            f"{C}.side_requests: 'train' would be ignored, because data.history is 'append'",
        ),
    ],
    "rule_branches_need_batches_of_any_size": [
        (
            (*PROGRAM, "data.history=branch", "policy.dynamic_batching.enabled=false"),
            "data.history: branch gives any number of rows",
        )
    ],
    "rule_environments_with_turns_need_conversations": [
        ((name,), f"{C}.enabled: env.name {name.partition('=')[2]!r} is an environment with turns")
        for name in ("env.name=guess", "env.name=program")
    ],
    "rule_rewards_of_conversations_have_no_length": [
        (
            (*TURNS, "grpo.reward_shaping.enabled=true", "grpo.reward_shaping.max_response_length=9"),
            "grpo.reward_shaping.overlong_buffer_length: the penalty is on the length of one response",
        )
    ],
    "rule_rewards_of_turns_stay_as_they_are": [
        ((*BY_TURN, "grpo.reward_scaling.enabled=true"), "grpo.reward_scaling.enabled: true changes the reward of a c"),
        (
            (*BY_TURN, "grpo.reward_shaping={enabled: true, stop_properly_penalty_coef: 0.5}"),
            "grpo.reward_shaping.enabled: true changes the reward of a conversation",
        ),
    ],
    "rule_conversations_take_no_kl_from_rewards": [
        ((*TURNS, "loss_fn.use_kl_in_reward=true"), "loss_fn.use_kl_in_reward: true takes the KL of one response")
    ],
    "rule_conversations_are_not_kept_with_checkpoints": [
        ((*TURNS, *ASYNC, "grpo.async.keep_finished=true"), "grpo.async.keep_finished: true keeps finished groups of")
    ],
    "rule_groups_have_enough_rows": [
        ((*TURNS, f"{C}.min_scored=99"), f"{C}.min_scored: 99 is more than grpo.num_generations_per_prompt")
    ],
    "rule_scorer_keys_fit_the_environment": [
        (("env.timeout_s=3",), "env.timeout_s: 3.0 would be ignored"),
        (("env.score_threshold=1",), "env.score_threshold: 1.0 would be ignored"),
        (("+env.reward_weights.a=1",), "env.reward_weights: would be ignored"),
        (("env.on_none=leave_out",), "env.on_none: 'leave_out' would be ignored"),
        (("env.reward_batch_size=8",), "env.reward_batch_size: 8 would be ignored"),
        (("env.preflight_reward=false",), "env.preflight_reward: False would be ignored"),
        (("env.name=a:B", "env.score_threshold=0.5"), "env.score_threshold: 0.5 would be ignored"),
        (("env.memory_mib=512",), "env.memory_mib: 512 would be ignored"),
        (("env.network=true",), "env.network: True would be ignored"),
        ((*TURNS, "env.name=guess", "env.on_timeout=error"), "env.on_timeout: 'error' would be ignored"),
        ((*TURNS, "env.name=guess", "env.score_threshold=1"), "env.score_threshold: 1.0 would be ignored"),
        ((*TURNS, "env.name=guess", "env.reward_batch_size=8"), "env.reward_batch_size: 8 would be ignored"),
        ((*PROGRAM, "env.network=true"), "env.network: True would be ignored"),
        ((*PROGRAM, "env.score_threshold=0.5"), "env.score_threshold: 0.5 would be ignored"),
        ((*PROGRAM, "env.num_workers=3"), "env.num_workers: 3 would be ignored"),
    ],
}
"""Refusals by the rules about conversations."""

ACCEPTED_CONVERSATIONS: list[tuple[str, ...]] = [
    TURNS,
    (*TURNS, TOOL, "env.tools.format=llama3"),
    (*TURNS, "env.name=guess", "env.memory_mib=512", "env.network=true", "env.num_workers=2"),
    PROGRAM,
    (*PROGRAM, "data.history=branch", f"{C}.max_rows=3", f"{C}.limit_answer=empty_turn"),
    (*PROGRAM, "env.tools.format=llama3", "data.history=new_row", "env.memory_mib=512"),
    (*PROGRAM, "env.reward_function=a:b", "env.score_threshold=0.5", "env.on_timeout=error"),
    BY_TURN,
    (*TURNS, "grpo.reward_scaling.enabled=true"),
    (*TURNS, *ASYNC),
]
"""Conversations that no rule refuses."""

ADAPTERS = ("policy.lora.enabled=true",)
MERGED = (*ADAPTERS, "policy.lora.serve=merged")
FINISH = f"{IN_FLIGHT}=finish"

REFUSED_ADAPTERS: Refused = {
    "rule_lora_reference_needs_an_adapter": [
        ((*ADAPTERS, "policy.lora.reference=start"), "policy.lora.reference: 'start' needs an adapter to start from")
    ],
    "rule_finish_needs_adapters": [
        ((*ASYNC, FINISH), "policy.generation.in_flight: 'finish' lets rows of two versions run side by side"),
        ((*ASYNC, FINISH, *MERGED), "policy.generation.in_flight: 'finish' lets rows of two versions"),
    ],
    "rule_vllm_rows_keep_their_adapter": [
        ((*ASYNC, *ADAPTERS, *VLLM), "policy.generation.in_flight: 'recompute' changes the adapter of running rows"),
        ((*ASYNC, *ADAPTERS, *VLLM, f"{IN_FLIGHT}=keep"), "policy.generation.in_flight: 'keep' changes the adapter"),
    ],
    "rule_adapters_are_sent_whole": [
        ((*ADAPTERS, "policy.generation.refit_delta.enabled=true"), "policy.generation.refit_delta.enabled: true, but")
    ],
}
"""Refusals by the rules about how adapters reach engines."""
ACCEPTED_ADAPTERS: list[tuple[str, ...]] = [
    (*ASYNC, *ADAPTERS, FINISH),
    (*ASYNC, *ADAPTERS, FINISH, *VLLM),
    (*ASYNC, *ADAPTERS),
    (*ASYNC, *MERGED, *VLLM),
    (*ADAPTERS, *VLLM),
    (*MERGED, "policy.generation.refit_delta.enabled=true"),
]

RECORDED = ("diagnostics.record.steps=[1]", "diagnostics.record.phases=[generation]")
IMAGES = (
    *("~data.train", "data.train.dataset_name=jsonl", "data.train.data_path=rows.jsonl"),
    "data.train.image_key=image",
)


def column(**keys: str) -> str:
    """Return an override that declares the extra column `own`."""
    return f"+data.extra_columns.own={{{', '.join(f'{key}: {value}' for key, value in keys.items())}}}"


REFUSED_COLUMNS: Refused = {
    "rule_extra_columns_can_be_written": [
        ((column(dtype="object", dims="[2]"),), "data.extra_columns.own.dims: a column of objects has none, got [2]"),
        ((column(dtype="object", read_by="[train, log]"),), "passes read tensors; of objects expected log alone"),
        ((column(dtype="float32", dims="[2, T]"),), "data.extra_columns.own.dims: T can only be the first dim"),
        ((column(dtype="float32", source="environment"),), "own.source: the environment 'sort' returns no columns"),
        ((*PROGRAM, column(dtype="float32", source="environment")), "the environment 'program' returns no columns"),
    ],
    "rule_images_need_single_turns_and_dtensor": [
        ((*TURNS, *IMAGES), "data.train.image_key: prompts have images, and conversations are of text alone"),
        (
            (*IMAGES, "policy.megatron_cfg.enabled=true", "policy.dtensor_cfg.enabled=false"),
            "data.train.image_key: prompts have images, and the Megatron worker has models of text alone",
        ),
        (
            (*TURNS, "data.validation.dataset_name=jsonl", "+data.validation.image_key=image"),
            "data.validation.image_key: prompts have images, and conversations are of text alone",
        ),
    ],
    "rule_generation_can_be_recorded": [
        (
            (*RECORDED, "policy.generation.backend=my_package.engines:build"),
            "diagnostics.record.phases: generation: the engine 'my_package.engines:build' cannot be recorded",
        ),
        ((*RECORDED, *ASYNC), "rows join and leave the batch of an engine that samples ahead"),
        ((*RECORDED, *TURNS), "a row of a conversation is read again in every turn"),
        ((*RECORDED, *VLLM, f"{VLLM_CFG}.pipeline_parallel_size=2"), "a later pipeline stage of vLLM has no tokens"),
        ((*RECORDED, *VLLM, *GPUS), "a compiled vLLM passes its modules by"),
    ],
}
"""Refusals by the rules about columns of rows, and records of engines."""
ACCEPTED_COLUMNS: list[tuple[str, ...]] = [
    (column(dtype="object", read_by="[log]"),),
    (column(dtype="float32", dims="[T, 2]", read_by="[train]"),),
    (column(dtype="float32", source="environment"), "env.name=my_package.scores:Environment"),
    (*TURNS, column(dtype="float32", source="environment"), "env.name=my_package.scores:Environment"),
    IMAGES,
    RECORDED,
    (*RECORDED, *VLLM),
    (*RECORDED, *VLLM, *GPUS, f"{VLLM_CFG}.enforce_eager=true"),
]
"""Columns and records that no rule refuses."""

ACCEPTED_ROLLOUTS = [*ACCEPTED_ADAPTERS, *ACCEPTED_ASYNC, *ACCEPTED_COLUMNS, *ACCEPTED_CONVERSATIONS]
REFUSED_ROLLOUTS: Refused = REFUSED_ADAPTERS | REFUSED_ASYNC | REFUSED_COLUMNS | REFUSED_CONVERSATIONS
