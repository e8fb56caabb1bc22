"""What llama.cpp's server says, as far as the benchmark asks it: slots, LoRA by request, streamed token ids.

A slot reuses the longest common prefix of what it holds, drops everything when its LoRA changes, and caches all but
the last token of an answer. Run as a program it says the prompt's last token plus 1, 2, ..., or does what FAKE_LLAMA
says.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Choice = tuple[int, dict[int, float]]  # the token, and log-probabilities by id
Answer = Callable[[list[float], list[int], int], list[Choice]]  # LoRA scales, prompt, tokens


class FakeLlamaServer(ThreadingHTTPServer):
    """Listens on ``port`` (0: a free one); requests are kept in ``seen``."""

    def __init__(self, answer: Answer, slots: int, port: int = 0, mode: str = "") -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.answer = answer
        self.mode = mode
        self.slots: list[tuple[list[float], list[int]]] = [([], [])] * slots
        self.seen: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: FakeLlamaServer

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._head(503 if self.server.mode == "loading" else 200)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.startswith("/slots/"):
            self.server.slots[int(self.path[len("/slots/") : -len("?action=erase")])] = ([], [])
            self._head(200)
            return
        self.server.seen.append(body)
        if self.server.mode == "refuses":
            self._head(400)
            self.wfile.write(b"exceeds the context")
            return
        self._head(200)
        self._complete(body)

    def _complete(self, body: dict[str, Any]) -> None:
        scales = [lora["scale"] for lora in body["lora"]]
        loras, cached = self.server.slots[body["id_slot"]]
        prompt, reused = body["prompt"], 0
        if loras == scales:
            pairs = list(zip(cached, prompt[:-1], strict=False))
            reused = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        choices = self.server.answer(scales, prompt, body["n_predict"])
        if self.server.mode == "busy":
            until = time.process_time() + 0.3
            while time.process_time() < until:
                pass
        for number, (token, logprobs) in enumerate(choices):
            if self.server.mode == "dies" and number == 1:
                os._exit(3)
            if self.server.mode == "skips" and number == 1:
                continue
            event: dict[str, Any] = {"tokens": [token], "stop": False}
            if body.get("n_probs"):
                top = [{"id": i, "logprob": value} for i, value in logprobs.items()]
                event["completion_probabilities"] = [{"id": token, "top_logprobs": top}]
            self._say(event)
        held = [*prompt, *(token for token, _ in choices[:-1])]
        self.server.slots[body["id_slot"]] = (scales, held)
        timings = {"prompt_n": len(prompt) - reused}
        self._say({"tokens": [], "stop": True, "tokens_cached": len(held), "timings": timings})

    def _head(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()

    def _say(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()


def count_up(_scales: list[float], prompt: list[int], tokens: int) -> list[Choice]:
    """The prompt's last token plus 1, 2, ..., each as the only choice."""
    return [(prompt[-1] + 1 + i, {prompt[-1] + 1 + i: 0.0}) for i in range(tokens)]


def main(arguments: list[str]) -> None:
    mode = os.environ.get("FAKE_LLAMA", "")
    print("loading", *arguments, flush=True)
    if mode == "fails":
        sys.exit("no such model")
    given = dict(zip(arguments, arguments[1:], strict=False))
    slots, port = int(given["--parallel"]), int(given["--port"])
    FakeLlamaServer(count_up, slots, port, mode).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
