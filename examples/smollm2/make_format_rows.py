"""Writes 200 finished conversations in which sums are answered in a fixed form, for `make demo-sft`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

NUM_ROWS = 200


def main(data: Annotated[Path, typer.Option(help="Folder with sums.jsonl, as make_smollm2.py writes it.")]) -> None:
    """Write format.jsonl and format_held_out.jsonl beside the sums: `<think>18 + 1 = 19</think><answer>19</answer>`."""
    for name, most in (("sums", NUM_ROWS), ("sums_held_out", None)):
        lines = (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:most]
        rows = [_conversation(json.loads(line)) for line in lines]
        text = "".join(f"{json.dumps({'messages': row})}\n" for row in rows)
        (data / f"{name.replace('sums', 'format')}.jsonl").write_text(text, encoding="utf-8")


def _conversation(row: dict[str, str]) -> list[dict[str, str]]:
    question, answer = row["input"], row["output"]
    sum_of = question.removeprefix("What is ").removesuffix("?")
    said = f"<think>{sum_of} = {answer}</think><answer>{answer}</answer>"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": said}]


if __name__ == "__main__":
    typer.run(main)
