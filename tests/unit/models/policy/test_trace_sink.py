"""What a rank offers to the hub, and what it does with what it cannot show."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nemo_rl.errors import UserError
from nemo_rl.models.policy.observer import Capture, PassRows
from nemo_rl.models.policy.trace_parts import Vectors
from nemo_rl.models.policy.tracing import TracedStep, TraceSink
from nemo_rl.records.record import RecordPlace, TokenTable
from nemo_rl.records.sites import Direction, SiteKind
from nemo_rl.tracer.frame import FramePart, FrameTable, decode
from nemo_rl.tracer.link import DirectSender, HubAddress, HubLink
from nemo_rl.tracer.protocol import Role
from nemo_rl.tracer.watch import WatchPlan

NOWHERE = HubAddress(host="127.0.0.1", port=9, token="t")


class Line(HubLink):
    """A line that keeps what is offered."""

    def __init__(self) -> None:
        super().__init__(NOWHERE, Role.RANK, hello={}, memory_bytes=1 << 20)
        self.messages: list[bytes] = []

    def open(self) -> None:
        pass

    def offer(self, message: bytes) -> bool:
        self.messages.append(message)
        return True


def seen(
    *watches: str, capture: Capture, keys: tuple[str, ...] = ("b",), folder: Path | None = None
) -> tuple[list, list]:
    """What goes to the hub, and what is reported."""
    line, problems = Line(), []
    step = TracedStep(run="r", number=10, plan=WatchPlan.parse(watches), keys=frozenset(keys))
    sink = TraceSink(
        step,
        phase="train",
        outlet=DirectSender(line),
        rank=1,
        axes={"dp": 1},
        vectors=Vectors(folder),
        on_problem=problems.append,
    )
    place = capture.place
    if sink.takes(place.kind, place.layer, place.direction):
        sink.see(capture)
    return [decode(message) for message in line.messages], problems


def sight_of(value: torch.Tensor, kind: SiteKind = SiteKind.LAYER_OUT, **changes: object) -> Capture:
    """Two rows of three and two tokens, padded."""
    row_R, position_R = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 0, 1])
    table = TokenTable(keys=("a", "b"), row_R=row_R, position_R=position_R, token_R=torch.arange(5) + 40)
    rows = PassRows(number=0, at=(row_R, position_R), table=table)
    parts = {"place": RecordPlace(kind=kind, layer=2), "value": value, "rows": rows, "is_first": True, **changes}
    return Capture(**parts)  # type: ignore[arg-type]


def test_whole_tensors_are_of_all_tokens_and_no_padding() -> None:
    value = torch.full((2, 3, 4), 100.0)
    value[0], value[1, :2] = 1.0, 2.0
    [part], problems = seen("layer.out | stats", capture=sight_of(value))
    assert isinstance(part, FramePart) and not problems
    assert part.payload[:5].tolist() == [20.0, 28.0, 44.0, 1.0, 2.0]
    assert (part.rank, part.where.step, part.where.site.text) == (1, 10, "layer.out[2]")


def test_tokens_are_those_of_the_rows_that_are_shown() -> None:
    value = torch.arange(24.0).reshape(2, 3, 4)
    (table, part), problems = seen("layer.out | full", capture=sight_of(value))
    assert isinstance(table, FrameTable) and isinstance(part, FramePart) and not problems
    assert table.tokens.tolist() == [[1, 1], [0, 1], [43, 44]]
    assert part.payload.tolist() == value[1, :2].tolist() and part.table == table.name
    assert seen("layer.out | full", capture=sight_of(value), keys=("c",)) == ([], [])


def test_ranks_with_the_same_tensor_are_silent_but_one() -> None:
    assert seen("layer.out | stats", capture=sight_of(torch.ones(2, 3, 4), is_first=False)) == ([], [])


def test_what_is_not_watched_is_not_shown() -> None:
    value = torch.ones(2, 3, 4)
    for watch in ("layer.in | stats", "layer.out & layer in 0..1 | stats", "layer.out | stats | prev_logprobs"):
        assert seen(watch, capture=sight_of(value)) == ([], []), watch
    assert seen("layer.out | stats | every 3", capture=sight_of(value)) == ([], [])
    assert seen("layer.out & backward | stats", capture=sight_of(value)) == ([], [])
    recomputed = RecordPlace(kind=SiteKind.LAYER_OUT, layer=2, is_recomputed=True)
    assert seen("layer.out | stats", capture=sight_of(value, place=recomputed)) == ([], [])
    [part], _ = seen("layer.out | stats | train; recomputed", capture=sight_of(value, place=recomputed))
    assert part.where.site.is_recomputed


def test_parameters_are_chosen_by_name() -> None:
    place = RecordPlace(kind=SiteKind.PARAM, name="model.layers.1.mlp.up_proj.weight")
    weight = Capture(place=place, value=torch.full((3, 4), 2.0), is_first=True)
    [part], _ = seen("param & name=*.up_proj.* | norm", capture=weight)
    assert part.payload.tolist() == pytest.approx([48.0], rel=1e-6)
    assert seen("param & name=*.down_proj.* | norm", capture=weight) == ([], [])
    [part], _ = seen("param & layer in 1 | norm", capture=weight)
    assert part.where.site.text == "param[model.layers.1.mlp.up_proj.weight]"


def test_what_cannot_be_computed_is_reported_and_the_step_goes_on() -> None:
    # A reducer that meets what nobody has foreseen: rows that point beyond the tensor.
    broken = sight_of(torch.ones(1, 1, 4))
    found, [problem] = seen("layer.out | stats", capture=broken)
    assert found == [] and problem.startswith("layer.out, layer 2: IndexError")


def test_no_token_is_no_problem() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    table = TokenTable(keys=("a",), row_R=empty, position_R=empty, token_R=empty)
    rows = PassRows(number=0, at=(empty, empty), table=table)
    found, problems = seen("layer.out | stats; full; sample(2)", capture=sight_of(torch.ones(1, 2, 4), rows=rows))
    assert not problems and [part.payload[0] for part in found] == [0.0]


def test_vectors_are_of_one_folder_and_fit_their_site(tmp_path: Path) -> None:
    save_file({"vector": torch.stack([torch.full((4,), float(n)) for n in range(3)])}, tmp_path / "v.safetensors")
    save_file({"other": torch.ones(4)}, tmp_path / "w.safetensors")
    value = torch.ones(2, 3, 4)
    (_, part), problems = seen("layer.out | project(v)", capture=sight_of(value), folder=tmp_path)
    assert np.array_equal(part.payload, [[8.0], [8.0]]) and not problems
    for name, text in {"w": "expected a tensor 'vector'", "x": "cannot be read"}.items():
        found, [problem] = seen(f"layer.out | project({name})", capture=sight_of(value), folder=tmp_path)
        assert not [part for part in found if isinstance(part, FramePart)] and text in problem
    with pytest.raises(UserError, match="expected 5 numbers"):
        Vectors(tmp_path).of_layer("v", 0, size=5)
    with pytest.raises(UserError, match="rows for layers 0 to 2"):
        Vectors(tmp_path).of_layer("v", 3, size=4)
    with pytest.raises(UserError, match="no folder of vectors"):
        Vectors(None).of_layer("v", 0, size=4)
    with pytest.raises(UserError, match="a name, not a path"):
        Vectors(tmp_path).of_layer("../v", 0, size=4)


@pytest.mark.parametrize("saved", [torch.arange(4.0), {"vector": torch.arange(4.0, dtype=torch.bfloat16)}])
def test_a_vector_may_be_saved_by_torch(tmp_path: Path, saved: object) -> None:
    torch.save(saved, tmp_path / "v.pt")
    assert Vectors(tmp_path).of_layer("v", 2, size=4).tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(UserError, match="expected 5 numbers"):
        Vectors(tmp_path).of_layer("v", 2, size=5)
    save_file({"vector": torch.ones(4)}, tmp_path / "v.safetensors")
    with pytest.raises(UserError, match=r"expected one file, got .*v.safetensors and .*v.pt; remove one"):
        Vectors(tmp_path).of_layer("v", 2, size=4)


class _Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("ran"),)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (torch.ones(2, 3, 4), r"shape \[h\] or \[L, h\], got torch.float32 \[2, 3, 4\]"),
        (torch.arange(4), "expected floating-point numbers .*, got torch.int64"),
        ({"other": torch.ones(4)}, r"a dict with a tensor 'vector', got \['other'\]"),
        ([torch.ones(4)], "expected a tensor, or a dict"),
        (_Runs(), "loadable without running code"),
    ],
)
def test_a_torch_file_that_is_no_vector_is_refused(tmp_path, saved, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(saved, tmp_path / "v.pt")
    with pytest.raises(UserError, match=said):
        Vectors(tmp_path).of_layer("v", 0, size=4)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "v.pt").write_bytes(b"no torch file")
    with pytest.raises(UserError, match="expected a tensor of torch.save"):
        Vectors(tmp_path).of_layer("v", 0, size=4)


def test_the_same_tokens_are_drawn_whoever_has_them() -> None:
    value = torch.arange(24.0).reshape(2, 3, 4)
    (table, part), _ = seen("layer.out | sample(2)", capture=sight_of(value))
    again = sight_of(value.flip(0))
    assert again.rows is not None
    swapped = PassRows(
        number=0,
        at=(1 - again.rows.at[0], again.rows.at[1]),
        table=TokenTable(
            keys=("b", "a"),
            row_R=1 - again.rows.table.row_R,
            position_R=again.rows.table.position_R,
            token_R=again.rows.table.token_R,
        ),
    )
    (other, same), _ = seen("layer.out | sample(2)", capture=sight_of(value.flip(0), rows=swapped))
    assert {(table.keys[row], at) for row, at, _ in table.tokens.T.tolist()} == {
        (other.keys[row], at) for row, at, _ in other.tokens.T.tolist()
    }
    assert sorted(part.payload.tolist()) == sorted(same.payload.tolist())


def test_a_site_without_its_direction_is_not_taken() -> None:
    plan = WatchPlan.parse(["layer.out & forward | stats"])
    assert not plan.looks_at(SiteKind.LAYER_OUT, 0, Direction.BACKWARD, phase="train", step=1)
