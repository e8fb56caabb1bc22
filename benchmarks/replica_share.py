"""The share of prompt tokens that several replicas find cached: trajectories of alternating agents over one URL.

    python benchmarks/replica_share.py http://127.0.0.1:8000 --agents plan,action
    PRECACHE_API_KEY=... python benchmarks/replica_share.py URL --agents plan,action --header X-Session-ID

Every round each trajectory takes one turn, all at the same time and in an order that is shuffled anew. Counts come from
`usage`, so the server needs --enable-prompt-tokens-details. `--seed` makes other tokens: give every run its own, or the
runs before have filled the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import string
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Ids that every model has, above the special tokens of the tests' tiny one.
FIRST_ID, VOCAB = 10, 120


def new_prompt(kind: str, count: int, seed: str) -> Any:
    rng = random.Random(seed)
    if kind == "ids":
        return [rng.randrange(FIRST_ID, VOCAB) for _ in range(count)]
    return "".join(rng.choices(string.ascii_lowercase, k=count))


class Trajectory:
    """One trajectory and what its turns found in the cache."""

    def __init__(self, number: int, args: argparse.Namespace) -> None:
        self.name = f"{args.seed}-{number}"
        self.args = args
        self.prompt = new_prompt(args.prompts, args.preamble, f"{args.seed}-preamble")
        self.turns: list[tuple[int, int]] = []  # prompt tokens, cached tokens

    def take_turn(self) -> None:
        args, number = self.args, len(self.turns)
        count = args.later if number else args.first
        self.prompt += new_prompt(args.prompts, count, f"{self.name}-{number}")
        agents = args.agents.split(",")
        headers = {"Content-Type": "application/json"}
        if args.header:
            headers[args.header] = self.name
        if key := os.environ.get("PRECACHE_API_KEY", "").split(",")[0]:
            headers["Authorization"] = f"Bearer {key}"
        body = {
            "model": agents[number % len(agents)],
            "prompt": self.prompt,
            "max_tokens": args.output,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            args.url + "/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=240) as reply:
            answer = json.loads(reply.read())
        choice, usage = answer["choices"][0], answer["usage"]
        self.prompt += choice["token_ids"] if args.prompts == "ids" else choice["text"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self.turns.append((usage["prompt_tokens"], cached))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="of a server or a router, without /v1")
    parser.add_argument("--agents", required=True, help="model names, with commas; they take turns")
    parser.add_argument("--prompts", choices=("ids", "text"), default="ids")
    parser.add_argument("--header", help="a header that names the trajectory")
    parser.add_argument("--trajectories", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--preamble", type=int, default=0, help="tokens that all begin with")
    parser.add_argument("--first", type=int, default=160, help="new prompt tokens of turn one")
    parser.add_argument("--later", type=int, default=24, help="and of every later one")
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    trajectories = [Trajectory(number, args) for number in range(args.trajectories)]
    order = random.Random(0)
    with ThreadPoolExecutor(args.trajectories) as pool:
        for _ in range(args.rounds):
            order.shuffle(trajectories)
            list(pool.map(Trajectory.take_turn, trajectories))
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    later = [cached for trajectory in trajectories for _, cached in trajectory.turns[1:]]
    prompt, cached = (sum(column) for column in zip(*turns, strict=True))
    report = {"prompt_tokens": prompt, "cached_tokens": cached, "share": round(cached / prompt, 4)}
    print(json.dumps({**report, "later_turns": len(later), "missed": later.count(0)}))


if __name__ == "__main__":
    main()
