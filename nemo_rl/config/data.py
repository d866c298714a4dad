"""Settings of the prompts (`data` section)."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from nemo_rl.config.base import FilePath, Options, Section, Text
from nemo_rl.config.env import EnvConfig
from nemo_rl.config.parts import CURRICULUM_RULES, DATASETS

__all__ = [
    "DATASETS_WITH_IMAGES",
    "MAIN_SET",
    "SAMPLING_OF_SOURCE",
    "SHARED_KEYS",
    "AgainConfig",
    "CurriculumConfig",
    "DataConfig",
    "DatasetConfig",
    "ExtraColumn",
    "GateConfig",
    "History",
    "MixtureConfig",
    "SourceConfig",
    "TrainConfig",
    "VarianceConfig",
    "WindowConfig",
]


History = Literal["append", "new_row", "branch"]
"""`data.history` with `auto` decided."""


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
    """Column of a held-out prompt that names its category, for its own table; of `sort_digits` it is `digits`."""
    system_prompt: str | None = None
    """Text of a system message before the prompt, where its row has none; null: none."""
    prompt_template: str = "{input}"
    """Text of the user message; `{input}` is replaced by the prompt."""
    env: EnvConfig | None = None
    """Reward of the rows of this section, with the keys of `env`, such as `{name: custom, reward_function: f.py:g}`; it
    has no turns. Null: `env` scores them."""
    apply_chat_template: bool = True
    """Give prompts through the tokenizer's chat template, where it has one; false gives the plain texts, as to a base
    model."""
    tools: list[Text] | None = None
    """Names of the tools of `env.tools.use` that conversations of this section have; an empty list: none. Null: all."""

    @property
    def has_images(self) -> bool:
        """Return whether prompts may have images."""
        return self.image_key is not None or self.dataset_name in DATASETS_WITH_IMAGES


class SourceConfig(DatasetConfig):
    """One of several sources of training prompts."""

    weight: NonNegativeFloat = 1.0
    """Share of this source among the prompts that are drawn, against the weights of the others; see `data.mixture`."""
    schedule: dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,11}$")], NonNegativeFloat] = Field(default_factory=dict)
    """Weights that take the place of `weight` from a step on, by its number. A step is `grpo.num_prompts_per_step`
    prompts of the stream."""
    loss_weight: PositiveFloat = 1.0
    """Weight of its rows in the loss: a row of weight w counts as w rows, also in the number that the loss is divided
    by."""
    max_num_epochs: PositiveInt | None = None
    """Passes over the prompts of this source, after which the run ends; null: it begins anew each time."""
    num_generations_per_prompt: Annotated[int, Field(ge=2)] | None = None
    """Samples of each of its prompts, at most those of `grpo.num_generations_per_prompt`; null: as many."""
    max_new_tokens: PositiveInt | None = None
    """Longest response, or turn, at most `policy.generation.max_new_tokens`; null: as long."""
    stop_strings: list[Text] | None = None
    """Strings that end a response, in place of `policy.generation.stop_strings`; an empty list: none. Null: those."""

    @property
    def weights(self) -> dict[int, float]:
        """Return the weights by the step from which on they hold, the first one from step 1 on."""
        return {1: self.weight, **{int(step): weight for step, weight in self.schedule.items()}}

    def weight_at(self, step: int) -> float:
        """Return the weight in a step, counted from 1."""
        return self.weights[max(first for first in self.weights if first <= step)]


SHARED_KEYS = (
    "input_key",
    "output_key",
    "unreadable",
    "image_key",
    "system_prompt",
    "prompt_template",
    "env",
    "apply_chat_template",
    "tools",
)
"""Keys of `data.train` that hold for each of several sources that does not set them itself."""

SAMPLING_OF_SOURCE = ("num_generations_per_prompt", "max_new_tokens", "stop_strings")
"""Keys of a source that say how its prompts are sampled."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


class TrainConfig(DatasetConfig):
    """Training prompts: the keys of one source, or several sources by name."""

    NAMED = SourceConfig
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, SourceConfig] = Field(init=False)

    @property
    def named(self) -> dict[str, SourceConfig]:
        """Return the sources by name; none where the section is itself the only one."""
        return dict(self.__pydantic_extra__)

    def without_ignored(self) -> Self:
        """Return the section as it holds: beside sources with names it has shared keys alone."""
        own = {name: field.get_default(call_default_factory=True) for name, field in DatasetConfig.model_fields.items()}
        kept = {name: value for name, value in own.items() if name not in SHARED_KEYS}
        return self.model_copy(update=kept) if self.named else self

    @model_validator(mode="after")
    def _share_keys(self) -> Self:
        for name, source in self.named.items():
            if not _NAME.fullmatch(name):
                raise PydanticCustomError(
                    "source_name",
                    "names of sources made of letters, digits, hyphens and underscores ({name})",
                    {"name": repr(name)},
                )
            shared = {key: getattr(self, key) for key in SHARED_KEYS if key not in source.model_fields_set}
            self.__pydantic_extra__[name] = source.model_copy(update=shared)
        return self


def _as_train(given: object) -> object:
    """Take the section of one source, made in Python, as it is."""
    is_one = isinstance(given, DatasetConfig) and not isinstance(given, TrainConfig)
    return dict(given) if is_one else given  # type: ignore[call-overload]


