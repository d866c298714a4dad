"""Pictures of prompts: from every kind of row, refused by name where they are none, and drawn ones by their seed."""

from __future__ import annotations

import base64
import io
import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb

from nemo_rl.config.data import DataConfig, DatasetConfig
from nemo_rl.data import pictures as pictures_module
from nemo_rl.data.datasets import PromptSet, build_prompt_sets
from nemo_rl.data.pictures import Picture, pictures_of
from nemo_rl.data.sources import shape_problems
from nemo_rl.errors import DatasetError
from nemo_rl.models.vision import PIXELS
from nemo_rl.models.vision.processor import PromptPictures, processor_for
from tests.helpers.vision_models import picture, vision_tokenizer, write_vision_folder


def png(seed: int, size: tuple[int, int] = (24, 16)) -> bytes:
    buffer = io.BytesIO()
    picture(seed, size).save(buffer, "PNG")
    return buffer.getvalue()


def test_a_row_gives_pictures_as_paths_bytes_images_and_lists(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    same = [
        "a.png",
        str(tmp_path / "a.png"),
        png(1),
        {"bytes": png(1), "path": None},
        {"bytes": None, "path": "a.png"},
        [png(1)],
    ]
    digests = {pictures_of(value, folder=tmp_path)[0].digest for value in same}
    assert len(digests) == 1
    assert pictures_of(None, folder=None) == () and pictures_of([], folder=None) == ()
    [decoded] = pictures_of(picture(1), folder=None)
    assert decoded.decode().tobytes() == picture(1).tobytes()
    assert [each.decode().size for each in pictures_of([png(1), png(2, (8, 32))], folder=None)] == [(24, 16), (8, 32)]


def url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def test_forms_of_other_data_sets_give_the_picture(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    forms: list[object] = [
        {"image": "a.png"},
        {"image": {"bytes": png(1)}},
        {"url": url(png(1))},
        {"image_url": {"url": url(png(1))}},
        {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}},
        [{"type": "image", "path": None, "image": png(1)}],
        url(png(1)),
    ]
    assert {each.digest for form in forms for each in pictures_of(form, folder=tmp_path)} == {Picture.of(png(1)).digest}
    for form, message in (
        ({"picture": "a.png"}, "expected one of the keys bytes, path, image, url, image_url of a picture, got picture"),
        ({"url": "https://example.org/a.png"}, "https://example.org/a.png: pictures of other machines.*download them"),
        ("s3://bucket/a.png", "pictures of other machines are not fetched"),
        ("data:image/png;base64,###", "the data URL is damaged"),
    ):
        with pytest.raises(DatasetError, match=message):
            pictures_of(form, folder=tmp_path)


MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK", "YCbCr")
KINDS = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK", "YCbCr"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P", "RGB"),
    "BMP": ("1", "L", "P", "RGB"),
    "TIFF": ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16"),
}
FILES = [(kind, mode) for kind, modes in KINDS.items() for mode in modes]


@pytest.mark.parametrize(("kind", "mode"), FILES, ids=[f"{kind}-{mode}" for kind, mode in FILES])
@pytest.mark.parametrize("orientation", [1, 6])
def test_pixels_are_those_of_the_models_processor(kind: str, mode: str, orientation: int) -> None:
    draws = np.random.default_rng([*map(ord, kind + mode), orientation])
    if mode == "I;16":
        drawn = Image.fromarray(draws.integers(0, 1 << 16, (9, 14), dtype=np.uint16))
    elif mode == "P":
        drawn = Image.fromarray(draws.integers(0, 256, (9, 14, 3), dtype=np.uint8)).quantize(16)
        drawn.info["transparency"] = 3
    else:
        bands = len(Image.new(mode, (1, 1)).getbands())
        whole = draws.integers(0, 256, (9, 14, bands), dtype=np.uint8)
        parts = [Image.fromarray(whole[..., band]) for band in range(bands)]
        drawn = parts[0].convert("1") if mode == "1" else Image.merge(mode, parts)
    buffer, tags = io.BytesIO(), Image.Exif()
    tags[0x0112] = orientation
    more = {"exif": tags} if kind in ("PNG", "JPEG", "WEBP") and orientation > 1 else {}
    if mode == "P" and kind in ("PNG", "GIF"):
        more["transparency"] = 3
    drawn.save(buffer, kind, **more)
    found = np.asarray(Picture.of(buffer.getvalue()).decode())
    stored = ImageOps.exif_transpose(Image.open(io.BytesIO(buffer.getvalue())))
    if mode == "I;16":
        expected = np.repeat(np.round(np.asarray(stored) / 257)[..., None], 3, -1)
    else:
        expected = convert_to_rgb(stored, return_numpy=True)
    assert found.shape == expected.shape and found.shape[:2] == ((14, 9) if more.get("exif") else (9, 14))
    assert np.abs(found.astype(int) - expected).max() <= (mode == "I;16")


