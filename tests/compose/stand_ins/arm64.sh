#!/bin/sh
# Builds the image for arm64 on a machine with another processor, and checks it under emulation. As root, with
# debootstrap, Docker, pip of Python 3.11, and QEMU in binfmt_misc with its flag F (Debian's qemu-user-static):
#
#   VECTORS=hstu_sample.npz tests/compose/stand_ins/arm64.sh
#
# The base images are Debian's, one with a C compiler and one without. pip installs under emulation; this machine's pip
# fetches the libraries before, which needs no emulated TLS and no image registry. PyPI's torch brings CUDA's libraries:
# 20 GiB of disk are needed. SUITE and MIRROR choose Debian's packages. VECTORS is a file for `relaygr vectors`.
set -eu
root=$(readlink -f "$(dirname "$0")/../../..")
work=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$work"' EXIT
port=${PORT:-8765}
image=${IMAGE:-relaygr:arm64}
compiler=gcc,libc6-dev,python3-dev
export DOCKER_BUILDKIT=1

# A base image of a folder with a system. `docker import` would name this machine's processor.
base() {
    tar --directory "$work/root" --create --file "$work/base/root.tar" .
    docker build --platform linux/arm64 --tag "$1" --file - "$work/base" <<'DOCKERFILE'
FROM scratch
ADD root.tar /
DOCKERFILE
}

# pip for Python 3.11 on arm64, with the tested versions.
pip_arm64() {
    action=$1
    shift
    # shellcheck disable=SC2046
    python3 -m pip "$action" --constraint "$root/constraints.txt" --only-binary=:all: --python-version 3.11 \
        $(seq --format='--platform manylinux_2_%.0f_aarch64' 17 36) --platform manylinux2014_aarch64 "$@"
}

mkdir "$work/base" "$work/wheels" "$work/tools"
debootstrap --arch=arm64 --variant=minbase --include="ca-certificates,python3,python3-venv,$compiler" \
    "${SUITE:-bookworm}" "$work/root" "${MIRROR:-http://deb.debian.org/debian}"
rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/*
base stand-in/debian-arm64-build:1
chroot "$work/root" apt-get purge --yes gcc 'cpp*' binutils libc6-dev python3-dev
base stand-in/debian-arm64:1

# faust-streaming has no wheel for arm64: its requirements, and those of its build, are fetched by name.
python3 -c '
import sys, tomllib
extras = tomllib.load(open(sys.argv[1], "rb"))["project"]["optional-dependencies"]
print(*(each for name in ("client", "cli", "http", "gateway", "trigger", "worker", "tracing") for each in extras[name]
        if not each.startswith(("relaygr", "faust"))), sep="\n")' "$root/pyproject.toml" > "$work/requirements.txt"
pip_arm64 download --dest "$work/wheels" --requirement "$work/requirements.txt" msgpack numpy hatchling \
    aiohttp aiohttp_cors click croniter intervaltree mypy_extensions six terminaltables venusian yarl async-timeout \
    setuptools setuptools_scm wheel 'cython>=3.1'
python3 -m pip download --dest "$work/wheels" --no-deps --no-binary faust-streaming \
    "$(grep '^faust-streaming==' "$root/constraints.txt")"
pip_arm64 install --target "$work/tools" pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis

python3 -m http.server "$port" --bind 127.0.0.1 --directory "$work/wheels" > "$work/server.log" 2>&1 &
server=$!
docker build --platform linux/arm64 --network=host --file "$root/compose/Dockerfile" --tag "$image" \
    --build-arg BUILD_IMAGE=stand-in/debian-arm64-build:1 --build-arg BASE_IMAGE=stand-in/debian-arm64:1 \
    --build-arg PIP_ARGS="--no-index --find-links http://127.0.0.1:$port/" "$root"

# QEMU shows this machine's /proc/cpuinfo and /sys, by which torch's libraries choose instructions, and then crash:
# a Neoverse N1 with two cores is described in their place.
processor=$work/cpu
for core in 0 1; do
    here=$processor/cpu$core
    mkdir -p "$here/regs/identification" "$here/topology" "$here/cpufreq"
    echo 0x00000000413fd0c1 > "$here/regs/identification/midr_el1"
    echo 0 > "$here/topology/physical_package_id"
    echo "$core" | tee "$here/topology/core_id" > "$here/topology/thread_siblings_list"
    echo 0-1 > "$here/topology/core_siblings_list"
    echo 3 > "$here/topology/core_siblings"
    echo 1500000 > "$here/cpufreq/cpuinfo_max_freq"
    echo 600000 > "$here/cpufreq/cpuinfo_min_freq"
    index=0
    for cache in 1:Data:32K 1:Instruction:32K 2:Unified:1024K 3:Unified:4096K; do
        one=$here/cache/index$index
        mkdir -p "$one"
        echo "$cache" | cut -d: -f1 > "$one/level"
        echo "$cache" | cut -d: -f2 > "$one/type"
        echo "$cache" | cut -d: -f3 > "$one/size"
        echo 64 > "$one/coherency_line_size"
        echo 256 > "$one/number_of_sets"
        echo 2 > "$one/ways_of_associativity"
        echo "$core" | tee "$one/shared_cpu_list" > "$one/shared_cpu_map"
        index=$((index + 1))
    done
    printf '%s\t: %s\n' processor "$core" BogoMIPS 50.00 \
        Features 'fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp' \
        'CPU implementer' 0x41 'CPU architecture' 8 'CPU variant' 0x3 'CPU part' 0xd0c 'CPU revision' 1
    echo
done > "$work/cpuinfo"
for file in online possible present; do echo 0-1 > "$processor/$file"; done
echo 1 > "$processor/kernel_max"

# A command in the image, without a network.
in_container() {
    docker run --rm --network=none --platform linux/arm64 --env QEMU_CPU=neoverse-n1 --ulimit core=0 \
        --volume "$processor:/sys/devices/system/cpu:ro" --volume "$work/cpuinfo:/proc/cpuinfo:ro" "$@"
}
in_container "$image" --version
in_container "$image" --help
in_container --entrypoint python3 "$image" -c '
import importlib, pkgutil, platform
import relaygr.worker
found = [each.name for each in pkgutil.walk_packages(relaygr.worker.__path__, "relaygr.worker.")]
for name in [*found, "relaygr.trigger", "relaygr.client", "relaygr.gateway", "faust", "aiokafka", "lmdb"]:
    importlib.import_module(name)
print(platform.machine(), len(found), "modules of the worker")'
[ -z "${VECTORS:-}" ] || in_container --volume "$(readlink -f "$VECTORS"):/vectors.npz:ro" "$image" vectors /vectors.npz
# Cached inference is full inference, for each kind of model.
in_container --volume "$root/tests:/src/tests:ro" --volume "$root/pyproject.toml:/src/pyproject.toml:ro" \
    --volume "$work/tools:/tools:ro" --workdir /src --env PYTHONPATH=/tools:/src \
    --env HYPOTHESIS_STORAGE_DIRECTORY=/tmp/examples --entrypoint python3 "$image" -m pytest -p no:cacheprovider \
    -n 0 -q -o timeout=0 -m "not slow" tests/workers/test_engine_contract.py
