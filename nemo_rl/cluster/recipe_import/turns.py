"""Keys of turns and tools: NeMo-RL's, verl's section `multi_turn`, and those of TRL's trainer.

Of recipes of verl and TRL these keys alone are converted; the others are named as unknown. Called by
`convert_sections`.
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_rl.cluster.recipe_import.keys import (
    Fate,
    Given,
    KeyOutcome,
    Table,
    becomes,
    lacks,
    no_effect,
    not_supported,
    refused,
    with_others,
)

__all__ = ["GAME", "TURNS", "convert_turns"]

GAME = "sliding_puzzle_game"
"""The environment of NeMo-RL that is here as well."""
SCORING = ("math", "math_default", "math_multi_reward", "code", "reward_model")
"""Environments of NeMo-RL that end every row after one turn."""
GAME_PROMPTS = 10_000
VERL, AGENT = "actor_rollout_ref.rollout.multi_turn", "actor_rollout_ref.rollout.agent"
PREFIX = "experience.conversation"
NO_LIMIT = 1000
"""Turns that stand for no limit there: `policy.max_total_sequence_length` ends a conversation before."""
CHARACTERS_PER_TOKEN = 4
FORMATS = {"hermes": "hermes", "gpt-oss": "gpt_oss", "gpt_oss": "gpt_oss", "llama3": "llama3", "llama3_json": "llama3"}
"""Formats of calls here, by their names in verl."""
OWN_TOOLS = "list functions in env.tools.use (docs/environments.md)"
OWN_ENVIRONMENT = "write it as an environment with turns (env.name=module:Class, docs/environments.md)"
CONVERSATION = "becomes experience.conversation and env.tools"

TURNS: Table = {
    "grpo.max_rollout_turns": with_others("becomes experience.conversation where the environment has turns"),
    **{
        f"{VERL}.{name}": with_others(CONVERSATION)
        for name in (
            *("enable", "max_assistant_turns", "max_user_turns", "max_parallel_calls", "max_tool_response_length"),
            "format",
        )
    },
    f"{VERL}.tool_response_truncate_side": not_supported("the middle of a long result is cut", off=(None, "middle")),
    f"{VERL}.tool_config_path": refused(OWN_TOOLS),
    f"{VERL}.function_tool_path": refused(OWN_TOOLS),
    f"{VERL}.interaction_config_path": refused(OWN_ENVIRONMENT),
    f"{VERL}.completion_callback": refused(OWN_ENVIRONMENT),
    f"{VERL}.use_inference_chat_template": no_effect("what was sampled is never rendered again; see data.history"),
    f"{VERL}.tokenization_sanity_check_mode": no_effect("tokens are never made from text again"),
    f"{VERL}.num_repeat_rollouts": not_supported("grpo.num_generations_per_prompt counts the rows of a prompt"),
    f"{AGENT}.num_workers": no_effect("one loop runs all conversations of a rollout worker"),
    f"{AGENT}.default_agent_loop": no_effect("tools and environment decide"),
    f"{AGENT}.agent_loop_config_path": refused(OWN_ENVIRONMENT),
    "max_tool_calling_iterations": with_others(CONVERSATION),
    "max_completion_length": with_others("becomes policy.generation.max_new_tokens"),
    "tools": refused(OWN_TOOLS),
    "environment_factory": refused(OWN_ENVIRONMENT),
}
"""Rules by key."""


def convert_turns(given: Given) -> Iterator[KeyOutcome]:
    """Convert turns and tools of all three frameworks."""
    yield from _nemo_rl(given)
    if given.section(VERL):
        yield from _verl(given)
    yield from _trl(given)


def _nemo_rl(given: Given) -> Iterator[KeyOutcome]:
    key, game = "grpo.max_rollout_turns", given.section(f"env.{GAME}")
    turns = given.get(key)
    most = turns if isinstance(turns, int) else 1
    if game:
        yield from _game(given, most if given.has(key) else NO_LIMIT)
    elif most > 1:
        name = given.get("data.train.env_name") or given.get("data.default.env_name") or SCORING[0]
        if name in SCORING:
            why = "the environment ends every row after one turn"
            yield KeyOutcome(key=key, fate=Fate.IGNORED, why=why)
            return
        yield becomes("", f"{PREFIX}.enabled", True, f"{key} is above 1")
        yield becomes(key, f"{PREFIX}.max_turns", most, "turns of the model")
        yield lacks(key, f"turns of env.{name}: {OWN_ENVIRONMENT}", must_decide=True)
    elif given.has(key):
        yield KeyOutcome(key=key, fate=Fate.SAME, why="one turn, as without experience.conversation")


def _game(given: Given, most: int) -> Iterator[KeyOutcome]:
    """Convert the sliding puzzle; its moves are turns."""
    prefix = f"env.{GAME}"
    names = {"size": "side", "shuffle_moves": "moves"}
    yield becomes("", "env.name", "sliding_puzzle", f"{GAME} there")
    for key, value in (
        ("dataset_name", "sliding_puzzle"),
        ("size", GAME_PROMPTS),
        ("seed", given.get("grpo.seed", 42)),
    ):
        yield becomes("", f"data.train.{key}", value, "there a script makes the boards while it trains")
    for theirs, ours in names.items():
        key = f"{prefix}.cfg.game_config.{theirs}"
        if given.has(key):
            yield becomes(key, f"data.train.options.{ours}", given.get(key), "")
    key = f"{prefix}.cfg.max_moves"
    moves = given.get(key)
    yield becomes("", f"{PREFIX}.enabled", True, "the environment has turns")
    if isinstance(moves, int):
        yield becomes(
            key, f"{PREFIX}.max_turns", min(moves, most), "a move is a turn, and grpo.max_rollout_turns holds"
        )
    elif most != NO_LIMIT:
        yield becomes("grpo.max_rollout_turns", f"{PREFIX}.max_turns", most, "")
    if given.has(f"{prefix}.num_workers"):
        yield becomes(f"{prefix}.num_workers", "env.num_workers", given.get(f"{prefix}.num_workers"), "")


def _verl(given: Given) -> Iterator[KeyOutcome]:
    is_on = bool(given.get(f"{VERL}.enable"))
    yield becomes(f"{VERL}.enable", f"{PREFIX}.enabled", is_on, "")
    if not is_on:
        return
    yield from _verl_turns(given)
    calls, length, form = (f"{VERL}.{name}" for name in ("max_parallel_calls", "max_tool_response_length", "format"))
    has_tools = bool(given.get(f"{VERL}.tool_config_path") or given.get(f"{VERL}.function_tool_path"))
    if not has_tools:
        for key in (calls, length, form):
            if given.has(key):
                yield KeyOutcome(key=key, fate=Fate.IGNORED, why="the recipe names no tool")
        return
    if given.has(calls):
        why = "further calls are dropped there, here the model is told"
        yield becomes(calls, "env.tools.max_parallel_calls", given.get(calls), why)
    characters = given.get(length)
    if isinstance(characters, int):
        tokens = max(1, characters // CHARACTERS_PER_TOKEN)
        why = f"{characters} characters there, about {CHARACTERS_PER_TOKEN} in a token"
        yield becomes(length, "env.tools.max_result_tokens", tokens, why)
    name = given.get(form)
    if name in FORMATS:
        yield becomes(form, "env.tools.format", FORMATS[name], "")
    elif name is not None:
        why = f"{name!r} is not here; write it as a class (env.tools.format=module:Class)"
        yield lacks(form, why, must_decide=True)


def _verl_turns(given: Given) -> Iterator[KeyOutcome]:
    """Convert both limits of turns to the one of the model's turns: a reply more makes a turn more."""
    own, replies = f"{VERL}.max_assistant_turns", f"{VERL}.max_user_turns"
    limits = {own: given.get(own), replies: given.get(replies)}
    found = {key: value + (key == replies) for key, value in limits.items() if isinstance(value, int)}
    if not found:
        yield becomes(own if given.has(own) else "", f"{PREFIX}.max_turns", NO_LIMIT, "no limit there")
        return
    least = min(found, key=lambda key: found[key])
    why = "a last turn follows the last reply" if least == replies else ""
    yield becomes(least, f"{PREFIX}.max_turns", found[least], why)
    for key in found:
        if key != least:
            yield KeyOutcome(key=key, fate=Fate.MAPPED, why=f"{least} is the lower limit")


def _trl(given: Given) -> Iterator[KeyOutcome]:
    rounds, length = "max_tool_calling_iterations", "max_completion_length"
    has_turns = given.has(rounds) or bool(given.get("tools")) or bool(given.get("environment_factory"))
    if has_turns:
        most = given.get(rounds)
        yield becomes("", f"{PREFIX}.enabled", True, "the trainer there has tools")
        key = rounds if given.has(rounds) else ""
        turns, why = (
            (most + 1, "a last turn follows the last call") if isinstance(most, int) else (NO_LIMIT, "no limit")
        )
        yield becomes(key, f"{PREFIX}.max_turns", turns, why)
    if given.has(length):
        why = (
            "there of all turns and results of a row, here of one turn; policy.max_total_sequence_length bounds the row"
        )
        yield becomes(length, "policy.generation.max_new_tokens", given.get(length), why if has_turns else "")
