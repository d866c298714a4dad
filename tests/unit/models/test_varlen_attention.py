"""Attention over sequences in one row: no leak, one call per sequence, and the bookkeeping of the zigzag split."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig

from benchmarks.dispatched_ops import DispatchedOps
from nemo_rl.models.attention.varlen import ATTENTION_NAME, Pattern, Segments, varlen_attention
from tests.helpers.tiny_model import tiny_model

LENGTHS = (5, 1, 9)
AGAIN = (5, 1, 5, 9, 1)
MODULE = torch.nn.Module()


def heads(total: int, count: int) -> torch.Tensor:
    return torch.randn(1, count, total, 8, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


VALUE_DIMS = (8, 6)
"""Dims of a value's head: that of the keys, which one operation serves, and another one, which calls of torch do."""


@pytest.mark.parametrize("value_dim", VALUE_DIMS)
@pytest.mark.parametrize("lengths", [LENGTHS, AGAIN, (15,)])
def test_each_sequence_is_attended_by_itself(lengths: tuple[int, ...], value_dim: int) -> None:
    total = sum(lengths)
    query, key, value = heads(total, 4), heads(total, 2), heads(total, 2)[..., :value_dim] + 1
    found, _ = varlen_attention(MODULE, query, key, value, None, scaling=0.5, segments=Segments(lengths=lengths))
    parts = []
    for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True):
        whole_k, whole_v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        parts.append(scaled_dot_product_attention(q, whole_k, whole_v, is_causal=True, scale=0.5))
    torch.testing.assert_close(found, torch.cat(parts, dim=2).transpose(1, 2))


