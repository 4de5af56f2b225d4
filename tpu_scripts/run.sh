#!/usr/bin/env bash
# Starts a command of ralm on every worker; it goes on when this connection ends. watch.sh tells how it goes.
#
#   run.sh --project P --zone Z --name N [options] -- score --model M --out gs://BUCKET/scores --distributed ...
#
#   --pull gs://BUCKET/PATH=FOLDER  copy this to FOLDER on each worker before the start; may be repeated
#   --sync gs://BUCKET/PATH=FOLDER  copy what an earlier run left there to FOLDER before the start, and FOLDER back every
#                                   five minutes and at the end; may be repeated
#   --worker N                      only on this worker, for what one process does; default: all
#   --stop                          stop the command that runs: SIGTERM, so that training saves
#   --dry-run                       print the commands only
#
# Folders are below the home folder on the workers. Each flag but the first two may come from the environment.

set -euo pipefail
source "$(dirname "$0")/common.sh"
STOP=''
parse "pull sync worker" "stop" "$@"

if [[ $STOP ]]; then
  on_workers "ralm-jax/tpu_scripts/worker.sh stop"
  exit
fi
((${#rest[@]})) || fail "the command is missing: -- score --model ..."
on_workers "$(quoted ralm-jax/tpu_scripts/worker.sh start "${copies[@]}" -- ralm "${rest[@]}")"
