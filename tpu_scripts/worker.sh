#!/usr/bin/env bash
# Runs on the workers, where setup.sh puts it; the other scripts call it.
#
#   worker.sh install EXTRAS
#   worker.sh start [--pull URL=FOLDER]... [--sync URL=FOLDER]... -- COMMAND...
#   worker.sh status     none | running | gone (the machine restarted) | exit CODE
#   worker.sh log LINES
#   worker.sh stop
#
# A TPU runs one command at a time; its log, process id and exit code are in ~/ralm-job.

set -euo pipefail
tree=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
job=$HOME/ralm-job
worker=${HOSTNAME##*-w-}
PATH=$tree/.venv/bin:$PATH
export LC_ALL=C.UTF-8

status() {
  if [[ -e $job/exit ]]; then
    echo "exit $(<"$job/exit")"
  elif [[ ! -e $job/pid ]]; then
    echo none
  elif grep -qsa worker.sh "/proc/$(<"$job/pid")/cmdline"; then
    echo running
  else
    echo gone
  fi
}

files() { (cd "$1" && find . -type f | sort); }

# Brings back what `push` left; nothing where it left nothing. A folder that is here is newer than its copy.
fetch() {
  local url=${1%%=*} folder=${1#*=} found
  [[ ! -e $folder ]] || return 0
  found=$(gcloud storage objects list "$url.files*" "--format=value(name)")
  [[ $found ]] || return 0
  rm -rf "$folder.part" && mkdir -p "$folder.part"
  gcloud storage cp "$url.files" "$job/files"
  gcloud storage rsync "$url" "$folder.part" --recursive
  # A copy that was cut off left files that are not on the list, such as half a checkpoint.
  files "$folder.part" | comm -23 - "$job/files" | (cd "$folder.part" && xargs -r -d '\n' rm --)
  find "$folder.part" -mindepth 1 -type d -empty -delete
  mv "$folder.part" "$folder"
}

# Copies a folder, then the list of its files, and only then deletes what is gone: whenever it is cut off, the list and
# what is on it fit together.
push() {
  local url=${1%%=*} folder=${1#*=}
  [[ -e $folder ]] || return 0
  files "$folder" >"$job/files"
  gcloud storage rsync "$folder" "$url" --recursive && gcloud storage cp "$job/files" "$url.files" &&
    gcloud storage rsync "$folder" "$url" --recursive --delete-unmatched-destination-objects
}

push_all() {
  local pair
  [[ $worker == 0 ]] || return 0
  for pair in "${synced[@]}"; do push "$pair" || echo "$pair: not copied; trying again later"; done
}

supervise() {
  local synced=() command='' stopped='' code=0 pusher pair
  trap 'stopped=1; [[ ! $command ]] || kill -TERM "$command"' TERM
  trap 'code=$?; echo "$code" >"$job/exit"' EXIT
  while [[ $1 != -- ]]; do
    pair=${2%%=*} && pair=${pair%/}=${2#*=}
    if [[ $1 == --sync ]]; then
      synced+=("$pair")
      fetch "$pair"
    else
      mkdir -p "${pair#*=}"
      gcloud storage rsync "${pair%%=*}" "${pair#*=}" --recursive
    fi
    shift 2
  done
  shift
  [[ ! $stopped ]] || exit 143
  "$@" &
  command=$!
  (
    trap - EXIT
    trap 'kill $!; exit' TERM
    while true; do
      sleep "${PUSH_EVERY:-300}" &
      wait $!
      push_all
    done
  ) &
  pusher=$!
  wait "$command" || code=$?
  if [[ $stopped ]]; then # the signal ended the wait, not the command
    code=0
    wait "$command" || code=$?
  fi
  kill "$pusher"
  wait "$pusher" || true
  push_all
  exit "$code"
}

case ${1:-} in
  install)
    # Ubuntu 22.04 of the TPU images has Python 3.10, which is too old.
    [[ -x $HOME/.local/bin/uv ]] || curl -LsSf https://astral.sh/uv/install.sh | sh
    "$HOME/.local/bin/uv" venv --quiet --python 3.12 "$tree/.venv"
    "$HOME/.local/bin/uv" pip install --quiet --python "$tree/.venv/bin/python" --editable "${tree}[$2]"
    ralm --version
    ;;
  start)
    [[ $(status) != running ]] || { echo "worker $worker: a command runs already; stop it first" >&2 && exit 1; }
    cd && mkdir -p "$job" && rm -f "$job/exit"
    echo "$(date -u +%FT%TZ) $*" >>"$job/log"
    setsid nohup "$tree/tpu_scripts/worker.sh" supervise "${@:2}" >>"$job/log" 2>&1 </dev/null &
    echo $! >"$job/pid"
    ;;
  supervise) supervise "${@:2}" ;;
  status) echo "worker $worker: $(status)" ;;
  log)
    echo "worker $worker: $(status)"
    [[ ! -e $job/log ]] || tail -n "$2" "$job/log"
    ;;
  stop) [[ $(status) != running ]] || kill -TERM "$(<"$job/pid")" ;;
  --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0" ;;
  *) echo "worker.sh: ${1:-no command}: unknown; --help tells what there is" >&2 && exit 2 ;;
esac
