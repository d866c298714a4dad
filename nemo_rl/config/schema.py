"""The whole config tree, with every default; YAML recipes hold only values that differ.

Key names follow the field's (NeMo-RL's), so that its users find their way. Every key that is accepted has an
effect; combinations that would be ignored are refused in `nemo_rl.config.validate`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, PrivateAttr

from nemo_rl.config.async_grpo import AsyncConfig
from nemo_rl.config.base import (
    AUTO,
    START_TIMEOUT_S,
    EnvVars,
    FilePath,
    ListOptions,
    Options,
    Section,
    Text,
    TimeLimit,
)
from nemo_rl.config.conversation import ExperienceConfig, ToolsConfig
from nemo_rl.config.data_plane import DataPlaneConfig
from nemo_rl.config.diagnostics import DiagnosticsConfig
from nemo_rl.config.distillation import num_teacher_workers
from nemo_rl.config.evaluation import EvaluationConfig
from nemo_rl.config.generation import DeviceSharing, RefitTransport
from nemo_rl.config.loss import LossConfig
from nemo_rl.config.parts import (
    ADVANTAGE_ESTIMATORS,
    DATASETS,
    ENGINE_CAPABILITIES,
    ENVIRONMENTS,
    TOKEN_ESTIMATORS,
    TRACKERS,
    EngineCapabilities,
)
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.config.rewards import (
    ESTIMATORS_BY_STEP,
    SESSION,
    RewardCode,
    RewardScalingConfig,
    RewardShapingConfig,
)

__all__ = [
    "MAIN_SET",
    "AdvantageEstimatorConfig",
    "CheckpointingConfig",
    "ClusterConfig",
    "DataConfig",
    "DatasetConfig",
    "EnvConfig",
    "GRPOConfig",
    "LoggerConfig",
    "LossConfig",
    "MasterConfig",
    "MlflowConfig",
    "WandbConfig",
]


class AdvantageEstimatorConfig(Section):
    """The estimator that turns rewards into advantages."""

    name: Annotated[str, ADVANTAGE_ESTIMATORS] = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gdpo`, `maxrl`,
    `optimal_token_baseline`, `outcome_plus_turn`, `discounted_return` (see docs/algorithms.md), or `module:Class` of
    your own, see docs/extending.md."""
    options: Options = Field(default_factory=dict)
    """Settings of your own estimator."""
    component_weights: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Weight of the advantages of each component of the reward, for `gdpo`; 1 where none is named."""
    turn_weight: NonNegativeFloat = 0.5
    """lambda of `outcome_plus_turn`: weight of the advantage of a turn beside that of its row."""
    turn_discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """gamma of `discounted_return`: discount of the next turn's reward."""


