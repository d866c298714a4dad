"""`train`: GRPO from Python, in a script or a notebook, and the `Run` that it returns.

`train` makes a recipe of its arguments and runs it as `nemo-rl train` runs one from a file: the numbers are the same.
Invariant: when it returns or raises, no process of the run is left, and signal handlers, log handlers, environment
variables and torch's threads are as they were before.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard

from nemo_rl.algorithms.processes import driver_environment, worker_forks
from nemo_rl.cli.checkpoints import FoundWeights, export, find_weights, for_evaluation, measure, open_weights
from nemo_rl.config.compose import recipe_of
from nemo_rl.config.env import RewardCode
from nemo_rl.config.grpo import GRPOConfig
from nemo_rl.config.load import load_recipe
from nemo_rl.config.parts import DATASETS
from nemo_rl.config.policy import adapter_warnings
from nemo_rl.config.schema import MasterConfig
from nemo_rl.config.schema_walk import dotted
from nemo_rl.config.sft import WARM_FOLDER
from nemo_rl.environments.session_rewards import Function, SessionReward, reward_code, takes_lists, with_names
from nemo_rl.errors import ConfigError, DatasetError, NemoRLError, UserError
from nemo_rl.utils import interrupt
from nemo_rl.utils.console import LOGGERS, configure_logging, make_console
from nemo_rl.utils.exits import crash_line, machine_problem
from nemo_rl.utils.files import write_text
from nemo_rl.utils.trackers import METRICS_FILE, metrics_by_step

__all__ = ["Run", "train"]

Prompts = str | Path | Iterable[Mapping[str, object]]
"""Rows, or what holds them: a file or folder of a dataset, or a dataset's name."""
Reward = Function | Sequence[Function] | Mapping[Function, float]
"""One function, several whose scores are added up, or several with weights."""
CALLED = "train()"
"""The name of the recipe in messages."""
INPUTS = ("input", "prompt", "messages", "question", "problem")
"""Columns of a prompt, the first that a row has."""
OUTPUTS = ("output", "answer", "solution", "ground_truth", "target")
"""Columns of a gold answer, the first that a row has; rows need none."""
SPLITS = frozenset({"train", "test", "validation", "val", "dev", "eval"})
"""Names of parts of a dataset, which are not trained on side by side."""
OF_PROMPTS = ("system_prompt", "prompt_template", "apply_chat_template")
"""Keys of training prompts that hold for held-out ones, too."""
_GPU_DRIVER = Path("/dev/nvidiactl")
_OF_SESSION, _NONE = "nemo_rl.training:train", "nemo_rl.training:no_reward"


