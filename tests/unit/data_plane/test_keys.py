"""Keys name their group, and no two steps mint the same ones."""

from __future__ import annotations

from nemo_rl.data_plane.keys import group_uid, keys_of_groups, new_group_ids


def test_keys_are_unique_and_name_their_group() -> None:
    uids = new_group_ids(3)
    keys = keys_of_groups(uids, 2)
    assert len(set(keys)) == 6 and [key.rsplit("_g", 1)[1] for key in keys] == ["0", "1"] * 3
    assert [group_uid(key) for key in keys] == [uid for uid in uids for _ in range(2)]
    assert group_uid("u_g1_g0") == "u_g1" and group_uid("alone") == "alone"


def test_steps_and_epochs_mint_uids_of_their_own() -> None:
    steps = [new_group_ids(4) for _ in range(500)]
    assert len({uid for step in steps for uid in step}) == 2000
