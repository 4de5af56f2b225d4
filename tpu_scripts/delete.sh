#!/usr/bin/env bash
# Deletes a TPU and all that is on its disks; buckets stay.
#
#   delete.sh --project P --zone Z --name N [--queued] [--yes] [--dry-run]
#
#   --queued  it was created with --queued: delete the queued resource with its TPU
#   --yes     do not ask
#
# Each flag but --yes may come from the environment: PROJECT, ZONE, NAME, QUEUED=1.

set -euo pipefail
source "$(dirname "$0")/common.sh"
parse "" "queued yes" "$@"
((${#rest[@]} == 0)) || fail "${rest[0]}: unknown; --help tells what there is"

if [[ ! $YES && ! $DRY_RUN ]]; then
  read -rp "Delete $NAME in $ZONE of $PROJECT, with what is on its disks? [y/N] " answer || fail "not asked; add --yes"
  [[ $answer == [yY]* ]] || fail "left as it is" 1
fi
if [[ $QUEUED ]]; then
  tpus queued-resources delete "$NAME" --force --quiet
else
  tpus tpu-vm delete "$NAME" --quiet
fi
