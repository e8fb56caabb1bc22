"""The recorded episodes that lie beside the project, where they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from precache.tasks import ROLES, TASKS, TaskDataError, load_episodes

DATA = Path(__file__).parents[3] / "shared/data/role_trajectories"

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} is not there")


@needs_data
@pytest.mark.parametrize("task", sorted(TASKS))
def test_most_episodes_are_readable_and_the_rest_is_counted(task: str) -> None:
    rows = (DATA / f"{task}_episodes.jsonl").read_text(encoding="utf-8").count("\n")

    loaded = load_episodes(TASKS[task], DATA)

    assert len(loaded.trajectories) + sum(loaded.skipped.values()) == rows
    assert len(loaded.trajectories) > 0.7 * rows


@needs_data
@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_trajectory_is_clean_and_has_a_planner_and_an_actor(task: str) -> None:
    for trajectory in load_episodes(TASKS[task], DATA).trajectories:
        assert {"plan", "action"} <= set(trajectory.roles) <= set(ROLES)
        assert "Answer is CORRECT" not in trajectory.text
        assert "Invalid action. Reflect" not in trajectory.text
        assert "bingsearch" not in trajectory.text.lower().replace("bingsearch error", "")
        assert all(turn.target.endswith(("\n", "[")) for turn in trajectory.turns())


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskDataError, match=r"scienceqa_episodes\.jsonl does not exist"):
        load_episodes(TASKS["scienceqa"], tmp_path)


@pytest.mark.parametrize("line", ["{", "[]", '{"question": "a"}', '{"question": 1, "prompt": ""}'])
def test_row_that_is_no_episode_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "scienceqa_episodes.jsonl").write_text(line + "\n")

    with pytest.raises(TaskDataError, match="line 1"):
        load_episodes(TASKS["scienceqa"], tmp_path)
