"""`precache demo`: three role agents solve one question under several policies, and what sharing saves and costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from precache.cli.options import demo_adapters, quiet_in_pipes
from precache.cli.values import split_names
from precache.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from precache import Engine
    from precache.agents import TurnRecord
    from precache.fidelity.scores import Score
    from precache.request import Usage

POLICIES = ("nonshared", "prelrshared", "rebaseshared")


@dataclass(frozen=True)
class DemoRow:
    """One policy: its own run (times, tokens, bytes), and its logits on nonshared's text (kl, top1_agreement).

    ``kl`` is in nats per output token, KL(nonshared || policy); ``tokens_prefilled`` counts prompt tokens that were
    run for a turn or to catch up, ``neutral_tokens`` those run with adapters off.
    """

    policy: str
    total_ttft_s: float
    tokens_per_s: float
    tokens_prefilled: int
    neutral_tokens: int
    cache_bytes: int
    kl: float
    top1_agreement: float


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `demo`."""
    parser = subparsers.add_parser(
        "demo",
        help="three role agents solve a question over one shared cache",
        description="Three trained role adapters (plan, action, reflect) take turns over one growing trajectory. "
        "Each policy plays the question once; the table compares cost and fidelity.",
        epilog="example:\n  precache demo --policies nonshared,prelrshared",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--policies",
        default=",".join(POLICIES),
        help=f"comma-separated; nonshared comes first in any case (default: {','.join(POLICIES)})",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Play the question under each policy and print turns and table."""
    policies = _policies(args.policies)
    quiet_in_pipes()
    from precache import Engine
    from precache.demo.question import QUESTION

    print("Loading SmolLM2-135M-Instruct and the adapters plan, action, reflect ...", flush=True)
    with demo_adapters() as adapters:
        first = Engine.load("smollm2", adapters=adapters, policy=policies[0], dtype=args.dtype)
        print(f"\n{QUESTION.question}\n{QUESTION.options}", flush=True)
        rows: list[DemoRow] = []
        turns: list[TurnRecord] = []
        reference: list[Tensor] = []
        for policy in policies:
            engine = first if policy == policies[0] else first.with_policy(policy)
            played = _play(engine)
            turns = turns or played
            logits = _forced_logits(engine, turns)
            reference = reference or logits
            rows.append(_row(engine, played, _compared(turns, logits, reference)))
            engine.close()
    _print_table(rows)
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    return 0


def _policies(text: str) -> list[str]:
    from precache.engine.policies import POLICIES as KNOWN

    names = split_names(text)
    unknown = [name for name in names if name not in KNOWN]
    if unknown or not names:
        raise ConfigError("--policies", text, f"names among {sorted(KNOWN)}")
    return list(dict.fromkeys(["nonshared", *names]))


def _play(engine: Engine) -> list[TurnRecord]:
    from precache.agents import EngineClient
    from precache.demo.episode import demo_episode
    from precache.demo.question import QUESTION

    title = engine.policy.name + (f" ({engine.policy.schedule})" if engine.policy.schedule else "")
    print(f"\n== {title} ==")
    print(f"{'agent':<8} {'prompt':>6} {'reused':>6} {'ran':>5} {'TTFT s':>7}  text", flush=True)
    turns = []
    episode = demo_episode(EngineClient(engine), QUESTION)
    for turn in episode.play():
        usage = _usage(turn)
        print(
            f"{turn.role:<8} {usage.prompt_tokens:>6} {usage.cached_tokens:>6} "
            f"{usage.prefill_tokens + usage.catch_up_tokens:>5} {turn.timings.ttft_s:>7.3f}  "
            f"{turn.text.strip()[:90]}",
            flush=True,
        )
        turns.append(turn)
    record = episode.record
    print(f"{record.outcome}: answer {record.answer!r} {record.error or ''}".rstrip(), flush=True)
    return turns


def _usage(turn: TurnRecord) -> Usage:
    assert turn.usage is not None, "an engine in this process always counts"
    return turn.usage


def _forced_logits(engine: Engine, turns: Sequence[TurnRecord]) -> list[Tensor]:
    """The logits of each turn's output when the engine is made to say the recorded text, on an empty cache."""
    print(f"measuring its logits on {len(turns)} recorded turns ...", flush=True)
    with engine.with_policy(engine.policy.name, engine.policy.schedule) as replay:
        return [replay.score(turn.role, turn.prompt_token_ids, turn.token_ids) for turn in turns]


def _compared(
    turns: Sequence[TurnRecord], logits: Sequence[Tensor], reference: Sequence[Tensor]
) -> Score:
    """How far logits are from the reference's on the turns that both were made to say."""
    from precache.fidelity.scores import Score, score

    scores = [
        score(exact, ours, turn.token_ids)
        for exact, ours, turn in zip(reference, logits, turns, strict=True)
    ]
    return sum(scores, Score())


def _row(engine: Engine, turns: Sequence[TurnRecord], compared: Score) -> DemoRow:
    usages, timings = [_usage(turn) for turn in turns], [turn.timings for turn in turns]
    return DemoRow(
        policy=engine.policy.name,
        total_ttft_s=sum(timing.ttft_s for timing in timings),
        tokens_per_s=sum(u.completion_tokens for u in usages) / sum(t.total_s for t in timings),
        tokens_prefilled=sum(u.prefill_tokens + u.catch_up_tokens for u in usages),
        neutral_tokens=sum(u.neutral_tokens for u in usages),
        cache_bytes=engine.stats().bytes_held,
        kl=compared.kl / compared.tokens,
        top1_agreement=compared.agreed / compared.tokens,
    )


def _print_table(rows: Sequence[DemoRow]) -> None:
    print(
        "\nTimes, tokens and bytes are of each policy's own run; KL and top-1 compare its logits with\n"
        "nonshared's while both are made to say what the agents said under nonshared.\n"
    )
    print(
        f"{'policy':<14} {'TTFT s':>7} {'tok/s':>6} {'prefilled':>9} {'neutral':>7} "
        f"{'cache MB':>8} {'KL nats':>8} {'top-1':>6}"
    )
    for row in rows:
        print(_table_line(asdict(row)))


def _table_line(row: dict[str, Any]) -> str:
    return (
        f"{row['policy']:<14} {row['total_ttft_s']:>7.2f} {row['tokens_per_s']:>6.1f} "
        f"{row['tokens_prefilled']:>9} {row['neutral_tokens']:>7} "
        f"{row['cache_bytes'] / 1e6:>8.1f} {row['kl']:>8.4f} {row['top1_agreement']:>6.3f}"
    )
