"""`DynamicRollout`: rounds of rollouts until a step has enough groups that can teach something (DAPO, 2503.14476).

    DynamicRollout.run                          in place of the stage `rollout`
      |- rounds                prompts -> rows in the data plane -> which groups are kept       (informative_rows)
      |    `- drop             rows of the others are cleared at once
      `- the first groups are the step's; those beyond are carried: their rows stay where they are, for the next step

The unit is the group, which is never split; it is kept when its rewards, as they were scored, are not all equal.
Invariant: `live` has the key of every row that the step answers for, so whoever runs it clears these, also after an
error; `keep_carried` takes the carried ones out when it has ended well, and `give_back` clears them before a checkpoint
and at the end of a run. What is given back is drawn
again, ahead of new prompts, so a resumed run samples what one that was left alone samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from nemo_rl.algorithms.advantage_estimator import group_statistics
from nemo_rl.algorithms.grpo import rows_of_equal_groups
from nemo_rl.algorithms.stages.bodies import Rollout
from nemo_rl.algorithms.stages.columns import PARTITION, StageColumns
from nemo_rl.algorithms.stages.stage import StageTools
from nemo_rl.algorithms.stages.state import StepState, begin_step
from nemo_rl.config.schema import GRPOConfig
from nemo_rl.data.sampler import PromptDraw, PromptSampler
from nemo_rl.data_plane.client.stage_context import CLEAR, working_for
from nemo_rl.distributed.calls import Pending
from nemo_rl.errors import CheckpointError, UserError
from nemo_rl.experience.sync_rollout_actor import RolloutResult
from nemo_rl.utils.metrics import Mean, Reduction, Sum
from nemo_rl.utils.r3_trace import trace_retired

__all__ = ["DynamicRollout", "informative_rows"]

DROPPED = "not trained: equal rewards in its group (grpo.use_dynamic_sampling)"
GIVEN_BACK = "not trained: its prompt is drawn again (a checkpoint, or the end of the run)"
REDRAWN = "redrawn_ordinals"
"""Name in a checkpoint's state."""
OLDER_REDRAWN = "redrawn_prompts"
"""Name in checkpoints that held numbers of prompts instead of ordinals."""


