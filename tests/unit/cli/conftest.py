"""Commands as a console runs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nemo_rl.cli.main import main


@pytest.fixture
def ended(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs a command: exit code, standard output, standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["nemo-rl", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def output_of(ended) -> Callable[..., str]:
    """Runs a command that ends well."""

    def run(*words: object) -> str:
        code, shown, error = ended(*words)
        assert code == 0, error
        return shown

    return run


@pytest.fixture
def refusal_of(ended) -> Callable[..., str]:
    """Runs a command that the user has to mend."""

    def run(*words: object) -> str:
        code, _, error = ended(*words)
        assert code == 2 and "Traceback" not in error
        return error

    return run
