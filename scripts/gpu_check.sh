#!/usr/bin/env bash
# Checks the Triton backend on this machine's GPU, times it, and replays the controlled trace on a Llama-3.1-8B with
# random weights. Builds and downloads nothing: it needs Python with torch and triton, and transformers for the trace.
#
#   scripts/gpu_check.sh                    8 minutes at most; one JSON object, the last line of stdout
#   scripts/gpu_check.sh --out result.json  the object also goes to a file, after every step
#   scripts/gpu_check.sh --dry-run          every line on a tiny scale, on a CPU, in Triton's interpreter
#
# PYTHON picks the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}"
exec timeout 480 "${PYTHON:-python3}" -m scripts.gpu_check "$@"