class GRPOConfig(Section):
    """The loop: how many prompts, how many samples of each, when to validate, when to stop."""

    num_prompts_per_step: PositiveInt = 32
    """Prompts drawn from the dataset per step."""
    num_generations_per_prompt: Annotated[int, Field(ge=2)] = 16
    """Samples rolled out per prompt (the group size); a leave-one-out baseline needs at least 2."""
    max_num_steps: PositiveInt = 1000
    """Steps to run; a resumed run counts from its first step."""
    max_num_epochs: PositiveInt | None = None
    """Passes over the training prompts; null repeats them until `max_num_steps`."""
    val_period: NonNegativeInt = 10
    """Steps between validations; 0 turns periodic validation off."""
    val_at_start: bool = True
    """Validate before the first step."""
    val_at_end: bool = True
    """Validate after the last step."""
    max_val_samples: PositiveInt = 256
    """Most prompts of each validation set in a validation during training; `nemo-rl eval` takes all."""
    stop_at_validation_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    """Stop early when a validation reaches this accuracy; needs rewards that are right or wrong."""
    adv_estimator: AdvantageEstimatorConfig = Field(default_factory=AdvantageEstimatorConfig)
    normalize_rewards: bool = True
    """Divide the advantage by the group's standard deviation."""
    use_leave_one_out_baseline: bool = True
    """Baseline of a sample is the mean reward of its siblings; false: mean of the whole group."""
    use_leave_one_out_std: bool = False
    """Divide by the siblings' standard deviation (NeMo-RL): then the one right answer of a group is not divided."""
    reward_scaling: RewardScalingConfig = Field(default_factory=RewardScalingConfig)
    reward_shaping: RewardShapingConfig = Field(default_factory=RewardShapingConfig)
    advantage_clip_low: float | None = None
    """Advantages below this are raised to it; null: no limit."""
    advantage_clip_high: float | None = None
    """Advantages above this are lowered to it; null: no limit."""
    drop_zero_advantage_groups: bool | Literal["auto"] = "auto"
    """Leave groups whose rewards are all equal out of the update; dynamic sampling does so itself. auto: where they
    carry no gradient, which KL, an entropy bonus, distillation and estimators that compare a step's rows give them."""
    use_dynamic_sampling: bool = False
    """Sample others in place of the groups that are left out (DAPO): more prompts are drawn until
    `num_prompts_per_step` groups are left; what is beyond is trained in the next step."""
    dynamic_sampling_max_gen_batches: PositiveInt = 10
    """Rounds of a step in which prompts are drawn; a step that still has too few groups ends the run."""
    batch_multiplier: Annotated[float, Field(ge=1, le=100)] = 1.0
    """Prompts of such a round in units of `num_prompts_per_step`, rounded up."""
    overlong_filtering: bool = False
    """Give truncated samples no weight in the loss; they still count for the baseline. Of conversations these are the
    endings `token_limit` and `context_full`."""
    seq_logprob_error_threshold: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Give rows no weight in the loss whose mean of exp(|log pi_old - log pi_gen|) over their response is above this:
    sampler and trainer disagree about them. They still count for the baseline; null: no limit."""
    use_generation_logprobs_as_prev: bool = False
    """Take the sampler's log-probabilities as pi_old instead of recomputing them in the trainer."""
    seed: int = 42
    """Seed of the prompt order and of sampling."""
    async_: AsyncConfig = Field(default_factory=AsyncConfig, alias="async")

    @property
    def samples_ahead(self) -> bool:
        """Return whether groups come from the asynchronous schedule. Dynamic sampling at a bound of 0 is that of the
        synchronous trainer, round by round."""
        section = self.async_
        return section.enabled and not (section.max_staleness == 0 and self.use_dynamic_sampling)

    @property
    def prompts_per_round(self) -> int:
        """Return the number of prompts of one sampling round with dynamic sampling."""
        return math.ceil(self.num_prompts_per_step * self.batch_multiplier)

    @property
    def prompts_at_once(self) -> int:
        """Return the number of prompts of one rollout."""
        return self.prompts_per_round if self.use_dynamic_sampling else self.num_prompts_per_step

    @property
    def leaves_equal_groups_out(self) -> bool:
        """Return whether the update is without groups of equal rewards; `MasterConfig.scoring` has decided auto."""
        return bool(self.drop_zero_advantage_groups) or self.use_dynamic_sampling

    @property
    def rows_alive(self) -> int:
        """Return the most rows of a step at one time: with dynamic sampling a round comes to nearly a batch that is
        there."""
        rounds = self.prompts_per_round if self.use_dynamic_sampling else 0
        return (self.num_prompts_per_step + rounds) * self.num_generations_per_prompt


