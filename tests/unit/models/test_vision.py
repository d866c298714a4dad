"""Images of vision-language models: processing, placeholders, positions, and the checks between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, Idefics3Processor, PreTrainedModel
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from nemo_rl.algorithms.preflight.model_check import check_model
from nemo_rl.config.backends import DTensorConfig, LoraConfig, MegatronConfig
from nemo_rl.config.policy import SequencePackingConfig, VisionConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.errors import ConfigError, DatasetError, ModelFolderError
from nemo_rl.models.adapters.lora import adapted_layers
from nemo_rl.models.dtensor.train_step import place_images
from nemo_rl.models.hf.loading import load_model_config, model_without_weights
from nemo_rl.models.hf.modules import HFSites
from nemo_rl.models.policy.fit import check_policy_fits
from nemo_rl.models.policy.microbatch import Microbatch, PassShape, build_microbatch, row_names
from nemo_rl.models.vision import FAMILIES, GRID, PIXELS, PromptImages, family_of, is_in_tower, vision_columns
from nemo_rl.models.vision.processor import processor_for
from nemo_rl.records.sites import SiteKind
from nemo_rl_tools.plan.setting import Model
from tests.helpers.tiny_model import tiny_policy, write_tiny_folder
from tests.helpers.vision_models import (
    GRIDS,
    SIZE,
    image_row,
    picture,
    vision_batch,
    vision_tokenizer,
    write_vision_folder,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("vision")
    for family in FAMILIES:
        write_vision_folder(found / family, family)
    return found


def ids_with(config: object, row: dict[str, torch.Tensor]) -> list[int]:
    family = family_of(config)  # type: ignore[arg-type]
    assert family is not None
    ids = [30, 31]
    for number, count in enumerate(family.features_of(row)):
        ids += [*[family.image_token] * count, 40 + number]
    return [*ids, 50, 51]


def test_columns_have_the_dims_of_the_models_tensors(root: Path) -> None:
    qwen, smol = (vision_columns(load_model_config(root / family)) for family in ("qwen2_5_vl", "smolvlm"))
    assert [(each.name, each.dtype, each.dims) for each in qwen] == [
        (PIXELS, "float32", (3 * 2 * 4 * 4,)),
        (GRID, "int64", (3,)),
    ]
    assert [(each.name, each.dims) for each in smol] == [(PIXELS, (3, SIZE, SIZE))]


def test_models_of_text_have_no_columns(tmp_path: Path) -> None:
    assert vision_columns(load_model_config(write_tiny_folder(tmp_path / "text"))) == ()


def test_positions_are_those_of_hugging_face(root: Path) -> None:
    config = load_model_config(root / "qwen2_5_vl")
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    family = family_of(config)
    assert family is not None
    for number, grids in enumerate(GRIDS):
        row = image_row(config, grids, seed=number)
        ids = torch.tensor(ids_with(config, row))
        found = family.places(ids, row).position_3L
        types = (ids == family.image_token).int()[None]
        expected, delta = model.model.get_rope_index(ids[None], types, row[GRID])
        assert torch.equal(found, expected[:, 0]), grids
        # The next token goes on where all axes have ended.
        assert int(found.max()) + 1 == len(ids) + int(delta)


@pytest.mark.parametrize("family_name", FAMILIES)
def test_rows_whose_placeholders_and_images_differ_are_named(family_name: str, root: Path) -> None:
    config = load_model_config(root / family_name)
    family = family_of(config)
    assert family is not None
    row = image_row(config, ((4, 4), (4, 4)), seed=0)
    ids = ids_with(config, row)
    assert family.row_problem(torch.tensor(ids), row) is None
    cut = torch.tensor(ids[:-5])
    assert "was the prompt cut" in str(family.row_problem(cut, row)) and "expected 8" in str(
        family.row_problem(cut, row)
    )
    # A sampled placeholder is text; in a prompt every one must be of an image.
    more = torch.tensor([*ids, family.image_token])
    assert family.row_problem(more, row) is None
    assert int((family.places(more, row).feature_L >= 0).sum()) == 8
    assert (
        family.prompt_problem(more, row)
        == f"expected 8 placeholder tokens ({family.image_token}) for its images, got 9"
    )
    broken = torch.tensor([*ids[:3], 60, *ids[3:]])
    assert "not one run of 4" in str(family.row_problem(broken, row))
    assert "expected [*" in str(family.row_problem(torch.tensor(ids), {**row, PIXELS: torch.zeros(3, 5)}))


def test_what_is_no_images_data_is_refused(root: Path) -> None:
    smol, qwen = (load_model_config(root / family) for family in ("smolvlm", "qwen2_5_vl"))
    zeros = {PIXELS: torch.zeros(1, 3, SIZE, SIZE)}
    family = family_of(smol)
    assert family is not None and "takes for padding" in str(
        family.row_problem(torch.tensor(ids_with(smol, zeros)), zeros)
    )
    row = image_row(qwen, ((4, 4),), seed=0)
    short = {**row, PIXELS: row[PIXELS][:-1]}
    family = family_of(qwen)
    assert family is not None and "expected 16 patches" in str(
        family.row_problem(torch.tensor(ids_with(qwen, row)), short)
    )


def test_equal_images_have_equal_digests(root: Path) -> None:
    config = load_model_config(root / "qwen2_5_vl")
    one, same, other = (PromptImages.of(image_row(config, ((4, 4),), seed=seed)) for seed in (1, 1, 2))
    assert one == same and hash(one) == hash(same) and one != other


def test_pictures_become_patches_and_as_many_placeholders(root: Path) -> None:
    folder = root / "qwen2_5_vl"
    tokenizer = vision_tokenizer("qwen2_5_vl")
    processor = processor_for(folder, tokenizer)
    assert processor.image_text == "<|vision_start|><|image_pad|><|vision_end|>"
    ids = tokenizer(f"{processor.image_text}two {processor.image_text}red")["input_ids"]
    assert processor.count(ids) == 2
    found, images = processor.expand(ids, [picture(0), picture(1, (16, 16))])
    # 24 x 16 pixels in patches of 4, of which four make a feature.
    assert images.tensors[GRID].tolist() == [[1, 4, 6], [1, 4, 4]]
    assert images.tensors[PIXELS].shape == (24 + 16, 96)
    token = load_model_config(folder).image_token_id
    assert found.count(token) == 6 + 4
    assert [each for each in found if each != token] == [each for each in ids if each != token]


@pytest.mark.parametrize("splits", [False, True])
def test_tiles_and_text_are_those_of_hugging_faces_processor(splits: bool, root: Path, tmp_path: Path) -> None:
    # transformers' processor of SmolVLM needs torchvision; that of Idefics 3 makes the same prompts.
    tokenizer = vision_tokenizer("smolvlm")
    sizes = {"size": {"longest_edge": 2 * SIZE}, "max_image_size": {"longest_edge": SIZE}}
    pixels = SmolVLMImageProcessorPil(**sizes, do_image_splitting=splits)
    folder = write_vision_folder(tmp_path / "smolvlm", "smolvlm")
    pixels.save_pretrained(str(folder))
    text, pictures = "<image>two<image>red", [picture(0, (32, 16)), picture(1, (16, 16))]
    ids, images = processor_for(folder, tokenizer).expand(tokenizer(text)["input_ids"], pictures)
    theirs = Idefics3Processor(pixels, vision_tokenizer("smolvlm"), image_seq_len=4)(
        text=[text], images=[pictures], add_special_tokens=False, return_tensors="pt"
    )
    assert list(ids) == theirs["input_ids"][0].tolist()
    torch.testing.assert_close(images.tensors[PIXELS], theirs[PIXELS][0].float(), rtol=0, atol=0)
    assert len(images.tensors[PIXELS]) > 2 if splits else len(images.tensors[PIXELS]) == 2


def test_prompts_without_a_place_for_each_picture_are_refused(root: Path) -> None:
    tokenizer = vision_tokenizer("smolvlm")
    with pytest.raises(DatasetError, match="expected 2 places for pictures, got 1"):
        processor_for(root / "smolvlm", tokenizer).expand(tokenizer("<image>")["input_ids"], [picture(0), picture(1)])


def place(folder: Path, batch: BatchedDataDict) -> Microbatch:
    family = family_of(load_model_config(folder))
    assert family is not None
    rows = range(batch.size)
    select_NT = torch.ones_like(batch.tensor("input_ids"), dtype=torch.bool)
    micro = build_microbatch(batch, rows, select_NT=select_NT, fields=(), is_packed=True, shape=PassShape())
    return place_images(micro, batch, family, names=row_names(batch, rows))


def test_a_worker_names_the_row_whose_images_do_not_fit(root: Path) -> None:
    folder = root / "qwen2_5_vl"
    batch = vision_batch(load_model_config(folder))
    batch["input_ids"] = batch.tensor("input_ids").clone()
    batch.tensor("input_ids")[2, 1] = 33
    with pytest.raises(ValueError, match=r"images of uid1_g0: expected 4 placeholder tokens .* of 2 images, got 3"):
        place(folder, batch)
    without = BatchedDataDict({name: column for name, column in batch.items() if name != GRID})
    with pytest.raises(ValueError, match=rf"the rows lack \['{GRID}'\]"):
        place(folder, without)


def test_rows_without_columns_of_images_are_text(root: Path) -> None:
    folder = root / "qwen2_5_vl"
    config = load_model_config(folder)
    inputs = place(folder, vision_batch(config, with_images=False)).inputs
    assert inputs.feature_ns is None and inputs.position_ids.dim() == 2


def test_what_cannot_train_a_tower_is_refused(root: Path, tmp_path: Path) -> None:
    megatron = MegatronConfig(enabled=True)
    folder = root / "smolvlm"
    with pytest.raises(ConfigError, match="'smolvlm' has a vision tower, and the Megatron worker"):
        check_policy_fits(tiny_policy(folder, dtensor_cfg=DTensorConfig(enabled=False), megatron_cfg=megatron))
    text = tiny_policy(write_tiny_folder(tmp_path / "text"), vision=VisionConfig(freeze_tower=True))
    with pytest.raises(ConfigError, match="'qwen3' has no vision tower that is known here"):
        check_policy_fits(text)
    split = DTensorConfig(tensor_parallel_size=2, sequence_parallel=True)
    with pytest.raises(ConfigError, match=r"sequence_parallel: 'smolvlm' has no plan for it"):
        check_policy_fits(tiny_policy(folder, dtensor_cfg=split))


def test_adapters_and_sites_leave_the_tower_alone(root: Path) -> None:
    for name in FAMILIES:
        config = load_model_config(root / name)
        model, family = model_without_weights(config, root / name), family_of(config)
        assert family is not None
        adapted = [layer.name for layer in adapted_layers(model, LoraConfig(enabled=True))]
        assert adapted and not [each for each in adapted if is_in_tower(each, family)]
        layers = [site.layer for site in HFSites(model).hook_points if site.kind is SiteKind.ATTN_OUT]
        assert layers == [0, 1]


def test_a_plan_counts_the_tower(root: Path) -> None:
    for name in FAMILIES:
        config = load_model_config(root / name)
        count = sum(weight.numel() for weight in model_without_weights(config, root / name).parameters())
        assert Model(config).num_parameters == count


@pytest.mark.parametrize("name", FAMILIES)
def test_a_small_model_of_the_family_is_checked_before_a_run(name: str, root: Path) -> None:
    packed = SequencePackingConfig(enabled=True)
    assert check_model(tiny_policy(root / name, sequence_packing=packed), cache=None) == []


def test_folders_that_take_no_images_are_refused(root: Path, tmp_path: Path) -> None:
    tokenizer = vision_tokenizer("smolvlm")
    with pytest.raises(ModelFolderError, match="the model takes none"):
        processor_for(write_tiny_folder(tmp_path / "text"), tokenizer)
    folder = write_vision_folder(tmp_path / "bare", "qwen2_5_vl")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"expected processor_config\.json or preprocessor_config\.json"):
        processor_for(folder, tokenizer)
