#!/bin/sh
# Tests and measures the CUDA path on this machine, without a network (docs/cuda.md). PYTHON names another Python.
#
#   benchmarks/gpu/run.sh right kernel      whether results are right; attention alone
#   benchmarks/gpu/run.sh engine relay      whole passes; the relay on the embedded cluster
#   benchmarks/gpu/run.sh --dry             the smallest case of every phase on a CPU
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
path=$PWD
for root in schemas streams workers training cli benchmarks; do path=$path:$PWD/$root; done
if ! "$python" -c "import confluent_kafka" 2>/dev/null; then
	"$python" -m pip install --quiet --no-index --no-deps --upgrade --target build/gpu/site build/gpu/wheels/*.whl
	path=$path:$PWD/build/gpu/site
fi
# What one call compiles and tunes, the next one finds.
PYTHONPATH=$path TRITON_CACHE_DIR=$PWD/build/gpu/triton exec "$python" -m benchmarks.gpu "$@"
