"""Every cross-field rule refuses what it is there for, and names the key to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl.config import rules
from nemo_rl.config.backends import OptimizerConfig, SchedulerConfig
from nemo_rl.config.load import load_config
from nemo_rl.config.yaml_text import to_yaml
from nemo_rl.errors import ConfigError
from tests.helpers.refused_configs import (
    ACCEPTED_LOSSES,
    APART,
    GPUS,
    LOCAL,
    REFUSED_CLUSTERS,
    REFUSED_LOSSES,
    REFUSED_REWARDS,
    REFUSED_SUPERVISED,
    SMALL_GROUP,
    SOURCES,
)
from tests.helpers.refused_distillation import ACCEPTED_DISTILLATION, REFUSED_DISTILLATION
from tests.helpers.refused_megatron import ACCEPTED_BY_MEGATRON, REFUSED_BY_MEGATRON
from tests.helpers.refused_rollouts import ACCEPTED_ROLLOUTS, REFUSED_ROLLOUTS

DEMO = "configs/grpo_sort_cpu.yaml"
MEGATRON_TP2 = "configs/recipes/grpo_sort_megatron_tp2_cpu.yaml"
MEGATRON_PP2 = "configs/recipes/grpo_sort_megatron_pp2_cpu.yaml"
NO_VALIDATION = ("data.validation=null", "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")
FIXED = ("policy.dynamic_batching.enabled=false",)
WINDOW = "data.curriculum.window={}"
JSONL = ("~data.train", "data.train.dataset_name=jsonl")
GRADED = ("env.name=custom", "env.reward_function=a:b")
CONNECTED = ("data_plane.impl=transfer_queue", "data_plane.transfer_queue.connect=true", "cluster.address=auto")
COMPILED = "policy.dtensor_cfg.compile=on"
RECORDED, FILTERED = "policy.generation.record_support=true", "policy.generation.top_p=0.8"
REPLAY = "policy.router_replay.enabled=true"
BY_POLICY = (REPLAY, "policy.router_replay.source=prev_logprobs")
NO_LOGPROBS = "grpo.use_generation_logprobs_as_prev=true"
FORCED_RATIO = ("grpo.use_generation_logprobs_as_prev=false", "loss_fn.force_on_policy_ratio=true")
NAMES_OF_PARTS = ("loss_fn.name", "grpo.adv_estimator.name", "env.name", "policy.generation.backend", "data_plane.impl")

CALCULATOR = ("experience.conversation.enabled=true", "env.tools.use=[{name: calculator}]")
JUDGED = "env.judges={one: {base_url: 'http://localhost:1', model: m, rubric: x}}"
GATED = "data.train.env={name: judge, gates: {one: 1}, judges: {one: {base_url: 'http://localhost:1', model: m}}}"

DYNAMIC = "grpo.use_dynamic_sampling=true"

REFUSED: dict[str, list[tuple[tuple[str, ...], str]]] = {
    "rule_rewards_of_sections_have_no_turns": [
        (
            ("data.train.env={name: guess}",),
            "data.train.env.name: 'guess' takes turns, and a section of data has a reward",
        ),
        (
            ("env.name=guess", "experience.conversation.enabled=true", "data.validation.env={name: sort}"),
            "data.validation.env: env.name 'guess' takes turns, and gives the rewards of all rows",
        ),
        (
            ("data.train.env={name: sort}", "data.train.env.tools.timeout_s=3"),
            "data.train.env.tools.timeout_s: 3.0 would be ignored, because a section of data has a reward alone",
        ),
    ],
    "rule_keys_beside_sources_are_shared": [
        ((*SOURCES, "data.train.size=9"), "data.train.size: 9 would be ignored, because data.train has several sources")
    ],
    "rule_sampling_of_sources_fits_the_run": [
        (
            (*SOURCES, "data.train.a.num_generations_per_prompt=99"),
            "data.train.a.num_generations_per_prompt: 99 is above grpo.num_generations_per_prompt",
        ),
        (
            (*SOURCES, "data.train.b.max_new_tokens=999"),
            "data.train.b.max_new_tokens: 999 is above policy.generation.max_new_tokens",
        ),
        (
            (*SOURCES, "data.train.a.max_new_tokens=2", "policy.generation.backend=a:B"),
            "data.train.a.max_new_tokens: 'a:B' is an engine of your own",
        ),
    ],
    "rule_groups_of_sources_fit_the_run": [
        (
            (*SMALL_GROUP, "policy.train_global_batch_size=512"),
            "makes the rows of a step another number in each step, which are trained in one optimizer step",
        ),
        (
            (*SMALL_GROUP, "grpo.async.enabled=true", "grpo.async.keep_finished=true"),
            "data.train.a.num_generations_per_prompt: 2 with grpo.async.keep_finished",
        ),
        (
            (*SMALL_GROUP, "experience.conversation.enabled=true", "experience.conversation.min_scored=3"),
            "experience.conversation.min_scored: 3 is more than data.train.a.num_generations_per_prompt 2",
        ),
    ],
    "rule_tools_of_sections_are_those_of_the_run": [
        ((*SOURCES, "data.train.a.tools=[python]"), "data.train.a.tools: would be ignored"),
        (
            (*SOURCES, "data.train.a.tools=[python]", *CALCULATOR),
            "data.train.a.tools: expected names of tools of env.tools.use (calculator), got 'python'",
        ),
    ],
    "rule_none_is_told_apart_from_other_rows": [
        (
            ("env.name=judge", "env.reward_function=a:b", "env.on_none=leave_out", JUDGED),
            "env.on_none: leave_out is of functions alone",
        ),
        (
            (*GRADED, "env.on_none=leave_out", "grpo.adv_estimator.name=gdpo", GATED),
            "behind data.train.env.gates a missing one counts 0",
        ),
    ],
    "rule_sources_have_shares": [
        (("data.mixture.by=size",), "data.mixture.by: 'size' would be ignored, because data.train is one source"),
        ((*SOURCES, "data.mixture.size_temperature=2"), "data.mixture.size_temperature: 2.0 would be ignored"),
        ((*SOURCES, "grpo.max_num_epochs=2"), "grpo.max_num_epochs: 2 is of one source, and data.train has a, b"),
        ((*SOURCES, DYNAMIC, "data.train.a.max_num_epochs=2"), "data.train.a.max_num_epochs: 2 ends a run"),
        (
            (*SOURCES, "data.mixture.unit=tokens", "data.train.a.max_num_epochs=2"),
            "ends a run that takes prompts in turns, and data.mixture.unit: tokens takes those that are missing",
        ),
        (
            (
                *(*SOURCES, "data.mixture.unit=tokens", "grpo.async.enabled=true"),
                *("loss_fn.use_importance_sampling_correction=true", *NO_VALIDATION),
            ),
            "data.mixture.unit: 'tokens' draws by what was trained",
        ),
        (
            (
                *(*SOURCES, DYNAMIC, "grpo.async.enabled=true", "loss_fn.use_importance_sampling_correction=true"),
                *NO_VALIDATION,
            ),
            "grpo.use_dynamic_sampling: true draws others for groups of equal rewards",
        ),
        (
            (*SOURCES, "data.train.a.weight=0", "data.train.b.schedule={7: 0}"),
            "data.train.a.weight: is 0 at step 7 as those of all sources are",
        ),
    ],
    "rule_adapters_leave_the_tower": [
        (
            ("policy.vision.freeze_tower=true", "policy.lora.enabled=true"),
            "policy.vision.freeze_tower: true would be ignored",
        )
    ],
    "rule_parallel_sizes_divide_the_workers": [
        (("policy.dtensor_cfg.tensor_parallel_size=4",), "policy.dtensor_cfg.tensor_parallel_size: 4 x context"),
        (("policy.dtensor_cfg.context_parallel_size=3",), "policy.dtensor_cfg.tensor_parallel_size: 1 x context"),
    ],
    "rule_copies_divide_the_data_and_context_ranks": [
        (("policy.dtensor_cfg.replicate_size=3",), "policy.dtensor_cfg.replicate_size: 3 copies of the weights do not"),
    ],
    "rule_tensor_parallel_keys_need_ranks": [
        (("policy.dtensor_cfg.sequence_parallel=true",), "policy.dtensor_cfg.sequence_parallel: True would be"),
        (("policy.dtensor_cfg.custom_parallel_plan={lm_head: colwise}",), "custom_parallel_plan: would be ignored"),
    ],
    "rule_sequence_parallel_has_a_plan": [
        (
            (
                "policy.dtensor_cfg.tensor_parallel_size=2",
                "policy.dtensor_cfg.sequence_parallel=true",
                "policy.dtensor_cfg.custom_parallel_plan={lm_head: colwise}",
            ),
            "policy.dtensor_cfg.sequence_parallel: a custom_parallel_plan",
        )
    ],
    "rule_compile_needs_whole_layers": [
        ((COMPILED, "policy.dtensor_cfg.tensor_parallel_size=2"), "policy.dtensor_cfg.compile: 'on', and policy.dten"),
        ((COMPILED, "policy.dtensor_cfg.context_parallel_size=2"), "policy.dtensor_cfg.context_parallel_size is above"),
        ((COMPILED, "policy.router_replay.enabled=true"), "policy.router_replay.enabled is true: its passes"),
        ((COMPILED, "policy.deterministic=true"), "policy.deterministic is true: bits depend"),
    ],
    "rule_cpu_offload_needs_a_gpu": [
        (("policy.dtensor_cfg.cpu_offload=true",), "policy.dtensor_cfg.cpu_offload: True")
    ],
    "rule_sampling_mask_needs_top_p_or_top_k": [
        ((RECORDED,), "policy.generation.record_support: policy.generation.top_p is 1 and"),
        ((RECORDED, FILTERED, "policy.generation.backend=vllm"), "policy.generation.backend is 'vllm', and only the"),
    ],
    "rule_keys_need_their_switch": [
        (
            ("policy.generation.receipt.enabled=false", "policy.generation.receipt.every=2"),
            "policy.generation.receipt.every: 2 would be ignored, because policy.generation.receipt.enabled is false",
        ),
        (("policy.lora.rank=8",), "policy.lora.rank: 8 would be ignored"),
        (("policy.router_replay.bit_packed=true",), "policy.router_replay.bit_packed: True would be ignored"),
        (("policy.router_replay.source=prev_logprobs",), "policy.router_replay.source: 'prev_logprobs' would be"),
        (("diagnostics.keep_steps.max_bytes=5",), "max_bytes: 5 would be ignored"),
        (("policy.tracer.hidden_states=true",), "hidden_states: True would be"),
    ],
    "rule_durable_rows_need_receipts": [
        (
            ("data_plane.durable.path=groups", "policy.generation.receipt.enabled=false"),
            "data_plane.durable.path: a stored group is used only if",
        ),
        (("data_plane.durable.fsync=true",), "data_plane.durable.fsync: True would be ignored, because no path is set"),
    ],
    "rule_logprob_microbatch_tokens_not_below_train": [
        (
            ("policy.dynamic_batching.enabled=true", "policy.dynamic_batching.logprob_mb_tokens=100"),
            "policy.dynamic_batching.logprob_mb_tokens: expected at least train_mb_tokens",
        )
    ],
    "rule_data_plane_fits_launcher": [
        (("data_plane.impl=noop",), "data_plane.impl: 'noop' keeps rows"),
        (("data_plane.impl=shm",), "data_plane.impl: 'shm' joins processes of one node"),
        ((*LOCAL, "data_plane.impl=transfer_queue"), "data_plane.impl: 'transfer_queue' lives in Ray"),
        ((*LOCAL, "data_plane.impl=ray"), "data_plane.impl: 'ray' lives in Ray"),
    ],
    "rule_ledger_host_fits_launcher": [
        (("data_plane.ledger_host=in_process",), "data_plane.ledger_host: 'in_process'"),
        ((*LOCAL, "data_plane.ledger_host=ray_actor"), "data_plane.ledger_host: 'ray_actor'"),
        (("data_plane.ledger_host=socket", "cluster.address=auto"), "data_plane.ledger_host: 'socket'"),
    ],
    "rule_ledger_recovery_needs_a_process_of_its_own": [
        ((*LOCAL, "data_plane.ledger.recovery=journal"), "'journal' needs the ledger in its own process; with"),
        (
            ("data_plane.ledger_host=socket", "data_plane.ledger.recovery=journal"),
            "with data_plane.ledger_host=socket it lives in the driver",
        ),
        (("data_plane.ledger.fsync=true",), "data_plane.ledger.fsync: True would be ignored"),
        (("data_plane.ledger.journal_bytes=5",), "data_plane.ledger.journal_bytes: 5 would be ignored"),
    ],
    "rule_leader_broadcast_needs_a_replica_group": [
        (("data_plane.fetch_policy=leader_broadcast",), "data_plane.fetch_policy: 'leader_broadcast' needs ranks"),
        (("data_plane.fetch_policy=leader_broadcast",), "or policy.dtensor_cfg.context_parallel_size above 1"),
        (("data_plane.fetch_policy=nobody",), "data_plane.fetch_policy"),
    ],
    "rule_backend_needs_transfer_queue": [
        (("data_plane.impl=mooncake", "data_plane.backend=mooncake_cpu"), "data_plane.backend: 'mooncake_cpu' would be")
    ],
    "rule_connect_needs_a_cluster_that_runs": [
        (
            ("data_plane.impl=transfer_queue", "data_plane.transfer_queue.connect=true"),
            "data_plane.transfer_queue.connect: the run starts its own Ray cluster",
        )
    ],
    "rule_connected_queue_brings_its_own_settings": [
        ((*CONNECTED, "data_plane.simple.num_storage_units=2"), "because the program that started TransferQueue"),
        (
            (*CONNECTED, "data_plane.backend=mooncake_cpu", "data_plane.mooncake.segment_bytes=5000000"),
            "data_plane.mooncake.segment_bytes: 5000000 would be ignored, because the program that started",
        ),
    ],
    "rule_mooncake_keys_fit_the_store": [
        (
            ("data_plane.impl=mooncake", "cluster.num_nodes=2", "cluster.address=auto"),
            "data_plane.mooncake.host: 2 nodes cannot reach 127.0.0.1",
        ),
        (
            (
                "data_plane.impl=transfer_queue",
                "data_plane.backend=mooncake_cpu",
                "data_plane.mooncake.master_address=10.0.0.1:50051",
            ),
            "data_plane.mooncake.master_address: '10.0.0.1:50051' would be ignored",
        ),
    ],
    "rule_store_sections_need_their_store": [
        ((*LOCAL, "data_plane.simple.num_storage_units=2"), "data_plane.simple.num_storage_units: 2 would be ignored"),
        ((*LOCAL, "data_plane.mooncake.protocol=rdma"), "data_plane.mooncake.protocol: 'rdma' would be ignored"),
        (("data_plane.ray.owner=node",), "data_plane.ray.owner: 'node' would be ignored"),
        (("data_plane.impl=ray", "data_plane.transfer_queue.layout=native"), "be ignored, because the store is 'ray'"),
        (("data_plane.impl=ray", "data_plane.shm.keep_bytes=5"), "data_plane.shm.keep_bytes: 5 would be ignored"),
        (
            ("data_plane.enabled=false", "data_plane.simple.num_storage_units=2"),
            "because the store is 'ray' with owner 'producer'; leave it out, or change data_plane.enabled",
        ),
    ],
    "rule_data_plane_impl_needs_its_switch": [
        (("data_plane.enabled=false", "data_plane.impl=mooncake"), "be ignored, because data_plane.enabled is false")
    ],
    "rule_packing_excludes_dynamic_batching": [
        (("policy.sequence_packing.enabled=true",), "policy.dynamic_batching.enabled: packing and dynamic")
    ],
    "rule_batching_keys_need_their_switch": [
        (("policy.sequence_packing.train_mb_tokens=64",), "policy.sequence_packing.train_mb_tokens: 64 would be"),
        (("policy.sequence_packing.algorithm=concatenative",), "policy.sequence_packing.algorithm: 'concatenative'"),
        (
            (*FIXED, "policy.train_micro_batch_size=2", "policy.sequence_packing.train_mb_tokens=64"),
            "because policy.train_micro_batch_size is set",
        ),
        ((*FIXED, "policy.dynamic_batching.microbatch_order=largest_first"), "dynamic_batching.microbatch_order: 'l"),
        (("policy.dynamic_batching.train_mb_tokens=47",), "policy.dynamic_batching.train_mb_tokens: 47 tokens do not"),
        (("policy.train_micro_batch_size=8",), "policy.train_micro_batch_size: 8 would be ignored"),
    ],
    "rule_fixed_microbatches_divide": [
        ((*FIXED, "policy.train_micro_batch_size=3"), "expected a multiple of 6"),
        (
            (*FIXED, "policy.train_micro_batch_size=2", *SMALL_GROUP),
            "policy.dynamic_batching.enabled: false and no packing of rows",
        ),
    ],
    "rule_step_divides_into_global_batches": [
        (("policy.train_global_batch_size=300",), "grpo.num_prompts_per_step x num_generations_per_prompt = 1024")
    ],
    "rule_training_temperature_above_zero": [
        (("policy.generation.temperature=0",), "policy.generation.temperature: 0 is greedy")
    ],
    "rule_lengths_fit": [(("policy.generation.max_new_tokens=17",), "policy.max_total_sequence_length: 48 does not")],
    "rule_advantage_clip_is_an_interval": [
        (("grpo.advantage_clip_low=1", "grpo.advantage_clip_high=1"), "grpo.advantage_clip_low: 1.0 is not below")
    ],
    "rule_route_recording_needs_its_pass": [
        ((*BY_POLICY, *FORCED_RATIO), "'prev_logprobs' never records, because loss_fn.force_on_policy_ratio is true"),
        ((*BY_POLICY, NO_LOGPROBS), "policy.router_replay.source: 'prev_logprobs' never records"),
    ],
    "rule_missing_route_share_needs_rollout_routes": [
        ((*BY_POLICY, "policy.router_replay.max_missing_share=0.1"), "router_replay.max_missing_share: 0.1 would")
    ],
    "rule_route_comparison_needs_logprob_pass": [
        (
            (REPLAY, NO_LOGPROBS, "policy.router_replay.compare_microbatches=2"),
            "policy.router_replay.compare_microbatches: 2 would be ignored, because grpo.use_generation",
        ),
        (
            (*BY_POLICY, "grpo.use_generation_logprobs_as_prev=false", "policy.router_replay.compare_microbatches=2"),
            "policy.router_replay.compare_microbatches: 2 would be ignored, because the pass that records",
        ),
    ],
    "rule_sibling_std_needs_a_sibling_baseline": [
        (
            ("grpo.use_leave_one_out_std=true", f"grpo.{switch}=false"),
            f"grpo.use_leave_one_out_std: True would be ignored, because grpo.{switch} is false",
        )
        for switch in ("normalize_rewards", "use_leave_one_out_baseline")
    ],
    "rule_scheduler_keys_need_a_decay": [
        (
            ("policy.scheduler.name=constant", "policy.scheduler.min_factor=0.5"),
            "policy.scheduler.min_factor: 0.5 would",
        ),
        (("policy.scheduler.decay_steps=5",), "policy.scheduler.warmup_steps: 5 leaves no step"),
        (
            ("policy.scheduler.phases=[{name: a.B}]", "policy.scheduler.warmup_steps=7"),
            "policy.scheduler.warmup_steps: 7 would be ignored",
        ),
    ],
    "rule_scheduler_milestones_separate_the_phases": [
        (("policy.scheduler=[{name: a.B}, {name: a.C}]",), "policy.scheduler.milestones: expected 1"),
        (("policy.scheduler.milestones=[3]",), "policy.scheduler.milestones: expected 0"),
        (
            ("policy.scheduler=[{name: a.B}, {name: a.C}, {name: a.D}, {milestones: [5, 5]}]",),
            "policy.scheduler.milestones: expected rising steps",
        ),
        (
            ("policy.scheduler={name: torch.optim.lr_scheduler.ReduceLROnPlateau}",),
            "policy.scheduler.phases: ReduceLROnPlateau",
        ),
    ],
    "rule_exactly_one_worker_is_enabled": [
        (("policy.dtensor_cfg.enabled=false",), "policy.dtensor_cfg.enabled: false, and so is policy.megatron_cfg.en"),
        (("policy.megatron_cfg.enabled=true",), "policy.megatron_cfg.enabled: true, and so is policy.dtensor_cfg.en"),
    ],
    "rule_worker_keys_fit_the_worker": [
        (("policy.megatron_cfg.freeze_moe_router=true",), "policy.megatron_cfg.freeze_moe_router: True would be"),
        (("policy.megatron_cfg.optimizer.adam_beta2=0.9",), "be ignored, because policy.megatron_cfg.enabled is f"),
    ],
    "rule_validation_needs_prompts": [
        (("~data.validation",), "grpo.val_period: 20 would be ignored, because there is no data.validation"),
        (("~data.validation",), "grpo.val_at_end: True would be ignored, because there is no data.validation"),
        (("data.validation=null", "grpo.val_period=5"), "grpo.val_period: 5 would be ignored, because there is no"),
        (("data.validation=null", "grpo.val_at_start=true"), "grpo.val_at_start: True would be ignored"),
        ((*NO_VALIDATION, "grpo.stop_at_validation_accuracy=0.5"), "grpo.stop_at_validation_accuracy: 0.5 would be"),
    ],
    "rule_validation_prompts_need_a_validation": [(NO_VALIDATION[1:], "data.validation: is never used")],
    "rule_dataset_keys_fit_their_kind": [
        (("data.train.size=null",), "data.train.size: must be set"),
        (("data.validation.task=chain_sum",), "data.validation.task: 'chain_sum' would be ignored"),
        (("data.train.options.digits=3",), "data.train.options.digits"),
        (("+data.train.options.digits=3",), "data.train.options.digits: sort_digits takes min_digits and max_digits"),
        (("data.train.dataset_name=guess",), "data.train.options.min_digits: guess takes numbers and games only"),
        (("data.train.dataset_name=reasoning_gym",), "data.train.task: must be set"),
        (JSONL, "data.train.data_path: must be set"),
        ((*JSONL, "data.train.data_path=a", "data.train.split=b"), "data.train.split: 'b' would be ignored"),
        (("data.train.prompt_template=text",), "data.train.prompt_template: expected a text with {input}"),
    ],
    "rule_curriculum_fits_the_run": [
        (("data.curriculum.smoothing=0.2",), "data.curriculum.smoothing: 0.2 would be ignored, because no rule is set"),
        (
            ("+data.curriculum.options.a=1", WINDOW),
            "data.curriculum.options: would be ignored, because data.curriculum.rule is null",
        ),
        (("data.curriculum.window={least: 0.9, most: 0.3}",), "data.curriculum.window.least: 0.9 is above most, 0.3"),
        ((WINDOW, "grpo.max_num_epochs=2"), "grpo.max_num_epochs: 2 counts passes over the prompts"),
        ((WINDOW, *SOURCES, "data.train.a.max_num_epochs=1"), "data.train.a.max_num_epochs: 1 counts passes"),
        ((WINDOW, *SOURCES, "data.mixture.unit=tokens"), "data.mixture.unit: takes prompts of the source of which"),
        (
            (WINDOW, *SOURCES, "grpo.use_dynamic_sampling=true"),
            "grpo.use_dynamic_sampling: takes prompts of the source",
        ),
        (
            (WINDOW, "grpo.async.enabled=true", "data_plane.durable.path=groups"),
            "data_plane.durable.path: finds finished groups by their place in the stream",
        ),
        (
            (
                *(WINDOW, "env.name=judge"),
                "env.judges={j: {model: m, rubric: r, base_url: 'http://127.0.0.1:1/v1', mode: pairwise}}",
            ),
            "env.judges.j.mode: 'pairwise' compares the responses of a group",
        ),
        (("data.curriculum.gates={b: {after: a}}",), "data.curriculum.gates.b: expected sources of data.train (it is"),
        (
            (*SOURCES, "data.curriculum.gates={b: {after: c}}"),
            "gates.b: expected sources of data.train (a, b), got 'c'",
        ),
        (
            (*SOURCES, "data.curriculum.gates={b: {after: a}, a: {after: b}}"),
            "data.curriculum.gates.b.after: b after a after b never opens",
        ),
    ],
    "rule_custom_reward_needs_a_function": [
        (("env.name=custom",), "env.reward_function: must be set"),
        (("env.reward_function=a:b",), "env.reward_function: 'a:b' would be ignored"),
        (("env.name=custom", "env.reward_function=a.b"), "env.reward_function: expected module:function"),
    ],
    "rule_reasoning_gym_reward_needs_its_prompts": [
        (("env.name=reasoning_gym",), "data.validation.dataset_name: env.")
    ],
    "rule_options_need_a_plugin": [
        ((f"+{name.rpartition('.')[0]}.options.x=1",), f".options: would be ignored, because {name} is ")
        for name in NAMES_OF_PARTS
    ],
    "rule_accuracy_needs_binary_rewards": [
        ((*GRADED, "grpo.stop_at_validation_accuracy=0.5"), "stop_at_validation_accuracy: env.name 'custom' gives"),
        ((*GRADED, "checkpointing.metric_name=val:accuracy"), "checkpointing.metric_name: env.name 'custom' gives"),
    ],
    "rule_checkpoint_keys_need_checkpointing": [
        (("checkpointing.enabled=false", "checkpointing.resume=true"), "checkpointing.resume: needs"),
        (("checkpointing.enabled=false", "checkpointing.save_optimizer=false"), "checkpointing.save_optimizer: False"),
        (("checkpointing.enabled=false", "checkpointing.async_save=true"), "checkpointing.async_save: True would be"),
    ],
    "rule_checkpoint_url_can_be_written": [
        (("checkpointing.staging_dir=staged",), "checkpointing.staging_dir: would be ignored"),
        (("checkpointing.checkpoint_dir=simplecache::s3://bucket/run",), "a chain of protocols is not written to"),
        (("checkpointing.checkpoint_dir=memory://run",), "memory:// ends with its process"),
        (("checkpointing.checkpoint_dir=s3://",), "s3:// names no place"),
        (("checkpointing.checkpoint_dir=s3://me:word@host/run",), "a URL of s3 with a password or a query"),
        (("checkpointing.checkpoint_dir=s3://bucket/run?sig=x",), "a URL of s3 with a password or a query"),
    ],
    "rule_checkpoint_metric_is_logged": [
        (("checkpointing.metric_name=accuracy",), "checkpointing.metric_name: expected val:NAME or train:NAME"),
        (("data.validation=null", "checkpointing.metric_name=val:pass_at_1"), "'val:pass_at_1' is never measured"),
        (("checkpointing.keep_top_k=null", "checkpointing.metric_name=a"), "checkpointing.metric_name: 'a' would be"),
    ],
    "rule_resume_needs_the_optimizer": [
        (("checkpointing.resume=true", "checkpointing.save_optimizer=false"), "checkpointing.save_optimizer: false"),
        (("checkpointing.load_optimizer=false",), "checkpointing.load_optimizer: False would be ignored"),
        (("checkpointing.allow_changed=[data]",), "checkpointing.allow_changed: would be ignored"),
    ],
    "rule_deterministic_products_repeat": [
        (("policy.deterministic=true", f"{section}.env_vars={{CUBLAS_WORKSPACE_CONFIG: ':0:0'}}"), "CONFIG ':0:0' of")
        for section in ("cluster", "policy.dtensor_cfg")
    ],
    "rule_profile_kind_fits_the_devices": [(("policy.profile={steps: [1], kind: nsys}",), "kind: nsys records CUDA")],
    "rule_record_keys_need_steps": [(("diagnostics.record.sites=logits",), "sites: 'logits' would be ignored")],
    "rule_tracer_host_reachable": [(("diagnostics.tracer.enabled=true", "cluster.num_nodes=2"), "is reached")],
    "rule_resume_excludes_overwrite": [(("checkpointing.resume=true", "logger.overwrite=true"), "removes")],
    "rule_tracker_keys_need_their_tracker": [
        (("logger.wandb.mode=offline",), "logger.wandb.mode: 'offline' would be ignored"),
        (("logger.mlflow.run_name=a",), "logger.mlflow.run_name: 'a' would be ignored"),
    ],
}

OF_THE_DEMO = (
    REFUSED
    | REFUSED_SUPERVISED
    | REFUSED_CLUSTERS
    | REFUSED_LOSSES
    | REFUSED_REWARDS
    | REFUSED_ROLLOUTS
    | REFUSED_DISTILLATION
)
CASES = [
    pytest.param(recipe, overrides, fragment, id=f"{rule}-{index}{suffix}")
    for recipe, table, suffix in ((DEMO, OF_THE_DEMO, ""), (MEGATRON_TP2, REFUSED_BY_MEGATRON, "-megatron"))
    for rule, cases in table.items()
    for index, (overrides, fragment) in enumerate(cases)
]


@pytest.mark.parametrize(("recipe", "overrides", "fragment"), CASES)
def test_rule_refuses(recipe: str, overrides: tuple[str, ...], fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    assert any(fragment in line for line in caught.value.problems), caught.value.problems


def test_every_rule_is_exercised() -> None:
    assert {rule.__name__ for rule in rules.RULES} == set(OF_THE_DEMO | REFUSED_BY_MEGATRON)


@pytest.mark.parametrize(
    "overrides",
    [
        LOCAL,
        (*LOCAL[:3], "data_plane.enabled=false"),
        (*LOCAL, "data_plane.ledger_host=socket"),
        ("data_plane.ledger_host=socket",),
        NO_VALIDATION,
        NO_VALIDATION[:1],
        (*NO_VALIDATION, "checkpointing.keep_top_k=null"),
        ("grpo.max_num_steps=2",),
        (*NO_VALIDATION, "checkpointing.metric_name=train:loss"),
        FIXED,
        ("env.name=custom", "env.reward_function=a.b:c", "env.timeout_s=3"),
        (*GRADED, "env.score_threshold=0.5", "grpo.stop_at_validation_accuracy=0.9", "env.reward_batch_size=8"),
        *ACCEPTED_LOSSES,
        *ACCEPTED_ROLLOUTS,
        *ACCEPTED_DISTILLATION,
    ],
)
def test_combinations_that_work_are_accepted(overrides: tuple[str, ...]) -> None:
    load_config(DEMO, overrides)


@pytest.mark.parametrize("parent", ["val:accuracy", "val:reward"])
def test_one_key_turns_validation_off_whatever_a_parent_asked_for(tmp_path: Path, parent: str) -> None:
    asks = f"checkpointing: {{metric_name: {parent}}}\ngrpo: {{stop_at_validation_accuracy: 0.5, max_val_samples: 9}}"
    more = "data: {validation_sets: {more: {dataset_name: sort_digits, size: 4}}}\nevaluation: {num_samples: 2}"
    (tmp_path / "parent.yaml").write_text(f"defaults: {DEMO}\n{asks}\n{more}\n")
    assert load_config(tmp_path / "parent.yaml").checkpoint_metric == parent
    (tmp_path / "child.yaml").write_text("defaults: parent.yaml\ndata: {validation: null}\n")
    config = load_config(tmp_path / "child.yaml")
    assert not config.has_validation and config.checkpoint_metric == "train:reward" and not config.data.held_out


@pytest.mark.parametrize("overrides", ACCEPTED_BY_MEGATRON)
def test_combinations_that_work_with_megatron_are_accepted(overrides: tuple[str, ...]) -> None:
    load_config(MEGATRON_TP2, overrides)


APART_GPUS = (*GPUS, APART, "policy.generation.colocated.gpus_per_node=2")
TRANSPORTS = {
    "on CPUs": ((), "payload"),
    "on shared GPUs": (GPUS, "ipc"),
    "to GPUs apart": (APART_GPUS, "shards"),
    "one rank each": ((*APART_GPUS, "cluster.gpus_per_node=1"), "broadcast"),
    "deltas": ((*APART_GPUS, "policy.generation.refit_delta.enabled=true"), "broadcast"),
    "a merged adapter": ((*APART_GPUS, "policy.lora.enabled=true", "policy.lora.serve=merged"), "broadcast"),
}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_auto_takes_the_transport_that_fits(name: str) -> None:
    overrides, transport = TRANSPORTS[name]
    assert load_config(DEMO, list(overrides)).refit_transport == transport


@pytest.mark.parametrize(
    ("switch", "key"),
    [
        ("checkpointing.enabled=false", "checkpointing.save_period=20"),
        ("policy.dynamic_batching.enabled=false", "policy.dynamic_batching.logprob_mb_tokens=16384"),
        ("cluster.gpus_per_node=2", "cluster.cpu_workers_per_node=2"),
    ],
)
def test_what_a_parent_set_up_may_be_switched_off_but_not_set_again(switch: str, key: str) -> None:
    load_config(DEMO, [switch])
    with pytest.raises(ConfigError, match=f"command line: {key.split('=')[0]}: .* would be ignored"):
        load_config(DEMO, [switch, key])


def test_megatron_over_a_recipe_of_the_other_worker_needs_three_keys(tmp_path: Path) -> None:
    """What the parent says about the DTensor worker is left behind; what the child says about it is refused."""
    recipe = tmp_path / "recipe.yaml"
    parent = f"defaults: {Path('configs/recipes/grpo_sort_tp2_cpu.yaml').resolve()}\n"
    child = "policy: {dtensor_cfg: {enabled: false}, megatron_cfg: {enabled: true, tensor_model_parallel_size: 2}"
    recipe.write_text(f"{parent}{child}}}")
    assert load_config(recipe).policy.parallel_sizes.tensor == 2
    recipe.write_text(f"{parent}{child}, optimizer: {{kwargs: {{lr: 0.5}}}}}}")
    with pytest.raises(ConfigError, match=r"policy\.optimizer\.kwargs: would be ignored, because the Megatron worker"):
        load_config(recipe)


@pytest.mark.parametrize("recipe", [MEGATRON_TP2, MEGATRON_PP2])
def test_torch_optimizer_and_scheduler_may_be_null_beside_megatron(recipe: str, tmp_path: Path) -> None:
    """Then nothing of them is left, and the config that is written besides a run loads again."""
    config = load_config(recipe)
    assert config.policy.optimizer == OptimizerConfig()
    assert config.policy.scheduler == SchedulerConfig()
    written = tmp_path / "written.yaml"
    written.write_text(to_yaml(config))
    assert load_config(written) == config


def test_the_dtensor_worker_needs_its_optimizer() -> None:
    with pytest.raises(ConfigError, match=r"policy\.optimizer: expected a section, got null"):
        load_config(DEMO, ["policy.optimizer=null"])
