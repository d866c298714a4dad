"""Digests of weights: one bit changes the hash, and the projections say how far apart weights are."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_rl.models.weight_sync.weights_digest import BLOCK, digest_weights


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (300, 32), "q": (64, 32), "norm": (32,), "big": (BLOCK + 5, 3), "scalar": ()}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


def test_the_same_weights_have_the_same_digest_whatever_the_random_state_is() -> None:
    torch.manual_seed(1)
    first = digest_weights(weights())
    torch.manual_seed(2)
    assert digest_weights(weights()) == first and first.distance(first) == 0.0


def test_one_bit_a_name_or_a_shape_changes_the_hash() -> None:
    first = digest_weights(weights())
    changed = weights()
    changed[1][1].view(-1).view(torch.int32)[5] ^= 1
    other = digest_weights(changed)
    assert other.bits != first.bits and first.furthest(other) == "q"
    renamed = digest_weights([("p" if name == "q" else name, weight) for name, weight in weights()])
    assert renamed.bits != first.bits and first.distance(renamed) == math.inf and first.furthest(renamed) is None
    turned = digest_weights([(name, weight.T if name == "q" else weight) for name, weight in weights()])
    assert turned.bits != first.bits and first.distance(turned) == math.inf


@pytest.mark.parametrize("scale", [1e-7, 2e-5, 1e-2])
def test_the_distance_is_that_of_the_weights(scale: float) -> None:
    one = [(f"w{i}", torch.randn(50, 40, dtype=torch.float64, generator=torch.manual_seed(i))) for i in range(40)]
    other = [(name, weight + scale * torch.randn_like(weight)) for name, weight in one]
    exact = math.sqrt(
        sum(float((a - b).square().sum()) for (_, a), (_, b) in zip(one, other, strict=True))
        / sum(float(a.square().sum()) for _, a in one)
    )
    # 160 projections: a standard error of 6 % of the distance.
    assert digest_weights(one).distance(digest_weights(other)) == pytest.approx(exact, rel=0.25)


def test_the_projections_do_not_depend_on_how_much_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(5 * BLOCK + 7, generator=torch.manual_seed(0))
    whole = digest_weights([("w", weight)]).tensors["w"]
    monkeypatch.setattr("nemo_rl.models.weight_sync.weights_digest.ROWS_AT_ONCE", 2)
    parts = digest_weights([("w", weight)]).tensors["w"]
    assert parts.projections == pytest.approx(whole.projections, rel=1e-12)
    assert parts.squares == pytest.approx(float(weight.double().square().sum()), rel=1e-12)


def test_nan_is_infinitely_far_from_everything() -> None:
    broken = weights()
    broken[0][1][0, 0] = float("nan")
    assert digest_weights(weights()).distance(digest_weights(broken)) == math.inf
