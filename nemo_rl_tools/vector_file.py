"""`convert_vector`: a vector of another program as a file that the tracer projects on."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file

from nemo_rl.errors import UserError
from nemo_rl.models.policy.trace_parts import TENSOR, read_vector
from nemo_rl.tracer.reducer import VECTOR, VECTOR_FILES
from nemo_rl.utils.exits import machine_problem
from nemo_rl.utils.files import give_usual_mode, replace_file

__all__ = ["convert_vector"]


def convert_vector(source: Path, out: Path, *, normalize: bool) -> tuple[int, ...]:
    """Write a vector that was saved with torch, or as safetensors, as an artifact of the tracer; return its shape.

    Args:
        out: a file that ends in `.safetensors`, whose name without the ending is that of the vector.
        normalize: give the vector, or the vector of each layer, length 1.

    Raises:
        UserError: the source is no vector, is not finite, or has length 0 where it shall be normalised.
    """
    if out.suffix != VECTOR_FILES[0] or VECTOR.fullmatch(out.stem) is None:
        raise UserError(f"{out}: expected NAME{VECTOR_FILES[0]}, with a name of letters, digits, '_' and '-'")
    found = read_vector(source)
    if not bool(found.isfinite().all()):
        raise UserError(f"{source}: expected finite numbers, got NaN or infinity")
    if normalize:
        length = found.double().norm(dim=-1, keepdim=True)
        if not bool((length > 0).all()):
            raise UserError(f"{source}: a vector of length 0 cannot be normalised; leave --normalize out")
        found = (found.double() / length).float()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, lambda temporary: save_file({TENSOR: found.contiguous()}, temporary))
        give_usual_mode(out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {machine_problem(error) or error}") from error
    return tuple(found.shape)
