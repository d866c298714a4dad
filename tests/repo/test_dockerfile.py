"""The Dockerfile names what is there; a docker daemon, where one answers, builds it."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch

import pytest

from tests.helpers.roots import ROOT, ROOTS

DOCKERFILE = ROOT / "Dockerfile"
VARIANTS = ("cpu", "cuda")
SECRET = re.compile(r"password|passwd|secret|token|api_?key|credential", re.IGNORECASE)
BUILD_TIMEOUT_S = 3000


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and argument of every instruction, in order; an instruction may go on over several lines."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    parts = [line.partition(" ") for line in joined.splitlines()]
    return [(name.upper(), argument.strip()) for name, _, argument in parts]


FOUND = instructions(DOCKERFILE.read_text(encoding="utf-8"))


def arguments_of(name: str) -> list[str]:
    return [argument for found, argument in FOUND if found == name]


def argument_defaults() -> dict[str, str]:
    """`ARG` by name."""
    return {name: value.strip('"') for name, _, value in (argument.partition("=") for argument in arguments_of("ARG"))}


def makefile_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([\w./$()-]+):", text, re.MULTILINE))


def is_in_the_build(path: str) -> bool:
    """What .dockerignore leaves: the last line that fits decides."""
    is_in = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and fnmatch(path, pattern):
            is_in = line.startswith("!")
    return is_in


def test_only_known_instructions() -> None:
    known = {"ARG", "CMD", "COPY", "ENV", "FROM", "RUN", "USER", "WORKDIR"}
    assert {name for name, _ in FOUND} <= known, "ADD takes addresses, too; another one needs a reason and a check here"


def test_base_images_are_arguments_with_a_fixed_tag() -> None:
    defaults = argument_defaults()
    stages = [re.fullmatch(r"\$\{(\w+)\}(?: AS (\w+))?", argument) for argument in arguments_of("FROM")]
    assert all(stages), arguments_of("FROM")
    named = {stage[2]: stage[1] for stage in stages if stage}
    assert set(named) == {*VARIANTS, None} and named[None] == "VARIANT" and defaults["VARIANT"] in VARIANTS
    for variant in VARIANTS:
        _, _, tag = defaults[named[variant]].rpartition(":")
        assert re.match(r"\d+\.\d+\.\d+-", tag), f"expected an image with a full version, got {tag!r}"


def test_no_user_with_all_rights_and_no_secrets() -> None:
    assert arguments_of("USER") and not {"root", "0"} & set(arguments_of("USER"))
    names = [*argument_defaults(), *(name for line in arguments_of("ENV") for name in re.findall(r"(\w+)=", line))]
    assert [name for name in names if SECRET.search(name)] == []


def test_copied_files_are_in_the_checkout_and_in_the_build() -> None:
    copied = [part for line in arguments_of("COPY") for part in line.split()[:-1] if not part.startswith("--")]
    assert {"Makefile", "constraints.txt", "pyproject.toml", *ROOTS} <= set(copied)
    assert [path for path in copied if not (ROOT / path).exists() or not is_in_the_build(path)] == []
    for path in (".git", "results", ".venv", "checkpoints", ".env"):
        assert not is_in_the_build(path), path


def test_make_targets_exist() -> None:
    asked = [word for line in arguments_of("RUN") for word in re.findall(r"\bmake (?:\w+=\S+ )*(\S*/\S+)", line)]
    assert asked
    wanted = {word.replace("${VENV}", "$(VENV)") for word in asked}
    assert wanted <= makefile_targets()


def daemon_problem() -> str | None:
    """Why nothing can be built here."""
    try:
        done = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        return f"no docker: {error}"
    return None if done.returncode == 0 else f"no docker daemon: {done.stderr.strip().splitlines()[-1]}"


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(BUILD_TIMEOUT_S + 100)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_image_is_built_and_starts(variant: str) -> None:
    if problem := daemon_problem():
        pytest.skip(problem)
    name = f"nemo-rl-test:{variant}"
    command = ["docker", "build", "--quiet", "--tag", name, "--build-arg", f"VARIANT={variant}", "."]
    try:
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        assert built.returncode == 0, built.stderr
        started = subprocess.run(
            ["docker", "run", "--rm", "--network", "none", name], capture_output=True, text=True, timeout=60
        )
        assert started.returncode == 0 and "Usage" in started.stdout, started.stderr
    finally:
        subprocess.run(["docker", "image", "rm", "--force", name], capture_output=True, timeout=60)
