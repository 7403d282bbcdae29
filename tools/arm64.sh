#!/bin/bash
# Runs this checkout on ARM64 Linux, which QEMU emulates on an x86 machine.
#
#   apt-get install qemu-user-static debootstrap
#   tools/arm64.sh /opt/arm64                      makes the system once, then runs all of the below
#   tools/arm64.sh /opt/arm64 python example.py    runs one command in it
#
# It needs root, Linux 6.7 or later, the pip of Python 3.11 and about 12 GB. Emulation is about 15
# times slower than this machine, so no time that it prints says anything about an ARM processor.
# The processor is a Neoverse N1 (Graviton 2): it has the dot product of int8, but no bfloat16.
set -euo pipefail

(($#)) || { sed -n '2,10s/^# \?//p' "$0"; exit 2; }
checkout=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1"
root=$(cd "$1" && pwd)
shift

make_system() {
    local packages=python3.11-minimal,libpython3.11-stdlib,python3.11,ca-certificates,libgomp1,procps
    debootstrap --arch=arm64 --foreign --variant=minbase --include=$packages,git bookworm "$root" \
        "${MIRROR:-http://deb.debian.org/debian}"
    # The second stage of debootstrap would run each package's scripts in the emulator.
    for package in "$root"/var/cache/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" |
            tar -C "$root" --keep-directory-symlink --skip-old-files -xf -
    done
    # torch of PyPI contains CUDA. PIP_INDEX_URL=https://download.pytorch.org/whl/cpu has none.
    local platforms=()
    for version in manylinux2014 manylinux_2_{17..36}; do
        platforms+=(--platform "${version}_aarch64")
    done
    python3.11 -m pip install --no-compile --only-binary=:all: "${platforms[@]}" \
        --python-version 3.11 --implementation cp --target "$root/opt/packages" \
        'torch==2.13.0' numba transformers safetensors xxhash tqdm psutil \
        pytest pytest-xdist hypothesis llguidance numpy
    cat > "$root/cpuinfo" <<END
processor	: 0
BogoMIPS	: 50.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x3
CPU part	: 0xd0c
CPU revision	: 1

END
    ln -s python3.11 "$root/usr/bin/python"
    rm -f "$root/proc"  # in a container, debootstrap makes a link
    touch "$root/complete"
}

# The registration of the emulator and the mounts are seen by this command alone.
emulate() {
    mkdir -p "$root"/{checkout,dev,proc,sys}
    root=$root checkout=$checkout unshare --user --map-root-user --mount bash -euc '
        mount -t tmpfs none /mnt
        mkdir /mnt/formats
        mount -t binfmt_misc none /mnt/formats
        magic="\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
        mask="\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
        echo ":arm64:M::$magic:$mask:/usr/bin/qemu-aarch64-static:FP" > /mnt/formats/register
        for directory in proc dev sys; do mount --rbind /$directory "$root/$directory"; done
        mount --bind "$root/cpuinfo" "$root/proc/cpuinfo"
        mount --rbind "$checkout" "$root/checkout"
        exec chroot "$root" env -i PATH=/opt/packages/bin:/usr/bin:/bin HOME=/root LANG=C.UTF-8 \
            PYTHONPATH=/opt/packages QEMU_CPU=neoverse-n1 OMP_NUM_THREADS=1 \
            bash -c "cd /checkout; exec \"\$@\"" bash "$@"' bash "$@"
}

[[ -e $root/complete ]] || make_system
if (($#)); then
    emulate "$@"
    exit
fi
emulate python example.py
emulate python -m nanovllm check
emulate python -m pytest -n 0 tests/backends/cpu