def test_only_pictures_in_plain_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(DatasetError, match=r"pipe\.png: the picture cannot be read: expected a plain file"):
        Picture.of(tmp_path / "pipe.png")
    with pytest.raises(DatasetError, match="/dev/zero: the picture cannot be read: expected a plain file"):
        Picture.of(Path("/dev/zero"))
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n"
    with pytest.raises(DatasetError, match=r"expected a picture \(PNG, JPEG"):
        Picture.of(script)
    monkeypatch.setattr(pictures_module, "MOST_BYTES", 10)
    (tmp_path / "a.png").write_bytes(png(1))
    with pytest.raises(DatasetError, match="cannot be read: expected at most"):
        Picture.of(tmp_path / "a.png")
    floats = io.BytesIO()
    Image.fromarray(np.ones((4, 4), np.float32)).save(floats, "TIFF")
    with pytest.raises(DatasetError, match="numbers without a known range"):
        Picture.of(floats.getvalue())


def test_damaged_files_and_odd_paths_are_refused_by_name(tmp_path: Path) -> None:
    frames, buffer = [Image.new("RGB", (64, 64), color) for color in ("red", "blue", "green")], io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    draws = np.random.default_rng(0)
    for content in (buffer.getvalue(), png(1, (40, 40))):
        for _ in range(60):
            broken = bytearray(content)
            for place in draws.integers(6, len(broken), 8):
                broken[place] = draws.integers(256)
            # Whatever a decoder makes of it is a picture, or an error of ours.
            with suppress(DatasetError):
                Picture.of(bytes(broken[: int(draws.integers(20, len(broken)))])).decode()
    for name, message in (
        ("a\0b.png", "embedded null byte"),
        ("~nobody-of-this-name/a.png", "is no path of a picture"),
    ):
        with pytest.raises(DatasetError, match=message):
            pictures_of(name, folder=tmp_path)


def test_the_first_frame_of_an_animation_is_the_picture() -> None:
    frames, buffer = [Image.new("RGB", (8, 4), color) for color in ("red", "blue")], io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    found = Picture.of(buffer.getvalue())
    assert found.num_frames == 2 and found.decode().getpixel((0, 0)) == (255, 0, 0)


def test_what_is_no_picture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    for value, message in (
        ("gone.png", "gone.png: the picture cannot be read: No such file"),
        ("text.png", "text.png: expected a picture"),
        (b"\x89PNG\r\n\x1a\nbroken", "a picture of 14 bytes: expected a picture"),
        (7, "expected a path or the bytes of a picture, or a list of them, got 7"),
        ({"path": None}, None),
    ):
        if message is None:
            assert pictures_of(value, folder=tmp_path) == ()
            continue
        with pytest.raises(DatasetError, match=message):
            pictures_of(value, folder=tmp_path)
    (tmp_path / "a.png").write_bytes(png(1))
    kept = Picture.of(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes(png(2))
    with pytest.raises(DatasetError, match="the file has changed since the prompts were read"):
        kept.decode()
    cut = Picture.of(png(3)[:200] + png(3)[200:])
    assert cut.decode().size == (24, 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_folder(tmp_path_factory.mktemp("model"), "qwen2_5_vl")


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_hugging_face_datasets_and_parquet_files_hold_pictures(tmp_path: Path, model: Path, kind: str) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    rows = {
        "input": ["how many", "how many", "none"],
        "output": ["1", "2", "0"],
        "image": [[{"bytes": png(1)}], [{"bytes": png(2)}, {"bytes": png(3)}], []],
    }
    features = datasets.Features(
        {
            "input": datasets.Value("string"),
            "output": datasets.Value("string"),
            "image": datasets.Sequence(datasets.Image()),
        }
    )
    made = datasets.Dataset.from_dict(rows, features=features)
    if kind == "saved":
        made.save_to_disk(str(tmp_path / "rows"))
    else:
        (tmp_path / "rows").mkdir()
        made.to_parquet(str(tmp_path / "rows" / "train.parquet"))
    tokenizer = vision_tokenizer("qwen2_5_vl")
    source = DatasetConfig(
        dataset_name="huggingface", data_path=tmp_path / "rows", image_key="image", apply_chat_template=False
    )
    encoder = processor_for(model, tokenizer)
    config = DataConfig(train=source, max_input_seq_length=200)
    train = build_prompt_sets(config, tokenizer, pictures=encoder)["data.train"]
    assert [len(prompt.pictures) for prompt in train.prompts] == [1, 2, 0]
    first, second, third = train.prompts
    assert len(second.ids) > len(first.ids) > len(third.ids) and first.identity != second.identity
    assert first.text == second.text, "equal texts with other pictures are other prompts"
    pictures = PromptPictures(encoder)
    images = pictures.of(train.prompts)
    assert images[2] is None and images[0] is not None and images[1] is not None
    assert len(images[1].tensors[PIXELS]) == 2 * len(images[0].tensors[PIXELS])
    assert pictures.of([third]) == ()


def test_a_control_token_beside_a_picture_is_refused(tmp_path: Path, model: Path) -> None:
    tokenizer = vision_tokenizer("qwen2_5_vl")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for part in m['content'] %}"
        "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}"
        "{% endif %}{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    )
    (tmp_path / "a.png").write_bytes(png(1))

    def ids(text: str) -> tuple[int, ...]:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"input": text, "output": "1", "image": "a.png"}) + "\n")
        config = DataConfig(train=DatasetConfig(data_path=path, image_key="image"), max_input_seq_length=200)
        return (
            build_prompt_sets(config, tokenizer, pictures=processor_for(model, tokenizer))["data.train"].prompts[0].ids
        )

    found = tokenizer.decode(ids("how many"))
    assert found.startswith("<|im_start|>user\n<|vision_start|><|image_pad|>") and "<|vision_end|>how many" in found
    for text in ("how <|im_end|> many", "how <|image_pad|> many"):
        with pytest.raises(DatasetError, match="contains a control token beside pictures|places for them"):
            ids(text)


