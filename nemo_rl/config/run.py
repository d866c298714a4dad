"""Settings of a run around its training: `cluster`, `logger`, `checkpointing`, `diagnostics`, `evaluation`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt

from nemo_rl.config.base import START_TIMEOUT_S, EnvVars, FilePath, Section, StoragePlace, Text, TimeLimit, is_url
from nemo_rl.config.parts import TRACKERS

__all__ = [
    "CheckpointingConfig",
    "ClusterConfig",
    "DiagnosticsConfig",
    "EvaluationConfig",
    "KeepStepsConfig",
    "LoggerConfig",
    "MlflowConfig",
    "RecordConfig",
    "TracerConfig",
    "TracerSwitches",
    "WandbConfig",
]


class ClusterConfig(Section):
    """Processes and machines."""

    launcher: Literal["ray", "local"] = "ray"
    """`ray`: workers are actors; `local`: everything in this process (one worker)."""
    address: Text | None = None
    """Address of a running Ray cluster (`auto` finds it); null starts one on this machine."""
    num_nodes: PositiveInt = 1
    """Machines with policy workers."""
    spare_nodes: NonNegativeInt = 0
    """Further machines of the Ray cluster that take the place of machines that die: the run goes on by itself from its
    last checkpoint, at most so many times. Needs checkpoints on a file system that all machines share."""
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


IdentityPart = Literal["data", "model", "tokenizer", "template", "reward"]
"""Parts of a run that a resumed run and a replay compare."""


class CheckpointingConfig(Section):
    """The times and the folder of checkpoints, and the ones that are kept."""

    enabled: bool = True
    """Save checkpoints."""
    checkpoint_dir: StoragePlace | None = None
    """Folder of the `step_N` folders and `latest`, or a URL that fsspec opens, such as `s3://bucket/run`; null:
    `checkpoints` in `logger.log_dir`."""
    staging_dir: FilePath | None = None
    """Folder in which a checkpoint is written before it is uploaded, and to which one is downloaded, where
    `checkpoint_dir` is a URL; has room for one, and is the same on all nodes. Null: `staging` in `logger.log_dir`."""
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
    async_save: bool | Literal["auto"] = "auto"
    """Copy what is saved (weights, and optimizer with `save_optimizer`) into the nodes' memory, and write it while the
    training goes on; the last save of a run is waited for. A checkpoint appears when all of it is written. `auto`:
    where the copies take at most a quarter of the memory that is free on each node."""
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

    @property
    def url(self) -> str | None:
        """Return `checkpoint_dir` where it is a URL."""
        return self.checkpoint_dir if isinstance(self.checkpoint_dir, str) else None

    @property
    def folder_key(self) -> str:
        """Return the key that names the folder of `folder`."""
        return f"checkpointing.{'staging_dir' if is_url(self.checkpoint_dir) else 'checkpoint_dir'}"

    def folder(self, log_dir: Path) -> Path:
        """Return the folder that checkpoints are written into: `checkpoint_dir` with null decided, and `staging_dir`
        where that is a URL."""
        if isinstance(self.checkpoint_dir, str):
            return self.staging_dir or log_dir / "staging"
        return self.checkpoint_dir or log_dir / "checkpoints"


class TracerConfig(Section):
    """Shows the model at work on a page beside the run; see docs/tracer.md."""

    enabled: bool = False
    """Start a hub that serves the page; false costs nothing."""
    host: Text = "127.0.0.1"
    """Address that the hub listens at. Others than this machine's own let everybody on the network reach it, who still
    needs a token; put a proxy with TLS in front of it."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Port of the page; 0 takes a free one."""
    origins: list[Text] = Field(default_factory=list)
    """Origins of pages besides the hub's own that may connect, such as `https://watch.example.org` of a proxy."""
    selectors: list[Text] = Field(
        default_factory=lambda: [
            "layer.out, attn.out, mlp.out, moe.logits, logprob, loss | stats",
            "layer.out | tiles(1, rms); histogram",
            "moe.topk_ids | counts",
        ]
    )
    """The watched tensors: `SITES | REDUCERS | WHEN` each; the page can change it at any time."""
    rows: NonNegativeInt = 4
    """Rows of a step whose tokens are shown one by one, of those that are trained; while decoding, of each engine."""
    max_hz: PositiveFloat = 10.0
    """Most steps per second that are looked at."""
    memory_bytes: PositiveInt = 64 << 20
    """Most bytes of frames that wait in each rank; beyond it the newest are dropped and counted."""
    artifacts: FilePath | None = None
    """Folder of vectors for `project(NAME)`; null has none."""
    record: bool = True
    """Write what the page shows to `tracer/` of the log folder; `nemo-rl trace serve` shows it again."""
    record_bytes: PositiveInt = 1 << 30
    """Most bytes of that; the oldest fall out first."""
    compatibility: bool = False
    """Serve `/legacy` too, the text protocol of an older public tracer."""


