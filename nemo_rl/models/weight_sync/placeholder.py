"""`Placeholder`: a tensor without values that notes which part of a weight is copied where.

A model's own loaders run over placeholders of its weights. They slice and reshape them as they would slice weights,
and every copy into a parameter tells the part of the weight that it takes: once to record what a rank of an engine
consumes, and at each refit to put the part that has come into its place. Used by the engines of
`refit_transport: shards`.
Invariant: a loader that needs values, or takes something that is no box of the weight, is refused, never guessed; it
gets the weight whole (`ShardLoader`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_rl.errors import WorkerError
from nemo_rl.models.hf.files import Box

__all__ = ["PartRefused", "Placeholder", "PlaceholderView", "WeightSource", "merged_boxes", "placeholder_of"]

_Strided = list[tuple[int, int]]
"""Size and stride of dims, in elements."""


class PartRefused(WorkerError):
    """A loader needs more of a weight than a box of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceholderView:
    """A strided view of a whole, contiguous weight."""

    name: str
    """Name of the weight in Hugging Face naming."""
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    meta: torch.Tensor
    """The view, on the meta device."""

    @property
    def box(self) -> Box:
        """Return the part of the weight that the view shows.

        Raises:
            PartRefused: its elements are no box.
        """
        first = self.meta.storage_offset()
        dims = [(n, int(stride)) for n, stride in zip(self.meta.shape, self.meta.stride(), strict=True) if n > 1]
        start = _unravel(first, self.shape)
        end = _unravel(first + sum((n - 1) * stride for n, stride in dims), self.shape)
        size = tuple(b - a + 1 for a, b in zip(start, end, strict=True))
        is_box = self.meta.numel() > 0 and all(n > 0 for n in size)
        if not is_box or _merged(dims) != _merged(list(zip(size, _strides(self.shape), strict=True))):
            raise _refused(self.name, f"it takes elements that are no box of {self.shape}")
        return Box(start=start, size=size)

    def of(self, part: torch.Tensor, *, held: Box) -> torch.Tensor:
        """Return the view's elements, in its shape, of a tensor that is the box `held` of the weight."""
        strides = part.stride()

        def steps(offset: Sequence[int]) -> int:
            return sum(a * b for a, b in zip(offset, strides, strict=True))

        start = _unravel(self.meta.storage_offset(), self.shape)
        offset = steps([a - b for a, b in zip(start, held.start, strict=True)]) + part.storage_offset()
        own = [steps(_unravel(stride, self.shape)) for stride in self.meta.stride()]
        return part.as_strided(tuple(self.meta.shape), own, offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSource:
    """The weight that a placeholder stands for, and what becomes of its copies."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    copy: Callable[[torch.Tensor, PlaceholderView], None]
    """Given the destination, and the part that a loader copies into it."""


class Placeholder(torch.Tensor):
    """Shape, dtype and device of a view of a weight; see the module."""

    _source: WeightSource
    _meta: torch.Tensor

    @staticmethod
    def __new__(cls: type[Placeholder], meta: torch.Tensor, source: WeightSource) -> Placeholder:
        made: Placeholder = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=source.device, requires_grad=False
        )
        made._source, made._meta = source, meta
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.Tensor.copy_ and isinstance(args[1], cls):
            return _copied(args[0], args[1])
        if func is torch.Tensor.__setitem__ and isinstance(args[2], cls):
            return _copied(args[0][args[1]], args[2])
        first = next((each for each in (*args, *named.values()) if isinstance(each, cls)), None)
        if first is None:
            # In a list, as of torch.cat.
            raise _refused("a weight", f"it calls {_name_of(func)} on several")
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return first._source.device
        if func in _SAME:
            return first
        if func is torch.Tensor.to:
            asked = [each for each in (*args[1:], *named.values()) if isinstance(each, torch.dtype | torch.Tensor)]
            if any((each.dtype if isinstance(each, torch.Tensor) else each) != first.dtype for each in asked):
                raise _refused(first._source.name, "it casts it, and the policy sends the dtype of the engine's model")
            return first
        return _on_meta(first, func, args, named)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise _refused("a weight", f"it calls {func}")


_SAME = frozenset({torch.Tensor.contiguous, torch.Tensor.cpu, torch.Tensor.cuda})
"""Functions whose result has the same elements, wherever they lie."""


def placeholder_of(source: WeightSource) -> Placeholder:
    return Placeholder(torch.empty(source.shape, dtype=source.dtype, device="meta"), source)


def _copied(target: torch.Tensor, given: Placeholder) -> torch.Tensor:
    source = given._source
    if isinstance(target, Placeholder) or target.numel() != given.numel():
        raise _refused(source.name, f"it copies {tuple(given.shape)} into {tuple(target.shape)}")
    source.copy(target, PlaceholderView(name=source.name, shape=source.shape, meta=given._meta))
    return target


def _on_meta(first: Placeholder, func: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Call a function on views without values: a view of the same weight is a placeholder again, a number is one."""
    source, meta = first._source, first._meta
    version = meta._version

    def bare(value: Any) -> Any:
        return value._meta if isinstance(value, Placeholder) else value

    def wrapped(value: Any) -> Any:
        if isinstance(value, tuple | list) and any(isinstance(each, torch.Tensor) for each in value):
            return type(value)(map(wrapped, value)) if type(value) in (tuple, list) else tuple(map(wrapped, value))
        if not isinstance(value, torch.Tensor):
            return value
        is_view = value.untyped_storage()._cdata == meta.untyped_storage()._cdata and value.dtype == source.dtype
        if not is_view or meta._version != version:
            raise _refused(source.name, f"it calls {_name_of(func)}, whose result is no view")
        return Placeholder(value, source)

    try:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*map(bare, args), **{key: bare(value) for key, value in named.items()})
    except (RuntimeError, NotImplementedError) as error:
        raise _refused(source.name, f"it calls {_name_of(func)}: {str(error).splitlines()[0]}") from error
    if meta._version != version:
        raise _refused(source.name, f"it calls {_name_of(func)}, which changes it")
    return wrapped(result)


