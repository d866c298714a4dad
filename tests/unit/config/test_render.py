"""`configs/grpo_base.yaml` is the schema, written out."""

from __future__ import annotations

from pathlib import Path

from nemo_rl.config.load import load_config
from nemo_rl.config.render import commented_defaults
from nemo_rl.config.schema_walk import iter_fields, section_class

ROOT = Path(__file__).parents[3]


def test_base_recipe_is_what_the_schema_renders() -> None:
    assert (ROOT / "configs/grpo_base.yaml").read_text(encoding="utf-8") == commented_defaults(), "run `make configs`"


def test_every_key_is_documented() -> None:
    assert [
        path for path, field in iter_fields() if not field.description and not section_class(field.annotation)
    ] == []


def test_base_recipe_equals_the_defaults(tmp_path: Path) -> None:
    needed = [
        "policy.model_name=m",
        "data.train.data_path=p",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
        "checkpointing.keep_top_k=null",
    ]
    (tmp_path / "empty.yaml").write_text("")
    assert load_config(ROOT / "configs/grpo_base.yaml", needed) == load_config(tmp_path / "empty.yaml", needed)
