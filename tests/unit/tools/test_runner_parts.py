"""Parts of the standalone runner: layouts as text, rows of tokens, files of routes, ranks of one machine."""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from nemo_rl.config.policy import ParallelSizes
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.distributed.collectives import RankSpec
from nemo_rl.distributed.local_job import ChildFailed, run_job
from nemo_rl.errors import UserError
from nemo_rl.records.sites import Direction, Selector, SiteKind
from nemo_rl.routes.shape import RouteShape
from nemo_rl_tools.runner.layout_text import LayoutText, smallest_world
from nemo_rl_tools.runner.prompts import PromptSpec, RunnerRows, batch_of, make_rows
from nemo_rl_tools.runner.rank import FORMAT, read_routes, write_routes
from tests.helpers.tiny_model import tiny_policy, write_tiny_folder

SHAPE = RouteShape(layers=(1, 3), top_k=2, num_experts=4)
MODEL = {"model_type": "qwen3_moe", "hidden_size": 32}
ROWS = RunnerRows(keys=("row_0", "row_1"), ids=((5, 6, 7), (5, 8)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(folder)


def rows_of(tokenizer: PreTrainedTokenizerBase, **settings: object) -> RunnerRows:
    return make_rows(PromptSpec(**settings), tokenizer, vocab_size=320, max_length=1000)  # type: ignore[arg-type]


# ---- layouts


def test_a_layout_becomes_the_settings_of_its_worker(folder: Path) -> None:
    layout = LayoutText.parse("worker=megatron tp=2 pp=2 ep=2 etp=1 sp mbs=1 recompute precision=bfloat16")
    policy = layout.put_into(tiny_policy(folder), num_rows=4, replays_routes=True)
    sizes = policy.parallel_sizes
    assert (sizes.tensor, sizes.pipeline, sizes.expert, sizes.expert_tensor) == (2, 2, 2, 1)
    assert policy.megatron_cfg.activation_checkpointing and sizes.sequence_parallel
    assert policy.router_replay.enabled and policy.precision == "bfloat16"
    assert (policy.train_global_batch_size, policy.train_micro_batch_size) == (4, 1)
    # What is not named is 1 or off.
    plain = LayoutText.parse("worker=dtensor").put_into(policy, num_rows=4, replays_routes=False)
    assert plain.dtensor_cfg.enabled and plain.parallel_sizes.replica_size == 1 and not plain.router_replay.enabled


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("tp=2", 2), ("ep=2", 2), ("tp=2 pp=2 ep=2 etp=1", 4), ("tp=2 ep=4 etp=1", 4), ("tp=2 ep=2", 2), ("dp=3 cp=2", 6)],
)
def test_experts_bring_data_parallel_ranks_where_no_others_hold_them(text: str, ranks: int) -> None:
    assert LayoutText.parse(text).world_size == ranks


@pytest.mark.parametrize(
    "text", ["tp", "tp=0", "tp=x", "tp=2 tp=4", "px=2", "worker=jax", "precision=int4", "sp=maybe", "weights="]
)
def test_a_layout_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="layout"):
        LayoutText.parse(text)


def test_the_dtensor_worker_has_no_pipeline(folder: Path) -> None:
    with pytest.raises(UserError, match="worker=megatron"):
        LayoutText.parse("worker=dtensor pp=2").put_into(tiny_policy(folder), num_rows=2, replays_routes=False)


def test_the_layout_of_a_recipe_has_as_many_ranks_as_its_experts_need() -> None:
    assert smallest_world(ParallelSizes(expert=2, expert_tensor=1)) == 2
    assert smallest_world(ParallelSizes(tensor=2, pipeline=2, expert=2, expert_tensor=1)) == 4
    assert smallest_world(ParallelSizes(tensor=2, expert=2, expert_tensor=2)) == 4
    assert smallest_world(ParallelSizes(context=2, expert_tensor=1)) == 2


# ---- rows


