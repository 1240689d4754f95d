#!/bin/sh
# Takes out of an environment what nothing imports: a quarter of the light image.
set -eu
packages=$(echo "$1"/lib/python3.*/site-packages)

find "$packages" -type d -name tests -prune -exec rm -r {} +
# What compilers read; of Transformers, what its models are generated from.
find "$packages" -type f \( -name '*.[ach]' -o -name '*.hpp' -o -name '*.py[ix]' -o -name '*.px[di]' \
  -o -name 'modular_*.py' \) -delete
# The bridge to PyPy, and Arrow's network protocol.
rm "$packages"/zstandard/_cffi* "$packages"/pyarrow/*flight*
# One library under three names, of which the loader asks for libNAME.so.VERSION.
find "$packages/pyarrow" -name 'libarrow_python*.so' -delete
find "$packages/pyarrow" -name 'libarrow_python*.so.*.*' -delete
# Of AWS: the store itself, and what its credentials may come by.
find "$packages/botocore/data" -mindepth 1 -maxdepth 1 -type d \
  ! -name s3 ! -name sts ! -name sso ! -name sso-oidc ! -name signin -exec rm -r {} +
