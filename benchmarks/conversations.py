"""The time of a step's rollout of conversations against its critical path, with an engine and tools that sleep.

    python benchmarks/conversations.py --json FILE [--quick] [--one-by-one]

What runs is `ConversationRollouts.groups`, as a rollout worker calls it, with processes of tools. Sleeps stand for the
forward passes of the engine (`SleepEngine`) and for the work of tools; both are log-normal. A turn calls one tool.

- `vs_critical_path`: time of all rollouts over that of their critical paths. The critical path of a rollout is its
  longest conversation, alone on an idle machine, or all decoding over the places of the engine, whichever is longer.
- `longest_s`, `engine_s`: means of the two.
- `serial_vs_rollout`: time of all conversations one after the other over that of the rollouts.

Exit code 1 when a bound is missed. `--one-by-one` plants the fault that the figures must find: one conversation is open
at a time.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

# A script's own folder is on the path, its package is not.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich.console import Console

from benchmarks.common import ROOT, Hold, check_figures, environment, figures_table, load_average, write_json
from benchmarks.sleep_engine import TAIL_Z, SleepOptions, build_sleep_engine
from benchmarks.tiny_model import write_random_model
from nemo_rl.config.load import load_config
from nemo_rl.config.schema import MasterConfig
from nemo_rl.data.conversation import ToolCall
from nemo_rl.data.datasets import build_prompt_sets
from nemo_rl.data.tokenizer import TOOLS_TEMPLATE, load_tokenizer, stop_token_ids
from nemo_rl.environments.call_formats import ParsedTurn
from nemo_rl.experience.conversation_attempt import ConversationRecord
from nemo_rl.experience.conversation_rollouts import ConversationRollouts
from nemo_rl.experience.conversation_setup import RolloutSampling
from nemo_rl.experience.conversations import GroupTask
from nemo_rl.experience.rollouts import RolloutSpec, row_seeds, sampling_params
from nemo_rl.models.generation.interfaces import EngineSpec

__all__ = ["HOLDS", "Setting", "TimedConversation", "TimedRollout", "WaitCalls", "figures_of", "main", "measure"]

RECIPE = ROOT / "configs" / "grpo_sort_cpu.yaml"
HOLDS: Mapping[str, Hold] = {"vs_critical_path": Hold(most=1.15)}
SEED = 1234
TOOL_MEDIAN_S, TAIL_RATIO = 0.2, 8.0
"""Median of the seconds of a tool; one of a thousand takes longer than this many medians, of tools and of turns."""
OPTIONS = SleepOptions(median_tokens=20.0, tail_ratio=TAIL_RATIO, tokens_per_s=100.0)
MAX_NEW_TOKENS = 320
"""Sixteen medians."""


class WaitCalls:
    """Reads every turn as one call of the tool `wait`, with a time that is a function of the turn's tokens.

    Args:
        tokenizer: not used; formats of one's own are made with it.
    """

    def __init__(self, tokenizer: object) -> None:
        del tokenizer

    def parse(self, ids: Sequence[int]) -> ParsedTurn:
        """Return the call of a turn."""
        draws = random.Random(f"wait:{list(ids)}")
        seconds = TOOL_MEDIAN_S * math.exp(math.log(TAIL_RATIO) / TAIL_Z * draws.gauss(0.0, 1.0))
        return ParsedTurn(text="", calls=(ToolCall(name="wait", arguments={"seconds": seconds}),))


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The sizes of the rollouts."""

    num_rollouts: int = 5
    num_groups: int = 8
    group_size: int = 8
    num_turns: int = 4
    max_open: int = 1024
    places: int = 32
    """Turns that the engine decodes at once, half as many as there are conversations."""
    options: SleepOptions = OPTIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedConversation:
    """One conversation: the time that it needs, and the time that it took."""

    engine_s: float
    tool_s: float
    took_s: float

    @classmethod
    def of(cls, record: ConversationRecord, options: SleepOptions) -> TimedConversation:
        made = [call for turn in record.turns if turn.results for call in turn.calls]
        return cls(
            engine_s=sum(turn.num_tokens for turn in record.turns) / options.tokens_per_s,
            tool_s=sum(float(str(call.arguments["seconds"])) for call in made),
            took_s=record.seconds,
        )

    @property
    def needed_s(self) -> float:
        return self.engine_s + self.tool_s


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedRollout:
    """One rollout of a step."""

    seconds: float
    conversations: tuple[TimedConversation, ...]
    endings: Mapping[str, int] = field(default_factory=dict)

    @property
    def longest_s(self) -> float:
        return max(each.needed_s for each in self.conversations)

    def engine_s(self, places: int) -> float:
        """Return the time of all decoding on that many places."""
        return sum(each.engine_s for each in self.conversations) / places

    def critical_s(self, places: int) -> float:
        return max(self.longest_s, self.engine_s(places))


