"""Runs over several questions: resume after a kill, scores, forced mode, rows and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

import pytest

from precache.agents import load_workflow
from precache.agents.corpus import Corpus
from precache.agents.record import episode_from_dict
from precache.agents.recorded import read_recorded
from precache.agents.report import forced_rows, natural_rows
from precache.agents.results import EpisodeResult, ResultsFile, ResultsFileError
from precache.agents.runner import RunOptions, run_forced, run_natural
from precache.agents.statistics import estimate
from precache.agents.tables import format_forced, format_natural
from tests.agents.fakes import PAGES, QUESTION, RIGHT, ScriptedClient

WORKFLOW = load_workflow("hotpotqa")
QUESTIONS = [replace(QUESTION, question_id=f"q{n}") for n in range(3)]
WRONG = (*RIGHT[:2], "Rome", *RIGHT[3:])
SETTINGS = {"task": "hotpotqa", "seed": 0}
TRAINED, HELD_OUT = "Who was it?", "Who wrote it?"


def run(
    path: Path, client: ScriptedClient, policy: str = "nonshared", repeats: int = 1
) -> list[EpisodeResult]:
    with ResultsFile(path, SETTINGS) as results:
        options = RunOptions(repeats=repeats)
        return list(
            run_natural(WORKFLOW, client, policy, QUESTIONS, results, options, corpus=Corpus(PAGES))
        )


def script(answers: Sequence[tuple[str, ...]]) -> ScriptedClient:
    return ScriptedClient(chain.from_iterable(answers))


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = [result.key for result in run(path, script([RIGHT] * 3))]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:100])  # the second episode was being written
    client = script([WRONG] * 2)
    results = run(path, client)
    assert client.num_episodes == 2
    assert [result.key for result in results] == whole
    assert [result.episode["answer"] for result in results] == ["Paris", "Rome", "Rome"]
    assert len(path.read_text().splitlines()) == 4


def test_a_record_comes_back_from_its_line(tmp_path: Path) -> None:
    (result, *_) = run(tmp_path / "out.jsonl", script([(" Hm.", " Dance", *RIGHT)] * 3))
    values = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[1])["episode"]
    text = values.pop("text")
    record = episode_from_dict(values)
    assert record.trajectory.text == text
    assert record.as_dict() == {key: result.episode[key] for key in values}
    assert (record.turns[0].timings.ttft_s, record.malformed) == (0.1, {"unknown_action": 1})


def test_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, script([RIGHT] * 3))
    with pytest.raises(ResultsFileError, match="seed=0, this one has 1"):
        ResultsFile(path, {**SETTINGS, "seed": 1})


@pytest.mark.parametrize("text", ["hello\n", "3\n", '{"question": "Why?"}\n'])
def test_a_file_of_something_else_is_not_overwritten(text: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(text)
    with pytest.raises(ResultsFileError, match="line 1: "):
        ResultsFile(path, SETTINGS)
    assert path.read_text() == text


def test_a_run_that_never_played_does_not_keep_its_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ResultsFile(path, SETTINGS).close()
    ResultsFile(path, {**SETTINGS, "seed": 1}).close()
    assert json.loads(path.read_text()) == {"settings": {**SETTINGS, "seed": 1}}


def test_scores_and_drops_are_paired_by_question(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    (played, *_) = run(path, script([RIGHT, RIGHT, WRONG]))
    first_text = str(played.episode["text"])
    run(path, script([RIGHT, WRONG, WRONG]), policy="fullshared")
    with ResultsFile(path, SETTINGS) as results:
        first, second = natural_rows(results.done.values())
    assert first.scores["em"].mean == pytest.approx(2 / 3)
    assert first.scores["success"].mean == pytest.approx(2 / 3)
    assert first.drops == {}
    assert second.drops["em"].mean == pytest.approx(1 / 3)
    assert 0 <= second.drops["em"].low <= 1 / 3 <= second.drops["em"].high <= 1
    assert (first.steps, first.turns, first.ttft_s) == (2, 5, pytest.approx(0.1))
    assert first.outcomes == {"accepted": 3}
    assert first.tokens == pytest.approx(len(first_text) / 4, rel=0.1)
    table = format_natural([first, second])
    assert "em %: mean ±std over repeats" in table
    assert "fullshared" in table


def test_std_is_over_repeats(tmp_path: Path) -> None:
    results = run(tmp_path / "out.jsonl", script([RIGHT] * 3 + [WRONG] * 3), repeats=2)
    (row,) = natural_rows(results)
    assert row.scores["em"].mean == pytest.approx(0.5)
    assert row.scores["em"].std == pytest.approx(0.5**0.5)


def test_questions_that_all_score_alike_prove_little() -> None:
    none = estimate([[0.0]] * 30, span=(0, 1))
    assert (none.mean, none.low) == (0, 0)
    assert none.high == pytest.approx(0.1157, abs=1e-3)  # Clopper-Pearson for 0 of 30
    drop = estimate([[0.0]] * 30, span=(-1, 1))
    assert (drop.low, drop.high) == (-none.high, none.high)
    assert estimate([[3.0]] * 30).high == 3


def test_the_interval_covers_the_mean_and_shrinks() -> None:
    few = estimate([[float(n % 2)] for n in range(10)])
    many = estimate([[float(n % 2)] for n in range(1000)])
    assert few.low < 0.5 < few.high
    assert many.high - many.low < 0.07 < few.high - few.low


def test_forced_mode_says_the_recorded_words(tmp_path: Path) -> None:
    played = run(tmp_path / "out.jsonl", script([RIGHT] * 3))
    recorded = read_recorded(tmp_path / "out.jsonl", "hotpotqa")
    client = ScriptedClient(repeat("unused"))
    with ResultsFile(tmp_path / "forced.jsonl", SETTINGS) as results:
        forced = list(run_forced(WORKFLOW, client, "nonshared", recorded, results))
    assert [len(recorded), len(client.requests)] == [3, 15]
    texts = [request.prompt for request in client.requests[:5]]
    assert all(str(played[0].episode["text"]).startswith(text) for text in texts)
    assert client.requests[1].stop == ("[", "\n")
    (row,) = forced_rows(forced)
    assert row.answers_kept.mean == 1  # the fake keeps what says Paris: the answer, one turn of 5
    assert row.turns_kept.mean == pytest.approx(1 / 5)
    assert row.nll is not None
    assert row.nll.mean == pytest.approx(0.5)
    assert row.nll_by_role == {"plan": 0.5, "action": 0.5, "reflect": 0.5}
    assert "answers kept" in format_forced([row])


def test_the_sources_held_out_episodes_can_be_replayed(tmp_path: Path) -> None:
    transcript = (
        "\nThought 1: I know.\nAction 1: Finish[Paris]\nObservation 1: Please reflect your answer."
        "\nThought 2: It is.\nAction 2: Reflect[right]\nObservation 2: Answer is CORRECT"
    )
    rows = [
        {"question": question, "prompt": transcript} for question in (HELD_OUT, TRAINED, HELD_OUT)
    ]
    (tmp_path / "hotpotqa_episodes.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    recorded = read_recorded(tmp_path, "hotpotqa")
    assert [(item.level, item.repeat) for item in recorded] == [("heldout", 0), ("heldout", 1)]
    assert {item.trajectory.question_id for item in recorded} == {HELD_OUT}
    with pytest.raises(ResultsFileError, match="not for 'chess'"):
        read_recorded(tmp_path, "chess")
