"""The record of a failure says where it began, and raises what the user can fix as what it is."""

from __future__ import annotations

import pytest

from nemo_rl.distributed.abort import RootCause, is_secondary
from nemo_rl.errors import CollectiveTimeout, ConfigError, KeysNotFound, NonFiniteError, WorkerError

CLOSED = "[/pair.cc:553] Connection closed by peer [127.0.0.1]:63198"


def round_trip(error: BaseException) -> BaseException:
    return RootCause.from_json(RootCause.of(error, rank=3, stage="train").to_json()).to_error()


def test_an_error_becomes_a_worker_error_of_its_rank():
    error = round_trip(KeyError("a"))
    assert isinstance(error, WorkerError)
    assert (error.rank, error.stage, error.text) == (3, "train", "KeyError: 'a'")


@pytest.mark.parametrize("kind", [NonFiniteError, ConfigError])
def test_what_the_user_can_fix_keeps_its_kind(kind):
    error = round_trip(kind("change this"))
    assert type(error) is kind and str(error) == "change this"
    assert error.origin_rank == 3 and error.__notes__ == ["rank 3, stage train"]


def test_an_error_that_came_from_another_rank_keeps_that_rank_and_its_text():
    passed_on = KeysNotFound("keys a, b")
    passed_on.origin_rank = 1
    assert str(round_trip(passed_on)) == "rank 1, stage train: KeysNotFound: keys a, b"
    first = WorkerError("ValueError: x", rank=0, stage="fetch")
    assert str(round_trip(round_trip(first))) == "rank 0, stage fetch: ValueError: x"
    assert isinstance(round_trip(CollectiveTimeout("too late", rank=2, stage="refit")), CollectiveTimeout)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError(CLOSED), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (WorkerError(f"RuntimeError: {CLOSED}", rank=0, stage="train"), True),
        (RuntimeError("shape mismatch"), False),
        (ConnectionError("connection reset by the tracker"), False),
        (NonFiniteError("loss is NaN in the gloo case"), False),
    ],
)
def test_only_what_a_peer_does_to_a_rank_is_a_symptom(error, expected):
    assert is_secondary(error) is expected