def test_sums_are_the_same_everywhere_and_differ_from_row_to_row(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = rows_of(tokenizer, num_rows=3, is_unequal=True)
    assert rows == rows_of(tokenizer, num_rows=3, is_unequal=True)
    assert [len(ids) for ids in rows.ids] == [137, 120, 103]
    assert tokenizer.decode(rows.ids[0][:12]).startswith("1+1=2, 1+2=3")
    assert tokenizer.decode(rows.ids[1][:12]).startswith("2+1=3, 2+2=4")


def test_padding_is_never_scored(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = rows_of(tokenizer, num_rows=2, is_unequal=True, length=20)
    batch = batch_of(rows)
    assert batch.tensor("token_mask").sum(1).tolist() == [19, 2]
    assert batch.tensor("input_lengths").tolist() == [20, 3]


def test_texts_files_and_token_ids(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    plain = rows_of(tokenizer, kind="text", text="sort 31")
    chat = rows_of(tokenizer, kind="text", text="sort 31", uses_chat_template=True)
    assert len(chat.ids[0]) > len(plain.ids[0])
    path = tmp_path / "a 'file' of mine"
    path.write_text("sort 31", encoding="utf-8")
    assert rows_of(tokenizer, kind="file", path=path) == plain
    path.write_text(json.dumps([[5, 6, 7], [5, 8]]), encoding="utf-8")
    assert rows_of(tokenizer, kind="token-ids", path=path) == ROWS


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[[5, 6", "JSON"),
        ("[5, 6]", "JSON list of rows"),
        ("[]", "JSON list of rows"),
        ('[["a", 5]]', "whole numbers"),
        ("[[true, 5]]", "whole numbers"),
        ("[[5]]", "2 to 1000 tokens"),
        ("[[5, 320]]", "token ids of 0 to 319"),
        ("[[5, -1]]", "token ids of 0 to 319"),
        (json.dumps([[5] * 1001]), "2 to 1000 tokens"),
    ],
)
def test_token_ids_that_are_none_are_refused(content, said, tokenizer, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        rows_of(tokenizer, kind="token-ids", path=path)


@pytest.mark.parametrize(
    "settings", [{"kind": "text"}, {"kind": "text", "text": "a", "length": 9}, {"kind": "file"}, {"kind": "token-ids"}]
)
def test_rows_without_a_source_are_refused(settings: dict[str, object], tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError):
        rows_of(tokenizer, **settings)


# ---- files of routes


def routes_NTLK() -> torch.Tensor:
    routes = torch.full((2, 3, 2, 2), -1, dtype=torch.int16)
    routes[0, :3] = torch.tensor([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[2, 0], [0, 1]]], dtype=torch.int16)
    routes[1, :2] = torch.tensor([[[3, 1], [2, 1]], [[1, 0], [3, 2]]], dtype=torch.int16)
    return routes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_routes(tmp_path / "it's routes", routes_NTLK(), ROWS, shape=SHAPE, model=MODEL)


def test_routes_come_back_for_rows_in_any_order_found_by_their_tokens(path: Path) -> None:
    held = read_routes(path)
    assert torch.equal(held.for_rows(ROWS, shape=SHAPE, model=MODEL, where=path), routes_NTLK())
    other = RunnerRows(keys=("x", "y", "z"), ids=((5, 8), (5, 6, 7), (5, 8)))
    assert torch.equal(held.for_rows(other, shape=SHAPE, model=MODEL, where=path), routes_NTLK()[[1, 0, 1]])
    with safe_open(str(path), framework="pt") as file:
        assert FORMAT in file.metadata()


def _rewrite(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, object]], None]) -> None:
    with safe_open(str(path), framework="pt") as file:
        manifest = json.loads(file.metadata()[FORMAT])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
    change(tensors, manifest)
    save_file(tensors, path, metadata={FORMAT: json.dumps(manifest)})


def swapped_order(tensors: dict[str, torch.Tensor], manifest: dict[str, object]) -> None:
    tensors["ids"][:2] = tensors["ids"][:2].flip(0)


def shifted_by_one(tensors: dict[str, torch.Tensor], manifest: dict[str, object]) -> None:
    tensors["ids"] = tensors["ids"].roll(1, dims=0)


def wrong_layers(tensors: dict[str, torch.Tensor], manifest: dict[str, object]) -> None:
    manifest["layers"] = [0, 3]


def other_tokens(tensors: dict[str, torch.Tensor], manifest: dict[str, object]) -> None:
    tensors["tokens"][1] += 1


def other_version(tensors: dict[str, torch.Tensor], manifest: dict[str, object]) -> None:
    manifest["version"] = 99


def fewer_rows(tensors: dict[str, torch.Tensor], manifest: dict[str, object]) -> None:
    tensors["lengths"] = tensors["lengths"][:1]


@pytest.mark.parametrize(
    "change", [swapped_order, shifted_by_one, wrong_layers, other_tokens, other_version, fewer_rows]
)
def test_a_changed_file_is_refused(change, path):
    _rewrite(path, change)
    with pytest.raises(UserError, match="routes"):
        read_routes(path)