def measure(setting: Setting) -> tuple[TimedRollout, ...]:
    """Time rollouts; one before them, which starts the processes of the tool, is not counted."""
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        folder = Path(made)
        config = _config(setting, folder, write_random_model(folder / "model"))
        tokenizer = load_tokenizer(config.policy.model_name, chat_template=TOOLS_TEMPLATE)
        stop_ids = stop_token_ids(config.policy.model_name, tokenizer)
        engine = build_sleep_engine(EngineSpec(policy=config.policy, weight_version=0, continuous=True))
        stack.callback(engine.shutdown)
        parts = RolloutSampling(
            RolloutSpec.of(config), tokenizer=tokenizer, stop_ids=stop_ids, generation=engine, log_file=folder / "log"
        )
        stack.callback(parts.shutdown)
        engine.prepare_for_generation()
        assert parts.conversations is not None, "the recipe has conversations"
        prompts = build_prompt_sets(config.data, tokenizer, now=None, tools=parts.environment.schemas)[
            "data.train"
        ].prompts
        sampling = sampling_params(config.policy.generation, stop_ids, is_validation=False)
        tasks = [
            GroupTask(
                prompt=prompts[number % len(prompts)],
                seeds=tuple(row_seeds(SEED, "group", number, count=setting.group_size)),
                sampling=sampling,
            )
            for number in range((setting.num_rollouts + 1) * setting.num_groups)
        ]
        timed = [
            _timed(parts.conversations, tasks[first : first + setting.num_groups], setting)
            for first in range(0, len(tasks), setting.num_groups)
        ]
        return tuple(timed[1:])


def figures_of(setting: Setting, rollouts: Sequence[TimedRollout]) -> dict[str, float]:
    places = setting.places
    total = sum(each.seconds for each in rollouts)
    serial = sum(each.needed_s for rollout in rollouts for each in rollout.conversations)
    return {
        "vs_critical_path": total / sum(each.critical_s(places) for each in rollouts),
        "worst_vs_critical_path": max(each.seconds / each.critical_s(places) for each in rollouts),
        "rollout_s": total / len(rollouts),
        "longest_s": statistics.mean(each.longest_s for each in rollouts),
        "engine_s": statistics.mean(each.engine_s(places) for each in rollouts),
        "tool_share": sum(each.tool_s for rollout in rollouts for each in rollout.conversations) / serial,
        "serial_vs_rollout": serial / total,
    }


def _timed(conversations: ConversationRollouts, tasks: Sequence[GroupTask], setting: Setting) -> TimedRollout:
    began = time.monotonic()
    groups = list(conversations.groups(tasks, version=0))
    seconds = time.monotonic() - began
    records = [record for group in groups for record in group.records]
    names = [record.ending.value for record in records]
    return TimedRollout(
        seconds=seconds,
        conversations=tuple(TimedConversation.of(record, setting.options) for record in records),
        endings={name: names.count(name) for name in sorted(set(names))},
    )


def _config(setting: Setting, folder: Path, model: Path) -> MasterConfig:
    options = {name: value for name, value in asdict(setting.options).items() if name not in ("lengths", "real_time")}
    overrides = [
        "cluster.launcher=local",
        "cluster.cpu_workers_per_node=1",
        "data_plane.impl=noop",
        f"logger.log_dir={folder / 'logs'}",
        "data.validation=null",
        "data.max_input_seq_length=256",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        f"grpo.num_generations_per_prompt={setting.group_size}",
        f"policy.model_name={model}",
        f"policy.max_total_sequence_length={setting.num_turns * (MAX_NEW_TOKENS + 64)}",
        f"policy.generation.max_new_tokens={MAX_NEW_TOKENS}",
        f"policy.generation.max_batch_size={setting.places}",
        "policy.generation.num_replicas=1",
        "policy.generation.backend=benchmarks.sleep_engine:build_sleep_engine",
        "policy.generation.receipt.enabled=false",
        *(f"+policy.generation.options.{name}={value}" for name, value in options.items()),
        "env.name=custom",
        "env.reward_function=benchmarks.rewards:odd_share",
        "env.tools.use=[{name: 'benchmarks.rewards:wait'}]",
        "env.tools.format=benchmarks.conversations:WaitCalls",
        f"env.tools.num_workers={setting.num_groups * setting.group_size}",
        "env.tools.timeout_s=60",
        "experience.conversation.enabled=true",
        f"experience.conversation.max_turns={setting.num_turns}",
        f"experience.conversation.max_open={setting.max_open}",
    ]
    return load_config(RECIPE, overrides)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="file for raw samples and figures")
    parser.add_argument("--quick", action="store_true", help="one small rollout; the bounds are not checked")
    parser.add_argument("--one-by-one", action="store_true", help="plant a fault: one conversation is open at a time")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    load_before = load_average()
    setting = Setting()
    if given.quick or given.one_by_one:
        setting = replace(setting, num_rollouts=1, num_groups=2, group_size=4)
    if given.one_by_one:
        setting = replace(setting, max_open=1)
    rollouts = measure(setting)
    figures = figures_of(setting, rollouts)
    holds = {} if given.quick else HOLDS
    console = Console()
    console.print(figures_table(figures, holds))
    missed = check_figures(figures, holds)
    report = {
        **environment(),
        "load_before": load_before,
        "load_after": load_average(),
        "setting": asdict(setting),
        "figures": figures,
        "problems": missed,
        "rollouts": [asdict(rollout) for rollout in rollouts],
    }
    console.print(f"written to {write_json(given.json, report)}")
    for line in missed:
        console.print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
