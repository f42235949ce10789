#!/bin/sh
# Downloads the wheels for a GPU host with Python 3.12 and no network into build/gpu/wheels, which git ignores.
set -eu
cd "$(dirname "$0")/../.."
set --
for platform in manylinux_2_28 manylinux_2_17 manylinux2014 manylinux1; do set -- "$@" --platform ${platform}_x86_64; done
rm -rf build/gpu/wheels
"${PYTHON:-python3}" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version 3.12 "$@" \
	--constraint constraints.txt --requirement benchmarks/gpu/wheels.txt --dest build/gpu/wheels
du -sh build/gpu/wheels