class TracerSwitches(Section):
    """Six classical places of a model, each looked at as 96 means per token; `diagnostics.tracer.selectors` can say
    more."""

    qkv_mat_mul: bool = False
    """Queries, keys and values as projected."""
    context_layer_mat_mul: bool = False
    """The gathered values of attention, before the output projection."""
    mlp1_mat_mul: bool = False
    """First product of the MLP."""
    mlp2_mat_mul: bool = False
    """Second product of the MLP, its output."""
    attention_output_mat_mul: bool = False
    """Output of attention."""
    hidden_states: bool = False
    """Residual stream out of each layer."""


Phase = Literal["prev_logprobs", "reference_logprobs", "train", "generation"]


class KeepStepsConfig(Section):
    """Steps kept whole in `steps/` of the log folder, so that `nemo-rl compare RUN replay` can run them again."""

    enabled: bool = False
    """Keep the columns, plans, seeds and outcome of every step."""
    max_bytes: PositiveInt = 1 << 30
    """Most bytes of kept steps. The oldest fall out first; those since the last checkpoint only if they alone are too
    many."""
    on_failure: bool = True
    """Keep the step in flight when it fails, as far as its columns were written; false keeps finished steps alone."""


class RecordConfig(Section):
    """Tensors that the policy workers write to `steps/step_N/records` of the log folder; `nemo-rl compare` reads them.

    A disk that refuses ends the recording of a step, never the step.
    """

    steps: list[PositiveInt] = Field(default_factory=list)
    """Steps that are recorded; empty records nothing, and costs nothing."""
    sites: Text = "layer.out, moe.topk_ids, logprob, loss"
    """The recorded tensors; a selector such as `attn.* & layer in 0..3; logits`, see docs/debugging.md."""
    phases: Annotated[list[Phase], Field(min_length=1)] = ["prev_logprobs", "reference_logprobs", "train"]
    """Passes of the workers that are recorded; `generation` records the engines while they decode, into
    `steps/step_N/records/generation`."""

    @property
    def has_generation(self) -> bool:
        """Return whether the engines are recorded."""
        return bool(self.steps) and "generation" in self.phases


class DiagnosticsConfig(Section):
    """The records that a run keeps of itself for later."""

    record: RecordConfig = Field(default_factory=RecordConfig)

    keep_steps: KeepStepsConfig = Field(default_factory=KeepStepsConfig)

    tracer: TracerConfig = Field(default_factory=TracerConfig)


class EvaluationConfig(Section):
    """The measurement of held-out prompts, by validations during training and by `nemo-rl eval`."""

    num_samples: Annotated[int, Field(gt=0, le=1024)] = 1
    """Sampled responses to each held-out prompt."""
    pass_at: tuple[PositiveInt, ...] = (1,)
    """Numbers k of the measure pass@k: the share of prompts of which one of k samples is right, without bias."""
    majority_at: tuple[Annotated[int, Field(gt=0, le=64)], ...] = ()
    """Numbers k of the measure majority@k: the share of prompts whose right answer has most votes of k samples. Right
    responses vote for one answer, wrong ones for what is boxed in them, or else for what follows their thoughts."""
    pass_reward: FiniteFloat = 1.0
    """A response with at least this reward is right."""
    greedy: bool = False
    """Take a greedy response to each prompt, too."""
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Confidence of the intervals around every mean over prompts."""