class DatasetConfig(Section):
    """One source of prompts."""

    dataset_name: Annotated[str, DATASETS] = "jsonl"
    """`sort_digits`, `guess`, `calculator_sums`, `sliding_puzzle`, `shapes` (pictures) and `reasoning_gym` are
    generated; `jsonl` and `huggingface` read local files; `owner/name` is a dataset of the Hugging Face hub; or
    `module:function` of your own, see docs/extending.md."""
    data_path: FilePath | None = None
    """File (`jsonl`), or file or folder (`huggingface`: as written by `datasets.save_to_disk`, or JSON, CSV and parquet
    files, whose names say their splits). `.gz` and `.zst` are read as well."""
    split: Text | None = None
    """Split of a `huggingface` dataset, or one of the hub, that has several."""
    subset: Text | None = None
    """Subset (configuration) of a dataset that has several, for example `main` of `openai/gsm8k`; of a local folder its
    card (README.md) names them."""
    input_key: Text = "input"
    """Name of the prompt's column in a file, or a dotted path into one; a text, or a list of messages."""
    output_key: Text = "output"
    """Name of the answer's column in a file, or a dotted path into one, such as `reward_model.ground_truth`. Where it
    is missing and the prompt is a finished conversation, its last message is the answer."""
    unreadable: Literal["refuse", "drop"] = "refuse"
    """Rows with a gold answer that the reward cannot read: refuse to start, or count and drop them. To drop them all
    rows are looked at before the first step, some 300 a second for each of `env.num_workers`."""
    image_key: Text | None = None
    """Name of the column with the images of a prompt in a file: a path (from the file's folder on), bytes, or a list of
    either, before the text of the prompt. Null: prompts have no images."""
    size: Annotated[int, Field(gt=0, le=10_000_000)] | None = None
    """Number of generated prompts; for files, only this many are kept, from the start."""
    seed: int = 0
    """Seed of generated prompts. reasoning_gym draws item i with seed + i: keep two seeds further apart than `size`."""
    options: Options = Field(default_factory=dict)
    """Settings of the generator: `min_digits`/`max_digits` for sort_digits and calculator_sums, and `smallest` for the
    latter; `numbers`/`games` for guess, `side`/`moves` for sliding_puzzle; any of the task's for reasoning_gym; any of
    your own dataset's."""
    task: Text | None = None
    """Task name of `reasoning_gym`, for example `chain_sum`."""
    category_key: Text | None = None
    """Column of a held-out prompt that names its category, for a table of its own; of `sort_digits` it is `digits`."""
    system_prompt: str | None = None
    """Text of a system message before the prompt, where its row has none; null: none."""
    prompt_template: str = "{input}"
    """Text of the user message; `{input}` is replaced by the prompt."""
    apply_chat_template: bool = True
    """Give prompts through the tokenizer's chat template, where it has one; false gives the plain texts, as to a base
    model."""

    @property
    def has_images(self) -> bool:
        """Return whether prompts may have images."""
        return self.image_key is not None or self.dataset_name in DATASETS_WITH_IMAGES


