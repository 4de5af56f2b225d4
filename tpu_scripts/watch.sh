#!/usr/bin/env bash
# Tells how a TPU is, and what the command on its workers printed last.
#
#   watch.sh --project P --zone Z --name N [--queued] [--worker N] [--lines 10] [--dry-run]
#
# Each flag may come from the environment: PROJECT, ZONE, NAME, QUEUED=1, WORKER, LINES.

set -euo pipefail
source "$(dirname "$0")/common.sh"
: "${LINES:=10}"
parse "worker lines" "queued" "$@"
((${#rest[@]} == 0)) || fail "${rest[0]}: unknown; --help tells what there is"
[[ $LINES =~ ^[0-9]+$ ]] || fail "--lines $LINES: is not a number"

if [[ $QUEUED ]]; then
  tpus queued-resources describe "$NAME" "--format=value(state.state)"
fi
tpus tpu-vm describe "$NAME" "--format=value(state,health)"
on_workers "ralm-jax/tpu_scripts/worker.sh log $LINES"
