"""Recordings of an invented model: the same tensors, written as ranks of any layout would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from nemo_rl.records.record import DimSplit, RecordManifest, RecordPlace, RecordWriter, TokenTable, new_folder
from nemo_rl.records.sites import Direction, SiteKind

NUM_LAYERS, HIDDEN, VOCAB = 2, 8, 16
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
IN_LAYERS = (
    *(SiteKind.LAYER_IN, SiteKind.ATTN_Q, SiteKind.MLP_IN),
    *(SiteKind.ROUTER_IDS, SiteKind.MLP_OUT, SiteKind.LAYER_OUT),
)
SPLIT = (SiteKind.ATTN_Q, SiteKind.LOGITS)
"""Kinds of which a tensor rank has a part."""
LAST_STAGE = (SiteKind.LOGITS, SiteKind.LOGPROB)
Where = tuple[SiteKind, int | None, Direction]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes of the axes, and microbatches of a data rank."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    num_microbatches: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def places(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Rank, and its place on the axes pp, dp, cp, tp."""
        for rank in range(self.world):
            rest, tp = divmod(rank, self.tp)
            rest, cp = divmod(rest, self.cp)
            pp, dp = divmod(rest, self.dp)
            yield rank, pp, dp, cp, tp


@dataclass(kw_only=True)
class Truth:
    """The tensors that the model computes in any layout."""

    tokens: dict[str, torch.Tensor]
    """Key -> `[L]`."""
    values: dict[Where, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Site -> key -> `[L, ...]`."""
    loss: dict[str, float] = field(default_factory=dict)
    """Share of each sample."""
    grads: dict[str, torch.Tensor] = field(default_factory=dict)

    def sites(self) -> list[dict[str, object]]:
        """Return the sites as the manifest lists them."""
        found: list[Where] = [*self.values]
        found += [(SiteKind.LOSS, None, FORWARD)] if self.loss else []
        found += [(SiteKind.GRAD, None, FORWARD)] if self.grads else []
        return [{"kind": kind.value, "layer": layer, "direction": way.value} for kind, layer, way in found]


def whole_truth(*, seed: int = 0, num_samples: int = 4, dtype: torch.dtype = torch.float32) -> Truth:
    """Return random tensors at every kind of site."""
    random = torch.Generator().manual_seed(seed)
    tokens = {f"s{i}": torch.randint(0, 100, (5 + 3 * i,), generator=random) for i in range(num_samples)}
    truth = Truth(tokens=tokens)

    def put(kind: SiteKind, layer: int | None, width: tuple[int, ...], way: Direction = FORWARD) -> None:
        drawn = {key: torch.randn(len(ids), *width, generator=random) for key, ids in tokens.items()}
        truth.values[(kind, layer, way)] = {key: value.to(dtype) for key, value in drawn.items()}

    put(SiteKind.EMBED, None, (HIDDEN,))
    for layer in range(NUM_LAYERS):
        for kind in IN_LAYERS:
            put(kind, layer, (HIDDEN,))
        put(SiteKind.LAYER_OUT, layer, (HIDDEN,), BACKWARD)
        ids = {key: torch.randint(0, 8, (len(own), 2), generator=random) for key, own in tokens.items()}
        truth.values[(SiteKind.ROUTER_IDS, layer, FORWARD)] = ids
    put(SiteKind.LOGITS, None, (VOCAB,))
    put(SiteKind.LOGPROB, None, ())
    # Sums of quarters are exact in any order.
    truth.loss = {key: 0.25 * i for i, key in enumerate(tokens)}
    truth.grads = {f"model.layers.{layer}.w": torch.randn(4, HIDDEN, generator=random) for layer in range(NUM_LAYERS)}
    return truth


def one_site(values: torch.Tensor, *, kind: SiteKind = SiteKind.LOGPROB, key: str = "s0") -> Truth:
    """Return the tensors of one sample at one site."""
    return Truth(tokens={key: torch.arange(len(values)) % 50}, values={(kind, None, FORWARD): {key: values}})


def write_recording(folder: Path, truth: Truth, layout: Layout | None = None, /, **manifest: object) -> Path:
    """Write a recording and return its folder; `manifest` replaces fields of the manifest."""
    layout = layout or Layout()
    sizes = {"world": layout.world, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp, "pp": layout.pp}
    fields: dict[str, object] = {
        "run_id": folder.name,
        "model": {"type": "invented", "layers": NUM_LAYERS},
        "layout": sizes,
        "engine": "dtensor",
        "precision": "float32",
        "selector": "*",
        "phases": ("train",),
        "sites": tuple(truth.sites()),
    }
    new_folder(folder, RecordManifest(**(fields | manifest)))  # type: ignore[arg-type]
    for rank, pp, dp, cp, tp in layout.places():
        with closing(RecordWriter(folder, rank=rank)) as writer:
            for microbatch in range(layout.num_microbatches):
                own = list(truth.tokens)[dp :: layout.dp][microbatch :: layout.num_microbatches]
                _write_pass(writer, truth, layout, keys=own, at=(pp, cp, tp), microbatch=microbatch)
            for name, grad in truth.grads.items():
                if _stage(int(name.split(".")[2]), layout) == pp:
                    writer.tensor(RecordPlace(kind=SiteKind.GRAD, name=name, phase="train"), grad, tokens=None)
    return folder


def zigzag(length: int, cp: int, size: int) -> torch.Tensor:
    """Return the positions of a context rank: the chunk that is its own, and the one as far from the end."""
    chunks = torch.arange(length).tensor_split(2 * size)
    return torch.cat((chunks[cp], chunks[2 * size - 1 - cp]))


def _write_pass(
    writer: RecordWriter, truth: Truth, layout: Layout, *, keys: list[str], at: tuple[int, int, int], microbatch: int
) -> None:
    pp, cp, tp = at
    positions = {key: zigzag(len(truth.tokens[key]), cp, layout.cp) for key in keys}
    table = TokenTable(
        keys=tuple(keys),
        row_R=torch.cat([torch.full_like(own, row) for row, own in enumerate(positions.values())] or [torch.zeros(0)]),
        position_R=torch.cat([*positions.values()] or [torch.zeros(0)]),
        token_R=torch.cat([truth.tokens[key][own] for key, own in positions.items()] or [torch.zeros(0)]),
    )
    name = writer.tokens(table)
    is_last = pp == layout.pp - 1
    for (kind, layer, direction), values in truth.values.items():
        stage = _stage(layer, layout) if layer is not None else layout.pp - 1 if kind in LAST_STAGE else 0
        if stage != pp or not keys:
            continue
        value = torch.cat([values[key][own] for key, own in positions.items()])
        place = RecordPlace(kind=kind, layer=layer, direction=direction, phase="train", microbatch=microbatch)
        if kind in SPLIT and layout.tp > 1:
            part = value.chunk(layout.tp, dim=-1)[tp]
            writer.tensor(place, part, tokens=name, split=DimSplit(index=tp, count=layout.tp))
        else:
            writer.tensor(place, value, tokens=name)
    if is_last and truth.loss:
        loss = torch.tensor(sum(truth.loss[key] for key in keys))
        writer.tensor(RecordPlace(kind=SiteKind.LOSS, phase="train", microbatch=microbatch), loss, tokens=None)


def _stage(layer: int, layout: Layout) -> int:
    return min(layer * layout.pp // NUM_LAYERS, layout.pp - 1)


def changed(values: Mapping[str, torch.Tensor], key: str, index: object, by: float) -> dict[str, torch.Tensor]:
    """Return a copy of the values of a site in which some of one sample are larger."""
    copy = {name: value.clone() for name, value in values.items()}
    copy[key][index] += by  # type: ignore[index]
    return copy
