#!/usr/bin/env bash
# Queues for a TPU, sets it up, runs a command of ralm with --resume, and does it all again whenever the TPU is taken
# away, until the command has ended well on every worker.
#
#   keep_running.sh --project P --zone Z --name N --accelerator-type T --spot [options] -- score ... --distributed
#
#   --every S    look after it every so many seconds; default: 60
#   --tries N    start a command that failed, or a request that did, so many times again; preemptions do not count;
#                default: 3
#   --delete     delete the TPU when the command has ended
#   --dry-run    print the commands of one round only
#   and the flags of create.sh, setup.sh and run.sh
#
# It may be stopped and started again at any time: it goes by what is there.

set -euo pipefail
source "$(dirname "$0")/common.sh"
: "${EVERY:=60}" "${TRIES:=3}" "${DELETE=}"
parse "accelerator-type version source ref extras token-file pull sync every tries" "spot reserved delete" "$@"
[[ $EVERY =~ ^[0-9]+$ && $TRIES =~ ^[0-9]+$ ]] || fail "--every and --tries take numbers"
((${#rest[@]})) || fail "the command is missing: -- score --model ..."
[[ " ${rest[*]} " != *" --overwrite "* ]] || fail "--overwrite would begin anew after each preemption; leave it out"
[[ " ${rest[*]} " == *" --resume "* || ${rest[0]} == sweep ]] || rest+=(--resume)
QUEUED=1

say() { echo "$(date -u +%FT%TZ) $NAME: $1"; }
state() { tpus queued-resources list "--filter=name~/$NAME$" "--format=value(state.state)"; }
status() { on_workers "ralm-jax/tpu_scripts/worker.sh status || echo none"; }
start() { "$scripts/run.sh" "${copies[@]}" -- "${rest[@]}"; }
again() {
  say "$1"
  ((left-- > 0)) || finish 1
}
finish() {
  [[ ! $DELETE ]] || "$scripts/delete.sh" --yes
  exit "$1"
}

round() {
  "$scripts/create.sh" && state && "$scripts/setup.sh" && start && status && "$scripts/delete.sh"
}
if [[ $DRY_RUN ]]; then
  round
  exit
fi
DRY_RUN=1 round >/dev/null # what is wrong with the flags ends it here
left=$TRIES

# Fails where an answer is needed and none comes; whatever went wrong is looked at again in the next round.
look() {
  local now answer
  now=$(state) || return
  case $now in
    ACTIVE)
      answer=$(status) || return
      say "${answer//$'\n'/, }"
      case $answer in
        *running*) ;;
        *"exit 2"*) finish 2 ;; # a request that cannot be met, whoever asks
        *none*) "$scripts/setup.sh" && start ;;
        *gone* | *"exit "[1-9]*) again "starting it again" && start ;;
        *"exit 0"*) finish 0 ;;
        *) return 1 ;;
      esac
      ;;
    SUSPENDED) say "was taken away" && left=$TRIES && "$scripts/delete.sh" --yes && "$scripts/create.sh" ;;
    FAILED) again "the request failed" && "$scripts/delete.sh" --yes && "$scripts/create.sh" ;;
    "") say "queueing" && "$scripts/create.sh" ;;
    *) say "$now" ;;
  esac
}

while true; do
  look || say "something went wrong; looking again in $EVERY s"
  sleep "$EVERY"
done