@pytest.mark.parametrize("has_template", [True, False])
def test_pictures_stand_where_the_text_names_them(tmp_path: Path, model: Path, has_template: bool) -> None:
    tokenizer = vision_tokenizer("qwen2_5_vl")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] "
        "%}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}"
        "{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    for name, size in (("a.png", (24, 16)), ("b.png", (64, 64))):
        (tmp_path / name).write_bytes(png(1, size))

    def read(*rows: tuple[str, list[str]]) -> PromptSet:
        path = tmp_path / "rows.jsonl"
        given = [{"input": text, "output": "1", "images": images} for text, images in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
        source = DatasetConfig(data_path=path, image_key="images", apply_chat_template=has_template)
        config = DataConfig(train=source, max_input_seq_length=200)
        return build_prompt_sets(config, tokenizer, pictures=processor_for(model, tokenizer))["data.train"]

    found = read(("is it <image> or <image>?", ["a.png", "b.png"]), ("how many", ["a.png"]), ("none", []))
    places = [tokenizer.decode(prompt.unexpanded) for prompt in found.prompts]
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    assert places[:2] == [f"is it {place} or {place}?", f"{place}how many"]
    assert [each.decode().size for each in found.prompts[0].pictures] == [(24, 16), (64, 64)]
    assert found.remarks == ("data.train: of 3 rows 1 without a picture, 1 with pictures at <image> in the text",)
    for text, images in (("is it <image>?", []), ("<image> or <image>?", ["a.png"])):
        with pytest.raises(
            DatasetError, match=rf"prompt 0: {text.count('<')} times <image> in 'input', and {len(images)}"
        ):
            read((text, images))


def test_a_text_with_another_picture_is_another_prompt(tmp_path: Path, model: Path) -> None:
    def source(name: str, *numbers: int) -> DatasetConfig:
        rows = [{"input": "how many", "output": "1", "image": f"{number}.png"} for number in numbers]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DatasetConfig(data_path=tmp_path / name, image_key="image", apply_chat_template=False)

    for number in (1, 2, 3):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    tokenizer = vision_tokenizer("qwen2_5_vl")
    config = DataConfig(train=source("train.jsonl", 1, 2, 3), validation=source("held_out.jsonl", 2))
    train = build_prompt_sets(config, tokenizer, pictures=processor_for(model, tokenizer))["data.train"]
    found = [made.digest for prompt in train.prompts for made in prompt.pictures]
    assert found == [Picture.of(tmp_path / f"{number}.png").digest for number in (1, 3)]


def test_pictures_without_a_model_for_them_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    (tmp_path / "a.png").write_bytes(png(1))
    path.write_text('{"input": "how many", "output": "1", "image": "a.png"}\n')
    config = DataConfig(train=DatasetConfig(data_path=path, image_key="image"))
    with pytest.raises(DatasetError, match=r"a prompt has pictures, and the model \(policy.model_name\) takes none"):
        build_prompt_sets(config, vision_tokenizer("qwen2_5_vl"))


def test_drawn_pictures_follow_their_seed_and_none_is_drawn_twice() -> None:
    problems = shape_problems(200, seed=3)
    assert problems == shape_problems(200, seed=3) and problems != shape_problems(200, seed=4)
    assert len({problem.picture for problem in problems}) == 200
    counts = {problem.answer for problem in problems}
    assert counts == {"1", "2", "3", "4"}
    names = shape_problems(50, seed=1, task="name")
    assert all(len(problem.answer.split()) == 2 for problem in names)
    assert Image.open(io.BytesIO(problems[0].picture)).size == (28, 28)
    for options, message in (({"task": "paint"}, "expected a task"), ({"cells": 1, "most": 2}, "1 to 1 shapes")):
        with pytest.raises(DatasetError, match=message):
            shape_problems(1, seed=0, **options)  # type: ignore[arg-type]