class MixtureConfig(Section):
    """Shares of several sources of training prompts. For every number of prompts that have been drawn, each source has
    its share of them to less than one prompt."""

    unit: Literal["prompts", "tokens"] = "prompts"
    """Shares of what: prompts that are drawn, or response tokens that are trained, which later steps make up for."""
    by: Literal["weight", "size"] = "weight"
    """`weight`: shares are those of the weights; `size`: weights times numbers of prompts."""
    size_temperature: PositiveFloat = 1.0
    """With `by: size`, numbers of prompts are raised to the power of 1 / temperature: 1 draws each prompt equally
    often, a large temperature draws from each source equally often."""


Rate = Annotated[float, Field(ge=0.0, le=1.0)]


class WindowConfig(Section):
    """Prompts are drawn while they are neither too easy nor too hard."""

    least: Rate = 0.1
    """Prompts of a lower pass rate are hard."""
    most: Rate = 0.9
    """Prompts of a higher pass rate are easy."""
    hard: Rate = 0.3
    """Chance that a hard prompt is drawn when its turn comes; above 0, since it may be solved later."""
    easy: Rate = 0.1
    """Chance that an easy prompt is drawn when its turn comes."""


class VarianceConfig(Section):
    """Prompts are drawn in proportion to `4 p (1 - p)`, with p their pass rate."""

    least: Rate = 0.1
    """Least chance of a prompt, also of one that always or never passes."""


class AgainConfig(Section):
    """Hard prompts are drawn again before their next turn."""

    share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.25
    """Share of the draws that are taken from prompts below, as long as there are any."""
    below: Rate = 0.5
    """A prompt whose pass rate is lower after a group of it waits for another draw."""


class GateConfig(Section):
    """A source that is closed until another one is solved often enough."""

    after: Text
    """Name of the other source in `data.train`."""
    rate: Rate = 0.8
    """Mean pass rate of its last `recent_groups` groups that opens the gate for good."""


class CurriculumConfig(Section):
    """Which prompts are drawn, by how often they were solved so far. Chances of several rules are multiplied; a prompt
    that was never sampled counts as its source does, and where there is one source has chance 1. Null or empty rules
    are off."""

    window: WindowConfig | None = None
    variance: VarianceConfig | None = None
    again: AgainConfig | None = None
    gates: dict[Text, GateConfig] = Field(default_factory=dict)
    """Name of a source in `data.train` -> what opens it."""
    rule: Annotated[str, CURRICULUM_RULES] | None = None
    """`module:Class` of a `CurriculumRule` of your own, see docs/extending.md."""
    options: Options = Field(default_factory=dict)
    """Arguments of `rule`."""
    passed_at: float = 1.0
    """A row has passed whose reward is at least this."""
    smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.5
    """Share of the former pass rate of a prompt in the one after another group; 0: the last group alone counts."""
    recent_groups: PositiveInt = 32
    """Groups of a source over which its mean pass rate is taken, for gates and for prompts never sampled."""

    @property
    def is_on(self) -> bool:
        """Return whether some rule chooses prompts."""
        return any((self.window, self.variance, self.again, self.gates, self.rule))


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

    train: Annotated[TrainConfig, BeforeValidator(_as_train)] = Field(default_factory=TrainConfig)
    """The keys of one source, or sections of several sources by name (`data.train.math.dataset_name`), each with the
    keys of one and `weight`, `schedule` and `max_num_epochs`; see docs/data.md."""
    mixture: MixtureConfig = Field(default_factory=MixtureConfig)
    curriculum: CurriculumConfig = Field(default_factory=CurriculumConfig)
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
    history: Literal["auto", "append", "new_row", "branch"] = "auto"
    """Conversations whose chat template rewrites earlier turns, such as one that strips thoughts. `append`: the tokens
    that were sampled stay, in one row; `new_row`: the conversation goes on in a further row, whose prompt is what the
    template makes of its history. `branch`: as `append`, and a program may have several histories at once, which
    begin rows of their own; the conversation still counts once. `auto`: `branch` for programs where the batch takes
    any number of rows (`policy.sequence_packing` or `policy.dynamic_batching`), else `append`."""
    shuffle: bool = True
    """Draw training prompts in a new order each epoch, from `grpo.seed`; false keeps the dataset's order."""

    extra_columns: dict[Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]*$")], ExtraColumn] = Field(
        default_factory=dict
    )
    """Columns by name that the rollout writes besides its own, such as features of a prompt or facts of a row that a
    loss of your own reads."""

    @property
    def sources(self) -> dict[str, DatasetConfig]:
        """Return the sources of training prompts by the dotted path of their sections."""
        named = {self.train_key(name): source for name, source in self.train.named.items()}
        return {**named} or {self.train_key(""): self.train}

    @property
    def sections(self) -> dict[str, DatasetConfig]:
        """Return all sources of prompts by the dotted path of their sections, those of training first."""
        return self.sources | {self.held_out_key(name): source for name, source in self.held_out.items()}

    @staticmethod
    def train_key(name: str) -> str:
        """Return the dotted path of a source of training prompts; of the only one for an empty name."""
        return f"data.train.{name}" if name else "data.train"

    @property
    def held_out(self) -> dict[str, DatasetConfig]:
        """Return every validation set by name, the main one first; none where `validation` is null."""
        return {} if self.validation is None else {MAIN_SET: self.validation, **self.validation_sets}

    @property
    def has_images(self) -> bool:
        """Return whether prompts of some set may have images."""
        return any(source.has_images for source in self.sections.values())

    @staticmethod
    def held_out_key(name: str) -> str:
        """Return the dotted path of a validation set, for messages."""
        return "data.validation" if name == MAIN_SET else f"data.validation_sets.{name}"
