#!/bin/sh
# Runs the kernel checks under the sanitizers: scripts/sanitize.sh [address,undefined] [thread]
# Builds outside of the module's build, in build/sanitize; CXX chooses the compiler. Instruction sets as in
# CMakeLists.txt.
set -eu
cd "$(dirname "$0")/.."
have_avx2=$([ "$(uname -m)" = x86_64 ] && echo 1 || echo 0)
[ $# -gt 0 ] || set -- address,undefined thread
for name in "$@"; do
  folder=build/sanitize/$name
  mkdir -p "$folder"
  flags="-std=c++20 -O1 -g -ffp-contract=off -fno-omit-frame-pointer -fsanitize=$name -Icsrc -DOCTAVO_HAVE_AVX2=$have_avx2 -DOCTAVO_HAVE_AVX512=$have_avx2"
  case $name in *undefined*) flags="$flags -fno-sanitize-recover=all" ;; esac
  objects=
  for source in csrc/*.cpp csrc/tests/*.cpp; do
    case $source in
      *bindings.cpp) continue ;;  # Python's side
      *_avx2.cpp) isa="-mavx2 -mfma -mf16c" ;;
      *_avx512.cpp) isa="-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni" ;;
      *) isa= ;;
    esac
    [ -n "$isa" ] && [ "$have_avx2" = 0 ] && continue
    object=$folder/$(basename "$source" .cpp).o
    case $source in
      */tests/*) ;;  # programs, each linked by itself
      *) objects="$objects $object" ;;
    esac
    if [ ! "$object" -nt "$source" ] || [ -n "$(find csrc -name '*.h' -newer "$object" | head -n 1)" ]; then
      # shellcheck disable=SC2086  # flags are words
      ${CXX:-c++} $flags $isa -Wno-psabi -c "$source" -o "$object"
    fi
  done
  for source in csrc/tests/*.cpp; do
    program=$folder/$(basename "$source" .cpp)
    # shellcheck disable=SC2086
    ${CXX:-c++} $flags "$program.o" $objects -lpthread -o "$program"
    echo "== $name: $(basename "$program")"
    "$program"
  done
done
