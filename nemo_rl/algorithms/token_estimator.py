"""`TokenEstimator`: an advantage estimator that gives one advantage for each token.

`grpo.adv_estimator.name` names one as it names an `AdvantageEstimator`; the driver makes it and sends it to the
workers, which call it next to the data plane with whole groups (`TokenWork`). Shapes: N rows, T positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from nemo_rl.config.parts import ADVANTAGE_ESTIMATORS, TOKEN_ESTIMATORS
from nemo_rl.config.rewards import row_loss_problems
from nemo_rl.config.schema import GRPOConfig, MasterConfig
from nemo_rl.errors import ConfigError

__all__ = ["TokenEstimator", "TokenRows", "return_to_go", "token_estimator"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRows:
    """Rows of whole groups, in any order; everything is on the CPU, floating point is float64.

    Example:
        >>> rows = TokenRows(groups=torch.tensor([0]), rewards=torch.tensor([1.0]), scored=torch.tensor([1.0]),
        ...                  mask=torch.tensor([[False, True, True]]), penalties=torch.tensor([[0.0, 0.5, 0.25]]),
        ...                  columns={})
        >>> rows.returns.tolist()
        [[0.0, 0.25, 0.75]]
    """

    groups: torch.Tensor
    """`[N]` int64, numbers of the groups."""
    rewards: torch.Tensor
    """`[N]`, scaled and shaped as the recipe says, without a KL."""
    scored: torch.Tensor
    """`[N]`, rewards as they were scored."""
    mask: torch.Tensor
    """`[N, T]` bool, response tokens; a row may have none."""
    penalties: torch.Tensor
    """`[N, T]`, what each token costs: the KL with `loss_fn.use_kl_in_reward`, else 0; 0 outside the mask."""
    columns: Mapping[str, torch.Tensor]
    """What the estimator `reads`, `[N, T]` or `[N]`; of per-token ones 0 outside the mask."""

    @property
    def returns(self) -> torch.Tensor:
        """`[N, T]`: the row's reward less the penalties from the token on; 0 outside the mask."""
        return torch.where(self.mask, self.rewards[:, None] - return_to_go(self.penalties), 0.0)


class TokenEstimator(ABC):
    """Made with `config=` (the section `grpo`); must be picklable and depend on nothing but its rows.

    It is called twice with the same rows where it whitens.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    """Columns that it needs besides the mask, such as `prev_logprobs`."""
    whitens: ClassVar[bool] = False
    """Whether what it gives is whitened over all response tokens of the step afterwards."""

    def __init__(self, *, config: GRPOConfig) -> None:
        self.config = config

    @abstractmethod
    def __call__(self, rows: TokenRows) -> torch.Tensor:
        """`[N, T]`, finite at the tokens of the mask; what is elsewhere does not matter."""


def return_to_go(values: torch.Tensor) -> torch.Tensor:
    """`[N, T]`: sums of the values from each position on; padding on the right changes no bit of them."""
    return values.flip(1).cumsum(1).flip(1)


def token_estimator(config: MasterConfig) -> TokenEstimator | None:
    """The estimator of the recipe if it gives one advantage for each token; None for one that gives one per row.

    Raises:
        ConfigError: it cannot be imported, or its advantages do not fit the loss.
    """
    key, name = "grpo.adv_estimator.name", config.grpo.adv_estimator.name
    if ADVANTAGE_ESTIMATORS.is_builtin(name):
        if not config.has_builtin_token_advantages:
            return None
        made: TokenEstimator = TOKEN_ESTIMATORS.load(name, key=key)(config=config.grpo)
        return made
    own = ADVANTAGE_ESTIMATORS.load(name, key=key)
    if not (isinstance(own, type) and issubclass(own, TokenEstimator)):
        return None
    problems = row_loss_problems(config)
    if problems:
        raise ConfigError(problems)
    return own(config=config.grpo)
