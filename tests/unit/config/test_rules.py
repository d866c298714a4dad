"""Every cross-field rule refuses what it is there for, and names the key to change."""

from __future__ import annotations

import pytest

from nemo_rl.config import validate
from nemo_rl.config.load import load_config
from nemo_rl.errors import ConfigError

DEMO = "configs/grpo_sort_cpu.yaml"
LOCAL = (
    "cluster.launcher=local",
    "cluster.cpu_workers_per_node=1",
    "policy.generation.num_replicas=1",
    "data_plane.impl=noop",
)
NO_VALIDATION = ("data.validation=null", "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")
FIXED = ("policy.dynamic_batching.enabled=false",)
JSONL = ("~data.train", "data.train.dataset_name=jsonl")

REFUSED: dict[str, list[tuple[tuple[str, ...], str]]] = {
    "rule_cpu_workers_only_without_gpus": [
        (("cluster.gpus_per_node=1", "cluster.cpu_workers_per_node=2"), "cluster.cpu_workers_per_node: 2 would be")
    ],
    "rule_local_launcher_is_one_process": [
        ((*LOCAL, "cluster.cpu_workers_per_node=2"), "cluster.launcher: 'local' runs one worker"),
        ((*LOCAL, "policy.generation.num_replicas=2"), "policy.generation.num_replicas: one process holds one engine"),
        ((*LOCAL, "cluster.address=auto"), "cluster.address: 'auto' would be ignored"),
    ],
    "rule_parallel_sizes_divide_the_workers": [
        (("policy.dtensor_cfg.tensor_parallel_size=4",), "policy.dtensor_cfg.tensor_parallel_size: 4 x context"),
        (("policy.dtensor_cfg.context_parallel_size=3",), "policy.dtensor_cfg.tensor_parallel_size: 1 x context"),
    ],
    "rule_tensor_parallel_keys_need_ranks": [
        (("policy.dtensor_cfg.sequence_parallel=true",), "policy.dtensor_cfg.sequence_parallel: True would be"),
        (
            ("policy.dtensor_cfg.custom_parallel_plan={lm_head: colwise}",),
            "policy.dtensor_cfg.custom_parallel_plan: would be ignored",
        ),
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
    "rule_cpu_offload_needs_a_gpu": [
        (("policy.dtensor_cfg.cpu_offload=true",), "policy.dtensor_cfg.cpu_offload: True")
    ],
    "rule_engines_share_gpus_with_workers": [
        (
            ("~cluster.cpu_workers_per_node", "cluster.gpus_per_node=1", "policy.generation.num_replicas=2"),
            "policy.generation.num_replicas: an engine shares a GPU",
        ),
    ],
    "rule_logprob_microbatches_are_not_smaller": [
        (
            ("policy.dynamic_batching.enabled=true", "policy.dynamic_batching.logprob_mb_tokens=100"),
            "policy.dynamic_batching.logprob_mb_tokens: expected at least train_mb_tokens",
        ),
    ],
    "rule_address_and_nodes_agree": [
        (("cluster.num_nodes=2",), "cluster.num_nodes: 2 nodes need"),
        (("cluster.address=auto", "cluster.num_cpus=8"), "cluster.num_cpus: would be ignored"),
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
    "rule_leader_broadcast_needs_a_replica_group": [
        (("data_plane.fetch_policy=leader_broadcast",), "data_plane.fetch_policy: 'leader_broadcast' needs ranks"),
        (("data_plane.fetch_policy=nobody",), "data_plane.fetch_policy"),
    ],
    "rule_backend_needs_transfer_queue": [
        (
            ("data_plane.impl=mooncake", "data_plane.backend=mooncake_cpu"),
            "data_plane.backend: 'mooncake_cpu' would be",
        ),
    ],
    "rule_mooncake_fits_its_user": [
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
        (("data_plane.impl=ray", "data_plane.shm.keep_bytes=5"), "data_plane.shm.keep_bytes: 5 would be ignored"),
        (
            ("data_plane.enabled=false", "data_plane.simple.num_storage_units=2"),
            "because the store is 'ray' with owner 'producer'; leave it out, or change data_plane.enabled",
        ),
    ],
    "rule_one_way_of_batching": [
        (("policy.sequence_packing.enabled=true",), "policy.dynamic_batching.enabled: packing and dynamic"),
    ],
    "rule_batching_keys_need_their_switch": [
        (("policy.sequence_packing.train_mb_tokens=64",), "policy.sequence_packing.train_mb_tokens: 64 would be"),
        (("policy.sequence_packing.algorithm=concatenative",), "policy.sequence_packing.algorithm: 'concatenative'"),
        ((*FIXED, "policy.dynamic_batching.microbatch_order=largest_first"), "dynamic_batching.microbatch_order: 'l"),
        (("policy.dynamic_batching.train_mb_tokens=47",), "policy.dynamic_batching.train_mb_tokens: 47 tokens do not"),
        (("policy.train_micro_batch_size=8",), "policy.train_micro_batch_size: 8 would be ignored"),
    ],
    "rule_fixed_microbatches_divide": [
        ((*FIXED, "policy.train_micro_batch_size=3"), "expected a multiple of 6"),
    ],
    "rule_step_divides_into_global_batches": [
        (("policy.train_global_batch_size=300",), "grpo.num_prompts_per_step x num_generations_per_prompt = 1024"),
    ],
    "rule_sampling_is_random_in_training": [
        (("policy.generation.temperature=0",), "policy.generation.temperature: 0 is greedy"),
    ],
    "rule_lengths_fit": [(("policy.generation.max_new_tokens=17",), "policy.max_total_sequence_length: 48 does not")],
    "rule_advantage_clip_is_an_interval": [
        (("grpo.advantage_clip_low=1", "grpo.advantage_clip_high=1"), "grpo.advantage_clip_low: 1.0 is not below"),
    ],
    "rule_kl_keys_need_a_penalty": [
        (("loss_fn.reference_policy_kl_type=k2",), "loss_fn.reference_policy_kl_type: 'k2' would be ignored"),
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
    "rule_refit_transport_fits_the_processes": [
        (
            ("policy.generation.refit_transport=broadcast", "cluster.launcher=local"),
            "policy.generation.refit_transport: 'broadcast' moves weights between processes",
        ),
        (("policy.generation.refit_transport=ipc",), "policy.generation.refit_transport: 'ipc' shares GPU memory"),
    ],
    "rule_milestones_part_the_phases": [
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
    "rule_dtensor_is_the_only_worker": [(("policy.dtensor_cfg.enabled=false",), "policy.dtensor_cfg.enabled: false")],
    "rule_validation_needs_prompts": [
        (("data.validation=null", "checkpointing.keep_top_k=null"), "grpo.val_period: there is no data.validation"),
        ((*NO_VALIDATION, "grpo.stop_at_validation_accuracy=0.5"), "grpo.stop_at_validation_accuracy=null"),
    ],
    "rule_validation_prompts_are_used": [(NO_VALIDATION[1:], "data.validation: is never used")],
    "rule_dataset_keys_fit_their_kind": [
        (("data.train.size=null",), "data.train.size: must be set"),
        (("data.validation.task=chain_sum",), "data.validation.task: 'chain_sum' would be ignored"),
        (("data.train.options.digits=3",), "data.train.options.digits"),
        (("+data.train.options.digits=3",), "data.train.options.digits: sort_digits takes min_digits and max_digits"),
        (("data.train.dataset_name=reasoning_gym",), "data.train.task: must be set"),
        (JSONL, "data.train.data_path: must be set"),
        ((*JSONL, "data.train.data_path=a", "data.train.split=b"), "data.train.split: 'b' would be ignored"),
        (("data.train.prompt_template=text",), "data.train.prompt_template: expected a text with {input}"),
    ],
    "rule_custom_reward_is_named": [
        (("env.name=custom",), "env.reward_function: must be set"),
        (("env.reward_function=a:b",), "env.reward_function: 'a:b' would be ignored"),
        (("env.name=custom", "env.reward_function=a.b"), "env.reward_function: expected module:function"),
    ],
    "rule_reasoning_gym_scores_its_own_prompts": [
        (("env.name=reasoning_gym",), "data.validation.dataset_name: env.name 'reasoning_gym'"),
    ],
    "rule_scorer_keys_fit_the_environment": [
        (("env.timeout_s=3",), "env.timeout_s: 3.0 would be ignored"),
        (("env.score_threshold=1",), "env.score_threshold: 1.0 would be ignored"),
    ],
    "rule_checkpoint_keys_need_checkpoints": [
        (("checkpointing.enabled=false", "checkpointing.resume=true"), "checkpointing.resume: needs"),
        (("checkpointing.enabled=false", "checkpointing.save_optimizer=false"), "checkpointing.save_optimizer: False"),
    ],
    "rule_checkpoints_are_ranked_by_something_logged": [
        (("checkpointing.metric_name=accuracy",), "checkpointing.metric_name: expected val:NAME or train:NAME"),
        (NO_VALIDATION, "checkpointing.metric_name: 'val:accuracy' is never measured"),
        (("checkpointing.keep_top_k=null", "checkpointing.metric_name=a"), "checkpointing.metric_name: 'a' would be"),
    ],
    "rule_resume_needs_the_optimizer": [
        (("checkpointing.resume=true", "checkpointing.save_optimizer=false"), "checkpointing.save_optimizer: false"),
    ],
    "rule_wandb_keys_need_wandb": [
        (("logger.wandb.mode=offline",), "logger.wandb.mode: 'offline' would be ignored"),
    ],
}


@pytest.mark.parametrize(
    ("rule", "overrides", "fragment"),
    [(rule, overrides, fragment) for rule, cases in REFUSED.items() for overrides, fragment in cases],
)
def test_rule_refuses(rule: str, overrides: tuple[str, ...], fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, overrides)
    assert any(fragment in line for line in caught.value.problems), caught.value.problems


def test_every_rule_is_exercised() -> None:
    assert {rule.__name__ for rule in validate.RULES} == set(REFUSED)


@pytest.mark.parametrize(
    "overrides",
    [
        LOCAL,
        (*LOCAL[:3], "data_plane.enabled=false"),
        (*LOCAL, "data_plane.ledger_host=socket"),
        ("data_plane.ledger_host=socket",),
        (*NO_VALIDATION, "checkpointing.keep_top_k=null"),
        ("grpo.max_num_steps=2",),
        (*NO_VALIDATION, "checkpointing.metric_name=train:loss"),
        FIXED,
        ("env.name=custom", "env.reward_function=a.b:c", "env.timeout_s=3"),
    ],
)
def test_combinations_that_work_are_accepted(overrides: tuple[str, ...]) -> None:
    load_config(DEMO, overrides)


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