def train(
    model: str | Path,
    prompts: Prompts | Mapping[str, Prompts],
    reward: Reward | None = None,
    *,
    held_out: Prompts | None = None,
    folder: str | Path | None = None,
    name: str | None = None,
    num_generations_per_prompt: int | None = None,
    num_prompts_per_step: int | None = None,
    max_num_steps: int | None = None,
    learning_rate: float | None = None,
    lora: bool | int | Mapping[str, object] = False,
    warm_start: Prompts | Mapping[str, object] | None = None,
    settings: Mapping[str, object] | None = None,
) -> Run:
    """Train a model with GRPO and return the run, once it has ended. docs/python.md is its page.

    Args:
        model: folder of a Hugging Face causal language model, or a name on the hub.
        prompts: rows with a prompt and, where the reward compares with it, a gold answer. The columns are the first of
            `INPUTS` and `OUTPUTS` that the first row has, or those of `data.train.input_key` and `output_key`. Several
            sources by name; `data.train.NAME.weight` in `settings` is the share of one.
        reward: our form `(prompt, response, answer) -> float`, or TRL's `(completions, **columns) -> list`. None: the
            settings name one (`env.name`).
        held_out: rows that are validated on.
        folder: of all that the run writes; None makes `results/NAME-TIME`.
        name: the NAME in it; None takes the model's.
        lora: train adapters; an integer is their rank, a mapping has keys of `policy.lora`.
        warm_start: finished conversations that the model is trained on first, in `FOLDER/warm_start`, one epoch of
            them; or a mapping with them as `data`, and keys of that run's recipe. docs/sft.md is the page.
        settings: any key of a recipe, such as `{"grpo.seed": 3}`.

    Raises:
        UserError: what can be mended, with the reason.
        NemoRLError: a worker or the data plane failed.
        KeyboardInterrupt: after all that was started has been ended.
    """
    out = Path(folder) if folder is not None else _fresh_folder(name or Path(model).name)
    short = {
        "policy.model_name": str(model),
        "logger.log_dir": str(out),
        "grpo.num_generations_per_prompt": num_generations_per_prompt,
        "grpo.num_prompts_per_step": num_prompts_per_step,
        "grpo.max_num_steps": max_num_steps,
        **_lora(lora),
    }
    given = _dotted(settings or {})
    is_megatron = given.get("policy.megatron_cfg.enabled") is True
    short["policy.megatron_cfg.optimizer.lr" if is_megatron else "policy.optimizer.kwargs.lr"] = learning_rate
    short = {key: value for key, value in short.items() if value is not None}
    own = {*short, "data.train.dataset_name", "data.train.data_path"}
    own |= {"env.name", "env.reward_function"} if reward is not None else set()
    if twice := sorted(own & given.keys()):
        raise ConfigError([f"{CALLED}: {key}: is given twice, by its own argument and in settings" for key in twice])
    keys, code, said = {**short, **given}, None, None
    sources = [
        _Rows(
            own, f"data.train.{source}" if source else "data.train", keys, file=out / "prompts" / f"train{source}.jsonl"
        )
        for source, own in _sources(prompts).items()
    ]
    held, of_held = None, {}
    if held_out is not None:
        held = _Rows(held_out, "data.validation", keys, file=out / "prompts" / "held_out.jsonl")
        of_held = held.keys
    elif not any(key.startswith("data.validation") for key in keys):
        of_held = {"data.validation": None}
    if reward is not None:
        code, of_reward = _rewarding(reward, sources, keys)
        keys = {**of_reward, **keys}
    of_rows = {key: value for rows in sources for key, value in rows.keys.items()}
    keys = {**_defaults(keys), **of_rows, **of_held, **keys}
    if warm_start is not None:
        of_first, said = _first_stage(warm_start, keys, out / WARM_FOLDER / "prompts" / "train.jsonl")
        keys |= {"stages": ["sft", "grpo"], "sft.settings": of_first}
    config = _config(keys, code)
    for rows in (*sources, *([] if held is None else [held])):
        rows.write()
    if said is not None:
        _write_rows(said, out / WARM_FOLDER / "prompts" / "train.jsonl")
    _run(config)
    if warm_start is not None:
        keys = {key: value for key, value in keys.items() if key not in ("stages", "sft.settings")}
        keys["policy.model_name"] = find_weights(str(out / WARM_FOLDER), None).model
    return Run(out, keys, code)


def _run(config: MasterConfig) -> None:
    console = make_console()
    for line in adapter_warnings(config.policy):
        console.print(f"warning: {line}", style="yellow", soft_wrap=True)
    # The workers' imports begin before this process's own.
    with _session(config), worker_forks(config) as forks:
        from nemo_rl.algorithms.run import run  # noqa: PLC0415

        if run(config, console=console, forks=forks).is_interrupted:
            raise KeyboardInterrupt


def _first_stage(
    given: Prompts | Mapping[str, object], keys: Mapping[str, object], file: Path
) -> tuple[dict[str, object], Iterable[Mapping[str, object]] | None]:
    """Return the settings of a warm start (`sft.settings`), and its rows, where they are to be written to `file`."""
    own = _dotted({name: value for name, value in given.items() if name != "data"}) if _is_settings(given) else {}
    data: Any = given["data"] if _is_settings(given) else given
    found: dict[str, object] = {} if keys.get("checkpointing.resume") else {"checkpointing.save_optimizer": False}
    if isinstance(data, str | Path):
        return {**found, **_place(data, "data.train"), **own}, None
    if data is None:
        return {**found, **own}, None
    return {**found, "data.train.dataset_name": "jsonl", "data.train.data_path": str(file), **own}, data


def _is_settings(given: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(given, Mapping)


def _write_rows(rows: Iterable[Mapping[str, object]], file: Path) -> None:
    from nemo_rl.data.datasets import json_value  # noqa: PLC0415 - imports transformers

    try:
        lines = [json.dumps(json_value(row), ensure_ascii=False) + "\n" for row in rows]
    except (TypeError, ValueError) as error:
        raise DatasetError(f"{CALLED}: warm_start: {error}") from error
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "".join(lines))


def no_reward(prompt: str, response: str, answer: object) -> float:
    """Return 0 for anything: `Run.sample` asks for responses alone."""
    del prompt, response, answer
    return 0.0