class DynamicRollout(Rollout):
    """The stage `rollout` of a run with `grpo.use_dynamic_sampling`; one object serves all steps of a scheduler.

    Args:
        sampler: of prompt numbers; nobody else draws from it.
    """

    def __init__(self, columns: StageColumns, tools: StageTools, *, sampler: PromptSampler) -> None:
        super().__init__(columns, tools)
        self._sampler = sampler
        self._carried: RolloutResult | None = None
        self._draw_of: dict[str, PromptDraw] = {}
        """Of the groups that are alive, by uid."""
        self._redrawn: list[PromptDraw] = []
        self.live: set[str] = set()
        """Keys of the rows that the step in flight answers for: what is cleared at its end."""

    @property
    def num_carried(self) -> int:
        """Rows that wait for the next step."""
        return 0 if self._carried is None else len(self._carried.meta)

    @property
    def is_exhausted(self) -> bool:
        """The last epoch has too few prompts left for a round, with those whose groups are carried.

        `give_back` does not change it. The sampler goes by its last draw, which drawing again makes smaller.
        """
        config = self._tools.grpo
        num_again = len(self._redrawn) + self.num_carried // config.num_generations_per_prompt
        return not self._sampler.has(config.prompts_per_round - num_again)

    def state_dict(self) -> dict[str, list[int]]:
        """For a checkpoint, after `give_back`."""
        return {REDRAWN: [draw.ordinal for draw in self._redrawn]}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continues where `state_dict` was taken, after the sampler did; a state without it draws nothing again."""
        if state.get(OLDER_REDRAWN):
            raise CheckpointError(
                f"{OLDER_REDRAWN}: the checkpoint was written when seeds of rows came from the step, and lists prompts "
                "to draw again without their places in the stream; resume it with the version that wrote it, or start "
                "afresh with checkpointing.resume=false"
            )
        found = state.get(REDRAWN, [])
        if not isinstance(found, list) or not all(isinstance(ordinal, int) for ordinal in found):
            raise CheckpointError(f"{REDRAWN}: expected a list of ordinals, got {found!r}")
        self._redrawn = [self._sampler.at(ordinal) for ordinal in found]

    def keep_carried(self) -> None:
        """The step has ended well: what it carries is no more its own."""
        if self._carried is not None:
            self.live.difference_update(self._carried.meta.keys)

    def give_back(self) -> None:
        """Clears the rows that are carried; their prompts are drawn again. Idempotent."""
        carried, self._carried = self._carried, None
        if carried is None:
            return
        uids = dict.fromkeys(carried.group_uids)
        self._redrawn += [self._draw_of.pop(uid) for uid in uids]
        self._clear(carried.meta.keys, GIVEN_BACK)

    def _submit(self, step: StepState) -> Pending[StepState]:
        """Waits for its rounds: how many there are is known after each."""
        config = self._tools.grpo
        wanted = config.num_prompts_per_step * config.num_generations_per_prompt
        pool, self._carried = self._carried, None
        self.live.clear()
        self.live.update(() if pool is None else pool.meta.keys)
        counts = _Counts()
        while pool is None or (len(pool.meta) < wanted and self._has_a_round()):
            if counts.rounds == config.dynamic_sampling_max_gen_batches:
                raise UserError(self._too_few(step, 0 if pool is None else len(pool.meta), counts))
            kept = self._round(step, counts, has_groups=pool is not None)
            if kept is not None:
                pool = kept if pool is None else pool.concat(kept)
        # At the end of the last epoch there may be fewer.
        chosen = pool.select(range(min(wanted, len(pool.meta))))
        if len(pool.meta) > wanted:
            # Their metrics are those of rounds that this step has counted.
            self._carried = replace(pool.select(range(wanted, len(pool.meta))), metrics={}, printed=())
        for uid in dict.fromkeys(chosen.group_uids):
            self._draw_of.pop(uid)
        metrics = {**chosen.metrics, **counts.metrics(carried=self.num_carried)}
        rolled = replace(chosen, metrics=metrics)
        return Pending.done(replace(step, rolled=rolled, keys=chosen.meta.keys, weight_version=None))

    def _round(self, step: StepState, counts: _Counts, *, has_groups: bool) -> RolloutResult | None:
        """The groups of one round that can teach something; None where there is none, and another round can be."""
        config = self._tools.grpo
        part = begin_step(
            step.number,
            self._next_prompts(config.prompts_per_round),
            group_size=config.num_generations_per_prompt,
            version=step.policy_version,
        )
        self.live.update(part.keys)
        self._draw_of |= dict(zip(part.uids, part.drawn, strict=True))
        rolled = self._tools.rollout.submit_rollout(
            part.drawn,
            uids=part.uids,
            version=part.weight_version,
            partition_id=part.partition,
        ).result()
        kept = informative_rows(rolled, config)
        counts.add(rolled, num_kept=len(kept))
        if not kept and not has_groups and not self._has_a_round():
            return rolled  # The last epoch ends as without dynamic sampling: a step of equal groups updates nothing.
        self._drop(rolled, kept)
        return rolled.select(kept) if kept else None

    def _drop(self, rolled: RolloutResult, kept: Sequence[int]) -> None:
        keys, stays = rolled.meta.keys, set(kept)
        dropped = [key for row, key in enumerate(keys) if row not in stays]
        if dropped:
            self._clear(dropped, DROPPED)
            self.live.difference_update(dropped)
            living = set(rolled.select(kept).group_uids) if kept else set()
            for uid in dict.fromkeys(rolled.group_uids):
                if uid not in living:
                    self._draw_of.pop(uid)

    def _clear(self, keys: Sequence[str], reason: str) -> None:
        with working_for(CLEAR):
            self._tools.client.kv_clear(list(keys), PARTITION, reason=reason)
        trace_retired(keys=keys, reason=reason)

    def _next_prompts(self, count: int) -> list[PromptDraw]:
        again, self._redrawn = self._redrawn[:count], self._redrawn[count:]
        return again + (self._sampler.next(count - len(again)) if len(again) < count else [])

    def _has_a_round(self) -> bool:
        return self._sampler.has(self._tools.grpo.prompts_per_round - len(self._redrawn))

    def _too_few(self, step: StepState, num_rows: int, counts: _Counts) -> str:
        config = self._tools.grpo
        return (
            f"grpo.dynamic_sampling_max_gen_batches: after {counts.rounds} rounds of {config.prompts_per_round} "
            f"prompts step {step.number} has {num_rows // config.num_generations_per_prompt} of "
            f"{config.num_prompts_per_step} groups whose rewards are not all equal (mean reward "
            f"{counts.reward.value:.3g}): the prompts are too easy or too hard for this model, or the reward is "
            "constant. Take others, raise it, or set grpo.use_dynamic_sampling=false"
        )


def informative_rows(rolled: RolloutResult, config: GRPOConfig) -> list[int]:
    """Rows of groups whose rewards are not all equal, compared exactly, in their order."""
    stats = group_statistics(torch.tensor(rolled.carry.rewards, dtype=torch.float32), rolled.group_uids)
    is_equal_N = rows_of_equal_groups(rolled.carry, stats, config)
    return [row for row, is_equal in enumerate(is_equal_N.tolist()) if not is_equal]


class _Counts:
    """Of the rounds of one step."""

    def __init__(self) -> None:
        self.rounds = 0
        self.reward = Mean(0.0, 0.0)
        self._kept = Mean(0.0, 0.0)

    def add(self, rolled: RolloutResult, *, num_kept: int) -> None:
        """One round."""
        count = float(len(rolled.meta))
        self.rounds += 1
        self.reward = self.reward.merge(Mean(float(rolled.carry.rewards.sum()), count))
        self._kept = self._kept.merge(Mean(float(num_kept), count))

    def metrics(self, *, carried: int) -> dict[str, Reduction]:
        """As a run logs them under `rollout/`; of a step that only took what was carried some are left out."""
        found: dict[str, Reduction] = {"sampling_rounds": Sum(float(self.rounds)), "carried_rows": Sum(float(carried))}
        return found | ({"sampled_reward": self.reward, "informative_share": self._kept} if self.rounds else {})