@pytest.mark.parametrize(
    ("rows", "shape", "model", "said"),
    [
        (ROWS, RouteShape(layers=(0, 3), top_k=2, num_experts=4), MODEL, "another model: layers"),
        (ROWS, RouteShape(layers=(1, 3), top_k=2, num_experts=8), MODEL, "another model: num_experts"),
        (ROWS, SHAPE, {**MODEL, "hidden_size": 64}, "another model: hidden_size"),
        (RunnerRows(keys=("row_0",), ids=((5, 6),)), SHAPE, MODEL, "row_0 has 3 tokens, this one 2"),
        (RunnerRows(keys=("row_0",), ids=((5, 9, 7),)), SHAPE, MODEL, "row_0 has token 6 at position 1, this one 9"),
        (RunnerRows(keys=("row_7",), ids=((5, 9, 7),)), SHAPE, MODEL, "no routes of row_7"),
    ],
)
def test_routes_of_another_model_length_or_sequence_are_refused_by_name(rows, shape, model, said, path):
    with pytest.raises(UserError, match=said):
        read_routes(path).for_rows(rows, shape=shape, model=model, where=path)


@pytest.mark.parametrize("content", [b"", b"not safetensors", b"\x80\x04cposix\nsystem\n"])
def test_what_is_no_file_of_routes_is_never_unpickled(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(UserError, match="not a routes file"):
        read_routes(tmp_path / "f")
    with pytest.raises(UserError, match="no such routes file"):
        read_routes(tmp_path / "g")


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_routes(tmp_path / "file" / "routes", routes_NTLK(), ROWS, shape=SHAPE, model=MODEL)


# ---- selectors


def test_terms_narrow_the_kinds_before_them() -> None:
    chosen = Selector.parse("moe.*, layer.out & layer in 0..1, 5 & forward; logits; grad & name=model.layers.0.*")
    assert chosen.takes(SiteKind.ROUTER_IDS, 5) and not chosen.takes(SiteKind.ROUTER_IDS, 2)
    assert not chosen.takes(SiteKind.LAYER_OUT, 0, Direction.BACKWARD) and chosen.takes(SiteKind.LOGITS)
    assert chosen.takes_parameter("model.layers.0.mlp.gate.weight") and not chosen.takes_parameter("lm_head.weight")
    assert Selector.parse("*").kinds() == tuple(SiteKind)
    of_two = Selector.parse("grad & layer in 1..2")
    assert of_two.takes_parameter("model.layers.2.mlp.gate.weight")
    assert not of_two.takes_parameter("model.layers.0.mlp.gate.weight") and not of_two.takes_parameter("lm_head.weight")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "layers",
        "layer.out & layer in x",
        "logits & step=3",
        "__import__('os')",
        "a" * 20_000,
        "grad & name=",
        "layer.out & name=x",
        "attn.q & backward",
    ],
)
def test_a_selector_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="selector"):
        Selector.parse(text)


# ---- ranks of one machine


def rank_of(spec: RankSpec, add: int) -> int:
    return spec.rank + add


def unforeseen(spec: RankSpec) -> None:
    if spec.rank == 1:
        raise RuntimeError("broken")
    time.sleep(600)


def refused(spec: RankSpec) -> None:
    raise UserError(f"rank {spec.rank} refuses")


def killed(spec: RankSpec) -> None:
    if spec.rank == 0:
        os._exit(9)
    time.sleep(600)


def endless(spec: RankSpec) -> None:
    time.sleep(600)


def begins_its_answer(spec: RankSpec, rank: int, exit_code: int | None) -> None:
    if spec.rank == rank:
        answers = sys._getframe(1).f_locals["answers"]
        os.write(answers.fileno(), struct.pack("!i", 1000) + b"the beginning")
        if exit_code is not None:
            os._exit(exit_code)
    time.sleep(600)


@pytest.mark.slow
def test_the_first_end_of_a_job_is_what_its_caller_gets() -> None:
    assert run_job(1, rank_of, 5, timeout_s=60) == [5]
    assert run_job(2, rank_of, 5, timeout_s=180) == [5, 6]
    with pytest.raises(ChildFailed, match="rank 1: RuntimeError: broken"):
        run_job(2, unforeseen, timeout_s=180)
    with pytest.raises(UserError, match="refuses"):
        run_job(1, refused, timeout_s=180, is_apart=True)
    with pytest.raises(ChildFailed, match="rank 0 ended without a result, exit code 9"):
        run_job(1, killed, timeout_s=180, is_apart=True)
    with pytest.raises(ChildFailed, match=r"ranks \[0, 1\] did not end in time"):
        run_job(2, endless, timeout_s=3)
    with pytest.raises(ChildFailed, match="rank 0 ended without a result, exit code 9"):
        run_job(1, begins_its_answer, 0, 9, timeout_s=180, is_apart=True)
    # On a busy machine a rank may not have begun at the first deadline.
    for deadline in (5, 30, 120):
        with pytest.raises(ChildFailed, match="did not end in time") as late:
            run_job(1, begins_its_answer, 0, None, timeout_s=deadline, is_apart=True)
        if "while it sent its result" in str(late.value):
            break
    assert "rank 0 did not end in time while it sent its result" in str(late.value)