class ExtraColumn(Section):
    """A column of the rollout's rows besides the fields of the library; see docs/data_plane.md."""

    dtype: Literal["float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "uint8", "bool", "object"]
    """Dtype of its values; `object` holds a JSON-like value per row."""
    dims: tuple[PositiveInt | Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...] = ()
    """Dims of one row. A name as the first one: rows differ in it, `T` is the row's tokens; a later name is settled by
    the first row; a number is fixed. None: one number per row."""
    source: Literal["prompt", "environment"] = "prompt"
    """`prompt`: the column of this name in the row of the dataset; `environment`: what an environment of your own
    returns in `EnvReport.columns`, or with turns in `Reply.columns`."""
    read_by: tuple[Literal["prev_logprobs", "reference_logprobs", "train", "log"], ...] = ()
    """Passes that fetch it; `log` writes it into the readable rollouts."""


DATASETS_WITH_IMAGES = ("shapes",)
"""Generated datasets whose prompts have images."""
MAIN_SET = "validation"
"""Name of the set that `data.validation` describes."""
SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
"""Name of a validation set: a part of a metric's name."""


class DataConfig(Section):
    """Prompts for training and validation."""

    train: DatasetConfig = Field(default_factory=DatasetConfig)
    validation: DatasetConfig | None = None
    """Held-out prompts; texts that also occur here are removed from the training prompts. Null turns all
    validation off, whatever `grpo` says of it."""
    validation_sets: dict[SetName, DatasetConfig] = Field(default_factory=dict)
    """Further held-out prompts by name, measured as `validation` is and logged as `val/NAME/...`; texts of them are not
    trained on either."""
    max_input_seq_length: PositiveInt = 512
    """Longest prompt in tokens, chat template included."""
    overlong_prompts: Literal["skip", "error"] = "skip"
    """The treatment of longer prompts: count and skip them, or refuse to start."""
    history: Literal["append", "new_row"] = "append"
    """Conversations whose chat template rewrites earlier turns, such as one that strips thoughts. `append`: the tokens
    that were sampled stay, in one row; `new_row`: the conversation goes on in a further row, whose prompt is what the
    template makes of its history."""
    shuffle: bool = True
    """Draw training prompts in a new order each epoch, from `grpo.seed`; false keeps the dataset's order."""

    extra_columns: dict[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")], ExtraColumn] = Field(
        default_factory=dict
    )
    """Columns by name that the rollout writes besides its own, such as features of a prompt or facts of a row that a
    loss of your own reads."""

    @property
    def held_out(self) -> dict[str, DatasetConfig]:
        """Return every validation set by name, the main one first; none where `validation` is null."""
        return {} if self.validation is None else {MAIN_SET: self.validation, **self.validation_sets}

    @property
    def has_images(self) -> bool:
        """Return whether prompts of some set may have images."""
        return any(source.has_images for source in (self.train, *self.held_out.values()))

    @staticmethod
    def held_out_key(name: str) -> str:
        """Return the dotted path of a validation set, for messages."""
        return "data.validation" if name == MAIN_SET else f"data.validation_sets.{name}"


class EnvConfig(Section):
    """The source of rewards."""

    name: Annotated[str, ENVIRONMENTS] = "math"
    """`sort`: exact match; `reasoning_gym`: the task's own score; `math`: math-verify; `custom`: your function;
    with turns: `guess`, `sliding_puzzle`, `calculator_task`, `reasoning_gym_turns`; `program`: a program that asks for
    turns; or `module:Class` of an environment of your own, see docs/environments.md."""
    options: ListOptions = Field(default_factory=dict)
    """Settings of your own environment, or of one with turns; `command` of `program`, such as `[python, agent.py]`."""
    reward_function: str | None = None
    """`module:function` or `FILE.py:function` of a custom reward: `(prompt: str, response: str, answer: object) ->
    float`. It may return components by name instead of one number, and have further parameters; see docs/guide.md."""
    reward_weights: dict[str, FiniteFloat] = Field(default_factory=dict)
    """Weight of each component of a custom reward in the reward: all must be named; 0 only draws its curve. Without
    weights the components are added up."""
    reward_batch_size: PositiveInt | None = None
    """Largest list of prompts, responses and answers that a custom reward is given; null: one response at a time."""
    preflight_reward: bool = True
    """Call `reward_function` once before the run, with the first row of `data.train` and an empty response: an
    exception, no finite number, or no answer within `timeout_s` refuses the run."""
    timeout_s: PositiveFloat = 10.0
    """Wall-clock limit of one call of the reward, that is of one response or one batch; past it the scorer's process is
    ended, and the responses of a batch are scored one by one, each with this limit."""
    on_timeout: Literal["zero", "error"] = "zero"
    """A response whose scoring takes too long: reward 0 and a counter, or stop the run."""
    num_workers: PositiveInt = 1
    """Scoring processes; `sort` needs none."""
    memory_mib: PositiveInt | None = None
    """Most memory of a process of an environment with turns, in MiB; null: no limit."""
    network: bool = False
    """Let an environment with turns use the network; loopback is always there."""
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    score_threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    """Make a graded reward (`reasoning_gym`, `custom`) right or wrong: 1 at or above the threshold, 0 below."""
    _code: RewardCode | None = PrivateAttr(None)

    @property
    def code(self) -> RewardCode | None:
        """Return the reward that `nemo_rl.train` was given as a function; None where a file or a module has it."""
        return self._code

    def with_code(self, code: RewardCode) -> EnvConfig:
        """Return the section with a function of this Python session as its reward, shown as `python:NAME`."""
        section = self.model_copy(update={"reward_function": f"{SESSION}{code.name}"})
        section._code = code
        return section

    @property
    def is_accuracy(self) -> bool:
        """Return whether every reward is 1 for right or 0 for wrong, so that its mean is an accuracy."""
        return self.name in ("sort", "math") or self.score_threshold is not None

    @property
    def measure(self) -> str:
        """Return the name of a mean of rewards."""
        return "accuracy" if self.is_accuracy else "reward"


class ClusterConfig(Section):
    """Processes and machines."""

    launcher: Literal["ray", "local"] = "ray"
    """`ray`: workers are actors; `local`: everything in this process (one worker)."""
    address: Text | None = None
    """Address of a running Ray cluster (`auto` finds it); null starts one on this machine."""
    num_nodes: PositiveInt = 1
    """Machines with policy workers."""
    gpus_per_node: NonNegativeInt = 0
    """Policy workers per node, one GPU each; 0 means CPU workers."""
    cpu_workers_per_node: PositiveInt | None = None
    """Policy workers per node on CPU; only with `gpus_per_node: 0` (default there: 1)."""
    num_cpus: PositiveInt | None = None
    """Logical CPUs that Ray may hand out on this machine; null: as many as the actors need, at least the cores."""
    threads_per_worker: PositiveInt = 1
    """Torch threads in every process of the run. With 2 a step on CPU is about 1.3 times faster while every thread has
    a core to itself, and up to ten times slower when another process takes one of the cores: threads of one operation
    wait for the slowest."""
    env_vars: EnvVars = {}
    """Variables of all processes of the run, such as `NCCL_SOCKET_IFNAME`, `NCCL_IB_HCA` or `GLOO_SOCKET_IFNAME`; they
    win over what was exported, and over what a run sets by itself. `--print-config` lists them."""
    worker_start_timeout_s: PositiveFloat = START_TIMEOUT_S
    """Deadline of each start at the beginning of a run (Ray, workers, stores, servers, ledger), in seconds."""
    collective_timeout_s: PositiveFloat = 120.0
    """Deadline of one collective between workers, in seconds."""
    stage_timeout_s: PositiveFloat = 1800.0
    """Deadline of one stage (rollout, logprobs, train, refit, checkpoint), in seconds."""
    grace_s: PositiveFloat = 25.0
    """Seconds in which the step that runs at SIGTERM or SIGUSR1 must end, to be saved before the run ends; Slurm kills
    30 s after SIGTERM. A step that takes longer is interrupted."""

    @property
    def num_workers(self) -> int:
        """Return the number of policy workers over all nodes."""
        return self.num_nodes * (self.gpus_per_node or self.cpu_workers_per_node or 1)


IdentityPart = Literal["data", "model", "tokenizer", "template", "reward"]
"""Parts of a run that a resumed run and a replay compare."""


class CheckpointingConfig(Section):
    """The times and the folder of checkpoints, and the ones that are kept."""

    enabled: bool = True
    """Save checkpoints."""
    checkpoint_dir: FilePath | None = None
    """Folder of the `step_N` folders and `latest`; null: `checkpoints` in `logger.log_dir`."""
    save_period: PositiveInt = 10
    """Steps between checkpoints; the last step is saved as well."""
    keep_top_k: PositiveInt | None = 3
    """Best checkpoints to keep by `metric_name`, in addition to the latest; null keeps all."""
    metric_name: Text = "val:reward"
    """`val:NAME` or `train:NAME` as logged; `val:accuracy` where rewards are right or wrong. Where nothing is
    validated, checkpoints are ranked by `train:reward` in place of `val:reward` or `val:accuracy`."""
    higher_is_better: bool = True
    """True where larger values of `metric_name` are better."""
    save_optimizer: bool = True
    """Save what exact resuming needs besides the weights; false halves the size and cannot be resumed from."""
    async_save: bool = False
    """Copy what is saved (weights, and optimizer with `save_optimizer`) into the nodes' memory, and write it while the
    training goes on; the last save of a run is waited for. A checkpoint appears when all of it is written."""
    resume: bool | Literal["auto"] = False
    """Continue from the latest intact checkpoint in `checkpoint_dir`; an error if there is none. `auto`: continue where
    there is one of this recipe's runs, start otherwise."""
    must_save_by: TimeLimit | None = None
    """Save and end before this: `HH:MM:SS` or `DD:HH:MM:SS` after the run's start, or `auto`, the end of the Slurm job.
    Leaves room for the longest step and save so far; the exit code is 75 then. Null: no limit."""
    load_optimizer: bool = True
    """Resume with the checkpoint's optimizer state; false starts a fresh optimizer from its weights."""
    allow_changed: tuple[IdentityPart, ...] = ()
    """Parts that may differ from the run that is resumed or replayed: `data` (rows of the datasets), `model` (weights
    at step 0), `tokenizer`, `template` (the chat template), `reward` (its source). Any other difference is refused."""


class WandbConfig(Section):
    """Weights & Biases (extra `wandb`)."""

    project: Text = "nemo_rl"
    """Project that the run appears in."""
    name: str | None = None
    """Name of the run; null lets wandb choose one."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes the run to the log folder; `wandb sync` uploads it later."""


class MlflowConfig(Section):
    """MLflow (extra `mlflow`)."""

    experiment_name: Text = "nemo_rl"
    """Experiment that the run appears in."""
    run_name: str | None = None
    """Name of the run; null lets MLflow choose one."""
    tracking_uri: str | None = None
    """Server, for example `http://host:5000`; null writes files to `mlflow/` in the log folder."""


class LoggerConfig(Section):
    """Trackers and files of a run. `metrics.jsonl` is always written."""

    log_dir: FilePath = Path("results/logs")
    """Folder of everything a run writes. It holds one run: another start in it is refused, or continues that run."""
    overwrite: bool = False
    """Remove what an earlier run wrote to the folders of this one, and nothing else, before starting."""
    tensorboard_enabled: bool = True
    """Write TensorBoard events to `tensorboard/`."""
    wandb_enabled: bool = False
    """Send metrics to Weights & Biases."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    mlflow_enabled: bool = False
    """Send metrics to MLflow."""
    mlflow: MlflowConfig = Field(default_factory=MlflowConfig)
    trackers: tuple[Annotated[str, TRACKERS], ...] = ()
    """Trackers of your own, each `module:Class`; see docs/extending.md."""
    num_rollouts_to_log: NonNegativeInt = 16
    """Readable rollouts per step written to `rollouts/step_N.jsonl`, and per validation to `rollouts/val_step_N.jsonl`:
    text, reward and its components, and of training rows advantage, masks, weight version, tokens and the
    log-probabilities of rollout and trainer; `nemo-rl inspect RUN rollouts` reads them."""
    reward_curve: bool = True
    """Write `reward_curve.png` at the end."""
    worker_level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    """The level from which workers write to `workers/<kind>_<rank>.log`; warnings also appear with rank and stage on
    the driver. Only under Ray."""
    live_panel: bool = True
    """A panel that redraws itself on a terminal; elsewhere, and when false, one plain line per step."""
    console: Literal["short", "full"] = "short"
    """The content of that line and panel: step, reward, validation, loss, tokens per second, elapsed and remaining
    time; `full` adds KL, mismatch, engines, endings, the seconds and bytes of each stage, and the refit."""


MOST_LOGPROB_GROWTH = 2.0
"""A microbatch without gradients keeps no activations of its layers: up to so many times the tokens of a training
microbatch, with the optimizer beside it, need no more memory than a training pass."""


class MasterConfig(Section):
    """Everything a run needs."""

    grpo: GRPOConfig = Field(default_factory=GRPOConfig)
    loss_fn: LossConfig = Field(default_factory=LossConfig)
    policy: PolicyConfig
    data: DataConfig = Field(default_factory=DataConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    experience: ExperienceConfig = Field(default_factory=ExperienceConfig)
    env: EnvConfig = Field(default_factory=EnvConfig)
    data_plane: DataPlaneConfig = Field(default_factory=DataPlaneConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    checkpointing: CheckpointingConfig = Field(default_factory=CheckpointingConfig)
    logger: LoggerConfig = Field(default_factory=LoggerConfig)
    diagnostics: DiagnosticsConfig = Field(default_factory=DiagnosticsConfig)

    @property
    def active_data_plane(self) -> DataPlaneConfig:
        """Return the data plane with the store that this run uses."""
        return self.data_plane.resolved(has_actors=self.cluster.launcher == "ray")

    @property
    def has_continuous_engines(self) -> bool:
        """Return whether rows join and leave the engines' batches one by one: in asynchronous runs, and in
        conversations."""
        return self.grpo.samples_ahead or self.experience.conversation.enabled

    @property
    def has_prev_logprobs_pass(self) -> bool:
        """Return whether workers compute the log-probabilities of the policy before its update."""
        return not (self.grpo.use_generation_logprobs_as_prev or self.loss_fn.force_on_policy_ratio)

    @property
    def rows_per_conversation(self) -> int:
        """Return the most rows of one sample of a prompt."""
        section = self.experience.conversation
        return section.max_turns if section.enabled and self.data.history == "new_row" else 1

    @property
    def has_builtin_token_advantages(self) -> bool:
        """Return whether the estimator is a built-in one that gives every token an advantage of its own."""
        name = self.grpo.adv_estimator.name
        return TOKEN_ESTIMATORS.is_builtin(name) and (
            self.loss_fn.use_kl_in_reward or TOKEN_ESTIMATORS.builtin[name] == ADVANTAGE_ESTIMATORS.builtin[name]
        )

    @property
    def scoring(self) -> GRPOConfig:
        """Return `grpo` with `drop_zero_advantage_groups` decided."""
        if self.grpo.drop_zero_advantage_groups != AUTO:
            return self.grpo
        loss = self.loss_fn
        teaches = loss.reference_policy_kl_penalty > 0 or loss.entropy_coefficient > 0 or loss.distillation.enabled
        teaches = teaches or self.grpo.adv_estimator.name in ESTIMATORS_BY_STEP
        return self.grpo.model_copy(update={"drop_zero_advantage_groups": not teaches})

    @property
    def has_validation(self) -> bool:
        """Return whether held-out prompts are measured at any time of the run."""
        grpo = self.grpo
        return self.data.validation is not None and (grpo.val_period > 0 or grpo.val_at_start or grpo.val_at_end)

    @property
    def checkpoint_metric(self) -> str:
        """Return `checkpointing.metric_name`, or its counterpart of training where nothing is validated."""
        name = self.checkpointing.metric_name
        return "train:reward" if name in ("val:reward", "val:accuracy") and not self.has_validation else name

    @property
    def checkpoint_dir(self) -> Path:
        """Return `checkpointing.checkpoint_dir`, with null decided."""
        return self.checkpointing.checkpoint_dir or self.logger.log_dir / "checkpoints"

    @property
    def sleep_level(self) -> int:
        """Return the level at which engines sleep while the policy trains: `policy.generation.sleep_level`, with null
        decided."""
        generation = self.policy.generation
        if generation.sleep_level is not None:
            return generation.sleep_level
        takes_turns = self.cluster.launcher == "ray" and self.cluster.gpus_per_node > 0 and generation.colocated.enabled
        can_sleep = ENGINE_CAPABILITIES.get(generation.backend, EngineCapabilities()).can_sleep
        if not takes_turns or not can_sleep or self.grpo.samples_ahead:
            return 0
        keeps_weights = generation.refit_delta.enabled and generation.backend == "torch"
        return 1 if keeps_weights or self.policy.lora.is_native else 2

    @property
    def device_sharing(self) -> DeviceSharing:
        """Return who else wants the memory of the policy workers' GPUs."""
        if self.cluster.gpus_per_node == 0:
            return "alone"
        if num_teacher_workers(self) or self.policy.logprob_growth > MOST_LOGPROB_GROWTH:
            return "crowded"
        return "turns" if self.sleep_level else "alone"

    @property
    def refit_transport(self) -> RefitTransport:
        """Return the transport of weights to the engines: `policy.generation.refit_transport`, with `auto` decided."""
        chosen = self.policy.generation.refit_transport
        if chosen != "auto":
            return chosen
        if self.cluster.gpus_per_node == 0 or self.cluster.launcher == "local":
            return "payload"
        return "ipc" if self.policy.generation.colocated.enabled else "broadcast"
