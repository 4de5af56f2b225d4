# shellcheck shell=bash
# Sourced by the other scripts: their flags, and commands that a dry run prints instead of running them.
# A flag --some-flag sets the variable SOME_FLAG, which the environment may hold beforehand.

# shellcheck disable=SC2034  # those that source this use it
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
rest=()   # what stood after "--"
copies=() # --pull and --sync with their values, in order
export PROJECT ZONE NAME ACCELERATOR_TYPE VERSION WORKER QUEUED SPOT RESERVED SOURCE REF EXTRAS TOKEN_FILE DRY_RUN
: "${PROJECT=}" "${ZONE=}" "${NAME=}" "${ACCELERATOR_TYPE=}" "${VERSION=}" "${WORKER:=all}" "${QUEUED=}" "${SPOT=}"
: "${RESERVED=}" "${SOURCE=}" "${REF=}" "${EXTRAS:=tpu,data}" "${TOKEN_FILE=}" "${DRY_RUN=}"

# fail MESSAGE [CODE]
fail() {
  echo "$(basename "$0"): $1" >&2
  exit "${2:-2}"
}

# parse VALUES SWITCHES ARGUMENT...: reads the flags, of which VALUES are followed by one.
parse() {
  local values=" project zone name $1 " switches=" help dry-run $2 " flag
  shift 2
  export HELP='' YES=''
  while (($#)); do
    [[ $1 != -- ]] || { rest=("${@:2}") && break; }
    [[ $1 != --*=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}"
    flag=${1#--}
    if [[ $1 == --* && $switches == *" $flag "* ]]; then
      shift
      set -- 1 "$@"
    elif [[ $1 == --* && $values == *" $flag "* ]]; then
      [[ ${2:-} && $2 != --* ]] || fail "--$flag needs a value"
      shift
    else
      fail "$1: unknown; --help tells what there is"
    fi
    if [[ $flag == pull || $flag == sync ]]; then
      [[ $1 =~ ^gs://[^=]+=.+ ]] || fail "--$flag $1: is not gs://BUCKET/PATH=FOLDER"
      copies+=("--$flag" "$1")
    fi
    flag=${flag//-/_}
    printf -v "${flag^^}" %s "$1"
    shift
  done
  if [[ $HELP ]]; then # the comment at the top of the script
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit
  fi
  [[ $PROJECT ]] || fail "--project (or PROJECT) is missing"
  [[ $ZONE ]] || fail "--zone (or ZONE) is missing"
  [[ $NAME ]] || fail "--name (or NAME) is missing"
}

# quoted WORD...: as they can be pasted into a shell.
quoted() {
  local word line=''
  for word; do
    [[ $word =~ ^[A-Za-z0-9_@%+=:,./-]+$ ]] || word=${word@Q}
    line+=" $word"
  done
  printf '%s\n' "${line:1}"
}

# run COMMAND...: runs it, or prints it in a dry run.
run() {
  if [[ $DRY_RUN ]]; then quoted "$@"; else "$@"; fi
}

# tpus GROUP VERB ARGUMENT...: gcloud's commands for TPUs.
tpus() {
  run gcloud compute tpus "$1" "$2" "${@:3}" "--project=$PROJECT" "--zone=$ZONE"
}

# on_workers COMMAND: runs a line of shell on the workers, all at once.
on_workers() {
  tpus tpu-vm ssh "$NAME" "--worker=$WORKER" "--command=$1"
}