@pytest.mark.parametrize("mode", ["eval", "train", "recomputed"])
def test_nothing_leaks_between_the_sequences_of_a_pack(mode: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(ATTENTION_NAME)
    model.train(mode != "eval")
    if mode == "recomputed":
        model.activation_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(7, 300, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    others = ids.clone()
    others[0, :6] = others[0, :6] + 1
    others[0, -1] = 7
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    kwargs = {"position_ids": positions, "use_cache": False, "segments": Segments(lengths=LENGTHS)}
    with torch.no_grad():
        first, second = model(ids, **kwargs).logits, model(others, **kwargs).logits
        alone = model(ids[:, 6:14], use_cache=False).logits
    assert torch.equal(first[0, 6:14], second[0, 6:14])
    assert not torch.equal(first[0, :6], second[0, :6])
    torch.testing.assert_close(first[:, 6:14], alone, rtol=0, atol=2e-6)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_ranks_share_every_sequence_evenly(cp_size: int) -> None:
    lengths = (8, 16) if cp_size < 4 else (8, 24)
    ranks = [Segments(lengths=lengths, cp_size=cp_size, cp_rank=rank) for rank in range(cp_size)]
    held = [segments.local_positions() for segments in ranks]
    assert torch.cat(held).sort().values.tolist() == list(range(sum(lengths)))
    side_by_side = torch.cat(held)
    assert side_by_side[ranks[0].row_order].tolist() == list(range(sum(lengths)))
    # The causal work of a rank is the number of keys that its queries see.
    starts = torch.tensor([0] * lengths[0] + [lengths[0]] * lengths[1])
    work = {int((positions - starts[positions] + 1).sum()) for positions in held}
    assert len(work) == 1, work


def test_sequences_of_one_length_share_a_call() -> None:
    segments = Segments(lengths=(4, 6, 4, 4, 6))
    assert [list(run.queries.shape) for run in segments.runs] == [[3, 4], [2, 6]]
    split = Segments(lengths=(4, 8, 4), cp_size=2, cp_rank=1)
    assert [(list(run.queries.shape), run.keys.shape[1]) for run in split.runs] == [
        ([2, 1], 2),
        ([2, 1], 3),
        ([1, 2], 4),
        ([1, 2], 6),
    ]


def test_a_sequence_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 6 tokens does not divide into 4 chunks"):
        Segments(lengths=(8, 6), cp_size=2)


def test_sequences_of_many_lengths_share_few_calls() -> None:
    lengths = tuple(range(3, 19))
    query, key, value = heads(sum(lengths), 4), heads(sum(lengths), 2), heads(sum(lengths), 2) + 1
    ops = []
    for case in (lengths, (10,) * 16):
        segments = Segments(lengths=case)
        assert segments.runs
        assert len(segments.local_order) == sum(case)
        with DispatchedOps() as counter:
            varlen_attention(MODULE, query, key, value, None, softcap=2.0, segments=segments)
        ops.append(counter.total)
    assert ops[0] <= 4 * ops[1], f"{ops[0]} operations for 16 lengths, {ops[1]} for one"
    # Without a cap one operation of this project serves all.
    with DispatchedOps() as counter:
        varlen_attention(MODULE, query, key, value, None, segments=Segments(lengths=lengths))
    assert counter.ops["nrl.segment_attention.default"] == 1


@pytest.mark.parametrize("pattern", [None, Pattern(window=3), Pattern(window=3, is_chunked=True)])
def test_gradients_of_the_operation_are_those_of_its_formula(pattern: Pattern | None) -> None:
    segments = Segments(lengths=(2, 2, 5))
    inputs = [each.requires_grad_() for each in (heads(9, 4), heads(9, 2) * 2, heads(9, 2) + 1)]
    assert torch.autograd.gradcheck(
        lambda *given: varlen_attention(MODULE, *given, pattern, scaling=0.5, segments=segments)[0], inputs
    )


@pytest.mark.parametrize("value_dim", VALUE_DIMS)
@pytest.mark.parametrize("window", [1, 3, 20])
def test_a_window_hides_what_is_further_back(window: int, value_dim: int) -> None:
    query, key, value = heads(9, 4), heads(9, 4) * 2, heads(9, 4)[..., :value_dim] + 1
    found, _ = varlen_attention(
        MODULE, query, key, value, Pattern(window=window), scaling=1.0, segments=Segments(lengths=(2, 7))
    )
    for start, stop in ((0, 2), (2, 9)):
        for place in range(start, stop):
            seen = slice(max(start, place - window + 1), place + 1)
            scores = (key[:, :, seen] * query[:, :, place : place + 1]).sum(-1).softmax(-1)
            expected = (value[:, :, seen] * scores[..., None]).sum(2)
            torch.testing.assert_close(found[:, place], expected)


@pytest.mark.parametrize("value_dim", VALUE_DIMS)
@pytest.mark.parametrize("chunk", [1, 3, 20])
def test_a_chunk_hides_what_is_in_an_earlier_one(chunk: int, value_dim: int) -> None:
    query, key, value = heads(9, 4), heads(9, 4) * 2, heads(9, 4)[..., :value_dim] + 1
    pattern = Pattern(window=chunk, is_chunked=True)
    found, _ = varlen_attention(MODULE, query, key, value, pattern, scaling=1.0, segments=Segments(lengths=(2, 7)))
    for start, stop in ((0, 2), (2, 9)):
        for place in range(start, stop):
            seen = slice(start + (place - start) // chunk * chunk, place + 1)
            scores = (key[:, :, seen] * query[:, :, place : place + 1]).sum(-1).softmax(-1)
            expected = (value[:, :, seen] * scores[..., None]).sum(2)
            torch.testing.assert_close(found[:, place], expected)


def test_capped_scores_and_sinks_are_as_written_out() -> None:
    query, key, value = heads(9, 4) * 3, heads(9, 2) * 2, heads(9, 2) + 1
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    found, _ = varlen_attention(
        MODULE, query, key, value, None, scaling=0.5, softcap=2.0, s_aux=sinks, segments=Segments(lengths=(2, 7))
    )
    for start, stop in ((0, 2), (2, 9)):
        for place in range(start, stop):
            for head in range(4):
                seen = key[:, head // 2, start : place + 1]
                scores = torch.tanh((seen * query[:, head, place, None]).sum(-1) * 0.5 / 2.0) * 2.0
                weights = torch.cat([scores, sinks[head].expand(len(scores), 1)], dim=1).softmax(-1)[:, :-1]
                expected = (value[:, head // 2, start : place + 1] * weights[..., None]).sum(1)
                torch.testing.assert_close(found[:, place, head], expected)


def test_a_mask_of_the_model_itself_is_refused() -> None:
    inputs = (MODULE, heads(3, 4), heads(3, 2), heads(3, 2))
    with pytest.raises(ValueError, match="makes its own mask"):
        varlen_attention(*inputs, torch.ones(1, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="masks attention by its own pattern"):
        Pattern.of_mask(use_vmap=True, config=LlamaConfig())
    with pytest.raises(ValueError, match="which look alike"):
        Pattern.of_mask(local_size=8, config=LlamaConfig(attention_chunk_size=8, sliding_window=8))