class Run:
    """A run that has ended: its measurements, and its last checkpoint.

    Args:
        folder: of all that it has written.
        keys: its recipe, dotted key -> value.
        code: its reward, where that is a function of this session.
    """

    def __init__(self, folder: Path, keys: Mapping[str, object], code: RewardCode | None) -> None:
        self.folder = folder
        self._keys, self._code = keys, code

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics of each step, name -> value; `train/reward` is the mean reward of its samples."""
        return list(metrics_by_step(self.folder / METRICS_FILE).values())

    def evaluate(
        self, prompts: Prompts | None = None, *, settings: Mapping[str, object] | None = None
    ) -> dict[str, float]:
        """Sample responses to held-out prompts with the last checkpoint, score and measure them.

        Args:
            prompts: as of `train`; None takes its `held_out`.
            settings: keys of a recipe, such as `{"evaluation.num_samples": 8}`.

        Returns:
            Measures by name, such as `reward`; `evaluation/samples.jsonl` in the run's folder has the responses.

        Raises:
            UserError: what can be mended. NemoRLError: an engine or the reward failed.
        """
        out = self.folder / "evaluation"
        with self._opened(self._keys, prompts, settings or {}, out) as (config, weights):
            result = measure(config, weights, None, out, report=make_console().print)
        return {key.removeprefix("val/"): value for key, value in result.metrics().items()}

    def sample(
        self,
        prompt: str | Sequence[Mapping[str, object]],
        *,
        num_samples: int | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> str | list[str]:
        """Return a response to a prompt with the last checkpoint, or a list of `num_samples` of them.

        Args:
            prompt: a text, or messages.
            settings: keys of a recipe, such as `{"policy.generation.temperature": 0.7}`.
        """
        rows = [{"input": prompt if isinstance(prompt, str) else list(prompt)}]
        keys = {key: value for key, value in self._keys.items() if not key.startswith("env.")}
        keys |= {"env.name": "custom", "env.reward_function": _NONE}
        with (
            tempfile.TemporaryDirectory(prefix="nemo_rl_sample_") as out,
            self._opened(keys, rows, settings or {}, Path(out)) as (config, weights),
            open_weights(config, weights, report=lambda line: None) as evaluator,
        ):
            texts = evaluator.texts(step=weights.step, num_samples=num_samples or 1)
        return texts[0] if num_samples is None else list(texts)

    def export(self, folder: str | Path) -> Path:
        """Copy the last checkpoint to a new folder, which transformers and vLLM read; with LoRA that is an adapter.

        Raises:
            CheckpointError: there is none, it is damaged, or the folder exists.
        """
        export(str(self.folder), out=Path(folder))
        return Path(folder)

    @contextmanager
    def _opened(
        self, keys: Mapping[str, object], prompts: Prompts | None, settings: Mapping[str, object], out: Path
    ) -> Iterator[tuple[MasterConfig, FoundWeights]]:
        """Give the config by which the last checkpoint is sampled, and its weights, in its own session."""
        given = _dotted(settings)
        keys = {**keys, **given}
        if prompts is not None:
            keys = {key: value for key, value in keys.items() if key in given or not key.startswith("data.validation")}
            rows = _Rows(prompts, "data.validation", keys, file=out / "prompts.jsonl")
            keys = {**rows.keys, **keys}
            rows.write()
        config = _config(keys, self._code)
        if config.cluster.gpus_per_node == 0 and config.policy.generation.backend == "torch":
            # One engine in this process gives the same samples, without the start of Ray.
            generation = config.policy.generation.model_copy(update={"num_replicas": 1})
            policy = config.policy.model_copy(update={"generation": generation})
            cluster = config.cluster.model_copy(update={"launcher": "local"})
            config = config.model_copy(update={"policy": policy, "cluster": cluster})
        with _session(config):
            weights = find_weights(str(self.folder), None)
            yield for_evaluation(config, weights, out), weights


# ---- the recipe


def _config(keys: Mapping[str, object], code: RewardCode | None) -> MasterConfig:
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{CALLED}: {key}: {section} has a value and no keys")
        node[last] = value
    config = load_recipe(recipe_of(tree, name=CALLED))
    if code is None or config.env.reward_function != _OF_SESSION:
        return config
    return config.model_copy(update={"env": config.env.with_code(code)})


def _dotted(settings: Mapping[str, object]) -> dict[str, object]:
    """Return settings, some of which may be sections, as dotted key -> JSON value."""
    found = {key: str(value) if isinstance(value, Path) else value for key, value in dotted(settings).items()}
    for key, value in found.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{CALLED}: {key}: expected a number, a text or a list of them: {error}") from error
    return found


def _lora(given: bool | int | Mapping[str, object]) -> dict[str, object]:
    if given is False:
        return {}
    own = (
        {"rank": given} if not isinstance(given, bool | Mapping) else dict(given) if isinstance(given, Mapping) else {}
    )
    return {f"policy.lora.{key}": value for key, value in {"enabled": True, **own}.items()}


def _defaults(keys: Mapping[str, object]) -> dict[str, object]:
    """Return what a person would set: all GPUs of the machine, float32 without one, one update for each step."""
    found: dict[str, object] = {}
    if "cluster.gpus_per_node" not in keys and "cluster.cpu_workers_per_node" not in keys and _GPU_DRIVER.exists():
        import torch  # noqa: PLC0415 - takes seconds, and where there is no driver it would find nothing

        found["cluster.gpus_per_node"] = torch.cuda.device_count()
    if not keys.get("cluster.gpus_per_node", found.get("cluster.gpus_per_node", 0)):
        # bfloat16 is emulated on most CPUs.
        found["policy.precision"] = "float32"
    return {**found, "policy.train_global_batch_size": _rows_per_step(keys)}


def _rows_per_step(keys: Mapping[str, object]) -> object:
    counts = [
        keys.get(f"grpo.{name}", default)
        for name, default in GRPOConfig()
        .model_dump(include={"num_prompts_per_step", "num_generations_per_prompt"})
        .items()
    ]
    # What is no number is refused where it was given.
    return counts[0] * counts[1] if all(isinstance(count, int) for count in counts) else 1  # type: ignore[operator]


def _sources(prompts: Prompts | Mapping[str, Prompts]) -> Mapping[str, Prompts]:
    """Return the sources of training prompts by name; the only one under an empty name."""
    if not isinstance(prompts, Mapping):
        return {"": prompts}
    splits = sorted(SPLITS & prompts.keys())
    if splits or not prompts:
        got = f"splits {', '.join(splits)}" if splits else "none"
        raise DatasetError(
            f"{CALLED}: prompts: expected sources by name, got {got}; give one split, as dataset['train']"
        )
    return prompts


def _rewarding(
    reward: Reward, sources: Sequence[_Rows], keys: Mapping[str, object]
) -> tuple[RewardCode, dict[str, object]]:
    """Return the code of the reward, and the keys that say how it is called."""
    rows = sources[0]
    functions = [reward] if callable(reward) else list(reward)
    named = with_names(functions)
    has_lists = any([takes_lists(function) for function in functions])
    found: dict[str, object] = {"env.name": "custom", "env.reward_function": _OF_SESSION}
    if callable(reward) and not has_lists:
        return reward_code(reward, functions), found
    if not callable(reward):
        weights = reward.values() if isinstance(reward, Mapping) else [1.0] * len(functions)
        found["env.reward_weights"] = dict(zip(named, weights, strict=True))
    is_chat = isinstance(rows.first.get(rows.input_key), list)
    columns = {(each.output_key, isinstance(each.first.get(each.input_key), list)) for each in sources}
    if len(columns) > 1:
        raise DatasetError(
            f"{CALLED}: prompts: expected one column of answers, and texts or messages, in all sources, for a reward "
            f"in TRL's form or of several functions; got {sorted(columns)}"
        )
    scorer = SessionReward(
        functions=named,
        by_name=not callable(reward),
        keeps_none=keys.get("env.on_none") == "leave_out",
        answer_key=rows.output_key,
        is_chat=is_chat,
    )
    found["env.reward_batch_size"] = _rows_per_step(keys) if has_lists else 1
    return reward_code(scorer, functions), found


# ---- the rows


class _Rows:
    """Rows of one set, and the keys that a recipe has of them.

    Args:
        where: the dotted path of the set.
        given: keys that are set already.
        file: gets the rows that are not in one.
    """

    def __init__(self, prompts: Prompts, where: str, given: Mapping[str, object], *, file: Path) -> None:
        self._file, self._rows = file, None
        self.keys: dict[str, object] = {f"{where}.dataset_name": "jsonl", f"{where}.data_path": str(file)}
        if isinstance(prompts, str | Path):
            self.keys = _place(prompts, where)
            self.first = _first_row(self.keys, where, given)
        else:
            rows = iter(prompts)
            first = next(rows, None)
            if not isinstance(first, Mapping):
                got = "none" if first is None else type(first).__name__
                raise DatasetError(f"{CALLED}: {where}: expected rows that are dictionaries, got {got}")
            self.first, self._rows = first, chain([first], rows)
        named = {"input_key": INPUTS, "output_key": OUTPUTS}
        for key, known in named.items():
            self.keys[f"{where}.{key}"] = next((name for name in known if name in self.first), known[0])
        self.keys |= {
            f"{where}.{key}": given[f"data.train.{key}"] for key in OF_PROMPTS if f"data.train.{key}" in given
        }
        self.keys |= {key: given[key] for key in self.keys if key in given}
        self.input_key, self.output_key = (str(self.keys[f"{where}.{key}"]) for key in named)

    def write(self) -> None:
        """Write rows that are in no file to one."""
        if self._rows is None:
            return
        from nemo_rl.data.datasets import json_value  # noqa: PLC0415 - imports transformers

        lines = []
        for number, row in enumerate(self._rows):
            try:
                # Rows need no gold answer: the reward gets null.
                lines.append(json.dumps(json_value({self.output_key: None, **row}), ensure_ascii=False) + "\n")
            except (TypeError, ValueError) as error:
                raise DatasetError(f"{CALLED}: row {number}: {error}") from error
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._file, "".join(lines))


def _place(given: str | Path, where: str) -> dict[str, object]:
    """Return the keys of a set that is in files, generated, or on the hub."""
    path, name = Path(given), str(given)
    if not path.exists() and (DATASETS.is_builtin(name) or (name.count("/") == 1 and not path.suffix)):
        return {f"{where}.dataset_name": name}
    is_lines = ".jsonl" in path.suffixes or not path.exists()
    return {f"{where}.dataset_name": "jsonl" if is_lines else "huggingface", f"{where}.data_path": str(path)}


def _first_row(keys: Mapping[str, object], where: str, given: Mapping[str, object]) -> Mapping[str, object]:
    """Return the first row of a set that is in files or on the hub; none of one that is generated, or not there."""
    from nemo_rl.data.huggingface_wrapper import hub_rows, json_rows, open_text, rows  # noqa: PLC0415 - imports the hub

    name, path = str(keys[f"{where}.dataset_name"]), Path(str(keys.get(f"{where}.data_path", "")))
    chosen = {key: given.get(f"{where}.{key}") for key in ("split", "subset")}
    if name == "huggingface":
        return next(rows(path, where=where, **chosen), {})  # type: ignore[arg-type]
    if "/" in name:
        return next(hub_rows(name, where=where, **chosen), {})  # type: ignore[arg-type]
    if not path.is_file():
        return {}
    with open_text(path) as file:
        return next((row for _, row in json_rows(file, path)), {})


# ---- this process


def _fresh_folder(name: str) -> Path:
    stem = Path("results") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = stem, 2
    while folder.exists():
        folder, number = stem.with_name(f"{stem.name}-{number}"), number + 1
    return folder


@contextmanager
def _session(config: MasterConfig) -> Iterator[None]:
    """Set this process up as the command line does, and put everything back at the end; errors are ours."""
    root, threads, hook = logging.getLogger(), _num_threads(), sys.excepthook
    handlers, levels = root.handlers[:], {logger: logger.level for logger in (root, *map(logging.getLogger, LOGGERS))}
    set_here = {name: value for name, value in driver_environment(config).items() if name not in os.environ}
    os.environ.update(set_here)
    # Handlers of the program are put aside: setting others up would close them.
    root.handlers.clear()
    configure_logging(make_console(), level=logging.WARNING)
    try:
        with interrupt.installed():
            yield from _guarded(config)
    finally:
        root.handlers[:] = handlers
        for logger, level in levels.items():
            logger.setLevel(level)
        # torch's names a rank.
        sys.excepthook = hook
        for name in set_here:
            os.environ.pop(name, None)
        if threads is not None:
            sys.modules["torch"].set_num_threads(threads)


def _guarded(config: MasterConfig) -> Iterator[None]:
    try:
        yield
    except NemoRLError:
        raise
    except Exception as error:
        # Libraries make errors of their own of an interrupt.
        if interrupt.received():
            raise KeyboardInterrupt from error
        problem = machine_problem(error)
        if problem is not None:
            raise UserError(problem) from error
        raise NemoRLError(crash_line(error, folder=config.logger.log_dir)) from error


def _num_threads() -> int | None:
    """Return torch's threads, where the program has imported torch already."""
    return sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
