#!/bin/sh
# Runs `relaygr` with the container's arguments.
#
# A worker that another process has fenced ends with 3, and must not come back: it would take the id back and
# fence the other. An engine restarts on any code but 0, so here a fenced worker ends with 0.
set -u
FENCED=3

# CANN's libraries, where the base image holds them and has not set their paths.
cann=/usr/local/Ascend/ascend-toolkit/set_env.sh
if [ -z "${ASCEND_TOOLKIT_HOME:-}" ] && [ -r "$cann" ]; then
    set +u
    . "$cann"
    set -u
fi

[ "${1:-}" = worker ] || exec relaygr "$@"

# Set before it starts: a stop that comes in between must not leave it behind.
worker=
stopped=
trap 'stopped=1; [ -z "$worker" ] || kill -TERM "$worker"' TERM INT
trap '[ -z "$worker" ] || kill -HUP "$worker"' HUP
relaygr "$@" &
worker=$!
[ -z "$stopped" ] || kill -TERM "$worker"
# A signal ends `wait` early, with the worker still draining.
while :; do
    wait "$worker"
    code=$?
    kill -0 "$worker" 2>/dev/null || break
done
if [ "$code" -eq "$FENCED" ]; then
    echo "another process has this worker's id: not started again" >&2
    exit 0
fi
exit "$code"
