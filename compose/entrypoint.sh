#!/bin/sh
# Runs `relaygr` with the container's arguments.
#
# A worker that was fenced by another process exits with 3 and must not be restarted, because it would take the id back
# and fence the other process. Docker restarts a container on any exit code but 0, so a fenced worker exits with 0 here.
# Kubernetes restarts on any code: with WHEN_FENCED=hold the container waits, without a worker, until it is stopped.
set -u
FENCED=3
FENCED_FILE=${TMPDIR:-/tmp}/fenced

# Sets the paths of CANN's libraries, if the base image has the libraries and has not set the paths.
cann=/usr/local/Ascend/ascend-toolkit/set_env.sh
if [ -z "${ASCEND_TOOLKIT_HOME:-}" ] && [ -r "$cann" ]; then
    set +u
    . "$cann"
    set -u
fi

[ "${1:-}" = worker ] || exec relaygr "$@"

[ "${WHEN_FENCED:-}" != hold ] || rm -f "$FENCED_FILE"

# The traps are set before the worker starts, so that an early stop signal stops the worker too.
worker=
stopped=
trap 'stopped=1; [ -z "$worker" ] || kill -TERM "$worker"' TERM INT
trap '[ -z "$worker" ] || kill -HUP "$worker"' HUP
relaygr "$@" &
worker=$!
[ -z "$stopped" ] || kill -TERM "$worker"
# A signal ends `wait` while the worker still drains.
while :; do
    wait "$worker"
    code=$?
    kill -0 "$worker" 2>/dev/null || break
done
if [ "$code" -eq "$FENCED" ]; then
    echo "another process has this worker's id: the worker is not restarted" >&2
    [ "${WHEN_FENCED:-}" = hold ] || exit 0
    : > "$FENCED_FILE"
    worker=
    while [ -z "$stopped" ]; do
        sleep 5 &
        wait $!
    done
    exit 0
fi
exit "$code"
