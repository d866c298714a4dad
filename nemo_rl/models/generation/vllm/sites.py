"""`VllmSites` and `VllmRecorder`: tensors of vLLM's modules, recorded in each of its workers.

vLLM lays the tokens of all requests end to end, `[T, ...]`, fuses projections (split here by their own sizes), and
carries the residual stream as two tensors that the next norm adds (added here). What it computes inside a kernel, such
as the choice of experts, has no site. Hooks see the modules in eager mode alone. Invariant: nothing that a hook gets is
changed, and it is written before vLLM goes on, which overwrites it in place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from nemo_rl.errors import UserError
from nemo_rl.models.generation.recording import NEVER_IN_DECODING, ROW_KEY, write_logprobs
from nemo_rl.models.policy.hooks import (
    Deliver,
    Detach,
    Order,
    TapList,
    TokenPositions,
    at_input,
    at_output,
    first_tensor,
)
from nemo_rl.models.policy.observer import Capture, PassRows
from nemo_rl.models.policy.recording import RecordSink
from nemo_rl.records.record import DimSplit, RecordPlace, RecordWriter, TokenTable
from nemo_rl.records.sites import Direction, Selector, SiteKind
from nemo_rl.tracer.watch import GENERATION

__all__ = ["VllmRecorder", "VllmSites"]

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")
KNOWN_LAYERS = (
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "Qwen3MoeDecoderLayer",
)
"""Classes of layers whose two results are the output of the MLP and the residual stream before it is added."""
UNKNOWN = "vLLM's layers of class {name} are not among those whose parts are known: {known}"
FUSED_CHOICE = "vLLM chooses experts inside a kernel"
IN_LAYERS = tuple(kind for kind in SiteKind if kind.value.startswith(("layer.", "attn.", "mlp.", "moe.")))


class VllmSites(TapList):
    """The taps of one worker's model.

    Args:
        rank: of this worker among the `size` tensor-parallel ranks of its engine.
    """

    def __init__(self, model: torch.nn.Module, *, rank: int, size: int) -> None:
        super().__init__(order=Order.ROWS)
        self._rank, self._size = rank, size
        self.cannot(FUSED_CHOICE, SiteKind.ROUTER_IDS, SiteKind.ROUTER_WEIGHTS)
        self.cannot("decoding computes no loss and no gradients", *NEVER_IN_DECODING)
        parts = dict(model.named_modules())
        embeddings = [part for name, part in parts.items() if name.endswith("embed_tokens")]
        if embeddings:
            self.add(SiteKind.EMBED, None, at_output(embeddings[0]))
        processors = [part for name, part in parts.items() if name.endswith("logits_processor")]
        if processors:
            self.add(SiteKind.LOGITS, None, _at_logits(processors[0]), tokens=TokenPositions.KEPT)
        for name, part in parts.items():
            if match := LAYER.search(name):
                self._layer(int(match[1]), part)

    @classmethod
    def of(cls, runner: Any) -> VllmSites:
        return cls(
            runner.get_model(),
            rank=get_tensor_model_parallel_rank(),
            size=get_tensor_model_parallel_world_size(),
        )

    def _layer(self, number: int, layer: torch.nn.Module) -> None:
        kind = type(layer).__name__
        if kind not in KNOWN_LAYERS:
            self.cannot(UNKNOWN.format(name=kind, known=", ".join(KNOWN_LAYERS)), *IN_LAYERS)
            return
        children = dict(layer.named_children())
        self.add(SiteKind.LAYER_IN, number, _at_stream_in(layer))
        self._attention(number, children["self_attn"])
        self.add(SiteKind.MLP_IN, number, at_input(children["mlp"]))
        self._mlp(number, children["mlp"])
        self.add(SiteKind.MLP_OUT, number, at_output(children["mlp"]))
        self.add(SiteKind.LAYER_OUT, number, at_output(layer, lambda output: output[0] + output[1]))

    def _attention(self, number: int, attention: Any) -> None:
        sizes = (attention.q_size, attention.kv_size, attention.kv_size)
        # Ranks may share a head of keys and values; the first of them shows it.
        copies = max(1, self._size // attention.total_num_kv_heads)
        heads = DimSplit(index=self._rank, count=self._size)
        key_heads = DimSplit(index=self._rank // copies, count=self._size // copies)
        for place, kind in enumerate((SiteKind.ATTN_Q, SiteKind.ATTN_K, SiteKind.ATTN_V)):
            if kind is SiteKind.ATTN_Q or self._rank % copies == 0:
                split = heads if kind is SiteKind.ATTN_Q else key_heads
                self.add(kind, number, at_output(attention.qkv_proj, _part(sizes, place)), split=split)
        self.add(SiteKind.ATTN_CONTEXT, number, at_input(attention.o_proj), split=heads)
        self.add(SiteKind.ATTN_OUT, number, at_output(attention))

    def _mlp(self, number: int, mlp: torch.nn.Module) -> None:
        children, split = dict(mlp.named_children()), DimSplit(index=self._rank, count=self._size)
        if "gate_up_proj" in children:
            for place, kind in enumerate((SiteKind.MLP_GATE, SiteKind.MLP_UP)):
                self.add(kind, number, at_output(children["gate_up_proj"], _half(place)), split=split)
            self.add(SiteKind.MLP_ACT, number, at_input(children["down_proj"]), split=split)
            return
        self.cannot("experts multiply inside a kernel", SiteKind.MLP_GATE, SiteKind.MLP_UP, SiteKind.MLP_ACT)
        if "gate" in children:
            self.add(SiteKind.ROUTER_LOGITS, number, at_output(children["gate"]))


def _part(sizes: tuple[int, ...], place: int) -> Callable[[Any], torch.Tensor]:
    return lambda output: first_tensor(output).split(sizes, dim=-1)[place]


def _half(place: int) -> Callable[[Any], torch.Tensor]:
    return lambda output: first_tensor(output).chunk(2, dim=-1)[place]


def _at_stream_in(layer: torch.nn.Module) -> Callable[[Deliver], Detach]:
    def attach(deliver: Deliver) -> Detach:
        def look(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            named = dict(zip(("positions", "hidden_states", "residual"), args, strict=False)) | kwargs
            hidden, residual = named["hidden_states"], named["residual"]
            deliver(hidden if residual is None else hidden + residual)

        return layer.register_forward_pre_hook(look, with_kwargs=True).remove

    return attach


def _at_logits(processor: torch.nn.Module) -> Callable[[Deliver], Detach]:
    def attach(deliver: Deliver) -> Detach:
        def look(_: object, __: object, output: torch.Tensor | None) -> None:
            # One rank gathers them where the vocabulary is split.
            if output is not None:
                deliver(output)

        return processor.register_forward_hook(look).remove

    return attach


@dataclass(frozen=True, kw_only=True, slots=True)
class _VllmPass:
    every: PassRows
    """Their tokens among the T of the pass."""
    kept: PassRows
    """The last token of each request among those whose logits are computed."""
    num_requests: int


class VllmRecorder:
    """The recording of one step in one worker.

    Args:
        runner: vLLM's model runner of this worker.
        rank: of this worker among all that write to the folder.
        writes_whole: whether this worker shows what all ranks of its engine have alike.
    """

    def __init__(
        self, runner: Any, sites: VllmSites, *, folder: Path, rank: int, selector: str, writes_whole: bool
    ) -> None:
        self._runner, self._selector, self._writes_whole = runner, Selector.parse(selector), writes_whole
        self._writer = RecordWriter(folder, rank=rank)
        self._sink = RecordSink(self._writer, self._selector, on_refusal=self._refuse)
        self._numbers = count()
        self._problem: str | None = None
        self._current: _VllmPass | None = None
        self._scheduled: Any = None
        self._stack = ExitStack()
        self._stack.callback(self._watch_passes())
        for point in sites.hook_points:
            if self._selector.takes(point.kind, point.layer, Direction.FORWARD):
                is_split = point.split is not None and point.split.count > 1
                if is_split or writes_whole:
                    place = RecordPlace(kind=point.kind, layer=point.layer, phase=GENERATION)
                    self._stack.callback(point.attach(self._deliver(place, point.tokens, point.split)))

    @classmethod
    def of(cls, runner: Any, folder: Path, *, first_rank: int, selector: str) -> VllmRecorder:
        rank = get_tensor_model_parallel_rank()
        return cls(
            runner,
            VllmSites.of(runner),
            folder=folder,
            rank=first_rank + rank,
            selector=selector,
            writes_whole=rank == 0,
        )

    def close(self, *, is_complete: bool) -> str | None:
        """Detach every hook and end the files; return why they are not whole, or None."""
        self._stack.close()
        self._current = None
        if not is_complete or self._problem is not None:
            self._writer.abandon()
            return self._problem
        try:
            self._writer.close()
        except UserError as error:
            return str(error)
        return None

    def logprobs(self, keys: Sequence[str], tokens: Sequence[Sequence[int]], logprobs: Sequence[float]) -> None:
        """Record the log-probabilities of what was sampled, on the worker that shows what all have alike.

        Args:
            tokens: row, position and id of each token.
        """
        if not self._writes_whole or not self._selector.takes(SiteKind.LOGPROB, None, Direction.FORWARD):
            return
        row_R, position_R, token_R = torch.tensor(tokens, dtype=torch.int64).reshape(-1, 3).unbind(1)
        table = TokenTable(keys=tuple(keys), row_R=row_R, position_R=position_R, token_R=token_R)
        try:
            write_logprobs(self._writer, table, torch.tensor(logprobs, dtype=torch.float32))
        except UserError as error:
            self._refuse(error)

    def _refuse(self, error: UserError) -> None:
        self._problem = str(error)

    def _watch_passes(self) -> Callable[[], None]:
        """Let every pass of the runner tell its rows; return what ends that."""
        runner, execute = self._runner, self._runner.execute_model
        model = runner.get_model()

        def executing(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._scheduled = scheduled
            return execute(scheduled, *args, **kwargs)

        def begins(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
            self._current = self._pass_of(self._scheduled, ids)

        runner.execute_model = executing
        hook = model.register_forward_pre_hook(begins, with_kwargs=True)

        def stop() -> None:
            hook.remove()
            del runner.execute_model

        return stop

    def _pass_of(self, scheduled: Any, ids_T: torch.Tensor) -> _VllmPass | None:
        batch = self._runner.input_batch
        names = list(batch.req_ids[: batch.num_reqs])
        lengths = [int(scheduled.num_scheduled_tokens[name]) for name in names]
        keys: dict[str, int] = {}
        parts: list[tuple[int, int, int, int]] = []  # row, first position, first place, request
        place = 0
        for number, (name, length) in enumerate(zip(names, lengths, strict=True)):
            key = (self._runner.requests[name].sampling_params.extra_args or {}).get(ROW_KEY)
            if key is not None:
                row = keys.setdefault(key, len(keys))
                parts.append((row, int(batch.num_computed_tokens_cpu[number]), place, number))
            place += length
        if not parts:
            return None
        rows = [torch.full((lengths[number],), row) for row, _, _, number in parts]
        positions = [torch.arange(first, first + lengths[number]) for _, first, _, number in parts]
        places = [torch.arange(at, at + lengths[number]) for _, _, at, number in parts]
        row_R, position_R, place_R = torch.cat(rows), torch.cat(positions), torch.cat(places)
        token_R = ids_T[place_R.to(ids_T.device)].long().cpu()
        last = torch.tensor([len(part) for part in rows]).cumsum(0) - 1
        every = TokenTable(keys=tuple(keys), row_R=row_R, position_R=position_R, token_R=token_R)
        kept = TokenTable(keys=tuple(keys), row_R=row_R[last], position_R=position_R[last], token_R=token_R[last])
        requests = torch.tensor([number for *_, number in parts])
        found = _VllmPass(every=self._rows(every, place_R), kept=self._rows(kept, requests), num_requests=len(names))
        if self._writes_whole and self._selector.takes(SiteKind.TOKENS, None, Direction.FORWARD):
            place_of = RecordPlace(kind=SiteKind.TOKENS, phase=GENERATION)
            self._sink.see(Capture(place=place_of, value=ids_T[None], rows=found.every, is_first=True))
        return found

    def _rows(self, table: TokenTable, place_R: torch.Tensor) -> PassRows:
        return PassRows(number=next(self._numbers), at=(torch.zeros_like(place_R), place_R), table=table)

    def _deliver(self, place: RecordPlace, tokens: TokenPositions, split: DimSplit | None) -> Deliver:
        def deliver(value: torch.Tensor) -> None:
            current = self._current
            if current is None:
                return
            if tokens is TokenPositions.KEPT and len(value) != current.num_requests:
                # Logits of a prompt, which nobody here asks for.
                return
            rows = current.kept if tokens is TokenPositions.KEPT else current.every
            self._sink.see(
                Capture(place=place, value=value.detach()[None], rows=rows, split=split, is_first=self._writes_whole)
            )

        return deliver