def _refused(name: str, why: str) -> PartRefused:
    return PartRefused(f"a loader of the engine needs more of {name} than a part of it: {why}", stage="refit")


def _name_of(func: Callable[..., Any]) -> str:
    return func.__name__


def _strides(shape: Sequence[int]) -> list[int]:
    strides, step = list[int](), 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return strides[::-1]


def _unravel(offset: int | torch.SymInt, shape: Sequence[int]) -> tuple[int, ...]:
    found, left = [], int(offset)
    for stride in _strides(shape):
        found.append(left // stride)
        left %= stride
    return tuple(found)


def _merged(dims: _Strided) -> _Strided:
    """Return sizes and strides of the same elements in as few dims as possible, the outer one first."""
    found: _Strided = []
    for n, stride in sorted((each for each in dims if each[0] > 1), key=lambda each: -each[1]):
        if found and found[-1][1] == n * stride:
            found[-1] = (found[-1][0] * n, stride)
        else:
            found.append((n, stride))
    return found


def merged_boxes(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """Return as few boxes as a merge of neighbours gives, without those that lie in others.

    Example:
        >>> merged_boxes([Box(start=(row, 0), size=(1, 4)) for row in (0, 1, 3)])
        (Box(start=(0, 0), size=(2, 4)), Box(start=(3, 0), size=(1, 4)))
    """
    found = sorted(set(boxes), key=lambda box: box.start)
    for dim in range(len(found[0].start) if found else 0):
        merged: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Box]] = {}
        for box in sorted(found, key=lambda box: box.start[dim]):
            beside = (box.start[:dim] + box.start[dim + 1 :], box.size[:dim] + box.size[dim + 1 :])
            runs = merged.setdefault(beside, [])
            if runs and runs[-1].start[dim] + runs[-1].size[dim] == box.start[dim]:
                runs[-1] = runs[-1].along(dim, 0, runs[-1].size[dim] + box.size[dim])
            else:
                runs.append(box)
        found = [box for runs in merged.values() for box in runs]
    inner = {box for box in found for other in found if box != other and other.meet(box) == box}
    return tuple(sorted((box for box in found if box not in inner), key=lambda box: box.start))
