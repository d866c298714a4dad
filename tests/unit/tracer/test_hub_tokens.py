"""Tokens: in files of their owner alone, and good for their role alone."""

import os
import stat

import pytest

from nemo_rl.errors import RunFolderError, UserError
from nemo_rl.tracer.protocol import HubTokens, Role, read_token, token_path, write_private


def test_tokens_are_read_as_they_were_written_and_replace_older_ones(tmp_path):
    for _ in range(2):
        tokens = HubTokens.draw()
        tokens.write(tmp_path / "tracer")
        read = {name: read_token(token_path(tmp_path / "tracer", name)) for name in ("job", "viewer", "controller")}
        assert read == {"job": tokens.job, "viewer": tokens.viewer, "controller": tokens.controller}
        assert len(set(read.values())) == 3 and all(len(token) > 40 for token in read.values())


def test_files_are_of_their_owner_alone_whatever_was_there_and_whatever_the_umask(tmp_path):
    path = token_path(tmp_path, "job")
    path.write_text("older")
    path.chmod(0o666)
    secret = tmp_path / "elsewhere"
    token_path(tmp_path, "viewer").symlink_to(secret)
    before = os.umask(0)
    try:
        HubTokens.draw().write(tmp_path)
    finally:
        os.umask(before)
    for name in ("job", "viewer", "controller"):
        assert stat.S_IMODE(token_path(tmp_path, name).lstat().st_mode) == 0o600
    assert not secret.exists(), "a link is replaced, not followed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["controller.token", "job.token", "viewer.token"]


def test_private_file_is_private_from_its_first_moment(tmp_path, monkeypatch):
    modes = []
    opened = os.open

    def watched(path, flags, mode=0o777, **more):
        handle = opened(path, flags, mode, **more)
        modes.append(stat.S_IMODE(os.fstat(handle).st_mode))
        return handle

    monkeypatch.setattr(os, "open", watched)
    before = os.umask(0)
    try:
        write_private(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert modes == [0o600]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666])
def test_token_that_others_can_read_is_refused(tmp_path, mode):
    HubTokens.draw().write(tmp_path)
    path = token_path(tmp_path, "viewer")
    path.chmod(mode)
    with pytest.raises(UserError, match="expected a file of mode 0600.*start the run again"):
        read_token(path)


def test_no_token_an_empty_one_and_a_link_are_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_token(tmp_path / "none.token")
    write_private(tmp_path / "empty.token", "\n")
    with pytest.raises(UserError, match="empty"):
        read_token(tmp_path / "empty.token")
    (tmp_path / "link.token").symlink_to(tmp_path / "empty.token")
    with pytest.raises(UserError, match="cannot be read"):
        read_token(tmp_path / "link.token")


def test_folder_that_cannot_be_written_is_the_users_problem(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot be written"):
        HubTokens.draw().write(tmp_path / "file" / "tracer")


def test_tokens_are_good_for_their_roles_alone():
    tokens = HubTokens(job="j", viewer="v", controller="c")
    good = {(role, token) for role in Role for token in ("j", "v", "c", "", "\ud800") if tokens.allow(role, token)}
    assert good == {
        (Role.RANK, "j"),
        (Role.DRIVER, "j"),
        (Role.VIEWER, "v"),
        (Role.VIEWER, "c"),
        (Role.CONTROLLER, "c"),
    }
    assert "j" not in repr(tokens).lower().replace("tokens", "")
